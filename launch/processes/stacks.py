"""Stacks that workers wrote with faulthandler: asked for, read, and judged: which worker waits for which."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fleet.common.plain_files import open_to_read
from fleet.launch.processes.worker_file import MAIN_THREAD, SHOWS_STACKS, STACK_SIGNAL, WorkerFile

_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_THREAD = re.compile(r"(?:Current t|T)hread (0x[0-9a-f]+)")
# In the innermost frames of a main thread, these say that it waits for other workers.
_WAITS = (
    "torch/distributed/",
    "torch/autograd/graph.py",
    "torch/futures/",
    "torch/nn/parallel/distributed.py",
    "strategies/_shared/waiting.py",
    "fleet/job/roll_call.py",
)
_WAIT_DEPTH = 6
_OUTERMOST = ("<module>", "_run_module_as_main")
_LIBRARIES = ("/torch/", f"{Path(__file__).parents[2]}/", "/site-packages/", "/lib/python3", "<frozen")


@dataclass(frozen=True)
class Frame:
    """One line of a stack, innermost first."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass(frozen=True)
class Stack:
    """The main thread of a worker; ``text`` holds all threads as they were written."""

    frames: tuple[Frame, ...] = ()
    text: str = ""

    @property
    def place(self) -> str:
        """The innermost line of the user's own code, and the library function that it called, if any."""
        if not self.frames:
            return ""
        own = next((f for f in self.frames if not any(part in f.file for part in _LIBRARIES)), self.frames[0])
        return f"{own}" if own is self.frames[0] else f"{own} (inside {self.frames[0]})"

    @property
    def is_whole(self) -> bool:
        """Whether it goes down to where Python began; it is written in small pieces."""
        return bool(self.frames) and self.frames[-1].function in _OUTERMOST

    @property
    def waits(self) -> bool:
        """Whether it is in an exchange with other workers."""
        return any(part in frame.file for frame in self.frames[:_WAIT_DEPTH] for part in _WAITS)


@dataclass(frozen=True)
class AskedWorker:
    """A worker that was asked for its stacks: where it writes them, from which byte on, and its main thread."""

    path: Path
    from_bytes: int
    main_thread: int


def ask_for_stacks(workers: Iterable[tuple[int, WorkerFile]], limit_s: float = 1.0) -> dict[int, Stack]:
    """Returns the stacks by process id of the workers that show them within ``limit_s``."""
    return wait_for_stacks(signal_for_stacks(workers), limit_s)


def signal_for_stacks(workers: Iterable[tuple[int, WorkerFile]]) -> dict[int, AskedWorker]:
    """Asks the workers that show their stacks, and waits for none; returns them by process id.

    A stopped worker is continued for it: the signal that waits for it comes before its own next instruction.
    """
    asked = {
        pid: AskedWorker(file.stacks, _size(file.stacks), file.words[MAIN_THREAD])
        for pid, file in workers
        if file.words[SHOWS_STACKS]
    }
    for pid in asked:
        with contextlib.suppress(OSError):
            _signal_main_thread(pid, STACK_SIGNAL)
            os.kill(pid, signal.SIGCONT)
    return asked


def wait_for_stacks(asked: Mapping[int, AskedWorker], limit_s: float = 1.0) -> dict[int, Stack]:
    """Returns the stacks of the workers that were asked, as soon as they are whole, or after ``limit_s``."""
    deadline = time.monotonic() + limit_s
    sizes = {pid: one.from_bytes for pid, one in asked.items()}
    found = dict.fromkeys(asked, Stack())
    while time.monotonic() < deadline:
        time.sleep(0.05)
        now = {pid: _size(one.path) for pid, one in asked.items()}
        found = {pid: read_stack(one.path, one.from_bytes, one.main_thread) for pid, one in asked.items()}
        if now == sizes and all(stack.is_whole for stack in found.values()):
            break
        sizes = now
    return found


def read_stack(path: Path, from_bytes: int, main_thread: int) -> Stack:
    """Returns the stack of ``main_thread`` in the part of ``path`` that begins at ``from_bytes``."""
    try:
        with open_to_read(path) as file:
            file.seek(from_bytes)
            text = file.read(1 << 20).decode("utf-8", "backslashreplace")
    except OSError:
        return Stack()
    threads: dict[int, list[Frame]] = {}
    current: list[Frame] = []
    for line in text.splitlines():
        if (thread := _THREAD.match(line)) is not None:
            current = threads.setdefault(int(thread[1], 16), [])
        elif (frame := _FRAME.match(line)) is not None:
            current.append(Frame(frame[1], int(frame[2]), frame[3]))
    return Stack(tuple(threads.get(main_thread, current)), text)


@dataclass(frozen=True)
class ProcessFacts:
    """The facts that the system has of a process."""

    is_stopped: bool  # by a signal (SIGSTOP, a debugger)
    resident_bytes: int


def facts_of(pid: int) -> ProcessFacts | None:
    """Returns the facts that the system has of a process; None off Linux and once it has ended."""
    try:
        # os.open() and os.read() take a fraction of the time of open(), and the page asks for every process.
        file = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
        try:
            words = os.read(file, 4096).rpartition(b")")[2].split()
        finally:
            os.close(file)
        return ProcessFacts(words[0] in (b"T", b"t"), int(words[21]) * os.sysconf("SC_PAGE_SIZE"))
    except (OSError, ValueError, IndexError):
        return None


def is_stopped(pid: int) -> bool:
    """Returns whether a signal (SIGSTOP, a debugger) has stopped the process."""
    facts = facts_of(pid)
    return facts is not None and facts.is_stopped


def _signal_main_thread(pid: int, number: int) -> None:
    """Sends a signal to the main thread, whose number is the number of its process.

    A signal to the process is taken by any thread once a stopped process goes on. It would read the frames of the main
    thread while that runs, and crash.
    """
    tgkill = getattr(ctypes.CDLL(None, use_errno=True), "tgkill", None)
    # glibc before 2.30 has no tgkill().
    if tgkill is None:
        os.kill(pid, number)
    elif tgkill(pid, pid, number):
        raise ProcessLookupError(ctypes.get_errno(), f"no process {pid}")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
