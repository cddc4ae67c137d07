"""The one rule for the failure of a process: restart, replace, go on or end; the README shows it as a table.

The supervisor asks it of each process, the membership of each generation. Everything else that ends a generation (a
node that is lost, left, joined or scaled away) is agreed on by the launchers, in ``membership/agreement.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fleet.launch.plan.records import LaunchConfig, ProcessSpec

# Where a job goes on after the failure of a generation.
SCHEDULER = "scheduler"
IN_PLACE = "in_place"
END = "end"
# The steps after the failure of one process.
REPLACE = "replace"
GO_ON = "go_on"
TOO_LATE = "too_late"
FAIL = "fail"

RESTART_CODE = 101  # asks the scheduler of an elastic job to start this node again
ERROR_CODE = 3


@dataclass(frozen=True)
class Outcome:
    """The outcome of a generation: another one, or the launcher's exit code."""

    exit_code: int
    restart: bool = False


@dataclass(frozen=True, kw_only=True)
class RestartRule:
    """The rule of one job.

    Args:
        fault: ``IN_PLACE``: the launchers start the job's processes again; ``SCHEDULER``: this launcher exits with 101
            and its scheduler starts it again; ``END``: the job ends.
        limit: how many restarts there are, ``--max_restart``.
        one_by_one: whether a process that fails is started again by itself, while the others go on. Parameter servers
            hold rows that a restart of all processes would lose.
    """

    fault: str = IN_PLACE
    limit: int = 0
    one_by_one: bool = False

    @classmethod
    def of(cls, config: LaunchConfig) -> RestartRule:
        """Returns the rule of ``config``.

        The older family of flags asks a scheduler for a restart, unless ``--max_restart`` was given; the newer one
        restarts in place.
        """
        elastic = config.elastic
        in_place = not elastic.is_scheduled or elastic.max_restart > 0
        fault = IN_PLACE if in_place else SCHEDULER if elastic.fault_level == 1 else END
        return cls(fault=fault, limit=elastic.max_restart, one_by_one=config.mode == "ps")

    def of_process(
        self, failed: ProcessSpec, *, replaced: int, running: Sequence[ProcessSpec], servers_have_ended: bool
    ) -> str:
        """Returns the step after the failure of one process: REPLACE, GO_ON, TOO_LATE or FAIL.

        Args:
            failed: the process.
            replaced: how many were started again before it.
            running: the servers of this node that run.
            servers_have_ended: whether this node had servers, and all of them have exited with 0.
        """
        # The servers left because the last worker had said goodbye: a worker that starts now would wait for them.
        if failed.role == "worker" and servers_have_ended:
            return TOO_LATE
        if self.one_by_one and replaced < self.limit:
            return REPLACE
        return GO_ON if _has_mate(failed, running) else FAIL

    def of_generation(self, code: int, restarts: int) -> Outcome:
        """Returns the outcome of a failure with ``code`` after ``restarts`` of the whole job."""
        if self.fault == SCHEDULER:
            return Outcome(RESTART_CODE, restart=True)
        if self.fault == END:
            return Outcome(ERROR_CODE)
        return Outcome(code, restart=not self.one_by_one and restarts < self.limit)

    def counts(self, restart: bool) -> bool:
        """Returns whether a restart uses up one of ``limit``; a scheduler's restarts are the scheduler's to count."""
        return restart and self.fault == IN_PLACE


NO_RESTARTS = RestartRule()


def _has_mate(spec: ProcessSpec, running: Sequence[ProcessSpec]) -> bool:
    """Returns whether the other of a server and its standby runs."""
    listed = spec.environment.get("FLEET_PS_STANDBY_ENDPOINTS", "")
    others = [server.index for server in running if server.index != spec.index]
    # Standbys are numbered on behind the servers, so the two of a pair have one remainder.
    count = len(listed.split(","))
    return spec.role == "server" and bool(listed) and any(index % count == spec.index % count for index in others)
