"""Axes: where this worker stands on the mesh, and the process group of every axis and of axes taken together.

[Note: Who holds what]
Workers along ``dp`` and ``sharding`` train on different rows. Workers along ``sep`` and ``cp`` hold different tokens of
the same rows. Workers along ``mp`` and ``pp`` hold different parts of the model and see the same rows. Hence:

- ``DATA_AXES``: a mean over the batch is a mean over these; data is dealt out by ``data_rank`` of ``data_replicas``.
- ``COPY_AXES``: workers that differ only here hold the same parameters, so their gradients are summed; the sum is
  divided by ``data_replicas``, not by the number of workers, because a loss over a divided sequence is a part already.
- ``MODEL_AXES``: workers that differ only here hold one copy of the model together; a norm is a sum over these.
- ``EXPERT_AXES``, where experts are divided: the workers of one pipeline stage as a second grid. Workers along ``ep``
  hold different experts, workers along ``moe_sharding`` the same ones. Every expert sees the tokens of its whole ``ep``
  group, so its gradients are summed over ``moe_sharding`` alone, and divided by ``data_replicas`` like all others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import product
from math import prod

import torch.distributed as dist

# Outermost axis first: neighbours along the last axis have neighbouring ranks.
AXES = ("dp", "pp", "sharding", "sep", "cp", "mp")
# The second grid of a job whose experts are divided: it takes the workers of one pipeline stage anew.
EXPERT_AXES = ("moe_sharding", "ep")
DATA_AXES = ("dp", "sharding")
COPY_AXES = ("dp", "sharding", "sep", "cp")
# Axes along which workers hold different tokens of the same rows.
SEQUENCE_AXES = ("sep", "cp")
# Workers that differ only here compute one loss.
LOSS_AXES = ("sep", "cp", "mp")
MODEL_AXES = ("pp", "mp")
# Sets of axes whose groups are made when the job starts, so that one worker may ask for a group alone. Those after the
# second are Fleet's: its check groups, the group of dp and sep, and that of cp and mp.
_FUSED = (
    COPY_AXES,
    MODEL_AXES,
    ("pp", "sharding", "sep", "cp", "mp"),
    ("dp", "pp", "sep", "cp", "mp"),
    ("dp", "sep"),
    ("cp", "mp"),
    SEQUENCE_AXES,
    LOSS_AXES,
    ("dp", "sep", "cp"),
)


class Axes:
    """The place of one worker on a mesh.

    Args:
        degrees: the number of workers along each axis, the outermost axis first.
        global_rank: the rank of this worker.
        groups: the process groups that this worker belongs to, by their ranks.
        experts: the number of workers along each of ``EXPERT_AXES``; empty where experts are not divided.

    Example:
        >>> Axes({"dp": 2, "mp": 2}, 3).ranks("mp")
        (2, 3)
    """

    def __init__(
        self,
        degrees: Mapping[str, int],
        global_rank: int,
        groups: Mapping[tuple[int, ...], dist.ProcessGroup] | None = None,
        experts: Mapping[str, int] | None = None,
    ) -> None:
        self.degrees = dict(degrees)
        self.global_rank = global_rank
        self.experts = dict(experts or {})
        self._groups = dict(groups or {})
        self._ranks: dict[tuple[str, ...], tuple[int, ...]] = {}  # answered once; training asks in every step
        self._places = list(product(*(range(degree) for degree in self.degrees.values())))
        self._expert_places: list[tuple[int, ...]] = []
        if self.experts:
            self._expert_places = self._placed_experts()

    def __repr__(self) -> str:
        return f"Axes({self.degrees}, global_rank={self.global_rank})"

    @property
    def world_size(self) -> int:
        """Number of workers on the mesh."""
        return len(self._places)

    def size(self, *axes: str) -> int:
        """Returns the number of workers along ``axes`` taken together."""
        degrees = self.degrees | self.experts
        return prod(degrees.get(axis, 1) for axis in axes)

    def rank(self, *axes: str) -> int:
        """Returns this worker's index among :meth:`ranks` of ``axes``."""
        return self.ranks(*axes).index(self.global_rank)

    def ranks(self, *axes: str) -> tuple[int, ...]:
        """Returns the ranks, in order, of the workers that differ from this one along ``axes`` at most."""
        if axes not in self._ranks:
            self._ranks[axes] = next(group for group in self.all_ranks(*axes) if self.global_rank in group)
        return self._ranks[axes]

    def all_ranks(self, *axes: str) -> list[tuple[int, ...]]:
        """Returns the ranks of every group along ``axes`` taken together, in the order of their first ranks."""
        names = list(self.degrees)
        places = self._places
        if self.experts and not {*axes}.isdisjoint(EXPERT_AXES):
            names = ["pp", *self.experts]
            places = self._expert_places
            if not {*axes} <= {*names}:
                raise AssertionError(f"the axes {axes} are on different grids")
        kept = [place for place, axis in enumerate(names) if axis not in axes]
        found: dict[tuple[int, ...], list[int]] = {}
        for rank, at in enumerate(places):
            found.setdefault(tuple(at[place] for place in kept), []).append(rank)
        return [tuple(ranks) for ranks in found.values()]

    def _placed_experts(self) -> list[tuple[int, ...]]:
        """Returns stage and places along ``EXPERT_AXES`` of every rank: a stage's workers in order, ep innermost."""
        places: dict[int, tuple[int, ...]] = {}
        stages = self.all_ranks(*(axis for axis in self.degrees if axis != "pp"))
        for stage, ranks in enumerate(stages):
            for place, rank in enumerate(ranks):
                places[rank] = (stage, *divmod(place, self.experts["ep"]))
        return [places[rank] for rank in range(self.world_size)]

    def coordinate(self, rank: int | None = None) -> dict[str, int]:
        """Returns the place of ``rank``, or of this worker, along every axis."""
        at = self._places[self.global_rank if rank is None else rank]
        return dict(zip(self.degrees, at, strict=True))

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """Returns the process group of :meth:`ranks`; ``None`` for this worker alone.

        Raises AssertionError for axes whose group was not made when the job started.
        """
        ranks = self.ranks(*axes)
        if len(ranks) == 1:
            return None
        if ranks not in self._groups:
            raise AssertionError(f"no process group was made for the axes {axes} of {self}")
        return self._groups[ranks]

    @property
    def data_replicas(self) -> int:
        """The number of workers, or groups of workers, that train on different rows."""
        return self.size(*DATA_AXES)

    @property
    def data_rank(self) -> int:
        """Which of :attr:`data_replicas` this worker belongs to; workers of one model copy have the same."""
        return self.rank(*DATA_AXES)

    def described(self, rank: int | None = None) -> str:
        """Returns the place along every axis above 1: ``"dp 0, mp 1"``; empty on a mesh of one axis or none."""
        at = self.coordinate(rank)
        real = [axis for axis, degree in self.degrees.items() if degree > 1]
        return ", ".join(f"{axis} {at[axis]}" for axis in real) if len(real) > 1 else ""

    def release(self) -> None:
        """Forgets the process groups; arithmetic still works."""
        self._groups.clear()


