"""What several workers drew, as one process draws it: joined, shared, or one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

PERMUTATIONS = ("randperm", "numpy.random.permutation", "generator.permutation")
# Draws whose size is that of another tensor, or of a data set.
_OF_OTHERS = ("_", "_like", "dropout", "bernoulli", "normal", "multinomial", *PERMUTATIONS)

_rand = torch.rand  # as it is before verify takes its place
_FACTS = 18  # numbers that say how an input of at most eight dimensions lies in memory


def tensor_of(drawn: Any) -> Tensor | None:
    """Returns the numbers of a draw of torch, numpy or ``random``; ``None`` where it drew something else."""
    if isinstance(drawn, Tensor):
        return None if drawn.is_meta else drawn
    if not isinstance(drawn, np.ndarray | np.generic | float | int | list):
        return None
    if isinstance(drawn, list) and not all(isinstance(one, float | int) for one in drawn):
        return None
    array = np.array(drawn)
    return torch.from_numpy(array) if array.dtype.kind in "bif" else None


def drawn_as(drawn: Any, found: Tensor) -> Any:
    """Returns the numbers ``found`` in the form of ``drawn``."""
    if isinstance(drawn, Tensor):
        return found
    array = found.numpy()
    if isinstance(drawn, np.ndarray):
        return array.astype(drawn.dtype)
    return array.tolist() if isinstance(drawn, list) else type(drawn)(array.item())


def joined(name: str, wanted: Tensor, parts: Sequence[Tensor], *, grows: bool) -> Tensor | None:
    """Returns what one process gets for a draw like ``wanted`` where the workers drew ``parts``; ``None``: unknown.

    A permutation keeps each worker's rows among themselves. Other draws are joined along the dimension in which
    ``wanted`` has room for them, also where each is shorter than its rows; where it has the size of one part, equal
    ones are shared, and ``grows`` says that different ones make a draw of all their sizes together: the script draws
    its batches.
    """
    if any(part.ndim != wanted.ndim for part in parts):
        return None
    if name in PERMUTATIONS and wanted.ndim == 1 and sum(map(len, parts)) == len(wanted):
        starts = [sum(map(len, parts[:i])) for i in range(len(parts))]
        return torch.cat([part + start for part, start in zip(parts, starts, strict=True)])
    if all(part.shape == wanted.shape for part in parts):
        if all(torch.equal(part, parts[0]) for part in parts):
            return parts[0]
        grows = grows and wanted.ndim > 0 and len(wanted) > 1 and not name.endswith(_OF_OTHERS)
        return torch.cat(list(parts)) if grows else None
    axis = _axis_of(wanted.shape, [part.shape for part in parts])
    if axis is not None:
        return torch.cat(list(parts), axis)
    return filled_up(wanted, parts) if wanted.ndim > 1 else None


def drawing_state(input: Tensor, copies: int) -> Tensor:
    """Returns the generator's state with the shape of ``input`` as bytes, in one row for each of ``copies``.

    An operation that draws inside torch draws the same numbers again from this state for an input of this shape.
    """
    order = _order(input)
    facts = [input.ndim, int(input.permute(order).is_contiguous()), *input.shape, *order]
    words = torch.tensor(facts + [0] * (_FACTS - len(facts))).view(torch.uint8)
    return torch.cat([words, torch.default_generator.get_state()]).expand(copies, -1).clone()


def with_states(operation: Callable[[Tensor], Tensor], input: Tensor, states: Tensor) -> Tensor | None:
    """Returns what ``operation`` makes of ``input``, of each worker's part with that worker's :func:`drawing_state`.

    ``None`` where the parts do not make up ``input``, or have rows that share memory. The generator is left as one
    draw of its own leaves it, so that no two calls begin with one state.
    """
    facts = [row[: 8 * _FACTS].clone().view(torch.int64).tolist() for row in states]
    shapes = [torch.Size(fact[2 : 2 + fact[0]]) for fact in facts]
    axis = _axis_of(input.shape, shapes)
    if axis is None or not all(fact[1] for fact in facts):
        return None
    own = torch.default_generator.get_state()
    made = []
    try:
        parts = input.split([shape[axis] for shape in shapes], axis)
        for part, row, fact in zip(parts, states, facts, strict=True):
            order = fact[2 + fact[0] : 2 + 2 * fact[0]]
            torch.default_generator.set_state(row[8 * _FACTS :].clone())
            made.append(operation(part.permute(order).contiguous().permute(_inverse(order))))
    finally:
        torch.default_generator.set_state(own)
        _rand(1)
    return torch.cat(made, axis)


def _order(input: Tensor) -> list[int]:
    """Returns the dimensions of ``input``, those whose steps in memory are the longest first."""
    return sorted(range(input.ndim), key=input.stride, reverse=True)


def _inverse(order: Sequence[int]) -> list[int]:
    """Returns the permutation that undoes ``order``."""
    return sorted(range(len(order)), key=order.__getitem__)


def _axis_of(whole: torch.Size, parts: Sequence[torch.Size]) -> int | None:
    """Returns the dimension along which tensors of the shapes ``parts`` make up one of the shape ``whole``."""
    for axis in range(len(whole)) if all(len(part) == len(whole) for part in parts) else ():
        rest = {(*shape[:axis], *shape[axis + 1 :]) for shape in (whole, *parts)}
        if len(rest) == 1 and sum(part[axis] for part in parts) == whole[axis]:
            return axis
    return None


def filled_up(like: Tensor, parts: Sequence[Tensor]) -> Tensor | None:
    """Returns ``like`` with the parts below each other, each in the first places of its rows; ``None``: no such size.

    So it is where every worker pads its batch to its own longest sample, and one process to the longest of all.
    """
    sizes = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    if list(like.shape) != [sum(map(len, parts)), *sizes]:
        return None
    made = like.clone()
    for part, rows in zip(parts, made.split([len(part) for part in parts]), strict=True):
        rows[(slice(None), *map(slice, part.shape[1:]))] = part
    return made
