"""Tracker, which writes the values of a run to one destination, and RunInfo, its description of the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """One run, as a tracker sees it.

    Attributes:
        name: the run's name; unique in ``folder`` on worker 0, unless the run goes on after a restart.
        project: the group of runs that this one belongs to.
        folder: receives files; it exists on worker 0.
        rank: the rank of this worker.
        world_size: the number of workers.
        options: the options of ``DistributedStrategy`` that the script set, as plain values.
        resumed: the run began in an earlier process, and goes on.
        first_step: the first step that this process writes, if an earlier process may have written it and later ones:
            this run supersedes those values. None if it supersedes nothing, or if the script passes its own steps.
    """

    name: str
    project: str
    folder: Path
    rank: int = 0
    world_size: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    resumed: bool = False
    first_step: int | None = None


class Tracker:
    """Writes values; a subclass is one destination.

    Worker 0 has a tracker, which gets means over the workers. With ``every_rank`` each worker has a tracker, which gets
    that worker's own values. The constructor imports the package that the tracker needs, and takes no arguments. An
    error of a method is logged, and the run goes on without this tracker.

    Example:
        >>> class Console(Tracker):
        ...     def log(self, values, step):
        ...         print(step, values)
    """

    every_rank: ClassVar[bool] = False

    def start(self, run: RunInfo) -> None:
        """Opens the destination; called once, before the first values."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Writes the values of one step."""
        raise NotImplementedError

    def close(self) -> None:
        """Writes pending values and closes the destination."""
