"""One process: how it starts and how its end is read."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from fleet.errors import LaunchError
from fleet.launch.plan.records import ProcessSpec
from fleet.launch.processes.process import Process


def spec(path: Path, *command: str, **fields: object) -> ProcessSpec:
    return ProcessSpec(  # type: ignore[arg-type]
        role="worker",
        index=2,
        local_index=0,
        command=command,
        log_path=path / "workerlog.0",
        **{"environment": {}, **fields},
    )


def run(path: Path, code: str, **fields: object) -> Process:
    one = spec(path, sys.executable, "-c", code, **fields)
    return Process(one, dict(os.environ), mark="m")


def ended(process: Process) -> tuple[int, str | None]:
    deadline = time.monotonic() + 10
    while (record := process.poll()) is None and time.monotonic() < deadline:
        time.sleep(0.005)
    assert record is not None
    os.kill(process.pid, 0)  # not reaped: the number cannot be used by another process
    process.reap()
    return record.exit_code, record.signal_name


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("raise SystemExit(0)", (0, None)),
        ("raise SystemExit(7)", (7, None)),
        ("import os; os.kill(os.getpid(), 9)", (137, "SIGKILL")),
        ("import os; os.kill(os.getpid(), 15)", (143, "SIGTERM")),
        ("import os; os.kill(os.getpid(), 34)", (162, "SIGRTMIN")),
        ("import os; os.kill(os.getpid(), 40)", (168, "signal 40")),
    ],
)
def test_exit_codes(tmp_path: Path, code: str, expected: tuple[int, str | None]) -> None:
    """Decision 10."""
    assert ended(run(tmp_path, code)) == expected


def test_environment_is_inherited_reduced_extended_and_marked(tmp_path: Path) -> None:
    code = "import os; e = os.environ; print(e.get('GONE'), e['ADDED'], e['FLEET_POD'], e['KEPT'])"
    one = spec(tmp_path, sys.executable, "-c", code, environment={"ADDED": "a", "FLEET_POD": "x"}, removed=("GONE",))
    process = Process(one, {"GONE": "g", "KEPT": "k"}, mark="outer,m")
    assert ended(process) == (0, None)
    assert (tmp_path / "workerlog.0").read_text() == "None a outer,m k\n"


def test_missing_program_is_said(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="'/no/such' cannot be started") as caught:
        Process(spec(tmp_path, "/no/such"), {}, mark="m")
    assert caught.value.exit_code == 127


def test_log_start_is_where_this_run_begins(tmp_path: Path) -> None:
    (tmp_path / "workerlog.0").write_text("before")
    process = run(tmp_path, "pass")
    assert (tmp_path / "workerlog.0").read_bytes()[process.log_start_bytes - 1 :] == b"\n", "behind the marker"
    ended(process)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's signal at a parent's death is Linux's")
def test_process_dies_with_its_launcher(tmp_path: Path) -> None:
    """PR_SET_PDEATHSIG: even without a guardian."""
    read_fd, write_fd = os.pipe()
    launcher = os.fork()
    if launcher == 0:
        os.write(write_fd, str(run(tmp_path, "import time; time.sleep(60)").pid).encode())
        time.sleep(0.3)
        os.kill(os.getpid(), 9)
    os.close(write_fd)
    pid = int(os.read(read_fd, 32))
    os.close(read_fd)
    os.waitpid(launcher, 0)
    from tests.launch.launcher import wait_until_gone

    assert wait_until_gone([pid], 1.0) == []
