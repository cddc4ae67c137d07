"""The texts say what the code does: generated parts, links, names, commands, and every example runs."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fleet
from fleet.errors import NotInitializedError
from fleet.launch.cli.flags import BY_SPELLING
from tests.helpers.ready_python import run_python
from tests.helpers.sources import ROOT, project_files

TEXTS = [path for path in project_files() if path.suffix == ".md"]
READMES = ("README.md", "README.zh-CN.md")
GLANCES = ("docs/start/at_a_glance.md", "docs/start/at_a_glance.zh-CN.md")
FENCED = re.compile(r"(?:<!-- example: ([\w./-]+) -->\n)?```(\w*)\n(.*?)```", re.DOTALL)
PACKAGE_NAME = r"`(fleet(?:\.[A-Za-z_]\w*)+)\b(?!\*)"
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def read(name: str | Path) -> str:
    """Returns a text of the project."""
    return (ROOT / name).read_text(encoding="utf-8")


@cache
def generator() -> ModuleType:
    """Returns docs/generate.py as a module."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        return importlib.import_module("generate")
    finally:
        sys.path.remove(str(ROOT / "docs"))


def api() -> ModuleType:
    """Returns docs/generate_api.py as a module."""
    generator()
    return sys.modules["generate_api"]


def found_in(name: str, pattern: str) -> str:
    """Returns the first group (or the whole match) of a pattern that a text must contain."""
    found = re.search(pattern, read(name), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[found.lastindex or 0]


def fenced(name: str, language: str) -> list[str]:
    """Returns the code blocks of a text in one language."""
    return [body for _, kind, body in FENCED.findall(read(name)) if kind == language]


def example(name: str, title: str) -> str:
    """Returns the code block of a text that stands under ``<!-- example: TITLE -->``."""
    body: str
    (body,) = (body for found, _, body in FENCED.findall(read(name)) if found == title)
    return body


def run(code: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs ``code`` as a script that sees the checkout, away from it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PADDLE_")}
    environment = {**kept, "PYTHONPATH": f"{cwd}{os.pathsep}{ROOT}", "CUDA_VISIBLE_DEVICES": "", **variables}
    return run_python(code, cwd=cwd, env=environment, warnings=["error"])


# ---- made from the code ----------------------------------------------------------------------------------------------


@cache
def generated() -> dict[str, str]:
    """Returns every generated file as it should be, by its path."""
    made: dict[str, str] = generator().files()
    return made


@pytest.mark.parametrize("name", generator().TEXTS)
def test_generated_parts_are_current(name: str) -> None:
    text = read(name)
    assert "<!-- generated: " in text
    assert text == generated()[name], "run `make docs`"


def test_generated_files_are_current() -> None:
    made = generated()
    assert {name for name, text in made.items() if not (ROOT / name).exists() or read(name) != text} == set()
    assert {name for name in made if name.endswith(".pyi")} == {str(p) for p in project_files() if p.suffix == ".pyi"}


def test_a_stale_part_is_noticed() -> None:
    text = read("README.md").replace("from fleet import fleet", "from fleet import float")
    assert generator().current(text) != text


# ---- two languages, one content --------------------------------------------------------------------------------------


def outline(name: str) -> list[str]:
    """Returns what must be equal in both languages: the kind of each heading, item and row; links; commands."""
    found = []
    for line in read(name).splitlines():
        words = re.sub(r"\s+#.*", "", line) if line.startswith("python -m") else ""
        kind = re.match(r"#+ |- |\| |```\w*|(?=pip |strategy\.)", line)
        cells = str(line.count(" | ")) if line.startswith("| ") else ""
        if kind:
            found.append(f"{kind[0]}{words}{cells}")
    links = set(LINK.findall(read(name))) - {Path(other).name for other in (*READMES, *GLANCES)}
    # A heading of another page has a name in each language.
    return found + sorted({re.sub(r"#.*", "", link.replace(".zh-CN.md", ".md")) for link in links})


@pytest.mark.parametrize(("names", "lines"), [(READMES, 60), (GLANCES, 60)])
def test_both_languages_have_the_same_outline(names: tuple[str, str], lines: int) -> None:
    english, chinese = (outline(name) for name in names)
    assert english == chinese
    assert len(english) > lines


@pytest.mark.parametrize("name", READMES)
def test_a_readme_is_short(name: str) -> None:
    """Issue 42, 1."""
    assert len(read(name).splitlines()) <= 160


@pytest.mark.parametrize("names", [READMES, GLANCES])
def test_each_language_links_to_the_other(names: tuple[str, str]) -> None:
    for name, other in (names, names[::-1]):
        assert Path(other).name in LINK.findall(read(name))


# ---- what the texts name exists --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", TEXTS, ids=str)
def test_links_lead_somewhere(path: Path) -> None:
    targets = [target.partition("#")[0] for target in LINK.findall(read(path)) if "://" not in target]
    assert [target for target in targets if target and not (ROOT / path.parent / target).exists()] == []


def test_the_index_names_every_text() -> None:
    linked = {(ROOT / "docs" / target).resolve() for target in LINK.findall(read("docs/README.md"))}
    described = ("docs", "deploy", "strategies", "benchmarks")
    wanted = {path for path in TEXTS if len(path.parts) == 1 or path.parts[0] in described}
    wanted -= {Path(page) for page in api().api_pages()} - {Path("docs/reference/api.md")}  # that page names them
    assert {str(path) for path in wanted if (ROOT / path).resolve() not in linked} == {"docs/README.md"}


def test_the_tree_names_paths_that_exist() -> None:
    tree = found_in("CONTRIBUTING.md", r"^## The source tree, in reading order\n\n```\n(.*?)```")
    paths = [line.split()[0] for line in tree.splitlines()]
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / path).exists()] == []
    assert {path.parts[0] for path in project_files() if len(path.parts) > 1 and path.parts[0][0] != "."} == {
        path.partition("/")[0] for path in paths
    }


