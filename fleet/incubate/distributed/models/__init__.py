"""Fleet's path to ``moe``."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["moe"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return import_module(f"fleet.incubate.distributed.models.{name}")
    raise AttributeError(f"fleet.incubate.distributed.models has no {name!r}")
