"""Training that survives failures: complete checkpoints, no sample seen twice, changes in the number of workers.

Names are resolved at first use, so that ``python -m fleet.elastic`` starts without torch.

Example:
    >>> sampler = fleet.elastic.ElasticSampler(range(12), seed=1)
    >>> checkpoint = fleet.elastic.Checkpoint("checkpoints", model, optimizer, data=sampler)
    >>> checkpoint.resume()
    False
"""

from __future__ import annotations

from fleet.common.lazy_names import lazy_names

_HOMES = {
    "Checkpoint": "fleet.elastic.checkpoint",
    "ElasticSampler": "fleet.elastic.sampler",
    "PREEMPTED": "fleet.launch.processes.worker_file",
    "keep_global_batch": "fleet.elastic.resize",
    "logical_ranks": "fleet.elastic.logical_loop",
    "scale_lr": "fleet.elastic.resize",
}

__all__ = sorted(_HOMES)

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