@pytest.mark.parametrize("name", ["docs/start/at_a_glance.md", "deploy/README.md", "docs/run/machines.md"])
def test_the_launcher_knows_every_flag_that_is_shown(name: str) -> None:
    lines = "\n".join(fenced(name, "bash")).replace("\\\n", " ").splitlines()
    commands = [re.split(r"fleet\.launch|torch-fleet ", line.partition(" #")[0])[1] for line in lines if _starts(line)]
    flags = {flag for command in commands for flag in re.findall(r"(?<= )--[\w-]+", command)}
    assert len(commands) >= 2
    assert {flag for flag in flags if flag not in BY_SPELLING} == set()


def _starts(line: str) -> bool:
    return "fleet.launch" in line or line.startswith("docker run")


# Names that pages mention because they are absent: an import of each ends with what to write instead, or fails.
ABSENT_NAMES = {"fleet.fluid", "fleet.incubate.fleet", "fleet.meta_parallel.pp_utils"}


def exists(name: str) -> bool:
    """Returns whether a dotted name is a module of the package or an attribute of one."""
    found: Any = fleet
    parts = name.split(".")
    for n, part in enumerate(parts[1:], 2):
        try:
            found = getattr(found, part)
        except NotInitializedError:
            return True  # fleet.util and what it has, before fleet.init
        except AttributeError:
            try:
                found = importlib.import_module(".".join(parts[:n]))
            except ImportError:
                return False
    return True


def test_names_of_the_package_exist() -> None:
    pages = [path for path in TEXTS if path.parts[0] in ("README.md", "README.zh-CN.md", "docs")]
    names = {found for path in pages for found in re.findall(PACKAGE_NAME, read(path))}
    assert len(names) >= 100
    assert {name for name in names if not exists(name)} == ABSENT_NAMES


def test_make_has_every_target_that_is_named() -> None:
    targets = set(found_in("Makefile", r"^\.PHONY: ([^\n]*)$").split())
    named = {name for path in TEXTS for name in re.findall(r"`make ([a-z-]+)`", read(path))}
    assert named >= {"demo", "test", "lint"}
    assert named - targets == set()


def test_the_demo_uses_options_that_the_example_has() -> None:
    recipe = found_in("Makefile", r"^demo:.*?\n\n")
    command = recipe.replace("\\\n", " ").splitlines()[2]
    script, _, options = command.partition("examples/")[2].partition(" ")
    script_help = run_python(ROOT / "examples" / script, "--help").stdout
    used = re.findall(r"--[\w-]+", options)
    assert "--history" in used
    assert [option for option in used if option not in script_help] == []
    for path in re.findall(r"\$\(PY\) (\S+\.py)", recipe):
        assert (ROOT / path).is_file()


