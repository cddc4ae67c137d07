"""Wheel, source archive, editable install and checkout show one package, ``fleet``, and nothing beside it."""

from __future__ import annotations

import email
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import fleet
from tests.helpers.requirements import link_distributions, required
from tests.helpers.sources import ROOT, project_files

pytestmark = pytest.mark.slow

# What the package consists of, by the names under which it is installed.
PACKAGE_FILES = {
    path.as_posix() if path.parts[0] == "fleet" else f"fleet/{path.as_posix()}"
    for path in project_files()
    if path.parts[0] in ("fleet", "strategies", "launch") and path.suffix in (".py", ".pyi", ".typed", ".css", ".js")
}

EXTRAS = {
    "dev",
    "docs",
    "elastic",
    "examples",
    "hf",
    "k8s",
    "kafka",
    "lightning",
    "metrics",
    "migrate",
    "mlflow",
    "parquet",
    "qat",
    "ray",
    "redis",
    "remote",
    "retrieval",
    "tensorboard",
    "trackio",
    "wandb",
}

# The user's own modules, named like our top folders.
TRAIN = """
import launch, strategies
from fleet import fleet
fleet.init(is_collective=True)
print("own", launch.OWN, strategies.OWN, "worker", fleet.worker_index(), "of", fleet.worker_num(), flush=True)
"""
SHOW = """
import fleet, fleet.launch, fleet.strategies.amp, launch, strategies
print(fleet.__file__, fleet.launch.__file__, fleet.strategies.amp.__file__, launch.OWN, strategies.OWN, sep="\\n")
"""


# Where the repository of the archives is; the default is an address that exists nowhere.
REPOSITORY = "https://example.org/owner/torch-fleet"


def run(*command: str | Path, cwd: Path, timeout_s: float = 60, status: int = 0, **variables: str) -> str:
    """Returns the output of a command that must end with ``status``, without this process's Python settings."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == status, done.stdout
    return done.stdout


LINK = re.compile(r"\]\(([^)\s]+)\)")


@cache
def hook() -> ModuleType:
    """Returns hatch_build.py as a module."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a copy of the project's files, links as links, so that building leaves nothing in the project."""
    folder = tmp_path_factory.mktemp("checkout")
    for path in project_files():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, folder / path, follow_symlinks=False)
    return folder


