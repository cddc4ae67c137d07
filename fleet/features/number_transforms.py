"""Transforms of numbers: Bucketize, Clip and Log."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fleet.errors import ConfigError
from fleet.features.column import FeatureColumn, Transform, Words, check_number

_FIRST, _LAST = -(2**63), 2**63 - 1  # of int64


@dataclass(frozen=True)
class Bucketize(Transform):
    """The number of the bucket that a value falls into, int64: how many of the boundaries are not above it.

    As ``torch.bucketize(right=True)`` and ``numpy.searchsorted(side="right")``; not-a-number is in the last bucket.
    Integers are compared as such, exactly above 2^53 too.

    Args:
        column: numbers, or bags of them.
        boundaries: ascending; n boundaries make the buckets 0 to n.
        out: the column to write; ``column`` itself if not given.

    Raises:
        ConfigError: no boundary, or they do not ascend.

    Example:
        >>> transforms = fleet.features.Transforms([fleet.features.Bucketize("age", [18, 30])])
        >>> transforms({"age": [17, 18, 44]})["age"].tolist()
        [0, 1, 2]
    """

    takes: ClassVar[tuple[str, ...]] = ("int", "float")

    column: str
    boundaries: Sequence[float]
    out: str | None = None

    def __post_init__(self) -> None:
        self._check_names()
        object.__setattr__(self, "boundaries", tuple(self.boundaries))
        for boundary in self.boundaries:
            check_number(f"Bucketize({self.column!r}, boundaries): {boundary!r}", boundary)
        if not self.boundaries or list(self.boundaries) != sorted(set(self.boundaries)):
            raise ConfigError(f"Bucketize({self.column!r}, boundaries={self.boundaries}): they ascend, one or more.")

    def apply(self, columns: Sequence[FeatureColumn]) -> FeatureColumn:
        """Returns the buckets."""
        (column,) = columns
        assert not isinstance(column.values, Words)
        # Integers against integers: float64, which searchsorted would compare in, rounds above 2^53.
        if column.kind == "int":
            least = [math.ceil(boundary) for boundary in self.boundaries]  # integers not below a boundary begin there
            below = sum(edge <= _FIRST for edge in least)
            edges = np.array([edge for edge in least if _FIRST < edge <= _LAST], np.int64)
            found = below + np.searchsorted(edges, column.values.astype(np.int64, copy=False), side="right")
        else:
            found = np.searchsorted(np.array([*map(_float_from, self.boundaries)]), column.values, side="right")
        return FeatureColumn(np.asarray(found, np.int64), column.ends)


def _float_from(boundary: float) -> float:
    """Returns the smallest float64 that is not below ``boundary``."""
    near = float(boundary)
    return near if near >= boundary else math.nextafter(near, math.inf)


@dataclass(frozen=True)
class Clip(Transform):
    """Values limited to a range; not-a-number stays. Integers become int64, other numbers float32.

    Args:
        column: numbers, or bags of them.
        low, high: the range, ends included; ``None``: no limit on that side.
        out: the column to write; ``column`` itself if not given.

    Raises:
        ConfigError: no limit at all, or ``low`` above ``high``.
    """

    takes: ClassVar[tuple[str, ...]] = ("int", "float")
    gives: ClassVar[str | None] = None

    column: str
    low: float | None = None
    high: float | None = None
    out: str | None = None

    def __post_init__(self) -> None:
        self._check_names()
        for name, value in (("low", self.low), ("high", self.high)):
            if value is not None:
                check_number(f"Clip({self.column!r}, {name})", value)
        if (self.low is None and self.high is None) or (
            self.low is not None and self.high is not None and self.low > self.high
        ):
            raise ConfigError(f"Clip({self.column!r}, low={self.low}, high={self.high}): low is at most high, or one.")

    def apply(self, columns: Sequence[FeatureColumn]) -> FeatureColumn:
        """Returns the values in the range."""
        (column,) = columns
        values = column.values
        assert not isinstance(values, Words)
        if column.kind == "int":
            low = _FIRST if self.low is None else max(int(np.ceil(self.low)), _FIRST)
            high = _LAST if self.high is None else min(int(np.floor(self.high)), _LAST)
            if low > high:
                raise ConfigError(f"{self!r}: column {self.column!r} holds integers, and none lies in the range.")
            return FeatureColumn(np.clip(values.astype(np.int64, copy=False), low, high), column.ends)
        clipped = np.clip(values, self.low, self.high)
        return FeatureColumn(clipped.astype(values.dtype, copy=False), column.ends)


@dataclass(frozen=True)
class Log(Transform):
    """``log(max(x, 0) + offset)``, float32: for counts before a network; values below 0 count as 0.

    Computed in float64 and rounded once. Not-a-number stays not-a-number.

    Args:
        column: numbers, or bags of them.
        offset: above 0.
        out: the column to write; ``column`` itself if not given.

    Raises:
        ConfigError: ``offset`` is 0 or below.
    """

    takes: ClassVar[tuple[str, ...]] = ("int", "float")
    gives: ClassVar[str | None] = "float"

    column: str
    offset: float = 1.0
    out: str | None = None

    def __post_init__(self) -> None:
        self._check_names()
        check_number(f"Log({self.column!r}, offset)", self.offset)
        if self.offset <= 0:
            raise ConfigError(
                f"Log({self.column!r}, offset={self.offset}): it is above 0, or 0 would have no logarithm."
            )

    def apply(self, columns: Sequence[FeatureColumn]) -> FeatureColumn:
        """Returns the logarithms."""
        (column,) = columns
        assert not isinstance(column.values, Words)
        positive = np.maximum(column.values.astype(np.float64), 0.0)
        return FeatureColumn(np.log(positive + self.offset).astype(np.float32), column.ends)
