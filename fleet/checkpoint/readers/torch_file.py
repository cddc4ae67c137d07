"""Files of ``torch.save``: read with ``weights_only``, mapped into memory, and written whole."""

from __future__ import annotations

import io
import re
import warnings
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fleet.checkpoint.conversion.formats import Asked, Format
from fleet.checkpoint.conversion.torch_tree import state_of_tree, tree_of_state
from fleet.checkpoint.conversion.unfolded import check_unfolded
from fleet.checkpoint.conversion.whole_state import WholeState, first_bytes
from fleet.checkpoint.save_load import verified_parts
from fleet.common.plain_files import create
from fleet.errors import CheckpointError
from fleet.ps.files.archive import check_archive

FORMAT = Format(
    order=50,
    title="files of torch.save",
    file="a file of torch.save",
    to="torch",
    suffixes=(".pt", ".pth", ".bin"),
    has_numbers=True,
)
_OLD = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."  # how a file began before torch 1.6


def recognises(path: str) -> bool:
    """Returns whether ``path`` is a file of ``torch.save``, or begins as one and was cut off."""
    local = Path(path)
    return local.is_file() and (is_torch_file(local) or _is_cut_off(local))


def open_state(path: str, asked: Asked) -> WholeState:
    """Returns the state in the file ``path``."""
    if not is_torch_file(Path(path)):
        raise CheckpointError(
            f"{path} begins as a file of torch.save and was cut off: the list of its parts, which ends such a "
            "file, is missing. Copy it again, or take an earlier one."
        )
    return torch_state(Path(path), asked.key, asked.in_order)


def _is_cut_off(path: Path) -> bool:
    return first_bytes(path, 4) == b"PK\x03\x04" and not zipfile.is_zipfile(path)


def is_torch_file(path: Path) -> bool:
    """Returns whether ``path`` is a file of ``torch.save``."""
    if first_bytes(path, len(_OLD)) == _OLD:
        return True
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith("/data.pkl") for name in archive.namelist())


def load_plain(source: Path | io.BytesIO, label: str, is_mapped: bool = False) -> Any:
    """Returns the content of ``source``, a file of ``torch.save``, read with ``weights_only``.

    Raises CheckpointError when it holds objects that torch does not make from data, or is damaged.
    """
    check_archive(source, label)
    num_bytes = _num_bytes_of_values(source)
    if isinstance(source, io.BytesIO):
        source.seek(0)
    try:
        with warnings.catch_warnings():
            # torch warns of storages and sparse tensors; the result is checked afterwards.
            warnings.simplefilter("ignore")
            found = torch.load(source, map_location="cpu", weights_only=True, mmap=is_mapped or None)
    except Exception as error:  # a damaged file can lead the unpickler to any error
        first = next(iter(f"{error}".strip().splitlines()), "").split(". ")[0]
        named = re.search(r"nsupported (?:global: )?GLOBAL (\S+)", f"{error}")
        what = (
            f": it holds an object of {named[1]:.200}"
            if named
            else f", or is damaged: {type(error).__name__}: {first:.200}"
        )
        raise CheckpointError(
            f"{label} cannot be read without running code from it{what}. Save state dictionaries of tensors, numbers, "
            "texts, lists and dictionaries."
        ) from error
    check_unfolded(found, num_bytes, label)
    return found


def _num_bytes_of_values(source: Path | io.BytesIO) -> int:
    """Returns the bytes of everything but tensors; in the form before torch 1.6, the size of the file."""
    if zipfile.is_zipfile(source):
        with zipfile.ZipFile(source) as archive:
            return sum(part.file_size for part in archive.infolist() if part.filename.endswith("/data.pkl"))
    return source.stat().st_size if isinstance(source, Path) else source.getbuffer().nbytes


def torch_state(path: Path, key: str | None = None, in_order: bool = False) -> WholeState:
    """Returns the state in a file of ``torch.save``; tensors are mapped, so they take memory only once they are read.

    For ``key`` and ``in_order`` see :func:`state_of_tree`. Raises CheckpointError; no code of the file runs.
    """
    is_archive = zipfile.is_zipfile(path)
    tree = load_plain(path, f"{path}", is_mapped=is_archive)
    state = state_of_tree(tree, f"{path}", "a file of torch.save", key, in_order)
    read = state.read
    for name in state.tensors:
        if read(name).is_meta:
            raise CheckpointError(
                f"{path}: {name!r} has no data: it was on the device 'meta' when it was saved. Save the model after "
                "its weights were made or loaded."
            )
    if not is_archive or not _has_sums(path):
        return state

    def read_verified(name: str) -> Tensor:
        if wrong := damage():
            raise CheckpointError(wrong[0])
        return read(name)

    # The sums are those of whole parts, so the first tensor that is read verifies the file, once.
    damage = cache(lambda: _damage(path))
    state.read = read_verified
    state.damage_of_files = damage
    return state


def _has_sums(path: Path) -> bool:
    """Returns whether the parts have CRC-32s; ``torch.serialization.set_crc32_options(False)`` leaves all of them 0."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(part.CRC for part in archive.infolist())
    except (zipfile.BadZipFile, ValueError) as error:
        raise CheckpointError(f"{path} changed while it was read: {error}. Wait until it is complete.") from error


def _damage(path: Path) -> list[str]:
    """Returns an error for the first part that does not match its CRC-32."""
    name = "its list of parts"
    try:
        for name in verified_parts(path):  # noqa: B007 - the error names the part at which it stopped
            pass
    except (zipfile.BadZipFile, EOFError, NotImplementedError, ValueError, OSError) as error:
        return [f"{path} was damaged after it was written: {name!r}: {error}."]
    return []


def write_state(state: WholeState, target: str | Path) -> None:
    """Writes ``state`` as ``torch.save`` does, with the whole of it in memory. Raises OSError."""
    tree = tree_of_state(state)
    with create(target, buffering=0) as file:  # given a path, torch does not say why it cannot write
        try:
            torch.save(tree, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
