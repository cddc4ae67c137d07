"""Security promise 1: nothing this project reads can run code, and no text becomes a command.

Every rule is a scan of the syntax trees, so a new file is under it as soon as it exists.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.sources import calls_in, imports_of, python_files

CODE = ("fleet", "strategies", "launch", "examples", "deploy", "benchmarks")

UNSAFE_MODULES = ("pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle")
UNSAFE_CALLS = {"eval", "exec", "os.system", "os.popen", "commands.getoutput", "subprocess.getoutput"}
UNSAFE_CALLS |= {"subprocess.getstatusoutput", "tempfile.mktemp", "ssl._create_unverified_context"}
# They pickle what they send and unpickle what they receive.
OBJECT_COLLECTIVES = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
}


# Files that may bind to every interface, and why.
OPEN_SOCKETS = {
    "fleet/job/process_group.py": "rank 0 behind address translation is reached at an address of no interface",
}


def keywords(call: ast.Call) -> dict[str, object]:
    """Returns the keyword arguments that are constants; others appear as the text of their expression."""
    return {
        keyword.arg or "**": keyword.value.value
        if isinstance(keyword.value, ast.Constant)
        else ast.unparse(keyword.value)
        for keyword in call.keywords
    }


def unsafe_import(path: Path) -> Iterator[str]:
    """Yields imports of modules that run code from data."""
    for found in imports_of(path):
        if found.within(*UNSAFE_MODULES) or found.target.rpartition(".")[2] in OBJECT_COLLECTIVES:
            yield str(found)


def unsafe_call(path: Path) -> Iterator[str]:
    """Yields calls that run text, and collectives that pickle."""
    for name, call in calls_in(path):
        if name in UNSAFE_CALLS or name.rpartition(".")[2] in OBJECT_COLLECTIVES:
            yield f"{path}:{call.lineno} calls {name}"


def unsafe_reader(path: Path) -> Iterator[str]:
    """Yields readers of files that would unpickle: torch.load, numpy.load, yaml.load and their kind."""
    for name, call in calls_in(path):
        given = keywords(call)
        torch_load = name.endswith("torch.load") and given.get("weights_only") is not True
        numpy_load = name in ("np.load", "numpy.load") and given.get("allow_pickle", False) is not False
        yaml_load = name in ("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load")
        if torch_load or numpy_load or yaml_load:
            yield f"{path}:{call.lineno} calls {name}({given})"


def unsafe_process(path: Path) -> Iterator[str]:
    """Yields processes that start through a shell."""
    for name, call in calls_in(path):
        if keywords(call).get("shell", False) is not False:
            yield f"{path}:{call.lineno} calls {name} with shell={keywords(call)['shell']}"


def open_socket(path: Path) -> Iterator[str]:
    """Yields constants that bind to every interface; sockets bind to the node's address."""
    for name, call in calls_in(path):
        if name.rpartition(".")[2] in ("bind", "create_server", "TCPServer", "HTTPServer", "ThreadingHTTPServer"):
            for node in ast.walk(call):
                if isinstance(node, ast.Constant) and node.value in ("0.0.0.0", "", "::"):
                    yield f"{path}:{call.lineno} binds to {node.value!r}"


RULES: list[Callable[[Path], Iterator[str]]] = [
    unsafe_import,
    unsafe_call,
    unsafe_reader,
    unsafe_process,
    open_socket,
]


@pytest.mark.parametrize("rule", RULES)
def test_no_file_breaks_the_rule(rule: Callable[[Path], Iterator[str]]) -> None:
    allowed = set(OPEN_SOCKETS) if rule is open_socket else set()
    paths = [path for path in python_files(*CODE) if path.as_posix() not in allowed]
    assert [found for path in paths for found in rule(path)] == []


def test_each_exception_is_needed() -> None:
    assert [path for path in OPEN_SOCKETS if not list(open_socket(Path(path)))] == []


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        (unsafe_import, "import pickle"),
        (unsafe_import, "from torch.distributed import all_gather_object"),
        (unsafe_import, "import importlib; importlib.import_module('marshal')"),
        (unsafe_call, "eval('1')"),
        (unsafe_call, "dist.broadcast_object_list(values)"),
        (unsafe_reader, "torch.load(path)"),
        (unsafe_reader, "torch.load(path, weights_only=False)"),
        (unsafe_reader, "torch.load(path, weights_only=flag)"),
        (unsafe_reader, "np.load(path, allow_pickle=True)"),
        (unsafe_reader, "yaml.load(text, Loader=yaml.Loader)"),
        (unsafe_process, "subprocess.run(text, shell=True)"),
        (open_socket, "socket.bind(('0.0.0.0', 80))"),
        (open_socket, "socket.create_server(('', 80))"),
    ],
)
def test_the_rule_finds_what_it_forbids(rule: Callable[[Path], Iterator[str]], line: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text(f"{line}\n")
    assert len(list(rule(bad))) == 1


@pytest.mark.parametrize(
    "line", ["torch.load(path, weights_only=True)", "np.load(path)", "yaml.safe_load(text)", "subprocess.run(['ls'])"]
)
def test_the_rules_allow_what_is_safe(line: str, tmp_path: Path) -> None:
    good = tmp_path / "good.py"
    good.write_text(f"{line}\n")
    assert [found for rule in RULES for found in rule(good)] == []
