"""Safetensors files, one or several with Hugging Face's index, as transformers and the safetensors package use them.

[Note: Shared tensors]
The format holds each tensor once. As ``safetensors.torch.save_model`` does, the other names of a shared tensor stand in
the metadata of its file, each with the name that is kept; transformers ties them by the model's configuration.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fleet.checkpoint.conversion.formats import Asked, Format
from fleet.checkpoint.conversion.whole_state import (
    DEFAULT_KEY,
    Described,
    WholeState,
    as_bytes,
    first_bytes,
    from_bytes,
    key_of,
    read_small,
    whole_blocks,
)
from fleet.checkpoint.data_files import MappedFile, read_header, write_file
from fleet.checkpoint.index import DTYPES, is_shape
from fleet.checkpoint.storage import LocalFolder
from fleet.errors import CheckpointError

FORMAT = Format(
    order=40,
    title="Hugging Face's safetensors files",
    mark="model.safetensors.index.json",
    folder="model.safetensors.index.json or one .safetensors file (Hugging Face)",
    file="a .safetensors file or the index of several",
    to="hf",
    suffixes=(".safetensors",),
    is_bare=True,
    shard_bytes=5_000_000_000,
)
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = FORMAT.mark
_CODES = {code: name for name, (_, code) in DTYPES.items()}


def recognises(path: str) -> bool:
    """Returns whether ``path`` is a safetensors file, an index of several, or a folder with either."""
    local = Path(path)
    if local.is_dir():
        return (local / WEIGHTS_INDEX).is_file() or any(local.glob("*.safetensors"))
    return local.is_file() and (local.name.endswith(".safetensors.index.json") or _is_safetensors(local))


def _is_safetensors(path: Path) -> bool:
    start = first_bytes(path, 9)
    return path.suffix == ".safetensors" or (len(start) == 9 and start[8:] == b"{" and start[4:8] == bytes(4))


class _Shard:
    """One safetensors file, mapped; its header was checked."""

    def __init__(self, path: Path) -> None:
        self._file = MappedFile(path, f"{path}")
        header, self._start = read_header(self._file.range(0, self._file.num_bytes), self._file.num_bytes, f"{path}")
        self.metadata: dict[str, str] = header.pop("__metadata__", None) or {}
        if not isinstance(self.metadata, dict) or not all(isinstance(text, str) for text in self.metadata.values()):
            raise CheckpointError(f"{path} is damaged: its '__metadata__' is {self.metadata!r:.200}; it holds texts.")
        self.tensors: dict[str, Described] = {}
        self._begins: dict[str, int] = {}
        end = 0
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            described = _described(name, entry, f"{path}")
            begin, last = entry["data_offsets"]
            if begin != end or last - begin != described.num_bytes:
                raise CheckpointError(f"{path} is damaged: {name!r} does not have the bytes of its type and shape.")
            self.tensors[name] = described
            self._begins[name] = begin
            end = last
        if self._start + end != self._file.num_bytes:
            raise CheckpointError(f"{path} is damaged: {self._start + end} of {self._file.num_bytes} bytes are used.")

    def read(self, name: str) -> Tensor:
        begin = self._start + self._begins[name]
        described = self.tensors[name]
        return from_bytes(self._file.range(begin, begin + described.num_bytes), described)


def _described(name: str, entry: Mapping[str, Any], label: str) -> Described:
    dtype = entry.get("dtype")
    shape = entry.get("shape")
    if not isinstance(dtype, str) or dtype not in _CODES:
        raise CheckpointError(f"{label}: {name!r} has the type {dtype!r:.80}; {', '.join(_CODES)} are read.")
    if not isinstance(shape, list) or not is_shape(shape, DTYPES[_CODES[dtype]][0]):
        raise CheckpointError(f"{label} is damaged: {name!r} has the shape {shape!r:.200}.")
    return Described(_CODES[dtype], tuple(shape))


def open_state(path: str | Path, asked: Asked) -> WholeState:
    """Returns the state in a safetensors file, an index of several, or a folder with either.

    Args:
        path: the file, the index or the folder.
        asked: the user's choices; ``key`` names the entry for its tensors.

    Raises:
        CheckpointError: a file is missing or damaged, or two files have a tensor of one name.
    """
    path = Path(path)
    if path.is_dir():
        path = path / WEIGHTS_INDEX if (path / WEIGHTS_INDEX).exists() else single_file(path)
    placed = _weight_map(path) if path.suffix == ".json" else None
    folder = path.parent
    shards = {name: _Shard(folder / name) for name in (sorted(set(placed.values())) if placed else [path.name])}
    # The index decides where several of its files have a tensor of one name.
    where: dict[str, _Shard] = {}
    unnamed = []
    for file, shard in shards.items():
        for name in shard.tensors:
            if placed is not None and placed.get(name) != file:
                unnamed.append(name)
            else:
                where[name] = shard
    if missing := sorted(set(placed or {}) - set(where)):
        raise CheckpointError(
            f"{path} says that {missing[0]!r} lies in {(placed or {})[missing[0]]!r}, which lacks it."
        )
    metadata = {name: text for shard in shards.values() for name, text in shard.metadata.items() if name != "format"}
    aliases = {name: kept for name, kept in metadata.items() if kept in where and name not in where}
    notes = [f"left out: the text {name!r} of the metadata" for name in metadata if name not in aliases]
    if unnamed:
        notes.append(f"left out: {len(unnamed)} tensors that the index places elsewhere or not at all: {unnamed[:3]!r}")
    first = asked.key or DEFAULT_KEY
    return WholeState(
        f"{path}", "safetensors" if placed is None else f"safetensors, {len(shards)} files",
        {f"{first}/{name}": shard.tensors[name] for name, shard in where.items()},
        lambda name: where[name.partition("/")[2]].read(name.partition("/")[2]),
        {f"{first}/{name}": f"{first}/{kept}" for name, kept in aliases.items()}, is_bare=True,
        kinds={first: ["module", ""]}, notes=notes,
    )  # fmt: skip


def single_file(folder: Path) -> Path:
    """Returns the only safetensors file of a folder. Raises CheckpointError when there are several or none."""
    found = sorted(folder.glob("*.safetensors"))
    if len(found) != 1:
        raise CheckpointError(
            f"{folder} holds {len(found)} safetensors files and no {WEIGHTS_INDEX}, which would say what lies where. "
            "Name one of the files."
        )
    return found[0]


def _weight_map(path: Path) -> dict[str, str]:
    try:
        found = json.loads(read_small(path))["weight_map"]
        wrong = [file for file in found.values() if not isinstance(file, str) or Path(file).name != file or not file]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is no index of safetensors files: it has no weight_map.") from error
    if wrong:
        raise CheckpointError(f"{path} names {wrong[0]!r}, which is no file beside it.")
    placed: dict[str, str] = found
    return placed


def write_state(state: WholeState, target: str | Path, shard_bytes: int | None = None) -> None:
    """Writes the tensors of ``state``, which has one entry, one tensor at a time.

    Args:
        state: the state; its values have no place in the format, and ``notes`` receive them.
        target: a file that ends with ``.safetensors``, or a folder, which is made.
        shard_bytes: most bytes of tensors in one file of a folder; a larger tensor fills a file alone.

    Raises:
        CheckpointError: a tensor has the name of the format's metadata, or there are values alone.
        OSError: it cannot be written.
    """
    names = state.names_outside_values()
    if state.values and not names:
        raise CheckpointError(
            f"{state.label}: {', '.join(state.keys())} holds no tensors by their names, which is all that safetensors "
            "files hold. Name another entry with --key, or another format with --to."
        )
    if state.values:
        state.notes.append(f"left out, because safetensors files hold tensors only: {', '.join(state.values)}")
    if any(_short(name) in ("__metadata__", "") for name in names):
        raise CheckpointError(f"{state.label}: no tensor of a safetensors file can be called '__metadata__' or ''.")
    path = Path(target)
    if path.suffix == ".safetensors":
        _write_shard(state, names, LocalFolder(path.parent), path.name)
        return
    folder = LocalFolder(path)
    folder.prepare()
    shards = _divided(state, names, shard_bytes)
    if len(shards) == 1:
        _write_shard(state, names, folder, WEIGHTS)
        return
    files = [f"model-{place:05d}-of-{len(shards):05d}.safetensors" for place in range(1, len(shards) + 1)]
    for file, shard in zip(files, shards, strict=True):
        _write_shard(state, shard, folder, file)
    index = {
        "metadata": {"total_size": sum(state.tensors[name].num_bytes for name in names)},
        "weight_map": {_short(name): file for file, shard in zip(files, shards, strict=True) for name in shard},
    }
    folder.put(WEIGHTS_INDEX, (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode())


def _short(name: str) -> str:
    return name[len(key_of(name)) + 1 :]


def _divided(state: WholeState, names: Sequence[str], max_bytes: int | None) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    used = 0
    for name in names:
        size = state.tensors[name].num_bytes
        if max_bytes is not None and shards[-1] and used + size > max_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def _write_shard(state: WholeState, names: Sequence[str], folder: LocalFolder, file: str) -> None:
    full = {_short(name): name for name in names}
    ordered = whole_blocks({short: state.tensors[name] for short, name in full.items()})
    kept = {_short(alias): _short(name) for alias, name in state.aliases.items() if name in names}
    with folder.create(file) as opened:
        write_file(opened, ordered, (as_bytes(state.read(full[block.name])) for block in ordered), metadata=kept)
