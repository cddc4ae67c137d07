"""``fleet.incubate``: Fleet's path to layers of experts; what else it held is in the ``fleet`` package itself."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["distributed"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return import_module(f"fleet.incubate.{name}")
    raise AttributeError(f"fleet.incubate has no {name!r}")
