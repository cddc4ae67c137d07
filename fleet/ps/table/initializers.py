"""Initializer: the weights of a new row, a pure function of (seed, key, column).

Neither the order in which rows arrive, nor the thread, nor the number of servers changes them.
"""

from __future__ import annotations

from dataclasses import dataclass

from fleet.errors import ConfigError, did_you_mean
from fleet.ps.table.rules import FLOAT32_MAX

KINDS = {"constant": 0, "uniform": 1, "normal": 2, "truncated_normal": 3}
_MOST_DEVIATIONS = {"normal": 9.0, "truncated_normal": 2.0}  # of a draw from its mean: it is made of 53 bits


@dataclass(frozen=True)
class Initializer:
    """How new weights are drawn: ``uniform`` in [a, b), ``normal`` with mean a and deviation b,
    ``truncated_normal`` the same cut at two deviations, ``constant`` a.

    Raises:
        ConfigError: unknown kind, a value that is not finite in float32, an empty range, a negative deviation, or a
            second value of ``constant``.

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
        self._check_values()
        if self.kind == "uniform" and self.a > self.b:
            raise ConfigError(f"initializer 'uniform': the range is [{self.a!r}, {self.b!r}); it must not be empty.")
        if self.kind.endswith("normal") and self.b < 0:
            raise ConfigError(f"initializer {self.kind!r}: the deviation is {self.b!r}; it must not be negative.")

    def _check_values(self) -> None:
        most = _MOST_DEVIATIONS.get(self.kind, 0.0)
        are_finite = all(abs(value) <= FLOAT32_MAX for value in (self.a, self.b))
        if not are_finite or abs(self.a) + most * abs(self.b) > FLOAT32_MAX:
            of_draws = f", and so must the mean with {most:g} deviations" * bool(most)
            raise ConfigError(
                f"initializer {self.kind!r}: the values are {self.a!r}, {self.b!r}; they must be finite in float32"
                f"{of_draws}."
            )
        if self.kind == "constant" and self.b not in (0.0, self.a, Initializer.b):
            raise ConfigError(f"initializer 'constant' takes one value, got {self.a!r} and {self.b!r}.")

    @property
    def code(self) -> int:
        """The number of the kind in kernels and files."""
        return KINDS[self.kind]
