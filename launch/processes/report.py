"""The report of a failed job: which process failed first, how, and its last words, in at most 30 lines.

When one rank dies, the others soon fail as well, with connection errors or an abort inside a collective. The report
names the cause, not the victims: the earliest failure, unless its log shows that it lost a peer and another process
failed on its own at nearly the same moment.
"""

from __future__ import annotations

import errno
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fleet.launch.plan.records import ProcessExit
from fleet.launch.processes.logs import read_tail
from fleet.launch.processes.redact import redact_arguments

# Six lines stand around the tail, three may be hints; "Exit code" follows. 30 lines in all.
MAX_TAIL_LINES = 20
DETAIL = "------------------------- ERROR LOG DETAIL -------------------------"  # above the last words
_MAX_LINE_CHARACTERS = 400
_MAX_COMMAND_CHARACTERS = 300
_PEER_LOSS = (
    "connection reset by peer",
    "connection closed by peer",
    "connection refused",
    "connection aborted",
    "broken pipe",
    "remote end closed",
    "socket closed",
    "ncclremoteerror",
    "watchdog caught collective operation timeout",
)
# Stands in the log of a worker of servers that ended so; the launcher reads it there.
LEFT_SERVERS_WAITING = "ended without fleet.stop_worker()"
_MISMATCH = "collective mismatch"  # gloo ends the process where two exchanges of different sizes meet
_SAME_TIME_S = 0.1
_PROBE_BYTES = 65536
_SIGABRT_CODE = 134
_SIGKILL_CODE = 137


def looks_like_victim(ended: ProcessExit, log_start_bytes: int = 0) -> bool:
    """Returns whether the process failed because a peer was gone: an abort, or a lost connection in its last lines."""
    if ended.exit_code == _SIGABRT_CODE:
        return True
    if ended.signal_name is not None:
        return False
    tail = read_tail(ended.spec.log_path, from_bytes=log_start_bytes, limit_bytes=4096).lower()
    return any(phrase in tail for phrase in _PEER_LOSS)


def choose_first_failure(failures: Sequence[ProcessExit], log_starts: dict[int, int] | None = None) -> ProcessExit:
    """Returns the failure to name; ``failures`` stand in the order in which they happened.

    Args:
        failures: at least one process that ended with a code other than 0, before anything was stopped.
        log_starts: by process id, the size of the log file when the process started.
    """
    starts = log_starts or {}
    own = [ended for ended in failures if not looks_like_victim(ended, starts.get(ended.pid, 0))]
    return own[0] if own else failures[0]


def last_words(text: str, max_lines: int = MAX_TAIL_LINES) -> list[str]:
    """Returns the last traceback in ``text`` and the lines behind it, or the last lines when no traceback is there.

    A long traceback keeps its first line and its end. Control characters are escaped, so that a log cannot drive the
    terminal.
    """
    lines = [_printable(line) for line in text.splitlines()]
    while lines and not lines[-1].strip():
        lines.pop()
    starts = [index for index, line in enumerate(lines) if "Traceback (most recent call last)" in line]
    if starts:
        lines = lines[_chained_start(lines, starts) :]
    if len(lines) <= max_lines:
        return lines
    if starts:
        return [lines[0], f"  ... {len(lines) - max_lines + 1} lines left out ...", *lines[-(max_lines - 2) :]]
    return lines[-max_lines:]


def _chained_start(lines: list[str], starts: list[int]) -> int:
    """Returns where the last chain of tracebacks begins: a cause stands before the error it led to."""
    first = starts[-1]
    for start in reversed(starts[:-1]):
        between = " ".join(lines[start:first])
        if "direct cause of the following" in between or "During handling of the above" in between:
            first = start
        else:
            break
    return first


def _printable(line: str) -> str:
    shown = "".join(c if c.isprintable() or c == "\t" else f"\\x{ord(c):02x}" for c in line[:_MAX_LINE_CHARACTERS])
    return shown + (" ..." if len(line) > _MAX_LINE_CHARACTERS else "")


def describe_end(ended: ProcessExit) -> str:
    """Returns how a process ended in words: ``exit code 7`` or ``signal SIGKILL (exit code 137)``."""
    if ended.signal_name is None:
        return f"exit code {ended.exit_code}"
    return f"signal {ended.signal_name} (exit code {ended.exit_code})"


def first_failure_line(ended: ProcessExit, *, role_size: int, host: str) -> str:
    """Returns the one sentence that names the process which failed first."""
    return (
        f"{ended.spec.role.capitalize()} {ended.spec.index} of {role_size} (host {host}, pid {ended.pid}) was the "
        f"first to fail: {describe_end(ended)} after {ended.lifetime_s:.1f} s. "
        f"Its last lines are in {ended.spec.log_path}."
    )


