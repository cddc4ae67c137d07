# Made by `make docs`; a change belongs into the code that it is made from.
"""Checkpoints that every mesh can load, written while training goes on.

Names are resolved at first use, so that the process that writes starts without torch.

Example:
    >>> fleet.checkpoint.save("checkpoint", {"model": model, "optimizer": optimizer, "epoch": 3})
    >>> fleet.checkpoint.load("checkpoint", {"model": model, "optimizer": optimizer, "epoch": 0})["epoch"]
    3
"""

from fleet.checkpoint.loading import load as load
from fleet.checkpoint.paddle_files.paddle_names import propose_map as propose_map
from fleet.checkpoint.paddle_files.paddle_optimizer import paddle_optimizer_state as paddle_optimizer_state
from fleet.checkpoint.paddle_files.paddle_pickle import read_paddle as read_paddle
from fleet.checkpoint.paddle_files.paddle_state import paddle_state as paddle_state
from fleet.checkpoint.paddle_files.paddle_tables import load_paddle_table as load_paddle_table
from fleet.checkpoint.paddle_files.paddle_tables import paddle_dense as paddle_dense
from fleet.checkpoint.saving import save as save
from fleet.checkpoint.saving import wait as wait

__all__ = [
    "load",
    "load_paddle_table",
    "paddle_dense",
    "paddle_optimizer_state",
    "paddle_state",
    "propose_map",
    "read_paddle",
    "save",
    "wait",
]
