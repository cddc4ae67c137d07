"""LauncherEnd: the end of one node's launcher, and the error of the job that follows from all ends."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fleet.errors import LaunchError, WorkerFailedError

_KEPT_CHARACTERS = 20_000
_LINES = 40
_ELSEWHERE = "Another node ended the job"
_REPORT = " Pod failed"
_FIRST = re.compile(r"Worker (\d+) of \d+ \(host (\S+), pid \d+\) was the first to fail.* are in (.+)\.$", re.MULTILINE)


@dataclass
class LauncherEnd:
    """The launcher of one node: its address, its last words and its exit code."""

    rank: int
    host: str = ""
    text: str = ""
    code: int | None = None
    is_running: bool = False  # started, and neither ended nor lost

    def add(self, text: str) -> None:
        """Keeps ``text`` as the newest words."""
        self.text = (self.text + text)[-_KEPT_CHARACTERS:]


def job_error(ends: Sequence[LauncherEnd]) -> LaunchError | None:
    """Returns the error of a job, None when every launcher ended with 0.

    It describes the node where the first worker failed; the other launchers only report that another node failed.
    """
    failed = [end for end in ends if end.code]
    if not failed:
        stuck = [f"{end.rank}" for end in ends if end.code is None]
        return LaunchError(f"The launchers of the nodes {', '.join(stuck)} did not end.") if stuck else None
    first = next((end for end in failed if _ELSEWHERE not in end.text), failed[0])
    assert first.code is not None
    # A launcher that a signal ended has a negative code; shells write 128 plus the signal.
    code = first.code if first.code > 0 else 128 - first.code
    lines = first.text[max(first.text.rfind(_REPORT), 0) :].splitlines()
    if _REPORT in first.text:
        lines = lines[1:]
    report = "\n".join(lines[-_LINES:])
    message = f"The launcher of node {first.rank} ({first.host}) ended with exit code {code}. Its last lines:\n{report}"
    if found := _FIRST.search(first.text):
        rank, host, path = found.groups()
        return WorkerFailedError(message, rank=int(rank), host=host, exit_code=code, log_path=path)
    return LaunchError(message, code)
