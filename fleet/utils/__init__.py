"""Fleet's utilities: ``run_check``, ``recompute``, file systems (``fleet.utils.fs``)."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "HDFSClient": "fleet.utils.fs",
    "LocalFS": "fleet.utils.fs",
    "recompute": "fleet.strategies._shared.segments",
    "recompute_hybrid": "fleet.strategies.tensor_parallel.recompute_hybrid",
    "recompute_sequential": "fleet.strategies._shared.segments",
    "run_check": "fleet.utils._run_check",
}

_MODULES = ("hybrid_parallel_util", "mix_precision_utils", "moe_utils", "sequence_parallel_utils", "timer_helper")

__all__ = ["HDFSClient", "LocalFS", "recompute", "recompute_hybrid", "recompute_sequential", "run_check"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"fleet.utils has no {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
