"""Health: how the workers agree after which step they stop when asked to, and how this one exits."""

from __future__ import annotations

import torch.distributed as dist

from fleet._log import LOGGER
from fleet.elastic._beat import Beat
from fleet.elastic._faults import Faults
from fleet.elastic._preemption import Agreement, TerminationNotice
from fleet.env import Environment
from fleet.job.job import Job
from fleet.job.listener import Listener
from fleet.launch.processes.worker_file import PREEMPTED
from fleet.training.batch_loops import BatchLoops


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
        """Hears requests to stop no longer."""
        self._beat = None
        if self._notice is not None:
            self._notice.close()

    def _is_synchronised(self) -> bool:
        return not any(optimizer.is_out_of_step for optimizer in self._job.optimizers)


def start_health(job: Job) -> None:
    """Adds the heartbeat of this worker where a launcher listens, and its health where it may be asked to stop."""
    environment = Environment()
    faults = Faults.read(environment.raw("FLEET_FAULTS"), job.global_rank, environment.int("FLEET_GENERATION"))
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
