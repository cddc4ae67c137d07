"""LeafGradient: what backward has left in a leaf tensor of rows, by parts that lookups read and clear alone."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class LeafGradient:
    """The gradient of a leaf, without the leaf: its hook has this object, which would else keep the leaf alive."""

    __slots__ = ("_array", "_tensor")
    _array: NDArray[np.float32] | None
    _tensor: Tensor

    def note(self, leaf: Tensor) -> None:
        """Takes the gradient that backward has left in ``leaf``."""
        assert leaf.grad is not None
        self._tensor = leaf.grad
        self._array = None

    def array(self) -> NDArray[np.float32]:
        """Returns the gradient of the rows, float32 [n, dim]."""
        if self._array is None:  # of a device, one copy serves all parts
            self._array = self._tensor.numpy(force=True)
        return self._array

    def clear(self, start: int, stop: int) -> None:
        """Makes rows zeros, to which a second backward of the same graph adds."""
        with torch.no_grad():
            self._tensor[start:stop] = 0
        self._array = None


class LeafPart:
    """Rows ``start`` to ``stop`` of a leaf: those of one lookup."""

    __slots__ = ("_gradient", "_start", "_stop")

    def __init__(self, gradient: LeafGradient, start: int, stop: int) -> None:
        self._gradient = gradient
        self._start = start
        self._stop = stop

    def rows(self) -> NDArray[np.float32]:
        """Returns the gradient of these rows, once backward has reached them."""
        return self._gradient.array()[self._start : self._stop]

    def clear(self) -> None:
        """Forgets the gradient of these rows."""
        self._gradient.clear(self._start, self._stop)
