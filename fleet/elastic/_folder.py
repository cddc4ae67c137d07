"""The folder of checkpoints: names, the newest complete ones, and the removal of what is no longer needed.

[Note: How a checkpoint stays whole]
A checkpoint is a folder ``step-N`` in the format of :mod:`fleet.checkpoint`, which is complete when its ``index.json``
is there; a save that died leaves the folder without one, and the next run removes it. Where the workers do not all see
the folder, or each has a state of its own, the files of :mod:`fleet.elastic._torch_files` are written into a staging
folder ``.step-N.TOKEN.tmp``, which gets a manifest and is renamed to ``step-N``. A file damaged later is detected by
its sums.

No checkpoint is ever replaced: a second one at the same step is ``step-N.1``.

The process that writes beside the trainer uses this module, which imports neither torch nor numpy.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from fleet.checkpoint.commit import is_data_or_record, read_index
from fleet.checkpoint.index import INDEX
from fleet.checkpoint.storage import LocalFolder
from fleet.errors import CheckpointError
from fleet.ps.files.own_folder import PLAIN

MANIFEST = "manifest.json"
VERSION = 1
_NAME = re.compile(r"step-(\d{10,})(?:\.(\d+))?")
_PART = re.compile(r"(model|optimizer|rest|worker-\d{5,})\.pt")
_MAX_MANIFEST_BYTES = 1 << 26  # some 500,000 workers
_MANIFEST_FORM = {"step": int, "epoch": int, "world_size": int, "has_worker_parts": bool, "parts": dict}


@dataclass(frozen=True)
class Part:
    """Length and SHA-256 of one file of a checkpoint."""

    num_bytes: int
    sha256: str

    def as_json(self) -> dict[str, Any]:
        """Returns what the manifest holds."""
        return {"bytes": self.num_bytes, "sha256": self.sha256}


@dataclass(frozen=True)
class Entry:
    """One checkpoint whose manifest was read of files of :mod:`fleet.elastic._torch_files`."""

    path: Path
    step: int
    epoch: int
    world_size: int
    has_worker_parts: bool
    parts: Mapping[str, Part] = field(default_factory=dict)


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


def has_index(path: Path) -> bool:
    """Returns whether the checkpoint at ``path`` is in the format of :mod:`fleet.checkpoint`."""
    return os.path.lexists(path / INDEX)


def is_unfinished(path: Path) -> bool:
    """Returns whether ``path`` holds no more than what a save has begun that died, or is under way."""
    try:
        return not path.is_symlink() and all(is_data_or_record(name) for name in os.listdir(path))
    except OSError:
        return False


def check_whole(path: Path) -> None:
    """Raises CheckpointError that says what is wrong, unless a checkpoint has an index and files of its lengths."""
    if not has_index(path):
        read_entry(path)
        return
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


def read_entry(path: Path) -> Entry:
    """Returns the checkpoint at ``path`` after reading its manifest and the lengths of its files.

    Raises CheckpointError that says what is wrong with it.
    """
    try:
        check_no_link(path)
        with open_file(path / MANIFEST) as file:
            content = json.loads(file.read(_MAX_MANIFEST_BYTES))
        stated = content.pop("sha256")
        if stated != sum_of(content) or content["format"] != "fleet-checkpoint":
            raise CheckpointError(f"{path.name}: {MANIFEST} is damaged")
        if content["version"] > VERSION:
            raise CheckpointError(
                f"{path.name}: it has version {content['version']}, and this package reads version {VERSION}"
            )
        if wrong := mismatch(content, _MANIFEST_FORM, ""):
            raise CheckpointError(f"{path.name}: {MANIFEST} {wrong}")
        parts = {name: Part(part["bytes"], part["sha256"]) for name, part in content["parts"].items()}
        for name, part in parts.items():
            if not _PART.fullmatch(name):
                raise CheckpointError(f"{path.name}: {MANIFEST} names the file {name!r}")
            size = os.stat(path / name, follow_symlinks=False).st_size
            if size != part.num_bytes:
                raise CheckpointError(f"{path.name}: {name} has {size} bytes; {part.num_bytes} were written")
        return Entry(path, content["step"], content["epoch"], content["world_size"], content["has_worker_parts"], parts)
    except CheckpointError:
        raise
    except OSError as error:
        raise _unreadable(path, error) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path.name}: {MANIFEST} is damaged ({error})") from error


def open_file(path: Path) -> BinaryIO:
    """Returns the file at ``path``, open at its beginning; raises OSError for a link, a FIFO or the like."""
    descriptor = os.open(path, os.O_RDONLY | PLAIN)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", f"{path}")
    return open(descriptor, "rb")


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
        os.rename(path, trash)  # from now on it is not a checkpoint, whatever happens to the removal
        meet("save.prune")
        shutil.rmtree(trash, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Removes what dead processes left behind: staging folders, half-removed checkpoints and those without an index."""
    for pattern in (".step-*.tmp", ".step-*.trash"):
        for path in folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)
    for path in candidates(folder):
        remove_unfinished(path)


def remove_unfinished(path: Path) -> None:
    """Removes a checkpoint that has no index, and nothing that another program has put there."""
    if is_unfinished(path):
        shutil.rmtree(path, ignore_errors=True)


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path.name}: {Path(error.filename or '').name}: {error.strerror or error}")


def sum_of(content: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of the JSON of ``content``."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def mismatch(value: Any, form: Any, place: str) -> str:
    """Returns where ``value`` does not have the structure ``form``, of types, or an empty string."""
    if isinstance(form, tuple):
        if value is None:
            return ""
        (form,) = form
    wanted: Any = form if isinstance(form, type) else type(form)
    if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
        at = f" at {place}" if place else ""
        return f"holds a value of type {type(value).__name__}{at}, where type {wanted.__name__} is required"
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(form, list):
        if not value:
            return f"holds nothing at {place}"
        inner = ((key, form[0]) for key in range(len(value)))
    elif isinstance(form, dict):
        inner = ((key, form[int]) for key in value if isinstance(key, int)) if int in form else form.items()
    for key, entry in inner:
        if isinstance(value, dict) and key not in value:
            return f"lacks {place}[{key!r}]"
        if wrong := mismatch(value[key], entry, f"{place}[{key!r}]"):
            return wrong
    return ""
