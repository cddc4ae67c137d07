"""Fleet's path to ``models.moe``, and to ``recompute_hybrid`` in ``fleet``."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["fleet", "models"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return import_module(f"fleet.incubate.distributed.{name}")
    raise AttributeError(f"fleet.incubate.distributed has no {name!r}")
