"""Health: a worker's heartbeat, and the agreement after which step all workers stop when asked to, to save and exit.

The heartbeat is a few numbers in memory that a worker shares with its launcher, and its stacks on a signal.

[Note: Agreement without a deadlock]
A worker that receives the request must not stop where it is: another one, a step ahead, would wait in a collective
forever. Nor can the workers use a collective to agree: it would pair up with the gradients of the one ahead. So they
use the store of the process group, which does not block:

1. A worker that has received it records this in the store and goes on training; from then on it checks the store
   after each step.
2. Once all have recorded it, worker 0 writes ``its step + 1`` as the step to stop at, before it begins that step.
3. Each worker stops after the first step, from that one on, in which the workers exchange something.

No worker has passed that step when it is written, because the step cannot finish without worker 0. And no worker
misses it: whoever finishes it has received worker 0's part of the exchange, which was sent after the write.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TextIO

import torch
import torch.distributed as dist
from torch import Tensor

from fleet.common.log import LOGGER
from fleet.common.plain_files import open_own
from fleet.elastic.faults import Faults, injected_faults
from fleet.env import Environment
from fleet.job.job import Job
from fleet.job.listener import Listener
from fleet.job.wrapped_model import WrappedModel
from fleet.launch.processes.worker_file import (
    BEAT_NS,
    OWN_NS,
    OWN_STEPS,
    PAUSED,
    PREEMPTED,
    SHOWS_STACKS,
    STACK_SIGNAL,
    STEP,
    STOP_ASKED,
    TAKES_TIMES,
    WorkerFile,
)
from fleet.training.batch_loops import BatchLoops

# The request may have reached only other workers (through another node's launcher): it is checked this often.
_LISTEN_PERIOD_S = 0.5


class Agreement:
    """One worker's part in agreeing on the last step; see [Note: Agreement without a deadlock].

    Args:
        store: the store of all workers; None for a single worker.
        rank: rank of this worker.
        world_size: number of workers.

    Attributes:
        is_reached: whether this worker has finished the last step.
    """

    def __init__(self, store: dist.Store | None, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._has_heard = False
        self._stop_at: int | None = None
        self._listened_at = 0.0
        self.is_reached = False

    def after_step(self, step: int, requested: bool, is_synchronised: Callable[[], bool]) -> bool:
        """Returns whether every worker stops after this ``step``.

        Args:
            step: steps that this worker has finished.
            requested: whether this worker was asked to stop.
            is_synchronised: whether the workers exchanged something in this step; called only when it matters.
        """
        if self.is_reached or not (self._has_heard or requested or self._others_asked()):
            return self.is_reached
        store = self._store
        if store is None:
            self._stop_at = step
        else:
            # "asked" spreads the request to workers that got no signal; "heard" lets worker 0 count all of them.
            if not self._has_heard:
                store.set("asked", "1")
                store.set(f"heard/{self._rank}", "1")
            if self._stop_at is None:
                self._decide(store, step)
        self._has_heard = True
        self.is_reached = self._stop_at is not None and step >= self._stop_at and (store is None or is_synchronised())
        return self.is_reached

    def _decide(self, store: dist.Store, step: int) -> None:
        if self._rank == 0:
            if store.check([f"heard/{rank}" for rank in range(self._world_size)]):
                # Worker 0 has not begun the next step, so nobody has finished it.
                self._stop_at = step + 1
                store.set("stop_at", f"{self._stop_at}")
        elif store.check(["stop_at"]):
            self._stop_at = int(store.get("stop_at"))

    def _others_asked(self) -> bool:
        if self._store is None:
            return False
        now = time.monotonic()
        if now - self._listened_at < _LISTEN_PERIOD_S:
            return False
        self._listened_at = now
        return self._store.check(["asked"])


class TerminationNotice:
    """Treats the first SIGTERM as a request to stop; a second one ends the process.

    A data-loader process forked from the worker inherits the handler, and SIGTERM still ends it. A handler that the
    program has set stays.
    """

    def __init__(self) -> None:
        self.received = False
        self._pid = os.getpid()
        self._is_set = False
        # Python sets signal handlers in the main thread only.
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._note)
            self._is_set = True

    def close(self) -> None:
        """Restores the signal's handler."""
        if self._is_set and signal.getsignal(signal.SIGTERM) == self._note:
            with contextlib.suppress(ValueError):  # not in the main thread
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # A forked process, such as one of a data loader, has nobody to save for it.
        if self.received or os.getpid() != self._pid:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.received = True


class Health(Listener):
    """A worker's part in a coordinated stop, and the faults of a test.

    Args:
        job: that this worker trains.
        beat: the heartbeat, which hears its launcher; None when no launcher listens.
        saves_on_request: whether a request to stop makes the workers agree on a step (``--preempt_grace``).
        faults: the injected faults.
    """

    def __init__(self, job: Job, beat: Beat | None, saves_on_request: bool, faults: Faults) -> None:
        self._job = job
        self._beat = beat
        self._faults = faults
        self._notice: TerminationNotice | None = None
        self._agreement: Agreement | None = None
        if saves_on_request:
            self._notice = TerminationNotice()
            self._agreement = Agreement(_store(job), job.global_rank, job.world_size)

    @property
    def is_preempted(self) -> bool:
        """Whether all workers have agreed to stop, and this is the step."""
        return self._agreement is not None and self._agreement.is_reached

    def after_step(self, step: int) -> None:
        """Agrees with the other workers whether they stop after this step."""
        if self._agreement is not None:
            asked = (self._notice is not None and self._notice.received) or (
                self._beat is not None and self._beat.stop_is_asked
            )
            self._agreement.after_step(step, asked, self._is_synchronised)
        if self._faults.points:
            self._faults.meet("step", step)

    def next_batch(self) -> None:
        """Saves every checkpoint and ends the process when the workers have agreed to stop.

        A program without a ``Checkpoint`` goes on: it calls ``fleet.preempted()`` itself, or nothing saves it.
        """
        checkpoints = self._job.listeners.get(BatchLoops).checkpoints
        if not self.is_preempted or not checkpoints:
            return
        for checkpoint in checkpoints:
            checkpoint.save(wait=True)
            LOGGER.info("Saved step %d to %s; stopping, as requested.", checkpoint.step, checkpoint.path)
        raise SystemExit(PREEMPTED)

    def close(self) -> None:
        """Stops listening for requests to stop."""
        self._beat = None
        if self._notice is not None:
            self._notice.close()

    def _is_synchronised(self) -> bool:
        return not any(optimizer.is_out_of_step for optimizer in self._job.optimizers)


def start_health(job: Job) -> None:
    """Adds the heartbeat of this worker where a launcher listens, and its health where it may be asked to stop."""
    environment = Environment()
    faults = injected_faults(job.global_rank)
    beat = Beat.start(environment)
    saves_on_request = environment.float("FLEET_PREEMPT_GRACE") > 0 and job.collective
    if beat is not None:
        job.listeners.add(beat)
    if saves_on_request or "step" in faults.points:
        job.listeners.add(Health(job, beat, saves_on_request, faults))


def _store(job: Job) -> dist.Store | None:
    """Returns the part of the process group's store that the agreement uses; None in a single process."""
    if job.process_group is None or job.world_size == 1:
        return None
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return dist.PrefixStore("fleet/preempt", store)


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
