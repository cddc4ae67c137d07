"""Boxes: the regions of whole tensors that this worker holds, and the other workers that hold them.

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
from fleet.strategies._shared.parts import chunk_of, is_part, local


@dataclass(frozen=True)
class HeldBox:
    """A box of a whole tensor that this worker holds.

    Attributes:
        offsets: where it begins in the whole tensor.
        view: the numbers, in this worker's memory, in the shape of the box.
    """

    offsets: tuple[int, ...]
    view: Tensor

    def rows(self, begin: int, end: int) -> HeldBox:
        """Returns the rows of the box (entries of dimension 0) from ``begin`` up to ``end``."""
        if not self.view.dim() or (begin == 0 and end == self.view.shape[0]):
            return self
        return HeldBox((self.offsets[0] + begin, *self.offsets[1:]), self.view[begin:end])


def whole_shape(tensor: Tensor, layout: Layout | None) -> tuple[int, ...]:
    """Returns the shape of the whole tensor of which ``tensor``, a parameter or its state, is a shard."""
    return layout.whole if layout is not None and tuple(tensor.shape) == layout.shape else tuple(tensor.shape)


def held_boxes(tensor: Tensor, layout: Layout | None = None) -> list[HeldBox]:
    """Returns the boxes that make up ``tensor``, as views of its memory.

    Args:
        tensor: a plain tensor, or a DTensor with its local shard.
        layout: the layout of a layer divided over workers; ignored unless ``tensor`` has the shape of a part.
    """
    own = local(tensor).detach()
    begin = _shard_offsets(tensor)
    # An empty shard of a tensor with elements is no box; an empty tensor is one, or a checkpoint would lack its name.
    if layout is None or layout.parts == 1 or tuple(tensor.shape) != layout.shape:
        return [HeldBox(begin, own)] if own.numel() or not tensor.numel() else []
    boxes = []
    dim = layout.dim
    at = 0
    whole_at = 0
    # A fused weight (query, key, value) is divided section by section, so one part is several boxes of the whole; a
    # DTensor of it holds only some rows of the part.
    for section in layout.sections or (layout.whole[dim],):
        size = section // layout.parts
        first = max(at, begin[dim])
        last = min(at + size, begin[dim] + own.shape[dim])
        if first < last:
            view = own.narrow(dim, first - begin[dim], last - first)
            place = whole_at + layout.index * size + first - at
            if view.numel():
                boxes.append(HeldBox((*begin[:dim], place, *begin[dim + 1 :]), view))
        at += size
        whole_at += section
    return boxes


def _shard_offsets(tensor: Tensor) -> tuple[int, ...]:
    """Returns where this worker's shard of a DTensor begins; torch cuts a dimension into equal chunks, rounded up."""
    offsets = [0] * tensor.dim()
    if is_part(tensor):
        sizes = list(tensor.shape)
        for mesh_dim, placement in enumerate(tensor.placements):
            if placement.is_shard():
                dim = cast(Any, placement).dim
                mesh = tensor.device_mesh
                own = chunk_of(sizes[dim], mesh.get_local_rank(mesh_dim), mesh.size(mesh_dim))
                offsets[dim] += own.start
                sizes[dim] = own.stop - own.start
    return tuple(offsets)


def holders_of(axes: Axes, tensor: Tensor, layout: Layout | None, expert: bool, owned: bool = False) -> tuple[int, ...]:
    """Returns the ranks, in order, that hold the same boxes of ``tensor`` as this worker.

    Args:
        axes: the place of this worker.
        tensor: a parameter, or optimizer state with its shape.
        layout: the parameter's layout.
        expert: whether the parameter belongs to experts that are divided over workers.
        owned: whether one worker of each sharding group, this one, keeps this state alone.
    """
    divided = set()
    if is_part(tensor):
        names = tensor.device_mesh.mesh_dim_names or ()
        divided = {names[dim] for dim, placement in enumerate(tensor.placements) if placement.is_shard()}
    if owned:
        divided.add("sharding")
    # Workers with different experts have them under different names, so only the copies of these experts count.
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
    """Yields the boxes, each with its place in ``boxes``, that holder ``rank`` of ``world_size`` writes.

    The bytes of the list are cut into ``world_size`` ranges of one length. A row belongs to the range in which it
    begins, so together the holders write each row once.

    Example:
        >>> [(place, box.offsets) for place, box in divided_among([HeldBox((0, 0), torch.zeros(4, 2))], 1, 2)]
        [(0, (2, 0))]
    """
    sizes = [box.view.numel() * box.view.element_size() for box in boxes]
    total = sum(sizes)
    first = total * rank // world_size
    last = total * (rank + 1) // world_size
    begin = 0
    for place, (box, size) in enumerate(zip(boxes, sizes, strict=True)):
        num_rows = box.view.shape[0] if box.view.dim() else 1
        row = size // num_rows if num_rows else 0
        rows = range(begin, begin + size, row) if row else range(begin, begin + 1)
        begin_row = bisect_left(rows, first)
        # Empty tensors at the end of the list begin where the last range ends, and no range would have them.
        end_row = len(rows) if rank == world_size - 1 else bisect_left(rows, last)
        if begin_row < end_row:
            yield place, box.rows(begin_row, end_row) if row else box
        begin += size


def box_slices(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    """Returns the index of a box in its whole tensor."""
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


@torch.no_grad()
def copy_from(piece: Piece, numbers: Tensor, boxes: Sequence[HeldBox]) -> int:
    """Copies the overlap of ``piece``, whose content is ``numbers``, into ``boxes``; returns how many were copied."""
    count = 0
    for box in boxes:
        spans = _overlap(piece, box)
        if spans is not None:
            theirs = tuple(slice(first - at, last - at) for (first, last), at in zip(spans, piece.offsets, strict=True))
            mine = tuple(slice(first - at, last - at) for (first, last), at in zip(spans, box.offsets, strict=True))
            box.view[mine].copy_(numbers[theirs])
            count += numbers[theirs].numel()
    return count


def row_range(piece: Piece, box: HeldBox) -> tuple[int, int] | None:
    """Returns the rows of ``piece`` that ``box`` needs, first and last + 1; ``None`` where it needs none."""
    spans = _overlap(piece, box)
    if not spans:
        return None if spans is None else (0, 1)
    return spans[0][0] - piece.offsets[0], spans[0][1] - piece.offsets[0]


def _overlap(piece: Piece, box: HeldBox) -> list[tuple[int, int]] | None:
    """Returns the overlap, first and last + 1 along each dimension of the whole; ``None`` without one."""
    ranges = zip(piece.offsets, piece.sizes, box.offsets, box.view.shape, strict=True)
    spans = [(max(offset, at), min(offset + size, at + length)) for offset, size, at, length in ranges]
    return spans if all(first < last for first, last in spans) else None
