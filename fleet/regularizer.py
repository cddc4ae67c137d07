"""Weight decay as Fleet scripts write it: ``weight_decay=L2Decay(1e-4)``."""

from __future__ import annotations

from dataclasses import dataclass

from fleet.errors import ConfigError

__all__ = ["L1Decay", "L2Decay"]


@dataclass(frozen=True)
class _Decay:
    coeff: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.coeff, bool) or not isinstance(self.coeff, int | float) or not self.coeff >= 0:
            raise ConfigError(f"{type(self).__name__}(coeff={self.coeff!r}): it must be a number of at least 0.")


class L1Decay(_Decay):
    """Adds ``coeff * sign(p)`` to each gradient."""


class L2Decay(_Decay):
    """Adds ``coeff * p`` to each gradient; what torch calls ``weight_decay`` of SGD and Adam."""
