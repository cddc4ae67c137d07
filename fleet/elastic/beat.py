"""The heartbeat of a worker: a few numbers in memory that it shares with its launcher, and stacks on a signal."""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor

from fleet.common.plain_files import open_own
from fleet.env import Environment
from fleet.job.listener import Listener
from fleet.job.wrapped_model import WrappedModel
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


class Beat(Listener):
    """Writes this worker's progress into ``file``; the launcher of the same node reads it.

    faulthandler writes its stacks inside the signal handler, so they appear even while the main thread is in a
    collective or other C code.
    """

    def __init__(self, file: WorkerFile) -> None:
        self._file = file
        self._words = file.words
        self._step_began_ns = time.monotonic_ns()
        self._own_ended_ns = 0
        descriptor = open_own(file.stacks, os.O_WRONLY | os.O_APPEND, 0o600)
        self._stacks: TextIO = open(descriptor, "a", encoding="utf-8")  # noqa: SIM115 (open while the worker lives)
        faulthandler.register(STACK_SIGNAL, self._stacks, all_threads=True, chain=False)
        self._words[SHOWS_STACKS] = 1
        file.begin(threading.main_thread().ident or 0)

    @classmethod
    def start(cls, environment: Environment) -> Beat | None:
        """Returns the heartbeat of this process, or None when its launcher does not listen."""
        path = environment.raw("FLEET_WORKER_FILE")
        return None if path is None or not Path(path).exists() else cls(WorkerFile(Path(path)))

    @property
    def stop_is_asked(self) -> bool:
        """Whether the launcher has asked the job to save and stop."""
        return bool(self._words[STOP_ASKED])

    def after_step(self, step: int) -> None:
        """Records that ``step`` steps are finished."""
        now_ns = time.monotonic_ns()
        words = self._words
        # The launcher reads these words at any moment, without a lock: each one is a whole number by itself.
        words[BEAT_NS] = now_ns
        words[STEP] = step
        words[PAUSED] = 0
        if self._own_ended_ns > self._step_began_ns:
            words[OWN_NS] += self._own_ended_ns - self._step_began_ns
            words[OWN_STEPS] += 1
        self._step_began_ns = now_ns

    def beat(self, pause: bool) -> None:
        """Records that the worker is alive, and with ``pause`` that it may be silent until the next beat."""
        self._words[BEAT_NS] = time.monotonic_ns()
        self._words[PAUSED] = int(pause)

    def model_wrapped(self, model: WrappedModel) -> None:
        """Measures when the gradient of the first parameter is ready: nearly the end of this worker's own work.

        After it, the worker only waits for the gradient exchange. The launcher decides whether to compare these times.
        """
        if not self._words[TAKES_TIMES]:
            return
        first = next((p for p in model.module.parameters() if p.requires_grad), None)
        if first is not None:
            with torch._C.DisableTorchFunctionSubclass():  # a weight that stands for rows takes no hooks of scripts
                first.register_hook(self._own_work_ended)

    def close(self) -> None:
        """Tells the launcher to expect no more beats."""
        self._words[SHOWS_STACKS] = 0
        self._words[PAUSED] = 1
        faulthandler.unregister(STACK_SIGNAL)
        self._stacks.close()
        self._words.release()
        self._file.close()

    def _own_work_ended(self, gradient: Tensor) -> None:
        self._own_ended_ns = time.monotonic_ns()
