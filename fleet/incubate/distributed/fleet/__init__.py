"""Fleet's path to ``recompute_hybrid`` and ``recompute_sequential``.

Example:
    >>> from fleet.incubate.distributed.fleet import recompute_hybrid, recompute_sequential
"""

from fleet.strategies._shared.segments import recompute_sequential as recompute_sequential
from fleet.strategies.tensor_parallel.recompute_hybrid import recompute_hybrid as recompute_hybrid

__all__ = ["recompute_hybrid", "recompute_sequential"]
