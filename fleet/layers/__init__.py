"""Fleet's older path of the layers whose weights are divided: ``fleet.layers.mpu``."""

from __future__ import annotations

from fleet.common.lazy_names import lazy_names

__all__ = ["mpu"]

__getattr__, __dir__ = lazy_names(__name__, {}, __all__)
