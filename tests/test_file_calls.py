"""Security promise 2: the library reads, makes, replaces and extends files in one way, which follows no link.

``fleet/common/plain_files.py`` is that way; the rule is a scan of the syntax trees, so a new file is under it as soon
as it exists.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.sources import calls_in, python_files

LIBRARY = ("fleet", "strategies", "launch")
HOME = "fleet/common/plain_files.py"

# Files that write in another way, and why.
WRITERS = {
    HOME: "it is the one way",
    "fleet/checkpoint/readers/dcp.py": "torch writes into a new folder with a name that nobody foresees",
    "fleet/profile/step_profiler.py": "torch's profiler takes a name; it lies in a new folder of this user alone",
    "fleet/ps_job/user_secret.py": "it makes the secret relative to a folder that was checked while it is open",
    "fleet/utils/fs.py": "the commands of a file system: the user names what is copied where",
    "fleet/verify/changed_files.py": "it puts back what a run changed, links included",
    "fleet/verify/paired_runs.py": "verify's own folder, which only this user can enter",
    "fleet/verify/record_files.py": "verify's own folder",
    "fleet/verify/engines/fleet_engine.py": "verify's own folder",
    "fleet/verify/script_runner.py": "verify's own folder",
    "fleet/verify/tensor_files.py": "verify's own folder",
    "fleet/ps/one_machine/memory_file.py": "memory of another process of this user, which has no name in any folder",
}

# Files that read in another way, and why.
READERS = {
    "fleet/checkpoint/conversion/formats.py": "the library's own modules",
    "fleet/options/__init__.py": "the library's own texts",
    "fleet/ps/table/kernels/common.py": "the library's own modules",
    "fleet/ps/table/kernels/numba_cache.py": "the library's own modules",
    "launch/page/page_server.py": "the library's own pages",
    "fleet/dataset/source.py": "the user's data, which may come through a pipe",
    "fleet/migrate/migrate_command.py": "the user's script",
    "launch/cli/config.py": "the user's script",
    "fleet/trackers/kubeflow_tracker.py": "a token that Kubernetes mounts as a link",
    "strategies/reproducible/same_kernels.py": "the processor, as the kernel names it",
    "fleet/verify/changed_files.py": "verify's own folder",
    "fleet/verify/paired_runs.py": "verify's own folder",
    "fleet/verify/record_files.py": "verify's own folder",
    **dict.fromkeys(
        (
            "fleet/estimate/measured_server.py",
            "fleet/ps/publishing/publisher.py",
            "fleet/ps/server/measures.py",
            "fleet/trackers/step_values.py",
            "launch/plan/interfaces.py",
            "launch/plan/local_machine.py",
            "launch/plan/ports.py",
            "launch/processes/guardian.py",
            "launch/processes/watch.py",
            "launch/processes/process.py",
            "launch/processes/report.py",
        ),
        "what the kernel says in /proc or /sys",
    ),
    HOME: "it is the one way",
}

# The last part of names of functions that make a file from its name.
MAKING = ("write_text", "write_bytes", "savez", "savez_compressed", "save_file", "tofile", "write_table", "mkfifo")
MAKING += ("export_chrome_trace", "FileHandler", "mkstemp", "NamedTemporaryFile", "copyfile", "copytree", "copy2")
SAVING = ("torch.save", "torch.export.save", "torch_checkpoint.save", "np.save", "numpy.save", "safetensors.torch.save")
FLAGS = ("O_CREAT", "O_WRONLY", "O_RDWR", "O_TRUNC", "O_APPEND")
# Openers by the place of their mode; a method's first argument is the mode.
MODES = {
    "open": 1,
    "os.fdopen": 1,
    "io.open": 1,
    "gzip.open": 1,
    "zipfile.ZipFile": 1,
    "np.memmap": 2,
    "numpy.memmap": 2,
}


def other_writer(path: Path) -> Iterator[str]:
    """Yields the calls that make a file, or open one for writing, by its name."""
    for name, call in calls_in(path):
        last = name.rpartition(".")[2]
        given = [ast.unparse(one) for one in (*call.args, *(keyword.value for keyword in call.keywords))]
        is_found = (
            last in MAKING
            or name in ("shutil.copy", "shutil.move", "os.link")
            or (last == "touch" and not call.args)
            or (
                name == "os.open"
                and any(flag in one for flag in FLAGS for one in given[1:])
                and given[0] != "os.devnull"
            )
            or (name in SAVING and not {"file", "buffer"} & set(given))  # what is open already
            or (last in ("open", "fdopen", "ZipFile", "memmap") and name != "os.open" and _is_for_writing(name, call))
        )
        if is_found:
            yield f"{path}:{call.lineno} calls {name}({', '.join(given)})"


def other_reader(path: Path) -> Iterator[str]:
    """Yields the calls that read a file by its name."""
    for name, call in calls_in(path):
        given = [ast.unparse(one) for one in call.args]
        is_opened = (
            name == "open" and given[0] not in ("descriptor", "os.devnull") and not given[0].startswith("open_own(")
        )
        is_method = name.endswith(".open") and given in (["'rb'"], ["'r'"]) and name not in MODES
        is_opened &= not _is_for_writing(name, call)
        if name.endswith((".read_text", ".read_bytes")) or is_opened or is_method:
            yield f"{path}:{call.lineno} calls {name}({', '.join(given)})"


def _is_for_writing(name: str, call: ast.Call) -> bool:
    """Returns whether the mode is one for writing and what is opened is no descriptor of ``open_own``."""
    first = ast.unparse(call.args[0]) if call.args else ""
    if first == "descriptor" or first.startswith("open_own("):
        return False
    modes = [keyword.value for keyword in call.keywords if keyword.arg == "mode"] + call.args[MODES.get(name, 0) :][:1]
    texts = [one.value for one in modes if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    return any(re.fullmatch("[rwaxbt+]+", text) and set(text) & set("wax+") for text in texts)


RULES = [(other_writer, WRITERS), (other_reader, READERS)]
Rule = Callable[[Path], Iterator[str]]


@pytest.mark.parametrize(("rule", "allowed"), RULES)
def test_files_are_opened_in_one_way(rule: Rule, allowed: dict[str, str]) -> None:
    paths = [path for path in python_files(*LIBRARY) if path.as_posix() not in allowed]
    assert [found for path in paths for found in rule(path)] == []


@pytest.mark.parametrize(("rule", "allowed"), RULES)
def test_each_exception_is_needed(rule: Rule, allowed: dict[str, str]) -> None:
    assert [path for path in allowed if not list(rule(Path(path)))] == []


@pytest.mark.parametrize(
    "line",
    [
        "open(path, 'w')",
        "open(path, mode='r+')",
        "path.open('ab')",
        "path.write_text('')",
        "os.open(path, os.O_WRONLY | os.O_CREAT)",
        "os.fdopen(os.open(path, os.O_RDONLY), 'w')",
        "torch.save(state, path)",
        "np.save(path, array)",
        "np.savez(path, a=array)",
        "np.memmap(path, np.uint8, 'r+')",
        "gzip.open(path, 'wb')",
        "zipfile.ZipFile(path, 'w')",
        "shutil.copyfile(path, other)",
        "path.touch()",
    ],
)
def test_the_rule_finds_what_it_forbids(line: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text(f"{line}\n")
    assert len(list(other_writer(bad))) == 1


@pytest.mark.parametrize("line", ["open(path)", "path.open('rb')", "path.read_text()"])
def test_the_rule_finds_other_readers(line: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text(f"{line}\n")
    assert len(list(other_reader(bad))) == 1


@pytest.mark.parametrize(
    "line",
    [
        "open(path)",
        "open(open_own(path, os.O_APPEND), 'a')",
        "path.open('rb')",
        "gzip.open(raw)",
        "torch.save(state, file)",
        "source.open(starts)",
        "rows.touch(places)",
        "np.memmap(path, np.uint8, 'r')",
        "os.open(os.devnull, os.O_RDWR)",
    ],
)
def test_the_rule_allows_what_is_safe(line: str, tmp_path: Path) -> None:
    good = tmp_path / "good.py"
    good.write_text(f"{line}\n")
    assert list(other_writer(good)) == []
