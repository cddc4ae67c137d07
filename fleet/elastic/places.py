"""A run that goes on with other workers: the saved worker that each one continues, and the mean of saved workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fleet.checkpoint.boxes import HeldBox, copy_from
from fleet.checkpoint.index import Index, Piece
from fleet.checkpoint.items import SavedTensors
from fleet.checkpoint.storage import Folder

if TYPE_CHECKING:
    from fleet.job.job import Job

# Axes along which workers hold different parts of the model, or of a sequence.
_PARTS = ("pp", "sep", "cp", "mp", "ep")
_FIRST = "@0/"
_MODEL = "model/"
_WHOLE_ALONG = ("dp", "sharding")  # along the other axes a worker holds a part of the model


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
    """Returns the entry of the saved worker that this worker continues, or ``None``.

    With as many replicas on another mesh, this is the first worker that trained on the same data: workers that hold
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


class MeanOfWorkers(SavedTensors):
    """Reads the mean of the workers' models, and worker 0's optimizer without the gradients that it had not yet used.

    Args:
        folder: the folder of the checkpoint.
        index: its index, with each worker's state under names that begin with the worker's rank.
        num_workers: how many workers have saved.
    """

    def __init__(self, folder: Folder, index: Index, num_workers: int) -> None:
        super().__init__(folder, _with_names_of_the_first(index))
        self._num_workers = num_workers

    def fill(self, name: str, boxes: Sequence[HeldBox]) -> None:
        """Copies the mean of the tensor ``name`` into ``boxes``; of integers, worker 0's. Raises CheckpointError."""
        dtype = getattr(torch, self.known(name).dtype)
        if not name.startswith(_MODEL) or not dtype.is_floating_point:
            super().fill(name, boxes)
            return
        # In float64: a sum over many workers would lose digits in a narrow type.
        first, *others = self._copies(name)
        total = self.whole(first).double()
        for copy in others:
            total += self.whole(copy).double()
        mean = (total / self._num_workers).to(dtype)
        copy_from(Piece("", 0, (0,) * mean.dim(), tuple(mean.shape)), mean, boxes)

    def verify(self, name: str, boxes: Sequence[HeldBox] | None = None) -> None:
        """Reads and verifies the tensor ``name``; for the model, every worker's copy of it. Raises CheckpointError."""
        for copy in self._copies(name) if name.startswith(_MODEL) else [name]:
            super().verify(copy, boxes)

    def _copies(self, name: str) -> list[str]:
        return [f"@{rank}/{name}" for rank in range(self._num_workers)]


def has_own_states(index: Index) -> bool:
    """Returns whether every worker has saved its own state."""
    return any(name.startswith(_FIRST) for name in (*index.values, *index.tensors))


def reason_against_mean(name: str, run: Mapping[str, Any]) -> str:
    """Returns why no other mesh can continue from the states of the workers of ``run``; empty where one can.

    Args:
        name: the name of the checkpoint.
        run: its world size and the degrees of its mesh.
    """
    degrees = run.get("degrees", {})
    if any(size > 1 for axis, size in degrees.items() if axis not in _WHOLE_ALONG):
        return (
            f"{name} holds a state for each worker of another mesh, saved inside a window of several batches. "
            "Continue on the same mesh, or from a checkpoint saved at an update"
        )
    if degrees.get("sharding", 1) > 1:
        return (
            f"Checkpoint.resume(): {name} was saved by {run['world_size']} workers with sharded parameters inside a "
            "window of gradient_merge. Continue with as many workers, or from a checkpoint saved at an update"
        )
    return ""


def _with_names_of_the_first(index: Index) -> Index:
    """Returns ``index`` with worker 0's state under the names of a common state as well."""
    values = {**index.values, **{_bare(name): _closed(value) for name, value in _firsts(index.values).items()}}
    return Index(
        tensors={**index.tensors, **{_bare(name): entry for name, entry in _firsts(index.tensors).items()}},
        aliases={**index.aliases, **{_bare(name): _bare(other) for name, other in _firsts(index.aliases).items()}},
        values=values,
        files=index.files,
        job=index.job,
    )


def _firsts(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {name: entry for name, entry in entries.items() if name.startswith(_FIRST)}


def _bare(name: str) -> str:
    return name.removeprefix(_FIRST)


def _closed(value: Any) -> Any:
    """Returns ``value`` with an empty window, where it is a window in which gradients of several batches add up."""
    is_window = isinstance(value, Mapping) and {"batch", "sums", "k_steps"} <= set(value)
    return {**value, "batch": 0, "sums": {}} if is_window else value


def _parts(place: Mapping[str, int]) -> list[int]:
    return [place.get(axis, 0) for axis in _PARTS]
