"""SharedLeaf: the rows of several lookups as one leaf tensor, with one lookup in it for all of them.

[Note: One leaf for several lookups]
A leaf for each table costs some 20 calls of torch a table and step. The lookups whose rows have the same width and
combiner share one: their rows stand one behind the other, and so do their bags. Backward reaches a part of the leaf
only through the output of its lookup, so a lookup whose output was not used has no gradient, as on its own. The outputs
share memory, but each is a tensor of its own for autograd: one may be changed in place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.ps.client.shards import Gradient, Rows
from fleet.ps.embeddings.bags import Bags, combined, joined
from fleet.ps.embeddings.leaf_gradient import LeafGradient, LeafPart
from fleet.ps.embeddings.lookup import RowLookup, RowSource

# A lookup that takes its gradient from a leaf, the gradient without its rows, and where the rows of the leaf are from.
WatchedRows: TypeAlias = tuple[RowLookup, Gradient, RowSource]


@dataclass(slots=True)
class FoundRows:
    """The rows that one lookup has found.

    Args:
        bags, present: as for :func:`fleet.ps.embeddings.bags.combined`.
        rows: float32 [u, dim].
        places: int32, for each id that is present, its place in ``rows``.
    """

    bags: Bags
    present: NDArray[np.int64] | None
    rows: Rows
    places: NDArray[np.int32]


class _Parts(torch.autograd.Function):
    """The outputs of several lookups from the output of all; ``reached`` notes which of them backward has used."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, shapes: Sequence[Sequence[int]], reached: list[int]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.reached = reached
        ctx.sizes = _sizes(shapes)
        return _divided(whole, shapes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.reached[:] = [number for number, gradient in enumerate(gradients) if gradient is not None]
        some = gradients[ctx.reached[0]]
        assert some is not None
        width = some.shape[-1]
        each = []
        for size, gradient in zip(ctx.sizes, gradients, strict=True):
            if gradient is None:
                each.append(some.new_zeros(size, width))
            else:
                each.append(gradient if gradient.ndim == 2 else gradient.reshape(size, width))
        return torch.cat(each), None, None


def _sizes(shapes: Sequence[Sequence[int]]) -> list[int]:
    return [math.prod(shape) for shape in shapes]


def _divided(whole: Tensor, shapes: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
    width = whole.shape[1]
    # `data` makes each part a tensor of its own, and no view: autograd refuses to change one of several views in place.
    return tuple(
        part.data if len(shape) == 1 else part.view(*shape, width).data
        for part, shape in zip(whole.split(_sizes(shapes)), shapes, strict=True)
    )


def look_up_together(
    found: Sequence[FoundRows], combiner: str, device: torch.device, watched: Sequence[WatchedRows] | None
) -> tuple[Tensor, ...]:
    """Returns for each lookup the rows of its ids, or their sum or mean per bag, bit for bit as on its own.

    Args:
        found: rows of the same width.
        combiner: of all lookups.
        device: where the results live.
        watched: where gradients of the rows go, for each lookup; ``None``: the rows take none.
    """
    leaf = torch.from_numpy(np.concatenate([one.rows for one in found])).to(device)
    ends = np.cumsum([len(one.rows) for one in found])
    places = np.concatenate([one.places for one in found])
    places += np.repeat(np.concatenate(([0], ends[:-1])).astype(np.int32), [len(one.places) for one in found])
    reached: list[int] = []
    if watched is not None:
        _watch(leaf, ends.tolist(), watched, reached, keeps_empty=combiner == "none")
    bags, present = joined([one.bags for one in found], [one.present for one in found])
    whole = combined(bags, present, leaf, torch.from_numpy(places).to(device), combiner)
    shapes = [one.bags.shape for one in found]
    if not whole.requires_grad:
        return _divided(whole, shapes)
    parts: tuple[Tensor, ...] = _Parts.apply(whole, shapes, reached)  # type: ignore[no-untyped-call]
    return parts


def _watch(
    leaf: Tensor, ends: Sequence[int], watched: Sequence[WatchedRows], reached: Sequence[int], keeps_empty: bool
) -> None:
    starts = [0, *ends[:-1]]
    found = LeafGradient()
    parts: dict[int, LeafPart] = {}

    def keep(leaf: Tensor) -> None:
        found.note(leaf)
        for number in reached:
            start, stop = starts[number], ends[number]
            if start == stop and not keeps_empty:  # on its own its result would be zeros without a graph
                continue
            if number not in parts:
                parts[number] = LeafPart(found, start, stop)
            lookup, gradient, source = watched[number]
            lookup.keep(parts[number], gradient, source)

    leaf.requires_grad_()
    leaf.register_post_accumulate_grad_hook(keep)
