"""The error of a job from what its launchers printed."""

from __future__ import annotations

from fleet.errors import WorkerFailedError
from fleet.integrations._ray_job import LauncherEnd, job_error

FAILED = """worker output
LAUNCH INFO now Pod failed
LAUNCH ERROR now Worker 3 of 4 (host 10.0.0.2, pid 7) was the first to fail: exit code 5 after 1.0 s. Its last lines are in log/a b/workerlog.1.
ValueError: boom
"""  # noqa: E501


def test_the_node_that_failed_first_is_told_of() -> None:
    ends = [
        LauncherEnd(0, "10.0.0.1", "LAUNCH ERROR Another node ended the job: ...", 5),
        LauncherEnd(1, "10.0.0.2", FAILED, 5),
    ]
    error = job_error(ends)
    assert isinstance(error, WorkerFailedError)
    assert (error.rank, error.host, error.exit_code, error.log_path) == (3, "10.0.0.2", 5, "log/a b/workerlog.1")
    assert "node 1 (10.0.0.2) ended with exit code 5" in str(error)
    assert str(error).endswith("ValueError: boom")
    assert "worker output" not in str(error)


def test_other_ends() -> None:
    assert job_error([LauncherEnd(0, code=0), LauncherEnd(1, code=0)]) is None
    killed = job_error([LauncherEnd(0, code=0), LauncherEnd(1, "h", "last\n", code=-9)])
    assert killed is not None
    assert killed.exit_code == 137
    stuck = job_error([LauncherEnd(0, code=0), LauncherEnd(1)])
    assert "nodes 1 did not end" in str(stuck)


def test_only_the_newest_words_are_kept() -> None:
    end = LauncherEnd(0)
    for number in range(1000):
        end.add(f"{number} {'x' * 100}\n")
    assert len(end.text) <= 20_000
    assert end.text.endswith(f"999 {'x' * 100}\n")
