# Made by `make docs`; a change belongs into the code that it is made from.
"""Layers whose weights are divided, the exchanges around them, and their random streams, under Fleet's older path.

The names are those of :mod:`fleet.meta_parallel`; :mod:`fleet.layers.mpu.mp_ops` has the exchanges that model code
calls itself.
"""

from fleet.layers.mpu.mp_layers import ColumnParallelLinear as ColumnParallelLinear
from fleet.layers.mpu.mp_layers import ParallelCrossEntropy as ParallelCrossEntropy
from fleet.layers.mpu.mp_layers import ParallelMultiLabelCrossEntropy as ParallelMultiLabelCrossEntropy
from fleet.layers.mpu.mp_layers import RowParallelLinear as RowParallelLinear
from fleet.layers.mpu.mp_layers import VocabParallelEmbedding as VocabParallelEmbedding
from fleet.layers.mpu.mp_ops import split as split
from fleet.layers.mpu.random import RNGStatesTracker as RNGStatesTracker
from fleet.layers.mpu.random import dropout as dropout
from fleet.layers.mpu.random import get_rng_state_tracker as get_rng_state_tracker
from fleet.layers.mpu.random import model_parallel_random_seed as model_parallel_random_seed

__all__ = [
    "ColumnParallelLinear",
    "ParallelCrossEntropy",
    "ParallelMultiLabelCrossEntropy",
    "RNGStatesTracker",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "dropout",
    "get_rng_state_tracker",
    "model_parallel_random_seed",
    "split",
]
