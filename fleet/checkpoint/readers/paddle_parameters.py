"""Paddle's ``.pdparams`` files, as a model's state; ``.pdopt`` files are refused, because a script must load them."""

from __future__ import annotations

from pathlib import Path

from fleet.checkpoint.conversion.formats import Asked, Format
from fleet.checkpoint.conversion.torch_tree import state_of_tree
from fleet.checkpoint.conversion.whole_state import WholeState
from fleet.checkpoint.paddle_files.paddle_state import paddle_state
from fleet.errors import CheckpointError

FORMAT = Format(order=60, title="Paddle's .pdparams files", file="a .pdparams file (Paddle)", renames=True)


def recognises(path: str) -> bool:
    """Returns whether ``path`` is called as Paddle's files are."""
    return Path(path).suffix in (".pdparams", ".pdopt") and Path(path).is_file()


def open_state(path: str, asked: Asked) -> WholeState:
    """Returns the parameters in the file ``path``, by the names of ``asked``."""
    if Path(path).suffix == ".pdopt":
        raise CheckpointError(
            f"{path} holds an optimizer's state, which belongs to the parameters in its .pdparams file. Convert "
            "that one, and load this one in the script by fleet.checkpoint.paddle_optimizer_state()."
        )
    return state_of_tree(paddle_state(path, asked.names), path, "a Paddle file", asked.key)
