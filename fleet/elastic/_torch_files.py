"""Checkpoints in files of torch.save, for workers that do not all see the folder or have states of their own.

A manifest holds the length and SHA-256 of each file; see [Note: How a checkpoint stays whole].
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from fleet.checkpoint.save_load import check_readable
from fleet.checkpoint.storage import flush_folder
from fleet.elastic._folder import MANIFEST, VERSION, Entry, Part, mismatch, new_name, open_file, sum_of
from fleet.errors import CheckpointError, ConfigError
from fleet.ps.files.archive import check_archive

_BLOCK_BYTES = 1 << 20

# The structure of the files, as far as resume() relies on it before it changes anything: a type; a dict of the
# required entries (`int`: all with an integer key, which are a parameter's); a list of entries with the same
# structure; a tuple also allows None.
_OPTIMIZER: Any = {"state": {int: dict}, "param_groups": [{"params": list}]}
_RANDOM: Any = {"torch": torch.Tensor, "python": list, "numpy": list}
_REST: dict[str, Any] = {"epoch": int, "step": int, "world_size": int, "k_steps": int, "extra": dict}
_FORMS: dict[str, Any] = {
    "model.pt": dict,
    "optimizer.pt": (_OPTIMIZER,),
    "rest.pt": {**_REST, "scheduler": object, "workers": [{"data": object, "random": _RANDOM}]},
    "random": _RANDOM,
    "run": {**_REST, "kinds": dict, "degrees": dict, "replicas": int, "workers": [{"data": object, "place": dict}]},
}


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
    text = json.dumps({**content, "sha256": sum_of(content)}, indent=1, sort_keys=True)
    with open(staging / MANIFEST, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    flush_folder(staging)


def publish(staging: Path, folder: Path, step: int) -> Path:
    """Renames a finished staging folder to the checkpoint of ``step`` and returns its name."""
    name = new_name(folder, step)
    os.rename(staging, name)
    flush_folder(folder)
    return name


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
    wrong = mismatch(content, _FORMS[name], "")
    if wrong:
        raise CheckpointError(f"{label} {wrong}")
