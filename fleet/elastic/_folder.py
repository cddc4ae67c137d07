"""The folder of checkpoints: publishes a checkpoint atomically, and finds the newest complete one.

[Note: How a checkpoint stays whole]
Its files are written into a staging folder ``.step-N.TOKEN.tmp`` and flushed to the disk; then the manifest, which
holds the length and SHA-256 of each; then the staging folder is renamed to ``step-N`` and the parent is flushed. A
crash at any moment leaves either no ``step-N`` or a complete one. A file damaged later is detected by its sum.

No checkpoint is ever replaced: a second one at the same step is ``step-N.1``.
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
from typing import Any, BinaryIO, cast

import torch

from fleet.errors import CheckpointError, ConfigError
from fleet.ps.files.archive import check_archive
from fleet.ps.files.own_folder import PLAIN
from fleet.runtime.save_load import check_readable, flush_folder

MANIFEST = "manifest.json"
VERSION = 1
_NAME = re.compile(r"step-(\d{10,})(?:\.(\d+))?")
_PART = re.compile(r"(model|optimizer|rest|worker-\d{5,})\.pt")
_BLOCK_BYTES = 1 << 20
_MAX_MANIFEST_BYTES = 1 << 26  # some 500,000 workers

# The structure of the files, as far as resume() relies on it before it changes anything: a type; a dict of the
# required entries (`int`: all with an integer key, which are a parameter's); a list of entries with the same
# structure; a tuple also allows None.
_OPTIMIZER: Any = {"state": {int: dict}, "param_groups": [{"params": list}]}
_RANDOM: Any = {"torch": torch.Tensor, "python": list, "numpy": list}
_FORMS: dict[str, Any] = {
    MANIFEST: {"step": int, "epoch": int, "world_size": int, "has_worker_parts": bool, "parts": dict},
    "model.pt": dict,
    "optimizer.pt": (_OPTIMIZER,),
    "rest.pt": {
        "epoch": int,
        "step": int,
        "world_size": int,
        "k_steps": int,
        "scheduler": object,
        "extra": dict,
        "workers": [{"data": object, "random": _RANDOM}],
    },
    "worker": {"model": dict, "optimizer": (_OPTIMIZER,)},
}


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
    """One checkpoint whose manifest was read; :func:`read_part` reads its files."""

    path: Path
    step: int
    epoch: int
    world_size: int
    has_worker_parts: bool
    parts: Mapping[str, Part] = field(default_factory=dict)


class PartWriter:
    """A file for ``torch.save``: counts and hashes what it writes, and triggers the faults of a test."""

    def __init__(self, file: BinaryIO, meet: Callable[[str], None]) -> None:
        self._file, self._meet = file, meet
        self._sum = hashlib.sha256()
        self._num_bytes = 0

    def write(self, data: Any) -> int:
        """Writes ``data`` in blocks."""
        view = memoryview(data).cast("B")
        for begin in range(0, len(view), _BLOCK_BYTES):
            block = view[begin : begin + _BLOCK_BYTES]
            self._meet("save.block")
            self._file.write(block)
            self._sum.update(block)
            self._num_bytes += len(block)
        return len(view)

    def flush(self) -> None:
        """Flushes what was written to the operating system."""
        self._file.flush()

    def part(self) -> Part:
        """Returns length and sum of what was written."""
        return Part(self._num_bytes, self._sum.hexdigest())


def write_part(path: Path, obj: Any, meet: Callable[[str], None]) -> Part:
    """Writes ``obj`` to the new file ``path`` and flushes it to disk; returns its length and sum.

    Raises:
        ConfigError: ``obj`` holds something that the reader would refuse.
        OSError: the file cannot be written.
    """
    with open(path, "xb") as file:
        writer = PartWriter(file, meet)
        try:
            torch.save(obj, cast(Any, writer))  # all it needs is write()
        except OSError:
            raise
        except Exception as error:  # torch wraps what write() raised; an object's __reduce__ can raise anything
            found: BaseException | None = error
            while found is not None and not isinstance(found, OSError):
                found = found.__context__
            if found is not None:
                raise found from None
            raise ConfigError(f"Checkpoint.save(): {type(obj).__name__} cannot be written: {error}.") from error
        file.flush()
        os.fsync(file.fileno())
    check_readable(path)
    meet("save.part")
    return writer.part()


def write_manifest(staging: Path, values: Mapping[str, Any], parts: Mapping[str, Part]) -> None:
    """Writes the manifest of a staging folder, with a sum over itself, and flushes both."""
    content = {"format": "fleet-checkpoint", "version": VERSION, **values}
    content["parts"] = {name: part.as_json() for name, part in parts.items()}
    text = json.dumps({**content, "sha256": _sum_of(content)}, indent=1, sort_keys=True)
    with open(staging / MANIFEST, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    flush_folder(staging)


def publish(staging: Path, folder: Path, step: int) -> Path:
    """Renames a finished staging folder to the checkpoint of ``step`` and returns its name."""
    name = folder / f"step-{step:010d}"
    turn = 0
    while name.exists():
        turn += 1
        name = folder / f"step-{step:010d}.{turn}"
    os.rename(staging, name)
    flush_folder(folder)
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


def read_entry(path: Path) -> Entry:
    """Returns the checkpoint at ``path`` after reading its manifest and the lengths of its files.

    Raises CheckpointError that says what is wrong with it.
    """
    try:
        if path.is_symlink():
            raise CheckpointError(f"{path.name}: it is a symbolic link, and may lead to someone else's folder")
        with open_file(path / MANIFEST) as file:
            content = json.loads(file.read(_MAX_MANIFEST_BYTES))
        stated = content.pop("sha256")
        if stated != _sum_of(content) or content["format"] != "fleet-checkpoint":
            raise CheckpointError(f"{path.name}: {MANIFEST} is damaged")
        if content["version"] > VERSION:
            raise CheckpointError(
                f"{path.name}: it has version {content['version']}, and this package reads version {VERSION}"
            )
        check_form(content, MANIFEST, f"{path.name}: {MANIFEST}")
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
        raise CheckpointError(f"{path.name}: {Path(error.filename or '').name}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path.name}: {MANIFEST} is damaged ({error})") from error


def open_file(path: Path) -> BinaryIO:
    """Returns the file at ``path``, open at its beginning; raises OSError for a link, a FIFO or the like."""
    descriptor = os.open(path, os.O_RDONLY | PLAIN)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", f"{path}")
    return open(descriptor, "rb")


def open_part(entry: Entry, name: str) -> BinaryIO:
    """Returns one file, open at its beginning, after verifying its sum.

    Raises CheckpointError that says what is wrong with it. A link is not followed.
    """
    part = entry.parts.get(name)
    if part is None:
        raise CheckpointError(f"{entry.path.name}: it has no {name}")
    try:
        file = open_file(entry.path / name)
    except OSError as error:
        raise CheckpointError(f"{entry.path.name}: {name}: {error.strerror or error}") from error
    try:
        found = hashlib.sha256()
        while block := file.read(_BLOCK_BYTES):
            found.update(block)
        if found.hexdigest() != part.sha256:
            raise CheckpointError(f"{entry.path.name}: {name} does not match its SHA-256: it was damaged later")
        file.seek(0)
    except OSError as error:
        file.close()
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{entry.path.name}: {name}: {error.strerror or error}") from error
    return file


def read_part(entry: Entry, name: str) -> Any:
    """Returns what one file holds, on the host; code in the file is never run. Raises CheckpointError."""
    with open_part(entry, name) as file:
        content = parse_part(file, f"{entry.path.name}: {name}")
    check_form(content, name, f"{entry.path.name}: {name}")
    return content


def parse_part(file: BinaryIO, label: str) -> Any:
    """Returns what ``file`` holds; raises CheckpointError that begins with ``label``."""
    try:
        check_archive(file, label)
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{label} cannot be read ({f'{error}'.splitlines()[0][:200]})") from error


def check_form(content: Any, name: str, label: str) -> None:
    """Raises CheckpointError that begins with ``label`` unless ``content`` has the structure of the file ``name``."""
    wrong = _mismatch(content, _FORMS["worker" if name.startswith("worker-") else name], "")
    if wrong:
        raise CheckpointError(f"{label} {wrong}")


def prune(folder: Path, keep: int, written: Path, meet: Callable[[str], None]) -> None:
    """Removes the oldest checkpoints beyond the ``keep`` newest complete ones; damaged ones stay for inspection.

    The count starts at ``written``, the one just published. A later one must be damaged in a way that only its sum
    shows, because training did not continue from it; it does not displace complete ones.
    """
    whole = []
    found = candidates(folder)
    for path in found[found.index(written) :] if written in found else ():
        try:
            whole.append(read_entry(path).path)
        except CheckpointError:
            continue
    for path in whole[keep:]:
        trash = path.with_name(f".{path.name}.trash")
        os.rename(path, trash)  # from now on it is not a checkpoint, whatever happens to the removal
        meet("save.prune")
        shutil.rmtree(trash, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Removes what dead processes left behind: staging folders and half-removed checkpoints."""
    for pattern in (".step-*.tmp", ".step-*.trash"):
        for path in folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def worker_part(rank: int) -> str:
    """Returns the name of the file with one worker's own state."""
    return f"worker-{rank:05d}.pt"


def all_parts(has_worker_parts: bool, world_size: int) -> Iterable[str]:
    """Returns the names of the files of a checkpoint."""
    shared = ["rest.pt"] if has_worker_parts else ["model.pt", "optimizer.pt", "rest.pt"]
    return [*shared, *(worker_part(rank) for rank in range(world_size) if has_worker_parts)]


def _sum_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _mismatch(value: Any, form: Any, place: str) -> str:
    """Returns where ``value`` does not have the structure ``form``, one of ``_FORMS``, or an empty string."""
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
        if wrong := _mismatch(value[key], entry, f"{place}[{key!r}]"):
            return wrong
    return ""
