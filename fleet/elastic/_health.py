"""Health: what a worker does after each step for its launcher, and how it exits when asked to stop."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from fleet._log import LOGGER
from fleet.elastic._beat import Beat
from fleet.elastic._faults import Faults
from fleet.elastic._preemption import Agreement, TerminationNotice
from fleet.env import Environment
from fleet.launch.processes.worker_file import PREEMPTED

if TYPE_CHECKING:
    from fleet.job.session import Session


class Health:
    """The heartbeat of a worker, its part in a coordinated stop, and the faults of a test.

    Args:
        session: the running session.
        beat: the heartbeat; None when no launcher listens.
        saves_on_request: whether a request to stop makes the workers agree on a step (``--preempt_grace``).
        faults: the injected faults.
    """

    def __init__(self, session: Session, beat: Beat | None, saves_on_request: bool, faults: Faults) -> None:
        self._session, self._beat, self._faults = session, beat, faults
        self._notice: TerminationNotice | None = None
        self._agreement: Agreement | None = None
        if saves_on_request:
            self._notice = TerminationNotice()
            self._agreement = Agreement(_store(session), session.global_rank, session.world_size)

    @property
    def is_preempted(self) -> bool:
        """Whether all workers have agreed to stop, and this is the step."""
        return self._agreement is not None and self._agreement.is_reached

    def after_step(self, step: int) -> None:
        """Called when ``step`` steps are finished."""
        if self._beat is not None:
            self._beat.after_step(step)
        if self._agreement is not None:
            asked = (self._notice is not None and self._notice.received) or (
                self._beat is not None and self._beat.stop_is_asked
            )
            self._agreement.after_step(step, asked, self._is_synchronised)
        if self._faults.points:
            self._faults.meet("step", step)

    def beat(self, pause: bool = False) -> None:
        """Reports that this worker is alive."""
        if self._beat is not None:
            self._beat.beat(pause)

    def watch_model(self, model: nn.Module) -> None:
        """Measures the worker's own work on ``model``."""
        if self._beat is not None:
            self._beat.watch_model(model)

    def leave_when_preempted(self) -> None:
        """Saves every checkpoint and ends the process when the workers have agreed to stop.

        A program without a ``Checkpoint`` goes on: it calls ``fleet.preempted()`` itself, or nothing saves it.
        """
        if not self.is_preempted or not self._session.loops.checkpoints:
            return
        for checkpoint in self._session.loops.checkpoints:
            checkpoint.save(wait=True)
            LOGGER.info("Saved step %d to %s; stopping, as requested.", checkpoint.step, checkpoint.path)
        raise SystemExit(PREEMPTED)

    def close(self) -> None:
        """Ends the heartbeat."""
        if self._beat is not None:
            self._beat.close()
            self._beat = None
        if self._notice is not None:
            self._notice.close()

    def _is_synchronised(self) -> bool:
        return not any(optimizer.is_out_of_step for optimizer in self._session.optimizers)


def start_health(session: Session) -> Health | None:
    """Returns the health of this worker; None when nothing watches it or will ask it to stop."""
    environment = Environment()
    faults = Faults.read(environment.raw("FLEET_FAULTS"), session.global_rank, environment.int("FLEET_GENERATION"))
    beat = Beat.start(environment)
    saves_on_request = environment.float("FLEET_PREEMPT_GRACE") > 0 and session.collective
    if beat is None and not saves_on_request and "step" not in faults.points:
        return None
    return Health(session, beat, saves_on_request, faults)


def _store(session: Session) -> dist.Store | None:
    """Returns the part of the process group's store that the agreement uses; None in a single process."""
    if session.process_group is None or session.world_size == 1:
        return None
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return dist.PrefixStore("fleet/preempt", store)
