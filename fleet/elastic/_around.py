"""What happens around a write, in the trainer or in the process beside it: faults of a test, and the removal of old
checkpoints. It imports neither torch nor numpy.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fleet.elastic._faults import Faults
from fleet.elastic._folder import prune

_FAULTS: dict[str, Faults] = {}  # of the process beside the trainer: a fault may count over several saves


def around(faults: Faults, path: Path, step: int, keep: int) -> tuple[Callable[[str], None], Callable[[], None]]:
    """Returns what a write calls at its named points, and what the worker that commits calls after it.

    Args:
        faults: those of this worker.
        path: the checkpoint that is written.
        step: its step.
        keep: how many checkpoints stay.
    """

    def meet(point: str) -> None:
        faults.meet(point, step)

    def after() -> None:
        if faults.rank == 0:
            prune(path.parent, keep, path, meet)

    return meet, after


def hooks(
    faults: str, rank: int, generation: int, trainer: int, path: str, step: int, keep: int
) -> tuple[Callable[[str], None], Callable[[], None]]:
    """Returns the same in the process beside the ``trainer``, which a fault that kills takes along."""
    if faults not in _FAULTS:
        _FAULTS[faults] = Faults.read(faults, rank, generation, trainer)
    return around(_FAULTS[faults], Path(path), step, keep)
