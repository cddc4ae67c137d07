"""Fleet's path of pieces of ``fleet.meta_parallel``: ``mp_layers``, ``pp_layers`` and ``random``."""

from __future__ import annotations

from fleet.meta_parallel.parallel_layers import mp_layers as mp_layers
from fleet.meta_parallel.parallel_layers import pp_layers as pp_layers
from fleet.meta_parallel.parallel_layers import random as random

__all__ = ["mp_layers", "pp_layers", "random"]
