"""The calls of ``fleet`` that belong to the health of a worker; :class:`fleet.facade.Fleet` inherits them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.errors import ConfigError

if TYPE_CHECKING:
    from fleet._session import Session


class HealthCalls:
    """``heartbeat`` and ``preempted``."""

    def heartbeat(self, pause: bool = False) -> None:
        """Tells the launcher that this worker is alive; each step of a distributed optimizer does it as well.

        Under ``--heartbeat_timeout`` a worker that is silent for so long is killed. Call it in what takes long between
        two steps: in an evaluation for each batch, or once with ``pause=True`` before it, which allows silence until
        the next step or call. It takes less than a microsecond, and does nothing where nobody listens.

        Example:
            >>> fleet.heartbeat(pause=True)
        """
        session = self._need("heartbeat")
        if pause not in (True, False):
            raise ConfigError(f"heartbeat(pause={pause!r}) takes True or False.")
        session.beat(pause)

    def preempted(self) -> bool:
        """Returns whether the job was asked to stop and all workers have agreed that this is the last step.

        The answer is the same on every worker after the same step, so that all may save now. It stays False without
        ``--preempt_grace``. With a ``fleet.elastic.Checkpoint`` it need not be asked: where the loop begins its next
        batch, the checkpoint is written and the process exits with ``fleet.elastic.PREEMPTED``.

        Example:
            >>> fleet.preempted()
            False
        """
        health = self._need("preempted").health
        return health is not None and health.is_preempted

    def _need(self, call: str) -> Session:
        raise NotImplementedError
