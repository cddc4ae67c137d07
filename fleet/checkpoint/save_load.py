"""save and load: files that are complete or absent, and reading that never runs code.

[Note: How a file stays whole]
The data goes to a new file in the same folder, which is flushed to the disk, read back without its tensor data, and
then renamed over the old one; the folder is flushed last. A crash at any moment leaves the old file or the new one.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from fleet.common.plain_files import own_target, remove_stale, replacing
from fleet.errors import CheckpointError, ConfigError
from fleet.ps.files.archive import check_archive
from fleet.strategies._shared.parts import has_parts, marked_part

_CHUNK_BYTES = 1 << 20
_CONTENTS = "tensors, numbers, texts, lists and dictionaries: model.state_dict(), optimizer.state_dict(), an epoch"


def save(obj: Any, path: str | os.PathLike[str]) -> None:
    """Writes ``obj`` to exactly ``path`` (no suffix is added); replaces the previous file atomically.

    Missing folders are created.

    Args:
        obj: tensors, numbers, texts, lists and dictionaries of them, as ``state_dict()`` returns.
        path: the file's name; Fleet's convention is ``.pdparams`` and ``.pdopt``.

    Raises:
        ConfigError: ``obj`` holds something that :func:`load` would refuse; nothing was written.
        CheckpointError: the file cannot be written (folder, rights, space); the previous file is untouched.

    Example:
        >>> save({"model": model.state_dict(), "epoch": 3}, "checkpoint.pdparams")
    """
    target = _checked_path("save", path)
    if target.is_dir():
        raise CheckpointError(f"save(path={str(path)!r}): this is a folder. Name a file in it.")
    if (place := marked_part(obj)) is not None:
        raise ConfigError(
            f"save(): this state_dict() is part {place['rank']} of {place['degree']} of a model that several "
            "workers hold. Call full_state_dict() on every worker and save its result on one; or save the result of "
            "local_state_dict() on each, to separate files."
        )
    if has_parts(obj):
        raise ConfigError(
            "save(): the state holds DTensors, of which this worker has only a shard. Call full_state_dict() on every "
            "worker and save its result on one; or save the result of local_state_dict() on each, to separate files."
        )
    try:
        target = Path(own_target(target))  # a link stays a link
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_stale(target)
        with replacing(target) as file:
            _write(obj, file)
            file.flush()
            _check_readable(Path(file.name))
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"save(path={str(path)!r}): {error.strerror or error}. A previous file with this name is untouched."
        ) from error


def load(path: str | os.PathLike[str], map_location: Any = "cpu", check_sums: bool = True) -> Any:
    """Returns what :func:`save` wrote; code in the file is never run.

    Args:
        path: the file.
        map_location: device of the loaded tensors; the CPU by default, so that a file written on a GPU loads anywhere.
        check_sums: verify the checksums in the file first, which reads it twice; torch itself ignores them. ``False``
            also reads files that were written without them.

    Raises:
        CheckpointError: the file is absent, truncated, damaged, compressed, or holds objects other than plain data.

    Example:
        >>> state = load("checkpoint.pdparams")
    """
    target = _checked_path("load", path)
    if not target.is_file():
        what = "this is a folder" if target.is_dir() else "there is no such file"
        raise CheckpointError(f"load(path={str(path)!r}): {what}.{_paddle_model_in(target)}")
    try:
        check_archive(target, f"load(path={str(path)!r})")
        if check_sums and zipfile.is_zipfile(target):  # other formats have no sums
            for _ in verified_parts(target):
                pass
        return torch.load(target, map_location=map_location, weights_only=True)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"load(path={str(path)!r}): {error.strerror or error}.") from error
    except Exception as error:
        hint = _paddle_model_in(target.parent) if target.name in ("__model__", "__params__") else ""
        raise CheckpointError(_reason(f"load(path={str(path)!r})", error) + hint) from error


def _paddle_model_in(folder: Path) -> str:
    from fleet.ps.files.manifest import paddle_model_in  # not needed in a job without servers

    return paddle_model_in(folder)


def known_entries(state_dict: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """Returns the entries of ``state_dict`` that ``known`` names; the other entries must not be tensors.

    Fleet's scripts put ``state_dict['epoch'] = n`` beside the parameters, and its ``set_state_dict`` ignores such
    entries, where torch's strict loading raises. An unknown tensor is an error in both.

    Raises:
        CheckpointError: a tensor has a name that is not known.

    Example:
        >>> known_entries({"weight": torch.zeros(1), "epoch": 3}, ["weight"])
        {'weight': tensor([0.])}
    """
    names = set(known)
    strangers = sorted(name for name, value in state_dict.items() if name not in names and torch.is_tensor(value))
    if strangers:
        raise CheckpointError(
            f"set_state_dict(): the state holds tensors that this object does not have: {strangers[:8]!r} "
            f"({len(strangers)} in all). It was saved from another model."
        )
    return {name: value for name, value in state_dict.items() if name in names}


def verified_parts(path: Path) -> Iterator[str]:
    """Reads the parts of an archive of ``torch.save`` and yields the name of each before it is read.

    Raises BadZipFile when a part does not match its checksum, which ``torch.load`` does not compare.
    """
    with zipfile.ZipFile(path) as archive:
        for part in archive.infolist():
            yield part.filename
            with archive.open(part) as file:
                while file.read(_CHUNK_BYTES):
                    pass


def _checked_path(call: str, path: object) -> Path:
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise ConfigError(f"{call}(path={path!r}) takes the name of a file.")
    return Path(path)


def _write(obj: Any, file: Any) -> None:
    try:
        torch.save(obj, file)
    except OSError:
        raise
    except Exception as error:  # an object's own __reduce__ may raise anything
        if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise ConfigError(f"save(): {type(obj).__name__} cannot be written: {error}. Save {_CONTENTS}.") from error


def _check_readable(temporary: Path) -> None:
    """Raises ConfigError when :func:`load` would refuse the file; the tensors' data is mapped, not read."""
    try:
        torch.load(temporary, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise ConfigError(_reason("save()", error)) from error


def _reason(call: str, error: Exception) -> str:
    text = str(error)
    found = re.search(r"Unsupported (?:global|class|operand)[^\n]*?((?:\w+\.)+\w+)", text)
    if found is not None:
        return (
            f"{call}: it holds an object of {found[1]}, which could run code when read. A checkpoint holds {_CONTENTS}."
        )
    if "eights only load failed" in text or "eights_only" in text:
        return f"{call}: it holds more than plain data ({text.splitlines()[0][:200]}). A checkpoint holds {_CONTENTS}."
    detail = text.splitlines()[0][:200] if text else type(error).__name__
    return f"{call}: the file is truncated or damaged ({detail}). Use an earlier checkpoint."
