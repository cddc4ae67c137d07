"""LateAnswers: answers to pushes that wait for a step, which the thread that applies the step sends.

[Note: Who answers a push of a step]
A push in sync mode is answered with the values after its step, so all but the last worker's wait. If their threads
waited and answered, as many threads as there are workers would want the processors at the moment at which the workers
do, and Python's lock: with two workers and a server on two processors one of the workers began every fourth step up to
4 ms late. So the thread of a connection leaves its answer here and listens for the worker again, and the thread that
applies the step, of the last worker, makes and sends the answers of all. The others sleep until their workers push
again.

One thread at a time speaks on a connection: everything sent through a :class:`LateAnswer` takes its lock, and a worker
that sends something else before it is answered is heard after its answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from fleet.ps.server.job_state import JobState, Worker


class LateAnswer:
    """The answer to one push.

    Args:
        worker: who pushed; its lease does not run until it is answered.
        step: that the answer waits for.
        send: makes and sends the answer; it raises nothing.
        beat: tells the worker that it still waits.
    """

    def __init__(self, worker: Worker, step: int, send: Callable[[], None], beat: Callable[[], None]) -> None:
        self.worker = worker
        self.step = step
        self._over = threading.Event()  # sent, or nobody listens any longer
        self._send = send
        self._beat = beat
        self._speaking = threading.Lock()

    def is_over(self, timeout_s: float = 0.0) -> bool:
        """Returns whether the answer is sent, or not wanted any longer, within a time."""
        return self._over.wait(timeout_s) if timeout_s else self._over.is_set()

    def send(self) -> None:
        """Sends the answer, unless it is over."""
        # Beats come from the connection's thread, the answer from another: no beat may follow the answer.
        with self._speaking:
            if not self._over.is_set():
                self._send()
                self._over.set()

    def beat(self) -> None:
        """Tells the worker that it still waits, unless it is over."""
        with self._speaking:
            if not self._over.is_set():
                self._beat()

    def end(self) -> None:
        """Ends it; returns when nothing more will be said."""
        with self._speaking:
            self._over.set()


class LateAnswers:
    """The answers that wait on one server.

    Args:
        job: its lock guards them.
        is_due: returns whether a step is applied.
    """

    def __init__(self, job: JobState, is_due: Callable[[int], bool]) -> None:
        self._job = job
        self._is_due = is_due
        self._waiting: list[LateAnswer] = []

    def add(self, answer: LateAnswer) -> bool:
        """Leaves ``answer`` to the thread that applies its step; returns False if that is done, or the server stops."""
        with self._job.changed:
            if self._is_due(answer.step) or self._job.stopped:
                return False
            answer.worker.busy += 1
            self._waiting.append(answer)
            return True

    def send(self) -> None:
        """Sends the answers whose step is applied; all of them when the server stops."""
        if not self._waiting:
            return
        with self._job.changed:
            due = [answer for answer in self._waiting if self._job.stopped or self._is_due(answer.step)]
            for answer in due:
                self._remove(answer)
        # Outside the lock: each answer reads its values first and then writes them.
        for answer in due:
            answer.send()

    def drop(self, answer: LateAnswer) -> None:
        """Forgets an answer that nobody will read; returns when nothing more is said on its connection."""
        with self._job.changed:
            if answer in self._waiting:
                self._remove(answer)
        answer.end()

    def _remove(self, answer: LateAnswer) -> None:
        self._waiting.remove(answer)
        answer.worker.busy -= 1
        answer.worker.seen = time.monotonic()
