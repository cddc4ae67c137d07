"""The rules of the tree that a reader may rely on: sizes, directions of imports, tests beside code, plain text."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import TypeGuard

import pytest

from fleet.strategies import REGISTRY
from tests.helpers.sources import (
    PACKAGES,
    ROOT,
    Import,
    dotted,
    imported_by,
    imports_of,
    module_name,
    nodes_of,
    project_files,
    python_files,
)

MAX_CODE_LINES = 400
MAX_FUNCTION_LINES = 60
USUAL_FUNCTION_LINES = 40
MAX_LONG_FUNCTIONS = 8

# Modules whose tests stand in another module's test file, and where.
TESTED_ELSEWHERE: dict[str, str] = {
    "fleet/env.py": "tests/fleet/role_maker/test_starters.py",
    "fleet/clip.py": "tests/fleet/optimizer/test_constructors.py",
    "fleet/regularizer.py": "tests/fleet/optimizer/test_constructors.py",
    "fleet/optimizer/optimizer_arguments.py": "tests/fleet/optimizer/test_constructors.py",
    "fleet/optimizer/paddle_rules.py": "tests/fleet/optimizer/test_constructors.py",
    "fleet/common/outside_graphs.py": "tests/strategies/test_to_static.py",
    "fleet/common/version.py": "tests/fleet/test_main.py",
    "strategies/_shared/update_rule.py": "tests/strategies/test_lars_lamb.py",
    "strategies/_shared/casts.py": "tests/strategies/amp/test_amp_model.py",
    "fleet/meta_parallel/pipeline_layer.py": "tests/fleet/training/test_pipeline_model.py",
    "fleet/ps/table/table_memory.py": "tests/fleet/ps/test_twins.py",
    "fleet/ps/table/kernels/finding.py": "tests/fleet/ps/test_twins.py",
    "fleet/ps/table/kernels/seal.py": "tests/fleet/ps/wire/test_sealed.py",
    "fleet/ps/table/kernels/row_kernels.py": "tests/fleet/ps/test_twins.py",
    "fleet/ps/worker/job_tables.py": "tests/fleet/ps/worker/test_refused_load.py",
    "fleet/ps/server/connected_worker.py": "tests/fleet/ps/server/test_late_answers.py",
    "fleet/ps/files/row_file.py": "tests/fleet/ps/files/test_table_files.py",
}

# Class names that the library defines twice, and why each still stands.
SHARED_CLASS_NAMES: dict[str, str] = {
    "FleetStrategy": "Lightning has a strategy of one name for Fabric and for its Trainer, of different base classes",
    "TensorParallel": "Fleet's name of a wrapped model, for isinstance, and the strategy",
}
# File stems that the library has twice, and why each still stands.
SHARED_STEMS: dict[str, str] = {
    "job": "one worker's view of the job it trains, and one node's run of the launcher",
    "mp_layers": "public paths of Paddle's scripts: fleet.layers.mpu and fleet.meta_parallel.parallel_layers",
    "random": "as mp_layers",
    "recompute": "a public path of Paddle's scripts, and the option",
    "report": "what a launched job left behind, and what verify found",
}

# Python files that hold characters outside ASCII because they are the data.
NOT_ASCII: set[str] = set()


def functions(path: Path) -> Iterator[tuple[str, int, int]]:
    """Yields name, number of lines, and the same without the docstring, of every function of a file."""
    for node in nodes_of(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            text = len((ast.get_docstring(node, clean=False) or "").splitlines())
            yield f"{path}:{node.lineno} {node.name}", lines, lines - text


def code_lines(text: str, nodes: Iterable[ast.AST]) -> list[int]:
    """Returns the numbers of the lines of code: docstrings, comments, imports and blank lines do not count."""
    words = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) or _is_text(node)]
    left_out = {line for node in words for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    lines = enumerate(text.splitlines(), start=1)
    return [n for n, line in lines if n not in left_out and line.strip() and not line.lstrip().startswith("#")]


def _is_text(node: ast.AST) -> TypeGuard[ast.Expr]:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def test_there_is_something_to_look_at() -> None:
    assert {path.parts[0] for path in python_files()} >= {"fleet", "strategies", "launch", "tests", "examples"}
    assert len(python_files("fleet", "strategies", "launch")) > 30


@pytest.mark.parametrize("name", ["fleet/strategies", "fleet/launch", ".editable/fleet"])
def test_the_folders_on_top_are_reached_through_links(name: str) -> None:
    link = ROOT / name
    assert link.is_symlink()
    assert link.readlink() == Path("..", link.name)


def test_files_are_short() -> None:
    texts = {path: (ROOT / path).read_text(encoding="utf-8") for path in python_files()}
    sizes = {str(path): len(code_lines(text, nodes_of(path))) for path, text in texts.items()}
    assert {name: size for name, size in sizes.items() if size > MAX_CODE_LINES} == {}


def test_code_lines_are_what_is_left_without_words_and_imports() -> None:
    words = '"""A docstring\n\nof three lines."""\n\nimport ast  # here\nfrom re import (\n    sub,\n)\n'
    text = f"{words}\n# why\nx = [\n    1,\n]\n"
    assert code_lines(text, ast.walk(ast.parse(text))) == [11, 12, 13]


def test_functions_are_short() -> None:
    own = (path for path in python_files() if "silent_bugs" not in path.parts)  # scripts as others write them
    sizes = [entry for path in own for entry in functions(path)]
    assert [name for name, lines, _ in sizes if lines > MAX_FUNCTION_LINES] == []
    longer = [f"{name}: {code}" for name, _, code in sizes if code > USUAL_FUNCTION_LINES]
    assert len(longer) <= MAX_LONG_FUNCTIONS, longer


# Top folder (or folder inside fleet) -> what its modules may import beside the standard library and themselves.
DIRECTIONS = {
    "launch": (
        "fleet.common.version",
        "fleet.common.own_thread",
        "fleet.common.extras",
        "fleet.common.addresses",
        "fleet.common.plain_files",
        "fleet.env",
        "fleet.errors",
        "fleet.common.env_table",
        "fleet.common.command_text",
        "fleet.common.round_axis",
        "fleet.common.sealing",
        "fleet.common.tracker_names",
        "etcd3gw",
    ),
    "strategies": (
        "fleet.common.notes",
        "fleet.common.outside_graphs",
        "fleet.common.own_thread",
        "fleet.common.extras",
        "fleet.env",
        "fleet.errors",
        "fleet.job",
        "fleet.ps",
        "torch",
        "torchao",
    ),
    "fleet/ps": (
        "fleet.errors",
        "fleet.common.lazy_names",
        "fleet.common.outside_graphs",
        "fleet.common.own_thread",
        "fleet.common.extras",
        "fleet.common.addresses",
        "fleet.common.plain_files",
        "fleet.common.python_file",
        "fleet.common.sealing",
        "fleet.common.whole_numbers",
        "numpy",
        "numba",
        "llvmlite",
        "faiss",
        "redis",
        "torch",
    ),
    # They stand on top of the package and the launcher: each may use all of it, and the framework that it joins.
    "fleet/integrations": (
        "fleet",
        "accelerate",
        "lightning",
        "lightning_utilities",
        "ray",
        "torch",
        "transformers",
    ),
    "fleet/k8s": (
        "fleet.errors",
        "fleet.common.command_text",
        "fleet.common.limited_yaml",
        "fleet.common.plain_files",
        "fleet.common.own_thread",
        "fleet.common.extras",
        "fleet.env",
        "fleet.launch",
        "yaml",
        "kopf",
        "kubernetes",
    ),
}


def wrong_imports(folder: str) -> list[str]:
    """Returns every import in ``folder`` that points against the direction."""
    top = folder.split("/")[0]
    inside = folder.replace(top, PACKAGES[top], 1).replace("/", ".")
    return [
        str(found)
        for path in python_files(top)
        if path.as_posix().startswith(f"{folder}/")
        for found in imports_of(path)
        if found.target.split(".")[0] not in sys.stdlib_module_names and not found.within(inside, *DIRECTIONS[folder])
    ]


@pytest.mark.parametrize("folder", list(DIRECTIONS))
def test_imports_point_one_way(folder: str) -> None:
    assert wrong_imports(folder) == []


def test_the_error_and_environment_modules_import_nothing_of_the_project() -> None:
    allowed = {
        "fleet/errors.py": (),
        "fleet/common/env_table.py": (),
        "fleet/common/extras.py": (),
        "fleet/common/addresses.py": ("fleet.errors",),
        "fleet/common/plain_files.py": (),
        "fleet/common/own_thread.py": ("fleet.errors",),
        "fleet/common/sealing.py": (),  # one way to prove and seal, for the launcher and the parameter server
        "fleet/env.py": ("fleet.common.env_table", "fleet.errors"),
    }
    for name, targets in allowed.items():
        for found in imports_of(Path(name)):
            root = found.target.split(".")[0]
            assert root in sys.stdlib_module_names or found.within(*targets), str(found)


def options() -> set[str]:
    """Returns the names of the files and folders of strategies/ that are one option each."""
    parts = {path.parts[1].removesuffix(".py") for path in python_files("strategies")}
    return {part for part in parts if not part.startswith("_")}


def test_strategies_do_not_know_each_other() -> None:
    names = options()
    assert {"amp", "sharding", "dgc"} <= names
    wrong = []
    for path in python_files("strategies"):
        others = [f"fleet.strategies.{name}" for name in names - {path.parts[1].removesuffix(".py")}]
        wrong += [str(found) for found in imports_of(path) if found.within(*others)]
    assert wrong == []


def test_only_etcd_code_imports_the_etcd_client() -> None:
    """The launcher starts without any package that is not in the standard library."""
    users = {
        path.as_posix() for path in python_files("launch") for found in imports_of(path) if found.within("etcd3gw")
    }
    assert all("etcd" in Path(user).stem for user in users), users


def test_everything_is_imported_through_the_package() -> None:
    """``import strategies`` would make a second registry; relative imports hide which package a file belongs to."""
    wrong = [
        str(found)
        for path in python_files()
        for found in imports_of(path)
        if found.within("strategies", "launch") or found.target.startswith(".")
    ]
    assert wrong == []


# Folders whose modules users import by their own names.
PUBLIC_MODULES = ("fleet/utils/", "fleet/integrations/", "strategies/")


def test_an_underscore_marks_a_private_module_among_public_ones() -> None:
    marked = {
        path.as_posix()
        for path in python_files("fleet", "strategies", "launch")
        if any(part.startswith("_") and not part.startswith("__") for part in path.parts)
    }
    assert {path for path in marked if not path.startswith(PUBLIC_MODULES)} == set()


def test_common_knows_nothing_of_the_rest() -> None:
    wrong = [
        str(found)
        for path in python_files("fleet")
        if path.as_posix().startswith("fleet/common/")
        for found in imports_of(path)
        if found.within("fleet") and not found.within("fleet.errors", "fleet.common")
    ]
    assert wrong == []


MAX_FILES = 24
MAX_TOP_FILES = 12
LARGER_FOLDERS = {"strategies"}  # a file an option, so it grows with them


def test_folders_are_small() -> None:
    sizes = Counter(path.parent.as_posix() for path in python_files("fleet", "strategies", "launch"))
    assert {folder for folder, size in sizes.items() if size > MAX_FILES} <= LARGER_FOLDERS
    assert sizes["fleet"] <= MAX_TOP_FILES


def environment_uses(path: Path) -> Iterator[str]:
    """Yields where a file touches the process environment."""
    names = {"os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv"}
    for node in nodes_of(path):
        if isinstance(node, ast.Attribute) and dotted(node) in names:
            yield f"{path}:{node.lineno} {dotted(node)}"
    for found in imports_of(path):
        if found.target in names:
            yield f"{path}:{found.line} {found.target}"


def test_one_reader_of_the_environment() -> None:
    assert list(environment_uses(Path("fleet/env.py"))) != []
    others = [path for path in python_files("fleet", "strategies", "launch") if path != Path("fleet/env.py")]
    assert [use for path in others for use in environment_uses(path)] == []


# Who may start a thread, and how its end is noticed there.
THREADS = {
    "fleet/common/own_thread.py": "says what ends it, and raises it to its owner",
    "launch/page/page_server.py": "one for each caller, who is answered that it failed",
}
THREAD_MAKERS = {"Thread", "Timer", "start_new_thread", "ThreadingMixIn", "ThreadingHTTPServer", "ThreadingTCPServer"}


def thread_makers(path: Path) -> Iterator[str]:
    """Yields what starts a thread by itself, and work of a pool whose outcome nobody asks for."""
    for node in nodes_of(path):
        made = [node.func] if isinstance(node, ast.Call) else node.bases if isinstance(node, ast.ClassDef) else []
        yield from (f"{path}:{node.lineno} {dotted(one)}" for one in made if _last(one) in THREAD_MAKERS)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _last(node.value.func) == "submit":
            yield f"{path}:{node.lineno} drops what {dotted(node.value.func)} returns"


def _last(node: ast.expr) -> str:
    return dotted(node).rpartition(".")[2]


def test_no_thread_ends_unseen() -> None:
    paths = python_files("fleet", "strategies", "launch")
    found = {path.as_posix(): list(thread_makers(path)) for path in paths}
    assert {path for path, uses in found.items() if uses} == set(THREADS), found


# Names of the standard library that came after Python 3.10, the oldest one that is supported.
NEWER_THAN_3_10 = (
    *(
        f"typing.{name}"
        for name in ("Self", "Never", "LiteralString", "assert_never", "override", "Unpack", "TypeVarTuple")
    ),
    *(f"enum.{name}" for name in ("StrEnum", "ReprEnum", "verify", "nonmember", "member")),
    *(f"asyncio.{name}" for name in ("TaskGroup", "Runner", "timeout", "Barrier")),
    *("tomllib", "datetime.UTC", "contextlib.chdir", "itertools.batched", "warnings.deprecated", "hashlib.file_digest"),
)


def test_nothing_needs_a_newer_python() -> None:
    imported = [str(found) for path in python_files() for found in imports_of(path) if found.within(*NEWER_THAN_3_10)]
    used = [
        f"{path}:{node.lineno} {dotted(node)}"
        for path in python_files()
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute) and dotted(node) in NEWER_THAN_3_10
    ]
    groups = [
        f"{path}:{node.lineno} {node.id}"
        for path in python_files()
        for node in nodes_of(path)
        if isinstance(node, ast.Name) and node.id in ("ExceptionGroup", "BaseExceptionGroup")
    ]
    assert imported + used + groups == []


@cache
def files_beside(folder: Path) -> tuple[Path, ...]:
    """Returns the test files that lie in a folder itself."""
    return tuple(test for test in python_files("tests") if test.parent == folder and test.stem.startswith("test_"))


def covering_tests(path: Path) -> list[str]:
    """Returns the test files of a module: the one named after it, and those of its folder, or above, that import it.

    ``launch/plan/nodes.py`` has ``tests/launch/plan/test_nodes.py``.
    """
    folders = [Path("tests") / folder for folder in (path.parent, *path.parent.parents[:-1])]
    return [
        test.as_posix()
        for folder in folders
        for test in files_beside(folder)
        if (folder == folders[0] and test.stem == f"test_{path.stem.strip('_')}")
        or module_name(path) in imported_by(test)
    ]


def is_only_refused(path: Path) -> bool:
    """Returns whether a file describes options and refuses all of them; the contract tests cover such a file."""
    if path.parts[0] != "strategies" or path.parts[1].startswith("_"):
        return False
    return all(strategy.refused for strategy in REGISTRY.values() if strategy.__module__ == module_name(path))


def test_every_module_has_a_test() -> None:
    modules = [path for path in python_files("fleet", "strategies", "launch") if path.stem != "__init__"]
    untested = {path.as_posix() for path in modules if not covering_tests(path) and not is_only_refused(path)}
    assert untested - set(TESTED_ELSEWHERE) == set()
    assert untested >= set(TESTED_ELSEWHERE), "an entry of TESTED_ELSEWHERE is not needed any more"
    assert [test for test in TESTED_ELSEWHERE.values() if not (ROOT / test).exists()] == []


def named_twice(places: Iterable[tuple[str, Path]]) -> dict[str, list[str]]:
    """Returns, for each name of more than one place, where it stands."""
    found: dict[str, list[str]] = {}
    for name, path in places:
        found.setdefault(name, []).append(path.as_posix())
    return {name: paths for name, paths in found.items() if len(paths) > 1}


def test_a_class_name_stands_for_one_thing() -> None:
    paths = python_files("fleet", "strategies", "launch")
    classes = [(node.name, path) for path in paths for node in nodes_of(path) if isinstance(node, ast.ClassDef)]
    twice = named_twice(classes)
    assert {name: paths for name, paths in twice.items() if name not in SHARED_CLASS_NAMES} == {}
    assert set(SHARED_CLASS_NAMES) - set(twice) == set(), "an entry of SHARED_CLASS_NAMES is not needed any more"


def test_a_file_name_stands_for_one_thing() -> None:
    paths = [path for path in python_files("fleet", "strategies", "launch") if not path.stem.startswith("__")]
    twice = named_twice((path.stem.lstrip("_"), path) for path in paths)
    assert {name: paths for name, paths in twice.items() if name not in SHARED_STEMS} == {}
    assert set(SHARED_STEMS) - set(twice) == set(), "an entry of SHARED_STEMS is not needed any more"


def test_package_code_is_ascii() -> None:
    kept = {"Makefile", ".ci/run", "pyproject.toml", "constraints.txt"}
    paths = [p.as_posix() for p in project_files() if p.suffix == ".py" or p.as_posix() in kept]
    found = {path for path in paths if not (ROOT / path).is_dir() and not (ROOT / path).read_bytes().isascii()}
    assert found - NOT_ASCII == set()
    assert found >= NOT_ASCII, "an entry of NOT_ASCII is not needed any more"


# Written with a class of one character so that this file does not find itself.
MACHINE_PATHS = re.compile(r"(?<![\w.~}])/(?:[w]ork|[r]oot|[h]ome|[U]sers|[o]pt/wheels|[m]nt/data)(?=/|\b)")
HOSTS = re.compile(r"\w+://(?:[^/@\s]*@)?\[?([\w.-]+)")
# Hosts a text may name: this machine, private and example addresses and names, where the licence is published, and
# where torch without CUDA is.
ALLOWED_HOSTS = re.compile(
    r"(127|10)(\.\d+){3}|192\.168(\.\d+){2}|192\.0\.2\.\d+|localhost|([\w-]+\.)*example(\.com|\.org)?"
    r"|www\.apache\.org|download\.pytorch\.org"
)
# What links to others' pages by its nature: public reports of bugs, and the comparison with other tools.
LINKED_PLACES = ("benchmarks/silent_bugs/", "docs/help/comparison")


def texts() -> Iterator[tuple[str, int, str]]:
    """Yields file, line number and line of everything in the project that is text."""
    for path in project_files():
        data = b"" if (ROOT / path).is_symlink() else (ROOT / path).read_bytes()
        if b"\0" in data:
            continue
        for number, line in enumerate(data.decode("utf-8").splitlines(), start=1):
            yield path.as_posix(), number, line


def test_no_file_names_a_machine() -> None:
    assert [f"{path}:{number} {line.strip()}" for path, number, line in texts() if MACHINE_PATHS.search(line)] == []


def test_no_file_names_a_host() -> None:
    found = [
        f"{path}:{number} {host}"
        for path, number, line in texts()
        for host in HOSTS.findall(line)
        if "." in host and not ALLOWED_HOSTS.fullmatch(host) and not path.startswith(LINKED_PLACES)
    ]
    assert found == []


def test_text_files_end_with_one_newline() -> None:
    wrong = []
    for path in project_files():
        data = b"" if (ROOT / path).is_symlink() else (ROOT / path).read_bytes()
        if data and b"\0" not in data and (not data.endswith(b"\n") or data.endswith(b"\n\n")):
            wrong.append(path.as_posix())
    assert wrong == []


def test_an_import_knows_what_it_lies_in() -> None:
    found = Import("fleet.errors.ConfigError", Path("x.py"), 3)
    assert found.within("fleet.errors")
    assert not found.within("fleet.err")
    assert str(found) == "x.py:3 imports fleet.errors.ConfigError"