@pytest.fixture(scope="module")
def archives(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder with the source archive and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    command = (sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, checkout)
    run(*command, cwd=folder, timeout_s=120, REPOSITORY=REPOSITORY)
    return folder


def metadata_of(archives: Path) -> email.message.Message:
    """Returns the metadata of the wheel."""
    with zipfile.ZipFile(next(archives.glob("*.whl"))) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(wheel.read(name))


@pytest.fixture(scope="module")
def user_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a user's folder: a training script, a ``launch.py`` and a package ``strategies`` of their own."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "strategies").mkdir()
    (folder / "strategies" / "__init__.py").write_text("OWN = 'strategies'\n")
    (folder / "launch.py").write_text("OWN = 'launch'\n")
    (folder / "train.py").write_text(TRAIN)
    return folder


def new_environment(folder: Path) -> Path:
    """Returns the Python of a new virtual environment that sees this one's packages, but not its editable ones."""
    venv.create(folder, symlinks=True, with_pip=False)
    python = folder / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    # Files of this kind are read by name, and the one of an editable install needs the packages of this one.
    (site / "_dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def install(python: Path, *what: str | Path) -> None:
    """Installs into the environment of ``python`` without fetching anything."""
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, "install", "--no-index")
    run(*pip, "--no-deps", "--no-build-isolation", *what, cwd=python.parent, timeout_s=120)


@pytest.fixture(scope="module")
def installed(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the Python of an environment with the wheel."""
    python = new_environment(tmp_path_factory.mktemp("wheel"))
    install(python, next(archives.glob("*.whl")))
    return python


@pytest.fixture(scope="module")
def editable(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the Python of an environment with an editable install of the copy."""
    python = new_environment(tmp_path_factory.mktemp("editable"))
    install(python, "--editable", checkout)
    return python


def test_the_wheel_holds_the_package_and_nothing_else(archives: Path) -> None:
    """003-38: the wheel is for any machine, and holds no shared library that one could lack."""
    with zipfile.ZipFile(next(archives.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
        assert {name for name in names if ".dist-info/" not in name} == PACKAGE_FILES
        assert (
            wheel.read("fleet/strategies/_declare/strategy.py")
            == (ROOT / "strategies" / "_declare" / "strategy.py").read_bytes()
        )
        assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_wheel_says_what_it_needs(archives: Path) -> None:
    metadata = metadata_of(archives)
    assert metadata["Name"] == "torch-fleet"
    assert metadata["Version"] == fleet.__version__
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra", [])) == EXTRAS
    core = {line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line}
    assert {line.partition(">")[0] for line in core} >= {"torch", "numpy", "pyyaml"}


def test_the_page_of_an_index_links_to_the_release(archives: Path) -> None:
    """Issue 42: every link of the long description is absolute, and leads to a file of the tag of this version."""
    metadata = metadata_of(archives)
    at_tag = f"{REPOSITORY}/blob/v{fleet.__version__}"
    urls = dict(line.split(", ") for line in metadata.get_all("Project-URL", []))
    assert urls["Homepage"] == REPOSITORY
    assert urls["Changelog"] == f"{at_tag}/CHANGELOG.md"
    text = str(metadata.get_payload(decode=True), "utf-8")
    targets = LINK.findall(text)
    assert [target for target in targets if "://" not in target] == []
    paths = [target.removeprefix(f"{at_tag}/").partition("#")[0] for target in targets if target.startswith(at_tag)]
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_without_a_repository_no_link_leads_nowhere() -> None:
    text = hook().long_description((ROOT / "README.md").read_text(encoding="utf-8"), "", "v1")
    assert [target for target in LINK.findall(text) if "://" not in target] == []
    assert hook().project_urls("", "v1") == {}


LINKED = """
[![picture of a *job*](docs/job.png)](docs/guides/page.md#top), ![alone](job.png), [web](https://example.com/a)
<img src="docs/job.png" alt="job">, [below](#limits)
```
[not](a/link)
```
- an item
  ```bash
  [not](a/link) either
  ```
"""
ABSOLUTE = """
[![picture of a *job*](R/raw/v1/docs/job.png)](R/blob/v1/docs/guides/page.md#top), ![alone](R/raw/v1/job.png), [web](https://example.com/a)
<img src="R/raw/v1/docs/job.png" alt="job">, [below](R/blob/v1/README.md#limits)
```
[not](a/link)
```
- an item
  ```bash
  [not](a/link) either
  ```
"""


def test_links_of_every_form_become_absolute() -> None:
    made = hook().long_description(LINKED, REPOSITORY, "v1")
    assert made.replace(REPOSITORY, "R") == ABSOLUTE


def test_a_repository_is_a_web_address(checkout: Path, tmp_path: Path) -> None:
    command = (sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path, checkout)
    said = run(*command, cwd=tmp_path, timeout_s=120, status=1, REPOSITORY="owner/torch-fleet")
    assert "REPOSITORY='owner/torch-fleet' is no address of a repository: https://HOST/OWNER/NAME" in said


def test_building_leaves_nothing_in_the_checkout(archives: Path, checkout: Path) -> None:
    """A build folder in the checkout would carry a removed module into the next wheel."""
    found = (path for path in checkout.rglob("*") if path.is_symlink() or path.is_file())
    present = {path.relative_to(checkout) for path in found if path.parent.name != "__pycache__"}
    assert {path for path in present if not (checkout / path.parent).is_symlink()} == set(project_files())


def test_the_source_archive_holds_files_and_no_links(archives: Path) -> None:
    with tarfile.open(next(archives.glob("*.tar.gz"))) as archive:
        members = {member.name.partition("/")[2]: member for member in archive.getmembers()}
    assert set(members) >= PACKAGE_FILES
    assert not [name for name, member in members.items() if member.issym() or member.islnk()]
    assert not [name for name in members if name.startswith(("strategies", "launch"))]


def test_the_wheel_works_beside_modules_of_the_same_names(installed: Path, user_folder: Path) -> None:
    *files, launch, strategies = run(installed, "-c", SHOW, cwd=user_folder).split()
    assert (launch, strategies) == ("launch", "strategies")
    assert [file for file in files if not Path(file).is_relative_to(installed.parents[1])] == []


def test_the_editable_install_works_beside_modules_of_the_same_names(
    editable: Path, checkout: Path, user_folder: Path
) -> None:
    *files, launch, strategies = run(editable, "-c", SHOW, cwd=user_folder).split()
    assert (launch, strategies) == ("launch", "strategies")
    assert [file for file in files if not Path(file).is_relative_to(checkout / ".editable" / "fleet")] == []


CHECKERS = ("mypy --strict --ignore-missing-imports --python-executable", "pyright --pythonpath")


@pytest.mark.parametrize("kind", ["installed", "editable"])
@pytest.mark.parametrize("checker", CHECKERS)
def test_type_checkers_find_the_package(
    kind: str, checker: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    python: Path = request.getfixturevalue(kind)
    script = tmp_path / "wrong.py"
    script.write_text("from fleet import fleet\nfleet.init(is_collective=True)\nfleet.init(is_colective=True)\n")
    command = (sys.executable, "-m", *checker.split(), python, script)
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300).stdout
    (error,) = (line for line in found.splitlines() if "error:" in line or " - error" in line)
    assert "wrong.py:3:" in error
    assert "is_colective" in error


@pytest.mark.parametrize("kind", ["installed", "editable"])
def test_our_top_folders_are_not_importable(
    kind: str, checkout: Path, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Other packages, as deepctr_torch, install a folder of one of these names."""
    python: Path = request.getfixturevalue(kind)
    code = (
        "import sys; from importlib.util import find_spec\n"
        "found = [s for m in ('launch', 'strategies', 'tests') if (s := find_spec(m)) is not None]\n"
        "places = [p for s in found for p in s.submodule_search_locations or [s.origin]]\n"
        f"print([p for p in places if p.startswith((sys.prefix, {str(checkout)!r}))])"
    )
    assert run(python, "-c", code, cwd=tmp_path).strip() == "[]"


@pytest.mark.parametrize("kind", ["installed", "editable"])
def test_a_new_file_of_the_checkout_is_seen_only_by_the_editable_install(
    kind: str, checkout: Path, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    python: Path = request.getfixturevalue(kind)
    new = checkout / "launch" / "_made_later.py"
    new.write_text("")
    try:
        code = "from importlib.util import find_spec; print(find_spec('fleet.launch._made_later') is not None)"
        assert run(python, "-c", code, cwd=tmp_path).strip() == str(kind == "editable")
    finally:
        new.unlink()


@pytest.mark.parametrize("kind", ["installed", "editable"])
@pytest.mark.parametrize("command", ["launch", "fleetrun", "fleet", "python -m fleet.launch", "python -m fleet"])
def test_the_commands_start(kind: str, command: str, user_folder: Path, request: pytest.FixtureRequest) -> None:
    python: Path = request.getfixturevalue(kind)
    words = command.split()
    help_text = run(python.parent / words[0], *words[1:], "--help", cwd=user_folder)
    assert "usage: " in help_text
    assert command.endswith("fleet") or "--gpus" in help_text


def test_a_job_runs_from_the_wheel(installed: Path, user_folder: Path) -> None:
    command = (installed.parent / "fleetrun", "--gpus=0,1", "--log_dir", "log", "train.py")
    run(*command, cwd=user_folder, timeout_s=60)
    logs = "".join((user_folder / "log" / f"workerlog.{rank}").read_text() for rank in (0, 1))
    for rank in (0, 1):
        assert f"own launch strategies worker {rank} of 2" in logs


# ---- what an installation brings along -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fresh(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns a function of an extra: the Python of an environment with the wheel and what it requires, no more."""

    @cache
    def made(extra: str) -> Path:
        python = tmp_path_factory.mktemp(f"fresh-{extra}") / "bin" / "python"
        venv.create(python.parents[1], symlinks=True, with_pip=False)
        install(python, next(archives.glob("*.whl")))
        site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=python.parent)
        link_distributions(required(metadata_of(archives).get_all("Requires-Dist", []), extra), Path(site.strip()))
        return python

    return made


def test_the_core_is_enough_to_train(fresh: Callable[[str], Path], user_folder: Path) -> None:
    """Issue 42: two devices are tried, and a script of one's own trains, with what `pip install torch-fleet` brings."""
    python = fresh("")
    assert "No module named" in run(python, "-c", "import pytest", cwd=user_folder, status=1)
    run(python, "-m", "fleet", "run_check", cwd=user_folder, timeout_s=300, CUDA_VISIBLE_DEVICES="")
    run(python.parent / "fleetrun", "--gpus=0,1", "--log_dir", "core", "train.py", cwd=user_folder)
    assert "worker 1 of 2" in (user_folder / "core" / "workerlog.1").read_text()


QUICK_START = ("-m", "fleet.launch", "--nproc_per_node=2", "examples/quickstart/train_fleet.py")


def test_the_quick_start_runs_with_the_extra_that_it_names(fresh: Callable[[str], Path], checkout: Path) -> None:
    """The command of the README, with what its extra brings."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "'.[examples,migrate]'" in readme
    assert f"python {' '.join(QUICK_START)}" in readme
    said = run(fresh("examples"), *QUICK_START, cwd=checkout, timeout_s=300, CUDA_VISIBLE_DEVICES="")
    assert re.search(r"epoch 4: loss [\d.]+, 3\d\d of 360 test images", said)


def test_an_example_without_the_extra_names_it(fresh: Callable[[str], Path], checkout: Path) -> None:
    said = run(fresh(""), "examples/resnet/train_torch.py", cwd=checkout, status=1)
    assert "pip install '.[examples]'" in said
    assert "Traceback" not in said
