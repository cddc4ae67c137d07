"""Initializer: the weights of a new row, a pure function of (seed, key, column).

Neither the order in which rows arrive, nor the thread, nor the number of servers changes them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fleet.errors import ConfigError, did_you_mean

KINDS = {"constant": 0, "uniform": 1, "normal": 2, "truncated_normal": 3}


@dataclass(frozen=True)
class Initializer:
    """How new weights are drawn: ``uniform`` in [a, b), ``normal`` with mean a and deviation b,
    ``truncated_normal`` the same cut at two deviations, ``constant`` a.

    Raises:
        ConfigError: unknown kind, a value that is not finite, an empty range or a negative deviation.

    Example:
        >>> Initializer("uniform", -0.5, 0.5)
        Initializer(kind='uniform', a=-0.5, b=0.5)
    """

    kind: str = "uniform"
    a: float = -1e-4
    b: float = 1e-4

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in KINDS:
            raise ConfigError(
                f"the initializer {self.kind!r} does not exist; one of {sorted(KINDS)}."
                + did_you_mean(str(self.kind), KINDS)
            )
        for value in (self.a, self.b):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"initializer {self.kind!r}: a value is {value!r}; it takes a number.")
        if not (math.isfinite(self.a) and math.isfinite(self.b)):
            raise ConfigError(f"initializer {self.kind!r}: the values are {self.a!r}, {self.b!r}; they must be finite.")
        if self.kind == "uniform" and self.a > self.b:
            raise ConfigError(f"initializer 'uniform': the range is [{self.a!r}, {self.b!r}); it must not be empty.")
        if self.kind.endswith("normal") and self.b < 0:
            raise ConfigError(f"initializer {self.kind!r}: the deviation is {self.b!r}; it must not be negative.")

    @property
    def code(self) -> int:
        """The number of the kind in kernels and files."""
        return KINDS[self.kind]
