"""A process that outlives the launcher for as long as it takes to kill the processes that the launcher leaves.

The guardian is forked before the launcher has threads, sits in its own session, and reads a pipe whose other end only
the launcher holds. However the launcher dies, SIGKILL included, the kernel closes that end and the guardian kills every
process of the job: the process groups it was told about, and every process whose environment carries the job's
mark (``FLEET_POD``), wherever it has moved with ``setsid``. Nothing without the mark is touched.

A mark is a comma-separated path, outermost job first, so that a job started inside another job's worker carries both
and falls with either.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

MARK_VARIABLE = "FLEET_POD"
_SCAN_PERIOD_S = 0.02
# Two empty scans in a row: a process that forks while /proc is read can hide its child from one scan, not from two.
_EMPTY_SCANS = 2


def make_mark(pod_id: str, outer: str | None) -> str:
    """Returns ``pod_id``, appended to ``outer`` when the launcher itself runs inside another job."""
    own = pod_id or os.urandom(8).hex()
    return f"{outer},{own}" if outer else own


def marked_processes(mark: str) -> list[int]:
    """Returns the ids of the running processes whose ``FLEET_POD`` ends with, or passes through, ``mark``'s last part.

    On a system without ``/proc`` the list is empty; process groups are all that is left there.
    """
    wanted = mark.rpartition(",")[2].encode()
    prefix = MARK_VARIABLE.encode() + b"="
    own = os.getpid()
    found = []
    try:
        names = os.listdir("/proc")
    except OSError:
        return []
    for name in names:
        if not name.isdigit() or int(name) == own:
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                block = file.read()
        except OSError:
            # The process has ended, or belongs to another user.
            continue
        if any(entry.startswith(prefix) and wanted in entry[len(prefix) :].split(b",") for entry in block.split(b"\0")):
            found.append(int(name))
    return found


def kill_marked(mark: str, *, limit_s: float = 2.0) -> bool:
    """Kills every process that carries ``mark``; returns whether none was left within ``limit_s``."""
    deadline = time.monotonic() + limit_s
    empty = 0
    while True:
        found = marked_processes(mark)
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        empty = 0 if found else empty + 1
        if empty >= _EMPTY_SCANS:
            return True
        if time.monotonic() > deadline:
            return False
        if found:
            time.sleep(_SCAN_PERIOD_S)


def kill_group(group: int) -> None:
    """Sends SIGKILL to a process group; an empty one is no error."""
    with contextlib.suppress(OSError):
        os.killpg(group, signal.SIGKILL)


class Guardian:
    """The launcher's hold on its guardian process.

    Start it before any thread and before any descriptor that must close with the launcher: the guardian closes all
    that it inherits, but two launchers in one process (tests) would share the pipe's end.
    """

    def __init__(self, pid: int, pipe_fd: int) -> None:
        self._pid = pid
        self._pipe_fd = pipe_fd

    @classmethod
    def start(cls, mark: str) -> Guardian:
        """Forks the guardian of the job that ``mark`` names."""
        read_fd, write_fd = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                _stand_guard(mark, read_fd)
            finally:
                # Not sys.exit(): the exit handlers and buffers of the launcher are not the guardian's to run.
                os._exit(0)
        os.close(read_fd)
        return cls(pid, write_fd)

    def add_group(self, group: int) -> None:
        """Names a process group to kill should the launcher die."""
        self._tell(f"+{group}\n")

    def remove_group(self, group: int) -> None:
        """Forgets a process group; call it before its leader is reaped, while the number cannot be reused."""
        self._tell(f"-{group}\n")

    def dismiss(self) -> None:
        """Lets the guardian go without a kill; the launcher has cleaned up itself."""
        self._tell("bye\n")
        os.close(self._pipe_fd)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)

    def _tell(self, line: str) -> None:
        # Somebody may have killed the guardian; PR_SET_PDEATHSIG still ends the processes with the launcher.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._pipe_fd, line.encode())


def _stand_guard(mark: str, pipe_fd: int) -> None:
    # A scheduler signals every process of the job, a terminal its group; the guardian has to outlive the launcher.
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)
    _keep_only(pipe_fd)
    groups: set[int] = set()
    dismissed = False
    rest = b""
    while block := os.read(pipe_fd, 4096):
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            if line == b"bye":
                dismissed = True
            elif line.startswith(b"+"):
                groups.add(int(line[1:]))
            else:
                groups.discard(int(line[1:]))
    if dismissed:
        return
    for group in groups:
        kill_group(group)
    kill_marked(mark, limit_s=30.0)


def _keep_only(fd: int) -> None:
    """Closes every descriptor but ``fd``: a pipe that a reader waits on must close when the launcher does."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    limit = os.sysconf("SC_OPEN_MAX") if "SC_OPEN_MAX" in os.sysconf_names else 4096
    try:
        limit = max((int(name) for name in os.listdir("/proc/self/fd")), default=limit) + 1
    except OSError:
        limit = min(limit, 65536)
    os.closerange(3, fd)
    os.closerange(fd + 1, limit)
