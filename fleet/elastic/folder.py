"""The folder of checkpoints: names, complete ones, and the removal of old and unfinished ones around a write.

[Note: How a checkpoint stays whole]
A checkpoint is a folder ``step-N`` in the format of :mod:`fleet.checkpoint`, which is complete when its ``index.json``
is there; a save that died leaves the folder without one, and the next run removes it. A file damaged later is detected
by its sums.

No checkpoint is ever replaced: a second one at the same step is ``step-N.1``.

The process that writes beside the trainer uses this module, which imports neither torch nor numpy.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from fleet.checkpoint.commit import is_data_or_record, read_index
from fleet.checkpoint.storage import LocalFolder
from fleet.elastic.faults import Faults
from fleet.errors import CheckpointError

_FAULTS: dict[str, Faults] = {}  # of the process beside the trainer: a fault may count over several saves
_NAME = re.compile(r"step-(\d{10,})(?:\.(\d+))?")


def new_name(folder: Path, step: int) -> Path:
    """Returns the name of the next checkpoint of ``step``, which is free."""
    name = folder / f"step-{step:010d}"
    turn = 0
    while os.path.lexists(name):
        turn += 1
        name = folder / f"step-{step:010d}.{turn}"
    return name


def candidates(folder: Path) -> list[Path]:
    """Returns the checkpoints of ``folder`` by name, newest first; they may be damaged."""
    found = []
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"Checkpoint(path={str(folder)!r}): {error.strerror or error}.") from error
    for name in names:
        match = _NAME.fullmatch(name)
        if match is not None:
            found.append((int(match[1]), int(match[2] or 0), folder / name))
    return [path for _, _, path in sorted(found, reverse=True)]


def is_unfinished(path: Path) -> bool:
    """Returns whether ``path`` holds only files of a save that died, or is under way."""
    try:
        return not path.is_symlink() and all(is_data_or_record(name) for name in os.listdir(path))
    except OSError:
        return False


def check_whole(path: Path) -> None:
    """Raises CheckpointError, with the reason, unless a checkpoint has an index, and files of the lengths in it."""
    check_no_link(path)
    try:
        for name, described in read_index(LocalFolder(path)).files.items():
            size = os.stat(path / name, follow_symlinks=False).st_size
            if size != described.num_bytes:
                raise CheckpointError(f"{path.name}: {name} has {size} bytes; {described.num_bytes} were written")
    except OSError as error:
        raise error if isinstance(error, CheckpointError) else _unreadable(path, error) from error


def check_no_link(path: Path) -> None:
    """Raises CheckpointError for a checkpoint that is a link."""
    if path.is_symlink():
        raise CheckpointError(f"{path.name}: it is a symbolic link, and may lead to someone else's folder")


def prune(folder: Path, keep: int, written: Path, meet: Callable[[str], None]) -> None:
    """Removes the oldest checkpoints beyond the ``keep`` newest complete ones; damaged ones stay for inspection.

    The count starts at ``written``, the one just published. A later one must be damaged in a way that only its sum
    shows, because training did not continue from it; it does not displace complete ones.
    """
    whole = []
    found = candidates(folder)
    for path in found[found.index(written) :] if written in found else ():
        try:
            check_whole(path)
            whole.append(path)
        except CheckpointError:
            continue
    for path in whole[keep:]:
        trash = path.with_name(f".{path.name}.trash")
        # One rename ends it as a checkpoint: a removal that dies half-way must not leave one that looks damaged.
        os.rename(path, trash)
        meet("save.prune")
        shutil.rmtree(trash, ignore_errors=True)


def around(faults: Faults, path: Path, step: int, keep: int) -> tuple[Callable[[str], None], Callable[[], None]]:
    """Returns two functions: one for the named points of a write, and one for its end on the worker that commits.

    Args:
        faults: the faults of this worker.
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
    """Returns the same functions in the process beside the ``trainer``, which a fault that kills ends as well."""
    if faults not in _FAULTS:
        _FAULTS[faults] = Faults.read(faults, rank, generation, trainer)
    return around(_FAULTS[faults], Path(path), step, keep)


def remove_leftovers(folder: Path) -> None:
    """Removes the leftovers of dead processes: half-removed checkpoints and those without an index."""
    for path in folder.glob(".step-*.trash"):
        shutil.rmtree(path, ignore_errors=True)
    for path in candidates(folder):
        remove_unfinished(path)


def remove_unfinished(path: Path) -> None:
    """Removes a checkpoint without an index, unless another program has put files there."""
    if is_unfinished(path):
        shutil.rmtree(path, ignore_errors=True)


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path.name}: {Path(error.filename or '').name}: {error.strerror or error}")
