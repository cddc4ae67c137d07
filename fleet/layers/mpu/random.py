"""Random streams of layers whose weights are divided; the names of :mod:`fleet.meta_parallel`, and dropout."""

from __future__ import annotations

from fleet.meta_parallel.seeds import model_parallel_random_seed as model_parallel_random_seed
from fleet.strategies._shared.random_streams import RNGStatesTracker as RNGStatesTracker
from fleet.strategies.tensor_parallel.layers import STREAM
from fleet.strategies.tensor_parallel.streams import determinate_seed as determinate_seed
from fleet.strategies.tensor_parallel.streams import dropout as dropout
from fleet.strategies.tensor_parallel.streams import get_rng_state_tracker as get_rng_state_tracker

MODEL_PARALLEL_RNG = STREAM

__all__ = [
    "MODEL_PARALLEL_RNG",
    "RNGStatesTracker",
    "determinate_seed",
    "dropout",
    "get_rng_state_tracker",
    "model_parallel_random_seed",
]
