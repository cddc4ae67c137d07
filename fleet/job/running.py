"""The session that ``fleet.init`` started, for objects that users create themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fleet.job.job import Job
    from fleet.job.logical_workers import LogicalWorkers
    from fleet.job.session import Session


@dataclass
class Running:
    """Holds the session of one Fleet: None before ``fleet.init`` and after the end."""

    session: Session | None = None

    def end(self) -> None:
        """Ends the session for a new one, which may fail to start: no session ends twice."""
        if self.session is not None:
            ended = self.session
            self.session = None
            ended.close()


# Shared by the Fleet of this process with what scripts create without it, such as fleet.elastic.Checkpoint().
RUNNING = Running()


def running_session() -> Session | None:
    """Returns the session of this process, or None before ``fleet.init``."""
    return RUNNING.session


def running_job() -> Job | None:
    """Returns the job of this process, or None before ``fleet.init``."""
    return None if RUNNING.session is None else RUNNING.session.job


def running_logical() -> LogicalWorkers | None:
    """Returns the logical workers of the job of this process, or None where it has none."""
    job = running_job()
    return None if job is None else job.logical
