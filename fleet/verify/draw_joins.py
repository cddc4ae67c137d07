"""What several workers drew, as one process draws it: joined, shared, or one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

PERMUTATIONS = ("randperm", "numpy.random.permutation", "generator.permutation")
# Draws whose size is that of another tensor, or of a data set.
_OF_OTHERS = ("_", "_like", "dropout", "bernoulli", "normal", "multinomial", *PERMUTATIONS)


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
    for axis in range(wanted.ndim):
        rest = [part.shape[:axis] + part.shape[axis + 1 :] for part in (wanted, *parts)]
        if len(set(rest)) == 1 and sum(part.shape[axis] for part in parts) == wanted.shape[axis]:
            return torch.cat(list(parts), axis)
    return filled_up(wanted, parts) if wanted.ndim > 1 else None


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
