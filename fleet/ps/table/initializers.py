"""Initializer: the weights of a row nobody has trained yet, a pure function of (seed, key, column).

Neither the order in which rows arrive, nor the thread, nor the number of servers changes them.
"""

from __future__ import annotations

import math
import re
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


_SPECS = {
    "gaussian_random": ("normal", (1, 2)),
    "truncated_gaussian_random": ("truncated_normal", (1, 2)),
    "uniform_random": ("uniform", (1, 2)),
    "fill_constant": ("constant", (0,)),
}


def initializer_from_paddle(text: str) -> tuple[Initializer, int]:
    """Returns the initializer and the seed of a specification such as ``uniform_random&0&-0.5&0.5``.

    The parts are separated by ``&`` or ``:``: ``gaussian_random seed mean std``, ``truncated_gaussian_random seed
    mean std``, ``uniform_random seed min max``, ``fill_constant value``.
    """
    name, *parts = re.split("[&:]", text)
    if name not in _SPECS:
        raise ConfigError(
            f"the initializer {text!r} does not exist; one of {sorted(_SPECS)}." + did_you_mean(name, _SPECS)
        )
    kind, places = _SPECS[name]
    try:
        values = [float(part) for part in parts]
        a, b = values[places[0]], values[places[-1]]
        seed = int(values[0]) if len(places) > 1 else 0
    except (ValueError, IndexError):
        raise ConfigError(f"the initializer {text!r} cannot be read; {name} takes {max(places) + 1} numbers.") from None
    return Initializer(kind, a, b), seed