def ended_before_line(ended: Sequence[ProcessExit], first: ProcessExit) -> str | None:
    """Returns a line about the workers that had ended well when another one failed, which may have waited for them."""
    if not ended or first.spec.role != "worker" or "TRAINING_ROLE" in first.spec.environment:
        return None
    last = max(ended, key=lambda end: end.ended_at)
    names = ", ".join(f"{end.spec.index}" for end in ended)
    gap_s = first.ended_at - last.ended_at
    when = f"{gap_s:.1f} s earlier" if gap_s >= _SAME_TIME_S else "at about the same time"
    steps = f" and {last.steps} steps" if last.steps else ""
    return (
        f"{'Worker' if len(ended) == 1 else 'Workers'} {names} ended normally (exit code 0) {when}, after "
        f"{last.lifetime_s:.1f} s{steps}; worker {first.spec.index} still ran. If it waited for the others: do all "
        "workers have equally many batches? A DistributedSampler with drop_last=True makes them equal, "
        "torch.distributed.algorithms.join.Join lets them differ."
    )


def left_servers_line(ended: ProcessExit, others: Sequence[int], log_start_bytes: int) -> str | None:
    """Returns a line about the workers that still train after one ended with 0; None when no servers wait for it."""
    if ended.exit_code or ended.spec.role != "worker" or not others:
        return None
    tail = read_tail(ended.spec.log_path, from_bytes=log_start_bytes, limit_bytes=4096)
    if LEFT_SERVERS_WAITING not in tail:
        return None
    who = "worker" if len(others) == 1 else "workers"
    return (
        f"worker {ended.spec.index} {LEFT_SERVERS_WAITING}, with exit code 0, while {who} "
        f"{', '.join(map(str, others))} of this node still ran: the servers wait for it to come back, and in sync mode "
        f"so do the others. Its last lines are in {ended.spec.log_path}."
    )


def hint_line(ended: ProcessExit, oom_kills: int = 0, words: Sequence[str] = ()) -> str | None:
    """Returns the likely cause of a SIGKILL, or of an abort of gloo by the last ``words``.

    ``oom_kills`` counts the kernel's kills for memory during the job.
    """
    if ended.exit_code == _SIGABRT_CODE and any(_MISMATCH in word for word in words):
        return (
            "The workers were in different exchanges: what every worker must call (step(), backward(), a save) was "
            "left out on some of them, or called in another order. Look for a line that only some run: "
            "`if rank == 0:`, `continue` for a bad batch."
        )
    if ended.exit_code != _SIGKILL_CODE:
        return None
    if ended.kill_reason:
        return ended.kill_reason
    if oom_kills:
        return (
            f"The kernel ended {oom_kills} process(es) of this control group for lack of memory during the job. "
            "Lower the batch size or the number of data-loader workers, or raise the memory limit."
        )
    return (
        "SIGKILL comes from outside the process: often the kernel for lack of memory (see dmesg), a memory limit "
        "of the container or scheduler, or a person."
    )


def full_folder_line(folder: Path) -> str | None:
    """Returns a sentence when the file system of the logs is full, which ends processes that print; else None."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_PROBE_BYTES))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return (
                f"Nothing more can be written in the log folder {folder} ({error.strerror}): a process that prints "
                "ends with an error, and its last lines are missing in its log. Free space there, or choose another "
                "--log_dir."
            )
    return None


def failure_report(
    ended: ProcessExit,
    *,
    role_size: int,
    host: str,
    log_start_bytes: int = 0,
    oom_kills: int = 0,
    ended_before: Sequence[ProcessExit] = (),
) -> list[tuple[str, str]]:
    """Returns the report as (level, text) pairs for the launcher's log; at most 29 lines, ``Exit code`` follows.

    Args:
        ended: the process that failed first.
        role_size: how many processes of its role the whole job has.
        host: the name of this node.
        log_start_bytes: where this run's part of the log file begins.
        oom_kills: how many processes the kernel ended for lack of memory during the job.
        ended_before: the workers that had ended with 0 by then.
    """
    command = shlex.join(redact_arguments(ended.spec.command))
    if len(command) > _MAX_COMMAND_CHARACTERS:
        command = command[:_MAX_COMMAND_CHARACTERS] + " ..."
    container = (
        "Container failed !!!\n"
        f"Container rank {ended.spec.index} status failed cmd {command} code {ended.exit_code} "
        f"log {ended.spec.log_path}"
    )
    lines = [("INFO", "Pod failed"), ("ERROR", _one_line_each(container))]
    lines.append(("ERROR", first_failure_line(ended, role_size=role_size, host=host)))
    words = last_words(read_tail(ended.spec.log_path, from_bytes=log_start_bytes))
    full = full_folder_line(ended.spec.log_path.parent)
    hints = (full, hint_line(ended, oom_kills, words), ended_before_line(ended_before, ended))
    lines += [("ERROR", hint) for hint in hints if hint]
    if words:
        lines.append(("INFO", DETAIL))
        lines += [("", word) for word in words]
    return lines


def _one_line_each(text: str) -> str:
    return "\n".join(_printable(line) for line in text.split("\n"))


def oom_kill_count() -> int:
    """Returns how often the kernel has killed in this control group for lack of memory; 0 where it cannot be read."""
    try:
        with open("/proc/self/cgroup", encoding="ascii", errors="replace") as file:
            path = next((line[3:].strip() for line in file if line.startswith("0::")), None)
        if path is None:
            return 0
        with open(f"/sys/fs/cgroup{path}/memory.events", encoding="ascii") as file:
            counts = dict(line.split() for line in file)
        return int(counts.get("oom_kill", 0))
    except (OSError, ValueError):
        return 0