def test_words_are_plain() -> None:
    selling = re.compile(
        r"\b(blazing|effortless\w*|elegant\w*|seamless\w*|powerful|state-of-the-art|world-class|simply|easily|robust)\b",
        re.IGNORECASE,
    )
    assert {(str(path), found) for path in TEXTS for found in selling.findall(read(path))} == set()
    prose = {path: re.sub(r"<!--|!(?=\[)|```.*?```|`[^`]*`", "", read(path), flags=re.DOTALL) for path in TEXTS}
    assert {str(path) for path, text in prose.items() if "!" in text} == set()


# ---- the container ---------------------------------------------------------------------------------------------------


def test_the_container_image_is_described() -> None:
    """000-22."""
    dockerfile = read("deploy/Dockerfile")
    sources = [word for line in re.findall(r"^COPY (.*)$", dockerfile, re.MULTILINE) for word in line.split()[:-1]]
    assert [source for source in sources if not (ROOT / source).exists()] == []
    ignored = read(".dockerignore").splitlines()
    assert [source for source in sources if f"!{source}" not in ignored] == []
    torch = found_in("constraints.txt", r"^torch==([^\n]*)$")
    assert f"ARG TORCH={torch}\n" in dockerfile
    assert "!deploy/constraints.txt" in ignored
    guide = read("deploy/README.md")
    assert "--net=host" in guide
    assert "--shm-size" in guide


@pytest.mark.parametrize("name", ["deploy/Dockerfile", "deploy/Dockerfile.operator"])
def test_an_image_is_made_of_exact_versions(name: str) -> None:
    """Issue 10, Low: the base by exact tag, and by digest where the builder gives one; one version of all the rest."""
    dockerfile = read(name)
    base = r"^ARG PYTHON=3\.\d+\.\d+\nARG DIGEST=\nFROM python:\$\{PYTHON\}-slim-\w+\$\{DIGEST\}$"
    assert re.search(base, dockerfile, re.MULTILINE)
    installs = re.findall(r"pip install ([^&]*)", dockerfile)
    assert all("--constraint constraints.txt" in words for words in installs), installs
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", read("deploy/constraints.txt"), re.MULTILINE))
    lists = re.findall(r"^(?:dependencies|examples|elastic|k8s) = \[(.*)\]$", read("pyproject.toml"), re.MULTILINE)
    wanted = {name for text in lists for name in re.findall(r'"([\w-]+)', text)}
    assert len(lists) == 4
    assert wanted - {"torch"} <= pins.keys()
    tested = re.findall(r'^([\w-]+)==(\S+?)(?:; python_version >= "3.11")?$', read("constraints.txt"), re.MULTILINE)
    assert {name: pins[name] for name, _ in tested if name in pins} == {n: v for n, v in tested if n in pins}


# ---- examples run ----------------------------------------------------------------------------------------------------


def test_the_examples_are_one_program_in_both_languages() -> None:
    """So that running one of them is enough."""
    english, chinese = ([ast.dump(ast.parse(code)) for code in fenced(name, "python")] for name in GLANCES)
    assert english == chinese


def test_the_strategy_example_runs(tmp_path: Path) -> None:
    _, _, code = fenced(GLANCES[0], "python")
    done = run(f"{code}\nprint(fleet.worker_num())", tmp_path)
    assert done.stdout.split()[-1:] == ["1"], done.stderr


def test_the_hybrid_example_runs(tmp_path: Path) -> None:
    """Issue 11: the script is the same on a mesh of one worker."""
    code, _, _ = fenced(GLANCES[0], "python")
    before = """
import torch
from fleet import fleet

layers = [fleet.meta_parallel.LayerDesc(torch.nn.Linear, 4, 4) for _ in range(2)]
criterion, scheduler = torch.nn.functional.mse_loss, None
loader = [(torch.ones(16, 4), torch.zeros(16, 4))] * 3
"""
    done = run(before + re.sub(r'_degree": 2', '_degree": 1', code) + "    print(float(loss))", tmp_path)
    first, _, last = map(float, done.stdout.split()[-3:])
    assert last < first, done.stderr


