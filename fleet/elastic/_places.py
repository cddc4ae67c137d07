"""Which worker of a checkpoint a worker of this job continues, where the mesh may have changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fleet.job.job import Job

# Axes along which workers hold different parts of the model, or of a sequence.
_PARTS = ("pp", "sep", "cp", "mp", "ep")


def replicas_of(rest: Mapping[str, Any]) -> int:
    """Returns how many workers, or groups of them, trained on different data when ``rest`` was saved."""
    return int(rest.get("replicas", rest["world_size"]))


def is_same_mesh(rest: Mapping[str, Any], job: Job) -> bool:
    """Returns whether every worker holds the part of the model that the worker of its rank held at the save."""
    if rest["world_size"] != job.world_size or replicas_of(rest) != job.data_replicas:
        return False
    saved = rest.get("degrees", {})
    if any(saved.get(axis, 1) != job.axes.size(axis) for axis in _PARTS):
        return False
    mine = rest["workers"][job.global_rank].get("place")
    return mine is None or (mine["data"] == job.data_rank and _parts(mine) == _parts(job.axes.coordinate()))


def predecessor(rest: Mapping[str, Any], job: Job) -> Mapping[str, Any] | None:
    """Returns what the worker of a checkpoint saved that this worker continues; ``None`` where there is none.

    With as many replicas on another mesh, that is the first worker that trained on the same data: workers that hold
    one copy of the model together need equal streams.
    """
    if is_same_mesh(rest, job):
        found: Mapping[str, Any] = rest["workers"][job.global_rank]
        return found
    if replicas_of(rest) != job.data_replicas:
        return None
    for rank, worker in enumerate(rest["workers"]):
        if worker.get("place", {"data": rank})["data"] == job.data_rank:
            first: Mapping[str, Any] = worker
            return first
    return None


def _parts(place: Mapping[str, int]) -> list[int]:
    return [place.get(axis, 0) for axis in _PARTS]
