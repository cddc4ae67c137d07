"""The heartbeat of a worker: a few numbers in memory that it shares with its launcher, and stacks on a signal."""

from __future__ import annotations

import faulthandler
import threading
import time
from pathlib import Path
from typing import TextIO

from torch import Tensor, nn

from fleet.env import Environment
from fleet.launch.processes.worker_file import (
    BEAT_NS,
    OWN_NS,
    OWN_STEPS,
    PAUSED,
    SHOWS_STACKS,
    STACK_SIGNAL,
    STEP,
    STOP_ASKED,
    TAKES_TIMES,
    WorkerFile,
)


class Beat:
    """Writes this worker's progress into ``file``; the launcher of the same node reads it.

    Its stacks are written by faulthandler inside the signal handler, so they come also while the main thread is in a
    collective or in other C code.
    """

    def __init__(self, file: WorkerFile) -> None:
        self._file, self._words = file, file.words
        self._step_began_ns = time.monotonic_ns()
        self._own_ended_ns = 0
        self._stacks: TextIO = open(file.stacks, "a", encoding="utf-8")  # noqa: SIM115 (open while the worker lives)
        faulthandler.register(STACK_SIGNAL, self._stacks, all_threads=True, chain=False)
        self._words[SHOWS_STACKS] = 1
        file.begin(threading.main_thread().ident or 0)

    @classmethod
    def start(cls, environment: Environment) -> Beat | None:
        """Returns the heartbeat of this process; None when its launcher does not listen."""
        path = environment.raw("FLEET_WORKER_FILE")
        return None if path is None or not Path(path).exists() else cls(WorkerFile(Path(path)))

    @property
    def stop_is_asked(self) -> bool:
        """Whether the launcher wants the job to save itself and stop."""
        return bool(self._words[STOP_ASKED])

    def after_step(self, step: int) -> None:
        """Notes that ``step`` steps are finished."""
        now_ns = time.monotonic_ns()
        words = self._words
        words[BEAT_NS] = now_ns
        words[STEP] = step
        words[PAUSED] = 0
        if self._own_ended_ns > self._step_began_ns:
            words[OWN_NS] += self._own_ended_ns - self._step_began_ns
            words[OWN_STEPS] += 1
        self._step_began_ns = now_ns

    def beat(self, pause: bool = False) -> None:
        """Notes that the worker is alive, and with ``pause`` that it may be silent until the next beat."""
        self._words[BEAT_NS] = time.monotonic_ns()
        self._words[PAUSED] = int(pause)

    def watch_model(self, model: nn.Module) -> None:
        """Takes the time at which the gradient of the first parameter is there: nearly the end of this worker's work.

        After it only the exchange of gradients is waited for. The launcher says whether it compares these times.
        """
        if not self._words[TAKES_TIMES]:
            return
        first = next((p for p in model.parameters() if p.requires_grad), None)
        if first is not None:
            first.register_hook(self._own_work_ended)

    def close(self) -> None:
        """Lets the launcher expect nothing any more."""
        self._words[SHOWS_STACKS] = 0
        self._words[PAUSED] = 1
        faulthandler.unregister(STACK_SIGNAL)
        self._stacks.close()
        self._words.release()
        self._file.close()

    def _own_work_ended(self, gradient: Tensor) -> None:
        self._own_ended_ns = time.monotonic_ns()
