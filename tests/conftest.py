"""Markers, and the rule that a test leaves nothing behind: no variable, no process, no process group."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# In CI the same examples each time: a new one that fails is found on a developer's machine, where it can be looked at,
# and not in a change that has nothing to do with it. Slow machines get the time they need.
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None)
if os.environ.get("CI"):
    hypothesis.settings.load_profile("ci")

# One fork server serves the whole run, and only what is named before its first process counts. The processes of a job
# then start in a fraction of a second: without the last of these, jobs that are killed 20 times took seven times as
# long and missed their deadline on a slow machine.
_PRELOAD = ["torch.distributed", "torch.nn.parallel", "torch.optim", "pytest", "hypothesis", "tests.helpers.ps_warm"]
_ALLOWED = {"PYTEST_CURRENT_TEST", "KMP_INIT_AT_FORK", "KMP_DUPLICATE_LIB_OK", "TORCHINDUCTOR_CACHE_DIR"}
_ALLOWED |= {"PYTORCH_NVML_BASED_CUDA_CHECK"}  # importing Lightning sets it


def pytest_configure(config: pytest.Config) -> None:
    """Registers the markers of this project."""
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:  # in a shell's background job: the tests' jobs would inherit it
            signal.signal(number, signal.default_int_handler)
    multiprocessing.set_forkserver_preload(_PRELOAD)
    config.addinivalue_line("markers", "slow: takes more than about ten seconds; the quick run leaves it out")
    config.addinivalue_line("markers", "long: takes more than ten minutes by itself; runs with `make test-long` only")
    config.addinivalue_line("markers", "gpu: needs a CUDA device")


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keeps what the run imports and collects, a million objects, out of the sight of the garbage collector."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips GPU tests where torch sees no CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Prints why a test needed another try, which pytest does for tests that fail to the end only."""
    reports = terminalreporter.getreports("rerun")
    if reports:
        terminalreporter.section("reruns: what the earlier tries said")
    for report in reports:
        terminalreporter.write_sep("_", f"{report.nodeid} [{report.when}]")
        terminalreporter.write_line(report.longreprtext)


@pytest.fixture(scope="session", autouse=True)
def _no_secret_in_the_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Jobs that are started by hand without a secret keep theirs in a folder of this run."""
    os.environ["FLEET_SECRET_FOLDER"] = str(tmp_path_factory.mktemp("secret") / "folder")


@pytest.fixture(autouse=True)
def _new_logger() -> None:
    """Undoes what ``fleet.init`` of an earlier test in this process set on the logger: a test may look for warnings."""
    logger = logging.getLogger("FLEET")
    logger.setLevel(logging.NOTSET)
    logger.handlers, logger.propagate = [], True


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    variables, children, grouped = dict(os.environ), _children(), _group_is_up()
    yield
    left = []
    if (running := sys.modules.get("fleet.job.running")) is not None:
        running.RUNNING.end()  # its listeners would watch the tests that follow
    if _group_is_up() and not grouped:
        import torch

        from fleet.job.process_group import is_in_group

        if is_in_group():
            left.append("an initialised process group")
        torch.distributed.destroy_process_group()  # that of one process, too, of which a next test may start another
    changed = sorted(
        name for name in {*variables, *os.environ} - _ALLOWED if variables.get(name) != os.environ.get(name)
    )
    if changed:
        for name in changed:
            _restore(name, variables.get(name))
        left.append(f"environment variables {changed}")
    if _backward_is_wrapped():
        left.append("functions around torch.autograd.backward")
    deadline = time.monotonic() + 2.0
    while (new := _children() - children - _servers()) and time.monotonic() < deadline:
        time.sleep(0.02)
    if new:
        left.append(f"child processes {sorted(map(_describe, new))}")
    if left:
        pytest.fail("the test left behind: " + "; ".join(left), pytrace=False)


def _backward_is_wrapped() -> bool:
    """Returns whether a session of this test still watches backward, and ends it for the tests that follow."""
    torch = sys.modules.get("torch")
    found = False
    for name in ("backward", "grad") if torch is not None else ():
        patch = getattr(torch.autograd, name)
        if hasattr(patch, "_fleet_layers"):
            found |= bool(patch._fleet_layers)
            setattr(torch.autograd, name, patch.__wrapped__)
    return found


def _group_is_up() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()


def _restore(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _servers() -> set[int]:
    """The standard library's own two processes and the one that forks scripts, which end with the test run."""
    known = (
        getattr(forkserver._forkserver, "_forkserver_pid", None),
        getattr(resource_tracker._resource_tracker, "_pid", None),
        getattr(sys.modules.get("tests.helpers.ready_python"), "ready_pid", lambda: None)(),
    )
    return {pid for pid in known if pid is not None}


def _children() -> set[int]:
    """The running children of this process; those that have ended and wait to be collected do not count."""
    found: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        try:
            found.update(int(pid) for pid in path.read_text().split())
        except OSError:
            continue
    return {pid for pid in found if _state(pid) not in ("", "Z")}


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _describe(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        command = "ended"
    return f"{pid}: {command.strip()[:120]}"
