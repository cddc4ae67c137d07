"""Divided layers on fake tensors: they are made as on a worker of an mp axis, and their exchanges send nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from fleet.job.axes import Axes
from fleet.strategies.tensor_parallel import cross_entropy, regions
from fleet.strategies.tensor_parallel.place import CurrentJob


class StandInGroup:
    """Stands for the process group of an axis: it has a size and a rank, and no workers."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        """Returns the number of workers."""
        return self._size

    def rank(self) -> int:
        """Returns 0: the estimate describes the first worker."""
        return 0


class StandInAxes(Axes):
    """The place of worker 0 on a mesh, whose groups are stand-ins."""

    def group(self, *axes: str) -> Any:
        """Returns a stand-in, or ``None`` for a worker alone."""
        return StandInGroup(self.size(*axes)) if self.size(*axes) > 1 else None


class Silent:
    """torch.distributed, except that its exchanges leave fake tensors as they are."""

    def __getattr__(self, name: str) -> Any:
        return _silent(getattr(dist, name))


def _silent(call: Any) -> Any:
    if not callable(call) or isinstance(call, type):
        return call

    def exchange(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, FakeTensor) for value in (*args, *kwargs.values())):
            return None
        return call(*args, **kwargs)

    return exchange


@contextmanager
def replaced(stand_ins: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Sets attributes, each named by its owner and name, and restores the old values afterwards."""
    real = [(owner, name, getattr(owner, name)) for owner, name, _ in stand_ins]
    try:
        for owner, name, value in stand_ins:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in real:
            setattr(owner, name, value)


@contextmanager
def divided_layers(degrees: Mapping[str, int]) -> Iterator[None]:
    """Makes layers that are created inside the context parts of ``degrees['mp']``, and exchanges of fakes silent."""
    before = CurrentJob.axes
    stand_ins: list[tuple[Any, str, Any]] = [(module, "dist", Silent()) for module in (regions, cross_entropy)]
    stand_ins += [(regions, name, _silent(getattr(regions, name))) for name in ("gather_into", "sum_scatter_into")]
    if degrees.get("mp", 1) > 1:
        CurrentJob.axes = StandInAxes(degrees, 0)
    try:
        with replaced(stand_ins):
            yield
    finally:
        CurrentJob.axes = before
