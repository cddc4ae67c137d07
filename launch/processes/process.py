"""One process of the job: how it is started, and how its end is read without giving up its number.

A process that has ended stays a zombie until the whole group is stopped. Its id, and with it the id of its process
group, cannot be reused before that, so a late kill of the group never hits a stranger.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping

from fleet.errors import LaunchError
from fleet.launch.plan.records import ProcessExit, ProcessSpec
from fleet.launch.processes.guardian import MARK_VARIABLE
from fleet.launch.processes.logs import mark_start, open_log

_PR_SET_PDEATHSIG = 1


def _parent_death_hook() -> Callable[[], None] | None:
    """Returns the function that a child calls before exec, so that the kernel kills it when the launcher dies.

    None off Linux.
    """
    if not sys.platform.startswith("linux"):
        return None
    try:
        # PyDLL keeps the interpreter's lock during the call: nothing may wait for another thread after a fork.
        prctl = ctypes.PyDLL(None).prctl
    except (OSError, AttributeError):
        return None
    launcher = os.getpid()

    def die_with_launcher() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        # The launcher died before prctl() was called, so no signal will come.
        if os.getppid() != launcher:
            os._exit(128 + signal.SIGKILL)

    return die_with_launcher


class Process:
    """A started process; ``ended`` holds its end once :meth:`poll` has seen it."""

    def __init__(self, spec: ProcessSpec, inherited: Mapping[str, str], *, mark: str) -> None:
        self.spec = spec
        self.ended: ProcessExit | None = None
        log_fd = open_log(spec.log_path)
        mark_start(log_fd, self.name)
        self.log_start_bytes = os.fstat(log_fd).st_size
        self.started_at = time.monotonic()
        self.kill_reason = ""
        try:
            self._popen = _start(spec, _child_environment(spec, inherited, mark), log_fd)
        except OSError as error:
            code = 127 if isinstance(error, FileNotFoundError) else 126
            raise LaunchError(f"{spec.command[0]!r} cannot be started: {error.strerror}.", code) from error
        finally:
            os.close(log_fd)
        self.pid = self._popen.pid
        self.pidfd = _open_pidfd(self.pid)

    @property
    def name(self) -> str:
        """The process as messages call it, such as ``worker 3``."""
        return f"{self.spec.role} {self.spec.index}"

    def poll(self) -> ProcessExit | None:
        """Returns how the process ended, or None while it runs; never reaps it."""
        if self.ended is None:
            status = self._status()
            if status is not None:
                now = time.monotonic()
                self.ended = ProcessExit(
                    spec=self.spec,
                    pid=self.pid,
                    exit_code=status if status >= 0 else 128 - status,
                    signal_name=None if status >= 0 else _signal_name(-status),
                    lifetime_s=now - self.started_at,
                    ended_at=now,
                    kill_reason=self.kill_reason,
                )
        return self.ended

    def _status(self) -> int | None:
        """Returns the exit code, the negative number of the signal that ended the process, or None."""
        # macOS before Python 3.13 has no waitid(): poll() gives the process id back at once there.
        if not hasattr(os, "waitid"):
            return self._popen.poll()
        # WNOWAIT leaves the zombie, whose id nobody else can get until reap().
        result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if result is None:
            return None
        return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status

    def terminate(self) -> None:
        """Sends SIGTERM to the process alone: its data-loader children end with it, in its own order."""
        if self.ended is None:
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL to the process alone."""
        if self.ended is None:
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)

    def is_dying(self) -> bool:
        """Returns whether the kernel is already taking the process down, though it cannot be waited for yet."""
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            return False
        # 0x4 is PF_EXITING, which the kernel sets while it frees the memory of a process.
        return bool(int(fields[6]) & 0x4)

    def reap(self) -> None:
        """Gives the process id back; only for an ended process, as the last step."""
        self._popen.wait()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


def _start(spec: ProcessSpec, environment: Mapping[str, str], log_fd: int) -> subprocess.Popen[bytes]:
    with warnings.catch_warnings():
        # Python 3.12 and later warn of any code between fork and exec in a program with threads. Ours is one system
        # call, prepared beforehand.
        warnings.simplefilter("ignore", DeprecationWarning)
        return subprocess.Popen(
            spec.command,
            stdin=subprocess.DEVNULL,
            stdout=log_fd,
            stderr=log_fd,
            env=environment,
            # Makes the process group that kill_group() ends, and keeps the terminal's Ctrl-C from the workers.
            start_new_session=True,
            pass_fds=spec.pass_fds,
            preexec_fn=_parent_death_hook(),
        )


def _child_environment(spec: ProcessSpec, inherited: Mapping[str, str], mark: str) -> dict[str, str]:
    kept = {name: value for name, value in inherited.items() if name not in spec.removed}
    return {**kept, **spec.environment, MARK_VARIABLE: mark}


def _open_pidfd(pid: int) -> int | None:
    """Returns a descriptor that becomes readable when ``pid`` ends; None where the system has none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
