"""Commit: a worker leaves its file and its record, and worker 0 makes the index of all of them.

[Note: A save]
1. Every worker writes ``data-TOKEN-RANK.safetensors``, flushed to disk, then ``record-TOKEN-RANK.json``, which says
   what the file holds, or why it could not be written.
2. Worker 0 waits for the records of all workers, makes the index of them and commits it; see
   :mod:`fleet.checkpoint.storage`. From this moment the checkpoint is the new one.
3. It removes what the new index does not name: the files of the checkpoint before, and what dead saves have left.

A save that dies in 1 or 2 leaves files that no index names. A name holds the token of its save, so that two saves, the
second one after a restart, never write to one file.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fleet.checkpoint.data_files import FileBlock, in_file_order, write_file
from fleet.checkpoint.index import INDEX, Index, Piece, TensorEntry
from fleet.checkpoint.storage import Folder, explained
from fleet.errors import CheckpointError, FleetError

_RECORD = r"record-[0-9a-f]+-\d+\.json"
_OURS = re.compile(rf"data-[0-9a-f]+-\d+\.safetensors|{_RECORD}|\.(index\.json|{_RECORD})\.\d+\.tmp")
_PEERS_S = 600.0  # the others began at the same step, and write as much as this worker
_SAID_AFTER_S = 10.0
_LOOK_S = 1.0  # between looks at whether the folder is still the one that was written to
_POLL_S = 0.01


@dataclass(frozen=True)
class Share:
    """What one worker writes of a checkpoint.

    Attributes:
        token: of this save, the same on all workers.
        rank: of this worker.
        world_size: number of workers that leave a record.
        blocks: what its file holds, in the order of ``in_file_order``.
        values, aliases, job: see :class:`Index`.
    """

    token: str
    rank: int
    world_size: int
    blocks: Sequence[FileBlock]
    values: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    job: dict[str, Any] = field(default_factory=dict)

    @property
    def data_name(self) -> str:
        """The name of its data file."""
        return f"data-{self.token}-{self.rank:05d}.safetensors"

    def record_name(self, rank: int) -> str:
        """Returns the name of the record of ``rank`` in this save."""
        return f"record-{self.token}-{rank:05d}.json"


def raise_here(failed: str) -> None:
    """Raises CheckpointError with the text ``failed`` unless it is empty."""
    if failed:
        raise CheckpointError(failed)


def write_share(
    folder: Folder, share: Share, data: Any, meet: Callable[[str], None] = lambda point: None,
    say: Callable[[str], None] = lambda text: None, agree: Callable[[str], None] = raise_here,
) -> None:  # fmt: skip
    """Writes this worker's file and record; on worker 0, waits for the others and commits the checkpoint.

    Args:
        folder: where.
        share: what.
        data: the contiguous bytes of each of the share's blocks, in order.
        meet: called at named points; it may raise to stop the save.
        say: is told whom this worker waits for.
        agree: is told why this worker has failed, or an empty text; when its part is written, and when the checkpoint
            is committed. It raises CheckpointError, where the workers can exchange it, on all of them.

    Raises:
        CheckpointError: this worker's file, or on worker 0 another one's, could not be written; the checkpoint before
            is whole, and its index stands.
    """
    record, failed = Index(), ""
    cause: Exception | None = None
    try:
        meet("save.begin")
        folder.prepare()
        if share.rank == 0:
            remove_leftovers(folder, share.token)
        record = _written(folder, share, data, meet)
        if share.rank:
            folder.put(share.record_name(share.rank), record.to_json().encode())
    except Exception as error:  # a store has errors of its own, and the other workers must hear of all of them
        with contextlib.suppress(Exception):
            folder.remove(share.data_name)
        leave_error(folder, share, _reason(error))
        failed, cause = _not_written(folder, _reason(error)), error
    _tell(agree, failed, cause)
    try:
        if share.rank == 0:
            _commit(folder, share, record, meet, say)
    except Exception as error:
        failed, cause = _not_written(folder, _reason(error)), error
    _tell(agree, failed, cause)


def _tell(agree: Callable[[str], None], failed: str, cause: Exception | None) -> None:
    """Calls ``agree``; what it raises names ``cause``, the error of this worker, if there is one."""
    try:
        agree(failed)
    except CheckpointError as error:
        raise error from cause


def leave_error(folder: Folder, share: Share, text: str) -> None:
    """Leaves a record that says why this worker's part is missing, so that worker 0 does not wait for it."""
    if share.rank:
        with contextlib.suppress(Exception):
            folder.prepare()
            folder.put(share.record_name(share.rank), Index(job={"error": text}).to_json().encode())


def _commit(
    folder: Folder, share: Share, record: Index, meet: Callable[[str], None], say: Callable[[str], None]
) -> None:
    """Makes the index of all records, commits it, and removes what it does not name."""
    others = [_peers_record(folder, share, rank, say, meet) for rank in range(1, share.world_size)]
    meet("save.manifest")
    index = Index.merged([record, *others])
    _check_files(folder, index.files)
    meet("save.rename")
    folder.put(INDEX, index.to_json().encode())
    meet("save.renamed")
    remove_unnamed(folder, index)


def is_data_or_record(name: str) -> bool:
    """Returns whether a save gives this name to a file other than the index."""
    return _OURS.fullmatch(name) is not None


