"""Checkpoints of this package, in a local or a remote folder: every block is verified."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fleet.checkpoint.boxes import box_slices
from fleet.checkpoint.commit import Share, read_index, write_share
from fleet.checkpoint.conversion.formats import Asked, Format
from fleet.checkpoint.conversion.whole_state import (
    TORCH_DTYPES,
    Described,
    WholeState,
    as_bytes,
    from_bytes,
    whole_blocks,
)
from fleet.checkpoint.data_files import DataReader
from fleet.checkpoint.index import BLOCK_BYTES, DTYPES, INDEX, OBJECTS, Index
from fleet.checkpoint.storage import Folder, LocalFolder, is_remote, open_folder
from fleet.checkpoint.values import decode
from fleet.errors import CheckpointError

FORMAT = Format(
    order=10, title="Fleet checkpoints", mark="index.json", folder="index.json (Fleet)", to="fleet", commits=True
)
# Whole numbers of the same width as a type, which every operation supports.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def recognises(path: str) -> bool:
    """Returns whether ``path`` is an address, or a folder with the index of a checkpoint."""
    return is_remote(path) or Path(path, INDEX).is_file()


def open_state(path: str, asked: Asked) -> WholeState:
    """Returns the state in the folder or at the address ``path``."""
    folder = open_folder(path)
    return fleet_state(folder, read_index(folder))


def fleet_state(folder: Folder, index: Index) -> WholeState:
    """Returns the state of a checkpoint of this package, without the states that only one worker can load.

    Its ``read`` raises CheckpointError where a file is missing, has another length, or does not match its sums.
    """

    @cache
    def reader(file: str) -> DataReader:
        return DataReader(folder.open_ranges(file), index.files[file], f"{folder.path}/{file}")

    def read(name: str) -> Tensor:
        entry = index.tensors[name]
        size = DTYPES[entry.dtype][0]
        made = None
        for piece in entry.pieces:
            found = reader(piece.file).range(piece.begin, piece.begin + piece.numel * size)
            part = from_bytes(found, Described(entry.dtype, piece.sizes))
            if piece.sizes == entry.shape:
                return part
            made = torch.empty(entry.shape, dtype=part.dtype) if made is None else made
            # As whole numbers of the same width: torch does not assign slices of every type.
            made.view(_BITS[size])[box_slices(piece.offsets, piece.sizes)] = part.view(_BITS[size])
        return torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype]) if made is None else made  # without elements

    def damage() -> list[str]:
        wrong = []
        for file, described in index.files.items():
            for first in range(0, described.num_bytes, BLOCK_BYTES):
                try:
                    reader(file).range(first, min(first + BLOCK_BYTES, described.num_bytes))
                except CheckpointError as error:
                    wrong.append(f"{error}")
                    break
        return wrong + _damaged_values(folder, index)

    tensors = {name: Described(entry.dtype, entry.shape) for name, entry in index.tensors.items()}
    own = [name for name in (*tensors, *index.values, *index.aliases) if name.startswith("@")]
    return WholeState(
        folder.path, "a Fleet checkpoint", _shared(tensors), read, _shared(index.aliases), _shared(index.values),
        kinds=index.values.get(OBJECTS, {}),
        damage_of_files=damage, job=index.job, pieces={name: len(one.pieces) for name, one in index.tensors.items()},
        notes=[f"left out: each worker's own state ({len(own)} entries)"] if own else [],
    )  # fmt: skip


def _damaged_values(folder: Folder, index: Index) -> list[str]:
    """Returns the errors of values that cannot be decoded; the index has checked their tensors."""
    wrong = []
    for name, value in index.values.items():
        try:
            decode(value, lambda _: torch.empty(0))
        except CheckpointError as error:
            wrong.append(f"{folder.path}/{INDEX}: {name!r}: {error}")
    return wrong


def write_state(state: WholeState, target: str) -> None:
    """Writes ``state`` as a checkpoint of this package, one tensor at a time.

    Raises CheckpointError when it cannot be written; a local folder that was made for it is gone then.
    """
    folder = open_folder(target)
    blocks = whole_blocks(state.tensors)
    share = Share(secrets.token_hex(4), 0, 1, blocks, {**state.values, OBJECTS: state.kinds}, state.aliases, state.job)
    try:
        write_share(folder, share, (as_bytes(state.read(block.name)) for block in blocks))
    except BaseException as error:
        with contextlib.suppress(OSError):
            if isinstance(folder, LocalFolder):
                os.rmdir(folder.path)
        if isinstance(error.__cause__, CheckpointError):
            raise error.__cause__ from None  # the error of reading the source, not of the target
        raise


def _shared(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: one for name, one in found.items() if name[:1] not in ("@", "#")}
