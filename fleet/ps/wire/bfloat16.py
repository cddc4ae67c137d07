"""bfloat16 on the wire: half the bytes, rounded to the nearest even value as torch does."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Returns ``values`` rounded to bfloat16, each as the uint16 of its bits; not-a-number stays not-a-number."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    halves = rounded.astype(np.uint16)
    unordered = np.isnan(values)
    if unordered.any():
        halves[unordered] = np.uint16(0x7FC0)
    return halves


def from_bfloat16(halves: NDArray[Any]) -> NDArray[np.float32]:
    """Returns the float32 values of bfloat16 bits."""
    out = np.empty(halves.shape, np.float32)
    np.left_shift(halves, np.uint32(16), out=out.view(np.uint32), dtype=np.uint32, casting="unsafe")
    return out
