"""Commit: every worker leaves its data file and its record, and worker 0 merges the records into the index.

[Note: A save]
1. Every worker writes ``data-TOKEN-RANK.safetensors``, flushed to disk, then ``record-TOKEN-RANK.json``: an index of
   this file, or the reason why it could not be written.
2. Worker 0 waits for the records of all workers, merges them into the index and commits it; see
   :mod:`fleet.checkpoint.storage`. From this moment the checkpoint is the new one.
3. It removes the files that the new index does not name: those of the checkpoint before, and leftovers of dead saves.

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

from fleet.checkpoint.data_files import FileBlock, add_block, in_file_order, write_file
from fleet.checkpoint.index import INDEX, Index
from fleet.checkpoint.storage import Folder, explained
from fleet.errors import CheckpointError, FleetError

_RECORD = r"record-[0-9a-f]+-\d+\.json"
_OURS = re.compile(rf"data-[0-9a-f]+-\d+\.safetensors|{_RECORD}|\.(index\.json|{_RECORD})\.[0-9a-f]+\.tmp")
_PEERS_S = 600.0  # the others began at the same step, and write as much as this worker
_WARN_EVERY_S = 10.0
_LOOK_S = 1.0  # between checks that the folder was not replaced while this worker waits
_POLL_S = 0.01


@dataclass(frozen=True)
class Share:
    """One worker's share of a checkpoint.

    Attributes:
        token: names this save, the same on all workers.
        rank: rank of this worker.
        world_size: number of workers that leave a record.
        blocks: the content of its file, in the order of ``in_file_order``.
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
        folder: the folder of the checkpoint.
        share: this worker's share.
        data: the contiguous bytes of each of the share's blocks, in order.
        meet: called at named points; it may raise to stop the save.
        say: called with a text that names the worker that this one waits for.
        agree: called once this worker's part is written, and once the checkpoint is committed, with the reason of a
            failure or an empty text. It raises CheckpointError on all workers that can exchange the reason.

    Raises:
        CheckpointError: this worker's file, or on worker 0 another one's, could not be written; the checkpoint before
            is whole, and its index stands.
    """
    record = Index()
    failed = ""
    cause: Exception | None = None
    try:
        meet("save.begin")
        folder.prepare()
        # Before any new file, which may need the room of the leftovers.
        if share.rank == 0:
            remove_leftovers(folder, share.token)
        record = _written(folder, share, data, meet)
        # The data file is on the disk now, and worker 0 takes the record as proof of that.
        if share.rank:
            folder.put(share.record_name(share.rank), record.to_json().encode())
    except Exception as error:  # a store has errors of its own, and the other workers must hear of all of them
        with contextlib.suppress(Exception):
            folder.remove(share.data_name)
        # Worker 0 waits for a record of every worker; the error stands in the place of this one's.
        leave_error(folder, share, _reason(error))
        failed = _not_written(folder, _reason(error))
        cause = error
    _tell(agree, failed, cause)
    try:
        if share.rank == 0:
            _commit(folder, share, record, meet, say)
    except Exception as error:
        failed = _not_written(folder, _reason(error))
        cause = error
    _tell(agree, failed, cause)


def _tell(agree: Callable[[str], None], failed: str, cause: Exception | None) -> None:
    """Calls ``agree``, whose error gets this worker's own error, if any, as its cause."""
    try:
        agree(failed)
    except CheckpointError as error:
        raise error from cause


def leave_error(folder: Folder, share: Share, text: str) -> None:
    """Leaves a record with the reason why this worker's part is missing, so that worker 0 does not wait for it."""
    if share.rank:
        with contextlib.suppress(Exception):
            folder.prepare()
            folder.put(share.record_name(share.rank), Index(job={"error": text}).to_json().encode())


def _commit(
    folder: Folder, share: Share, record: Index, meet: Callable[[str], None], say: Callable[[str], None]
) -> None:
    """Merges all records into the index, commits it, and removes the files that it does not name."""
    others = [_peers_record(folder, share, rank, say, meet) for rank in range(1, share.world_size)]
    meet("save.manifest")
    index = Index.merged([record, *others])
    # A folder that was removed while the workers wrote would get an index whose files are gone.
    _check_files(folder, index.files)
    meet("save.rename")
    folder.put(INDEX, index.to_json().encode())
    meet("save.renamed")
    # Until the index was replaced, the files of the checkpoint before were those that count.
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
    """Returns the index of the checkpoint in ``folder``; raises CheckpointError for a missing or damaged one."""
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
        # The folder itself may be unreadable; the error names the index in any case.
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
    """Removes leftovers of killed saves, which take the room that the save ``token`` needs.

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
        add_block(record, block, share.data_name, begin)
    return record


def _check_files(folder: Folder, files: Iterable[str]) -> None:
    """Raises CheckpointError unless the folder still has ``files``."""
    if gone := set(files) - set(folder.names()):
        raise CheckpointError(
            f"{min(gone)!r} is gone from the folder; somebody removed it, or the folder, while it was being written. "
            "The next save makes it again"
        )


def _peers_record(
    folder: Folder, share: Share, rank: int, say: Callable[[str], None], meet: Callable[[str], None]
) -> Index:
    """Waits for the record of worker ``rank``, removes it and returns it."""
    name = share.record_name(rank)
    began = looked = time.monotonic()
    next_warning = began + _WARN_EVERY_S
    while True:
        try:
            text = folder.get(name)
            break
        except FileNotFoundError:
            meet("save.wait")
            now = time.monotonic()
            # In a removed folder the record never appears: this worker's own file shows it long before the limit.
            if now > looked + _LOOK_S and share.blocks:
                looked = now
                _check_files(folder, [share.data_name])
            if now - began > _PEERS_S:
                raise CheckpointError(
                    f"worker {rank} has not written its part within {_PEERS_S:.0f} s; every worker calls save(), and "
                    "all of them must see the same folder"
                ) from None
            if now > next_warning:
                next_warning = now + _WARN_EVERY_S
                say(f"checkpoint {folder.path!r}: waiting for the part of worker {rank} since {now - began:.0f} s")
            time.sleep(_POLL_S)
    record = Index.from_json(text, f"{folder.path}/{name}", is_record=True)
    with contextlib.suppress(OSError):
        folder.remove(name)
    if "error" in record.job:
        raise CheckpointError(f"worker {rank}: {record.job['error']}")
    return record
