"""The path of the role makers in older scripts: ``fleet.base.role_maker``."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["role_maker"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return import_module(f"fleet.base.{name}")
    raise AttributeError(f"fleet.base has no {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
