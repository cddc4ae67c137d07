"""Training that survives failures: complete checkpoints, no sample seen twice, changes in the number of workers.

Names are resolved at first use, so that ``python -m fleet.elastic`` starts without torch.

Example:
    >>> sampler = fleet.elastic.ElasticSampler(range(12), seed=1)
    >>> checkpoint = fleet.elastic.Checkpoint("checkpoints", model, optimizer, data=sampler)
    >>> checkpoint.resume()
    False
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "Checkpoint": "fleet.elastic._checkpoint",
    "ElasticSampler": "fleet.elastic._sampler",
    "PREEMPTED": "fleet.launch.processes.worker_file",
    "keep_global_batch": "fleet.elastic._resize",
    "scale_lr": "fleet.elastic._resize",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    from fleet.errors import did_you_mean

    raise AttributeError(f"fleet.elastic has no {name!r}.{did_you_mean(name, __all__)}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