def make_axes(
    degrees: Mapping[str, int],
    global_rank: int,
    process_group: dist.ProcessGroup | None,
    timeout_s: float,
    experts: Mapping[str, int] | None = None,
) -> Axes:
    """Returns the place of this worker, with process groups for every axis; every worker calls it at the same point.

    A group of all workers is ``process_group`` itself.
    """
    axes = Axes(degrees, global_rank, experts=experts)
    if process_group is None:
        return axes
    # Sets of axes often give the same groups. Each group is made once: NCCL takes memory for every communicator.
    everyone = tuple(range(axes.world_size))
    groups = {everyone: process_group}
    made: set[frozenset[tuple[int, ...]]] = set()
    for fused in _axes_with_groups(axes):
        lists = axes.all_ranks(*fused)
        if len(lists[0]) in (1, axes.world_size) or frozenset(lists) in made:
            continue
        made.add(frozenset(lists))
        own, _ = dist.new_subgroups_by_enumeration([list(g) for g in lists], timeout=timedelta(seconds=timeout_s))
        groups[axes.ranks(*fused)] = own
    return Axes(degrees, global_rank, groups, experts)


def _axes_with_groups(axes: Axes) -> Iterator[Sequence[str]]:
    yield from ((axis,) for axis in axes.degrees)
    yield from _FUSED
    if axes.experts:
        yield from (("moe_sharding",), ("ep",), ("pp", "ep"), ("sharding", "cp"))
