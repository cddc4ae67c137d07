"""Checkpoints that every mesh can load, written while training goes on.

Names are resolved at first use, so that the process that writes starts without torch.

Example:
    >>> fleet.checkpoint.save("checkpoint", {"model": model, "optimizer": optimizer, "epoch": 3})
    >>> fleet.checkpoint.load("checkpoint", {"model": model, "optimizer": optimizer, "epoch": 0})["epoch"]
    3
"""

from __future__ import annotations

from fleet.common.lazy_names import lazy_names

_HOMES = {
    "load": "fleet.checkpoint.loading",
    "load_paddle_table": "fleet.checkpoint.paddle_files.paddle_tables",
    "paddle_dense": "fleet.checkpoint.paddle_files.paddle_tables",
    "paddle_optimizer_state": "fleet.checkpoint.paddle_files.paddle_optimizer",
    "paddle_state": "fleet.checkpoint.paddle_files.paddle_state",
    "propose_map": "fleet.checkpoint.paddle_files.paddle_names",
    "read_paddle": "fleet.checkpoint.paddle_files.paddle_pickle",
    "save": "fleet.checkpoint.saving",
    "wait": "fleet.checkpoint.saving",
}

__all__ = sorted(_HOMES)

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
