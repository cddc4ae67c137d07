"""Layers whose weights are divided, the exchanges around them, and their random streams, under Fleet's older path.

The names are those of :mod:`fleet.meta_parallel`; :mod:`fleet.layers.mpu.mp_ops` has the exchanges that model code
calls itself.
"""

from __future__ import annotations

from fleet.common.lazy_names import lazy_names

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

__getattr__, __dir__ = lazy_names(__name__, {name: f".{home}" for name, home in _HOMES.items()})
