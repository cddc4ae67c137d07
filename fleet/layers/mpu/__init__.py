"""Layers whose weights are divided, the exchanges around them, and their random streams, under Fleet's older path.

The names are those of :mod:`fleet.meta_parallel`; :mod:`fleet.layers.mpu.mp_ops` has the exchanges that model code
calls itself.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "ColumnParallelLinear": "mp_layers",
    "ParallelCrossEntropy": "mp_layers",
    "ParallelMultiLabelCrossEntropy": "mp_layers",
    "RNGStatesTracker": "random",
    "RowParallelLinear": "mp_layers",
    "VocabParallelEmbedding": "mp_layers",
    "dropout": "random",
    "get_rng_state_tracker": "random",
    "model_parallel_random_seed": "random",
    "split": "mp_ops",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
