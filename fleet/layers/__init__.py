"""Fleet's older path of the layers whose weights are divided: ``fleet.layers.mpu``."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["mpu"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return import_module(f"fleet.layers.{name}")
    raise AttributeError(f"fleet.layers has no {name!r}")
