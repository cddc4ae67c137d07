"""The peers of each generation, and the outcome when this node's processes have ended.

Supervision knows nothing of this, and this knows nothing of processes: the loop in ``job`` asks for the next
generation, runs it, and hands the result back. There are two memberships: :class:`Alone`, a node that asks nobody, and
the engine, for nodes that agree over a store.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fleet.errors import LaunchError
from fleet.launch.plan.records import GroupResult
from fleet.launch.processes.supervisor import PeerNews
from fleet.launch.restarts import Outcome, RestartRule


@dataclass(frozen=True)
class Generation:
    """One start of the job: its number, every node's published record in rank order, and our place.

    ``number`` grows with each start, ``restarts`` counts only those after a failure of a worker.
    """

    number: int
    peers: tuple[Mapping[str, Any], ...]
    node_rank: int
    restarts: int = 0


class StoppedBySignalError(LaunchError):
    """A signal came while the launcher waited; ``exit_code`` is 128 + its number."""

    def __init__(self, number: int) -> None:
        super().__init__(f"Terminating with signal {number}", 128 + number)


class LeftJobError(LaunchError):
    """The job needs nothing of this node (any more); ``exit_code`` is 0 unless the job has failed."""


def taken_name(pod_id: str) -> str:
    """Returns the error of a launcher whose name another one has: the others would take both for one node."""
    return f"Another launcher of this job has the pod id {pod_id}; it is drawn at each start. Start this one again."


class Alone:
    """The membership of a node that asks nobody: it is alone, or its peers were listed beforehand.

    Args:
        peers: every node's record when they were listed; empty for a node alone.
        node_rank: this node's place in ``peers``.
        rule: the restart rule of the job.
    """

    def __init__(self, *, rule: RestartRule, peers: tuple[Mapping[str, Any], ...], node_rank: int) -> None:
        self._rule = rule
        self._peers = peers
        self._node_rank = node_rank
        self._number = -1

    @property
    def news(self) -> PeerNews | None:
        """None: nobody sends any."""
        return None

    def join(self, peer: Mapping[str, Any]) -> Generation:
        """Returns the next generation at once."""
        self._number += 1
        return Generation(self._number, self._peers or (peer,), self._node_rank if self._peers else 0, self._number)

    def announce_end(self, result: GroupResult, failure: str) -> None:
        """Has nobody to tell."""

    def settle(self, result: GroupResult) -> Outcome:
        """Follows the restart rule after a failure; otherwise the group's code is the launcher's."""
        if result.first_failure is None:
            return Outcome(result.exit_code)
        return self._rule.of_generation(result.exit_code, self._number)

    def close(self) -> None:
        """Has nothing to leave."""
