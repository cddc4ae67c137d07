"""StackRequests: a page asks for the stacks of a process, and the thread that supervises it answers."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Mapping

from fleet.launch.processes.signals import Wakeup
from fleet.launch.processes.stacks import Stack, ask_for_stacks, is_stopped
from fleet.launch.processes.worker_file import SHOWS_STACKS, WorkerFile

Live = Mapping[str, tuple[int, WorkerFile | None]]


class StackRequests(Wakeup):
    """Hands questions from the page's threads to the supervising thread; ``fileno`` is readable while somebody asks.

    A process id may be given back as soon as that thread has reaped the process, so no other thread sends signals.
    """

    def __init__(self) -> None:
        super().__init__()
        self._asked: queue.SimpleQueue[_Question] = queue.SimpleQueue()

    def ask(self, name: str, limit_s: float = 10.0) -> str:
        """Returns the stacks of all threads of the process ``name``, or a sentence that says why there are none."""
        question = _Question(name)
        self._asked.put(question)
        with contextlib.suppress(BlockingIOError):  # it is full, so readable
            os.write(self._write_fd, b"?")
        if not question.answered.wait(limit_s):
            return f"No answer within {limit_s:g} s: the launcher is starting or stopping processes. Ask again."
        return question.answer

    def answer(self, live: Live) -> None:
        """Answers what was asked; ``live`` are the process id and file of each process that runs, by name."""
        self.drain()
        asked = []
        while not self._asked.empty():
            asked.append(self._asked.get())
        known = {name: live[name] for name in {question.name for question in asked} & set(live)}
        # A stopped process would have to go on to write its stacks, and a page changes nothing.
        files = [(pid, file) for pid, file in known.values() if file is not None and not is_stopped(pid)]
        found = ask_for_stacks(files) if files else {}
        for question in asked:
            pid, file = known.get(question.name, (0, None))
            stack = found.get(pid, Stack())
            cut = "" if stack.is_whole else "[cut off: the process wrote no more within a second]\n"
            question.give(stack.text + cut if stack.text else _why_none(question.name, file, pid))


class _Question:
    def __init__(self, name: str) -> None:
        self.name, self.answer = name, ""
        self.answered = threading.Event()

    def give(self, answer: str) -> None:
        self.answer = answer
        self.answered.set()


def _why_none(name: str, file: WorkerFile | None, pid: int) -> str:
    if not pid:
        return f"{name} does not run."
    if file is None:
        return f"{name} shows no stacks: only workers do. With py-spy: py-spy dump --pid {pid}"
    if not file.words[SHOWS_STACKS]:
        return f"{name} has not called fleet.init() yet, or has ended it. With py-spy: py-spy dump --pid {pid}"
    if is_stopped(pid):
        return (
            f"{name} (process {pid}) is stopped by a signal or a debugger, and would have to go on to write "
            f"its stacks. With py-spy: py-spy dump --nonblocking --pid {pid}"
        )
    return f"{name} (process {pid}) wrote no stack within a second."
