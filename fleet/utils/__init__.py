"""Fleet's utilities: ``run_check``, ``recompute``, file systems (``fleet.utils.fs``)."""

from __future__ import annotations

from fleet.common.lazy_names import lazy_names

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

__getattr__, __dir__ = lazy_names(__name__, _HOMES, _MODULES)
