"""Tables of Paddle's parameter server: recognised, and refused, because a script must load them into tables."""

from __future__ import annotations

from pathlib import Path

from fleet.checkpoint.conversion.formats import Asked, Format
from fleet.checkpoint.conversion.whole_state import WholeState
from fleet.errors import CheckpointError

FORMAT = Format(order=30)


def recognises(path: str) -> bool:
    """Returns whether ``path`` is a folder with the parts of tables."""
    return any(Path(path).glob("[0-9][0-9][0-9]/part-*"))


def open_state(path: str, asked: Asked) -> WholeState:
    """Raises CheckpointError with the way to load the tables."""
    raise CheckpointError(
        f"{path} holds tables of Paddle's parameter server. Load them into tables of fleet.ps in a script, by "
        "fleet.checkpoint.load_paddle_table() and paddle_dense()."
    )