def test_the_parameter_server_example_runs(tmp_path: Path) -> None:
    """Issue 4: one machine, one process; rows come up for the ids that are met."""
    _, code, _ = fenced(GLANCES[0], "python")
    loop = "loss = model(batch).sum(); loss.backward(); optimizer.step()"
    before = """
import torch
from fleet import fleet

class WideDeep(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.top = fleet.SparseEmbedding(dim=10), torch.nn.Linear(10, 1)
    def forward(self, ids):
        return self.top(self.rows(ids))

loader = [torch.tensor([7, 10**15])]
"""
    code = before + re.sub(r"\.\.\.  #.*", f"{loop}; fleet.barrier_worker(); fleet.print_table_stat(0)", code)
    code = code.replace(
        "optimizer = fleet", "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\noptimizer = fleet"
    )
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 rows" in done.stdout


USE = """
import torch
from fleet import fleet
{use}
fleet.init(is_collective=True, strategy=strategy)
strategy = __import__("copy").deepcopy(strategy)  # one that no job has copied, to be changed below
model = torch.nn.Linear(4, 1)
before = [p.detach().clone() for p in model.parameters()]
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
model = fleet.distributed_model(model)
(model(torch.full((8, 4), 100.0)).sum()).backward()
optimizer.step()
moved = torch.stack([(p - q).norm() for p, q in zip(model.parameters(), before)]).norm()
print("moved by", round(moved.item(), 4))
def closure():
    optimizer.zero_grad()
    loss = model(torch.full((8, 4), 100.0)).sum()
    loss.backward()
    return loss
before = [p.detach().clone() for p in model.parameters()]
optimizer.step(closure)
moved = torch.stack([(p - q).norm() for p, q in zip(model.parameters(), before)]).norm()
print("with a closure by", round(moved.item(), 4))
for change in [("clip_gradients_configs", {{"max_norm": 0.0}}), ("clip_gradients_configs", {{"norm": 1.0}})]:
    try:
        setattr(strategy, *change)
    except Exception as error:
        print(type(error).__name__, error)
strategy.sharding = True
print(fleet.DistributedStrategy.load is not None, [str(e) for e in
      __import__("fleet.strategies._declare.strategy_plan", fromlist=["x"]).problems(strategy, 2)][0])
"""


def test_the_strategy_of_the_guide_works(tmp_path: Path) -> None:
    """The file of CONTRIBUTING.md, brought by another distribution through an entry point, limits the step."""
    (tmp_path / "clip_gradients.py").write_text(example("CONTRIBUTING.md", "strategies/clip_gradients.py"))
    info = tmp_path / "clip_gradients-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: clip-gradients\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fleet.strategies]\nclip_gradients = clip_gradients:ClipGradients\n")
    done = run(USE.format(use=example("CONTRIBUTING.md", "use")), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "moved by 0.5\n" in done.stdout
    assert "with a closure by 0.5\n" in done.stdout
    assert re.search(r"ConfigError clip_gradients_configs\['max_norm'\] is 0.0; it must be greater than 0", done.stdout)
    assert re.search(r"UnknownOptionError .*Did you mean 'max_norm'\?", done.stdout)
    assert "'clip_gradients' and 'sharding' cannot both be on" in done.stdout


@pytest.mark.parametrize(
    ("text", "cause"),
    [("raise ValueError('an old numpy')", "ValueError: an old numpy"), (None, "ModuleNotFoundError: No module")],
)
def test_a_package_whose_option_cannot_be_loaded_is_named(text: str | None, cause: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "extra_option.py").write_text(text)
    info = tmp_path / "extra_option-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: extra-option\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[fleet.strategies]\nextra = extra_option:Extra\n")
    done = run("from fleet import fleet\nfleet.DistributedStrategy()", tmp_path)
    assert done.returncode == 1
    assert re.search(
        rf"ConfigError: extra-option 1\.2 .*'extra = extra_option:Extra' .*\({cause}.*\)\. .*uninstall", done.stderr
    )


def test_the_strategy_of_the_guide_is_in_style(tmp_path: Path) -> None:
    file = tmp_path / "clip_gradients.py"
    file.write_text(example("CONTRIBUTING.md", "strategies/clip_gradients.py"))
    for words in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *words, "--config", str(ROOT / "pyproject.toml"), str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", GLANCES)
def test_the_glance_maps_what_a_paddle_script_writes(name: str) -> None:
    """002-07: the words of a Fleet script that have no call here are explained."""
    text = (ROOT / name).read_text(encoding="utf-8")
    for written in ("label.stop_gradient = True", "paddle.DataParallel", "paddle.save", "L2Decay"):
        assert written in text, written
