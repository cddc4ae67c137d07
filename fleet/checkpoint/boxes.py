"""Boxes: where the numbers that this worker holds lie in whole tensors, and who else holds the same.

[Note: Who writes what]
Nothing is exchanged to decide it. The workers that hold the same box of a tensor follow from the axes along which the
tensor is divided. Workers that hold the same boxes of the same tensors divide the bytes of their list among themselves:
each takes one range of the whole list, cut between rows. Where copies may differ (the statistics of batch norm, a
module that the job did not wrap), the first holder writes alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from fleet.checkpoint.index import Piece
from fleet.job.axes import COPY_AXES, Axes
from fleet.strategies._shared.parameter_layout import Layout
from fleet.strategies._shared.parts import is_part, local


@dataclass(frozen=True)
class HeldBox:
    """A box of a whole tensor that this worker holds.

    Attributes:
        offsets: where it begins in the whole tensor.
        view: the numbers, in this worker's memory; its shape is that of the box.
    """

    offsets: tuple[int, ...]
    view: Tensor

    def rows(self, begin: int, end: int) -> HeldBox:
        """Returns the part of the box between two of its rows (entries of dimension 0)."""
        if not self.view.dim() or (begin == 0 and end == self.view.shape[0]):
            return self
        return HeldBox((self.offsets[0] + begin, *self.offsets[1:]), self.view[begin:end])


def whole_shape(tensor: Tensor, layout: Layout | None) -> tuple[int, ...]:
    """Returns the shape of the whole that ``tensor``, a parameter or one like it, is a part of."""
    return layout.whole if layout is not None and tuple(tensor.shape) == layout.shape else tuple(tensor.shape)


def held_boxes(tensor: Tensor, layout: Layout | None = None) -> list[HeldBox]:
    """Returns the boxes that ``tensor`` is made of, views of its memory.

    Args:
        tensor: a plain tensor, or a DTensor, of which the local shard counts.
        layout: of a layer that is divided over workers; it counts where ``tensor`` has the shape of a part.
    """
    own = local(tensor).detach()
    begin = _shard_offsets(tensor)
    if layout is None or layout.parts == 1 or tuple(tensor.shape) != layout.shape:
        return [HeldBox(begin, own)] if own.numel() or not tensor.numel() else []
    found = []
    dim, at = layout.dim, 0
    whole_at = 0
    for section in layout.sections or (layout.whole[layout.dim],):
        size = section // layout.parts
        first, last = max(at, begin[dim]), min(at + size, begin[dim] + own.shape[dim])
        if first < last:
            view = own.narrow(dim, first - begin[dim], last - first)
            place = whole_at + layout.index * size + first - at
            if view.numel():
                found.append(HeldBox((*begin[:dim], place, *begin[dim + 1 :]), view))
        at, whole_at = at + size, whole_at + section
    return found


def _shard_offsets(tensor: Tensor) -> tuple[int, ...]:
    """Returns where this worker's shard of a DTensor begins; torch cuts a dimension into equal chunks, rounded up."""
    offsets = [0] * tensor.dim()
    if is_part(tensor):
        sizes = list(tensor.shape)
        for mesh_dim, placement in enumerate(tensor.placements):
            if placement.is_shard():
                dim, degree = cast(Any, placement).dim, tensor.device_mesh.size(mesh_dim)
                chunk = -(-sizes[dim] // degree)
                begin = min(tensor.device_mesh.get_local_rank(mesh_dim) * chunk, sizes[dim])
                offsets[dim] += begin
                sizes[dim] = min(chunk, sizes[dim] - begin)
    return tuple(offsets)


def holders_of(axes: Axes, tensor: Tensor, layout: Layout | None, expert: bool, owned: bool = False) -> tuple[int, ...]:
    """Returns the ranks, in order, that hold what this worker holds of ``tensor``.

    Args:
        axes: the place of this worker.
        tensor: a parameter, or the state of one laid out like it.
        layout: of the parameter.
        expert: whether the parameter belongs to experts that are divided over workers.
        owned: this is state that one worker of each sharding group keeps, and this worker does.
    """
    divided = set()
    if is_part(tensor):
        names = tensor.device_mesh.mesh_dim_names or ()
        divided = {names[dim] for dim, placement in enumerate(tensor.placements) if placement.is_shard()}
    if owned:
        divided.add("sharding")
    if expert and axes.experts:
        return (axes.global_rank,) if owned else axes.ranks("moe_sharding")
    along = [*COPY_AXES, "mp"]
    if layout is not None and layout.parts > 1 and tuple(tensor.shape) == layout.shape:
        along.remove(layout.axis)
    mine = axes.coordinate()
    return tuple(
        rank
        for rank in axes.ranks(*along)
        if all(axes.coordinate(rank)[axis] == mine[axis] for axis in divided if axis in mine)
    )


def divided_among(boxes: Sequence[HeldBox], rank: int, world_size: int) -> Iterator[tuple[int, HeldBox]]:
    """Yields the part of ``boxes`` that one of several holders writes: places in the list, and boxes.

    The bytes of the list are cut into ``world_size`` ranges of one length; a row belongs to the range it begins in, so
    the parts of all holders are the list, each row once.

    Example:
        >>> [(place, box.offsets) for place, box in divided_among([HeldBox((0, 0), torch.zeros(4, 2))], 1, 2)]
        [(0, (2, 0))]
    """
    sizes = [box.view.numel() * box.view.element_size() for box in boxes]
    total = sum(sizes)
    first, last = total * rank // world_size, total * (rank + 1) // world_size
    begin = 0
    for place, (box, size) in enumerate(zip(boxes, sizes, strict=True)):
        num_rows = box.view.shape[0] if box.view.dim() else 1
        row = size // num_rows if num_rows else 0
        rows = range(begin, begin + size, row) if row else range(begin, begin + 1)
        one, other = bisect_left(rows, first), bisect_left(rows, last)
        if rank == world_size - 1:
            other = len(rows)  # what is empty at the end of the list belongs to the last
        if one < other:
            yield place, box.rows(one, other) if row else box
        begin += size


def box_slices(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    """Returns the index of a box in its whole tensor."""
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


@torch.no_grad()
def copy_from(piece: Piece, found: Tensor, boxes: Sequence[HeldBox]) -> int:
    """Copies what ``piece`` and ``boxes`` have in common from ``found``, its numbers; returns how many were copied."""
    count = 0
    for box in boxes:
        theirs, mine = [], []
        for offset, size, at, length in zip(piece.offsets, piece.sizes, box.offsets, box.view.shape, strict=True):
            first, last = max(offset, at), min(offset + size, at + length)
            if first >= last:
                break
            theirs.append(slice(first - offset, last - offset))
            mine.append(slice(first - at, last - at))
        else:
            box.view[tuple(mine)].copy_(found[tuple(theirs)])
            count += found[tuple(theirs)].numel()
    return count


def row_range(piece: Piece, boxes: Sequence[HeldBox]) -> tuple[int, int] | None:
    """Returns which rows of ``piece`` the ``boxes`` need: first and last + 1; ``None`` for none."""
    found: list[tuple[int, int]] = []
    for box in boxes:
        spans = [
            (max(offset, at) - offset, min(offset + size, at + length) - offset)
            for offset, size, at, length in zip(piece.offsets, piece.sizes, box.offsets, box.view.shape, strict=True)
        ]
        if all(first < last for first, last in spans):
            found.append(spans[0] if spans else (0, 1))
    if not found:
        return None
    return min(first for first, _ in found), max(last for _, last in found)