def _reason(error: Exception) -> str:
    if isinstance(error, FleetError):
        return f"{error}"
    return explained(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def _not_written(folder: Folder, reason: str) -> str:
    whole = ""
    with contextlib.suppress(Exception):
        whole = " The checkpoint before it is whole." if INDEX in folder.names() else ""
    return f"{folder.path!r} was not written: {reason.rstrip('.')}.{whole}"


def check_target(folder: Folder) -> None:
    """Raises CheckpointError when ``folder`` holds something other than a checkpoint, before anything is written."""
    try:
        names = folder.names()
    except OSError as error:
        what = "is a file" if isinstance(error, NotADirectoryError) else explained(error)
        raise CheckpointError(f"save(path={folder.path!r}): {what}. Name a folder for the checkpoint.") from error
    strangers = sorted(name for name in names if name != INDEX and not _OURS.fullmatch(name))
    if strangers and INDEX not in names:
        raise CheckpointError(
            f"save(path={folder.path!r}): the folder holds {strangers[:3]!r} and no checkpoint. A checkpoint takes a "
            "folder of its own, new or empty; name another one."
        )


def read_index(folder: Folder) -> Index:
    """Returns the index of the checkpoint in ``folder``.

    Raises CheckpointError when there is none, or it is damaged.
    """
    label = f"{folder.path}/{INDEX}"
    try:
        text = folder.get(INDEX)
    except NotADirectoryError as error:
        raise CheckpointError(
            f"{folder.path!r} is a file. Name the folder of a checkpoint, or convert the file with "
            "python -m fleet checkpoint convert."
        ) from error
    except OSError as error:
        names = []
        with contextlib.suppress(OSError):
            names = folder.names()
        what = (
            "holds parts of a save that did not finish, and no index"
            if any(_OURS.fullmatch(name) for name in names)
            else f"holds no {INDEX}, only {sorted(names)[:3]!r}"
            if names
            else "is absent or empty"
        )
        raise CheckpointError(f"{folder.path!r} is no checkpoint: it {what}.") from error
    return Index.from_json(text, label)


def remove_unnamed(folder: Folder, index: Index) -> None:
    """Removes data files and records that ``index`` does not name; a failure leaves them for the next save."""
    with contextlib.suppress(Exception):
        for name in folder.names():
            if _OURS.fullmatch(name) and name not in index.files:
                folder.remove(name)


def remove_leftovers(folder: Folder, token: str) -> None:
    """Removes what saves that were killed have left, which takes the room that the save ``token`` needs.

    Where the index cannot be read, everything stays: it may name any file.
    """
    with contextlib.suppress(Exception):
        names = [name for name in folder.names() if _OURS.fullmatch(name) and token not in name]
        if names:
            index = Index.from_json(folder.get(INDEX), INDEX) if INDEX in folder.names() else Index()
            for name in set(names) - set(index.files):
                folder.remove(name)


def _written(folder: Folder, share: Share, data: Any, meet: Callable[[str], None]) -> Index:
    """Writes the data file, if there is anything to write, and returns this worker's record."""
    record = Index(values=share.values, aliases=share.aliases, job=share.job)
    if not share.blocks:
        return record
    blocks = list(share.blocks)
    if blocks != in_file_order(blocks):
        raise AssertionError("the blocks are not in the order of a file")
    with folder.create(share.data_name, sum(block.num_bytes for block in blocks)) as file:
        described, begins = write_file(file, blocks, data, lambda: meet("save.block"))
    meet("save.part")
    record.files[share.data_name] = described
    for block, begin in zip(blocks, begins, strict=True):
        entry = record.tensors.setdefault(block.name, TensorEntry(block.dtype, block.shape))
        entry.pieces.append(Piece(share.data_name, begin, block.offsets, block.sizes))
    return record


def _check_files(folder: Folder, files: Iterable[str]) -> None:
    """Raises CheckpointError unless the folder still has what was written to it."""
    if gone := set(files) - set(folder.names()):
        raise CheckpointError(
            f"{min(gone)!r} is gone from the folder; somebody removed it, or the folder, while it was being written. "
            "The next save makes it again"
        )


def _peers_record(
    folder: Folder, share: Share, rank: int, say: Callable[[str], None], meet: Callable[[str], None]
) -> Index:
    """Returns the record that worker ``rank`` leaves, and removes it."""
    name = share.record_name(rank)
    began = looked = time.monotonic()
    said = began + _SAID_AFTER_S
    while True:
        try:
            text = folder.get(name)
            break
        except FileNotFoundError:
            meet("save.wait")
            now = time.monotonic()
            if now > looked + _LOOK_S and share.blocks:
                looked = now
                _check_files(folder, [share.data_name])
            if now - began > _PEERS_S:
                raise CheckpointError(
                    f"worker {rank} has not written its part within {_PEERS_S:.0f} s; every worker calls save(), and "
                    "all of them must see the same folder"
                ) from None
            if now > said:
                said = now + _SAID_AFTER_S
                say(f"checkpoint {folder.path!r}: waiting for the part of worker {rank} since {now - began:.0f} s")
            time.sleep(_POLL_S)
    record = Index.from_json(text, f"{folder.path}/{name}", is_record=True)
    with contextlib.suppress(OSError):
        folder.remove(name)
    if "error" in record.job:
        raise CheckpointError(f"worker {rank}: {record.job['error']}")
    return record
