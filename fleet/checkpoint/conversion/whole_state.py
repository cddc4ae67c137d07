"""Whole states: the form in which every converter reads and writes a state, one tensor at a time.

[Note: Names]
All formats share these names: ``KEY/NAME`` for a tensor, where KEY is the entry of the state (``model``) and NAME the
name of the parameter, and ``KEY/PARAMETER/STATE`` for the state of an optimizer. Everything but tensors is a value by
such a name, or by KEY alone. A file that holds nothing but tensors by their names has no entries: it is *bare*, and its
KEY is chosen.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fleet.checkpoint.data_files import FileBlock, in_file_order
from fleet.checkpoint.index import DTYPES, merged_groups, tensor_names
from fleet.checkpoint.storage import LocalFolder
from fleet.errors import CheckpointError, did_you_mean
from fleet.ps.files.row_file import open_plain

DEFAULT_KEY = "model"
_GROUPS = "groups@"
TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES if hasattr(torch, name)}


@dataclass(frozen=True)
class Described:
    """Type and shape of a whole tensor; ``dtype`` is torch's name: ``"float32"``."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * DTYPES[self.dtype][0]


@dataclass
class WholeState:
    """A state whose tensors are read one at a time.

    Attributes:
        label: its name in errors.
        kind: the format, in words.
        tensors: type and shape of each tensor, by name.
        read: returns a tensor by its name, in memory that nothing else writes to. Raises CheckpointError.
        aliases: second names of tensors, each with the first.
        values: everything but tensors, as :mod:`fleet.checkpoint.values` encodes it.
        is_bare: whether the source had no entries, so that the first part of each name is a chosen KEY.
        damage_of_files: returns the damage of the files, in sentences, where the format has sums.
        kinds: of each entry: ``"module"``, ``"optimizer"``, ``"state"`` or ``"value"``, and its class if it is known.
        job: the job that saved it, where the format says so.
        pieces: number of pieces of each tensor, where the format divides tensors.
        notes: remarks for the user, as on entries left out.
    """

    label: str
    kind: str
    tensors: dict[str, Described]
    read: Callable[[str], Tensor]
    aliases: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    is_bare: bool = False
    damage_of_files: Callable[[], list[str]] | None = None
    kinds: dict[str, list[str]] = field(default_factory=dict)
    job: dict[str, Any] = field(default_factory=dict)
    pieces: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def keys(self) -> list[str]:
        """Returns the entries, in order."""
        return list(dict.fromkeys(key_of(name) for name in (*self.tensors, *self.aliases, *self.values)))

    def names_in_values(self) -> set[str]:
        """Returns the tensors that are parts of values."""
        return {name for value in self.values.values() for name in tensor_names(value)}

    def names_outside_values(self) -> list[str]:
        """Returns the tensors that are no part of a value, in order."""
        inside = self.names_in_values()
        return [name for name in self.tensors if name not in inside]

    def groups(self, key: str) -> list[dict[str, Any]] | None:
        """Returns the parameter groups of an optimizer, as :func:`merged_groups` does; ``None`` for another entry."""
        stages = [value for name, value in self.values.items() if key_of(name) == key and is_groups(name)]
        return merged_groups(stages) if stages else None

    def damage(self) -> list[str]:
        """Reads everything; returns one sentence for each cause of damage."""
        if self.damage_of_files is not None:
            return self.damage_of_files()
        wrong: dict[str, None] = {}
        for name in self.tensors:
            try:
                self.read(name)
            except CheckpointError as error:
                wrong[f"{error}"] = None
        return list(wrong)

    def only(self, key: str) -> WholeState:
        """Returns the entry ``key`` alone; ``notes`` name the others. Raises CheckpointError for an unknown key."""
        keys = self.keys()
        if key not in keys:
            raise CheckpointError(
                f"--key {key}: {self.label} has no such entry, only {keys!r}.{did_you_mean(key, keys)}"
            )
        others = [one for one in keys if one != key]
        return WholeState(
            self.label, self.kind, _of(key, self.tensors), self.read, _of(key, self.aliases), _of(key, self.values),
            is_bare=True, kinds=_of(key, self.kinds),
            notes=[*self.notes, *([f"left out: {', '.join(others)}"] if others else [])],
        )  # fmt: skip

    def renamed(self, names: Mapping[str, str]) -> WholeState:
        """Returns the state with parameters renamed, in every entry that has them.

        Args:
            names: new names, without KEY, each with its present one; other names stay.

        Raises:
            CheckpointError: no tensor has the name now, or two tensors would have one name.
        """
        unknown = set(names.values())
        if len(unknown) < len(names):
            twice = Counter(names.values()).most_common(1)[0][0]
            raise CheckpointError(f"--map: {twice!r} would get two names.")
        new_names = {old: new for new, old in names.items()}

        def new(name: str) -> str:
            key, _, rest = name.partition("/")
            parameter, _, last = rest.rpartition("/") if self.groups(key) is not None else (rest, "", "")
            if parameter not in new_names:
                return name
            unknown.discard(parameter)
            return f"{key}/{new_names[parameter]}" + (f"/{last}" if last else "")

        inside = self.names_in_values()
        changed = {name: name if name in inside else new(name) for name in (*self.tensors, *self.aliases)}
        values = [(new(name), _with_new_names(name, value, new_names)) for name, value in self.values.items()]
        if unknown:
            first = min(unknown)
            known = [name.partition("/")[2] for name in changed]
            raise CheckpointError(f"--map: {first!r} is no tensor of {self.label}.{did_you_mean(first, known)}")
        # A value may have the name of a tensor inside it, so values are compared with the other tensors only.
        kept = [now for before, now in changed.items() if before not in inside]
        for group in ([*changed.values()], [*kept, *(name for name, _ in values)]):
            if several := [name for name, count in Counter(group).items() if count > 1]:
                raise CheckpointError(f"--map: two tensors would be called {several[0].partition('/')[2]!r}.")
        old = {now: before for before, now in changed.items()}
        return WholeState(
            self.label, self.kind, {changed[n]: d for n, d in self.tensors.items()}, lambda name: self.read(old[name]),
            {changed[a]: changed[n] for a, n in self.aliases.items()}, dict(values), self.is_bare, None, self.kinds,
            self.job,
            {changed[n]: count for n, count in self.pieces.items() if n in changed}, self.notes,
        )  # fmt: skip


def _with_new_names(name: str, value: Any, names: Mapping[str, str]) -> Any:
    """Returns ``value``; in an optimizer's groups, with the new names of parameters."""
    if not is_groups(name):
        return value
    return [{**group, "params": [names.get(one, one) for one in group["params"]]} for group in value]


def is_groups(name: str) -> bool:
    """Returns whether ``name`` stands for an optimizer's groups, one value for each stage of a pipeline."""
    return name.partition("/")[2].startswith(_GROUPS)


def _of(key: str, found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: one for name, one in found.items() if key_of(name) == key}


def check_key(key: str, label: str) -> None:
    """Raises CheckpointError, with ``label``, unless ``key`` can be the name of an entry."""
    if not key or set(key) & set("/@#+"):
        raise CheckpointError(f"{label}: {key!r} cannot be an entry: a text without '/', '@', '#' and '+'.")


def key_of(name: str) -> str:
    """Returns the entry that ``name`` belongs to."""
    return name.partition("/")[0]


def describe(tensor: Tensor, label: str) -> Described:
    """Returns type and shape of ``tensor``. Raises CheckpointError, with ``label``, for a type that no file has."""
    dtype = f"{tensor.dtype}".removeprefix("torch.")
    if dtype not in DTYPES or tensor.layout != torch.strided or tensor.is_quantized:
        raise CheckpointError(
            f"{label} is a tensor of {tensor.dtype} with {tensor.layout}; a checkpoint holds dense tensors of "
            f"{', '.join(TORCH_DTYPES)}."
        )
    return Described(dtype, tuple(tensor.shape))


def as_bytes(tensor: Tensor) -> memoryview | bytes:
    """Returns the bytes of ``tensor`` in the order of its elements; without a copy where it is contiguous."""
    if not tensor.numel():
        return b""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def from_bytes(data: memoryview | bytes, described: Described) -> Tensor:
    """Returns a tensor of ``described`` with a copy of ``data``."""
    tensor = torch.empty(described.shape, dtype=TORCH_DTYPES[described.dtype])
    if described.num_bytes:
        target = tensor.reshape(-1).view(torch.uint8).numpy().data
        target[:] = memoryview(data).cast("B")
    return tensor


def whole_blocks(tensors: Mapping[str, Described]) -> list[FileBlock]:
    """Returns ``tensors`` as the blocks of one file, each whole, in the order in which they are written."""
    return in_file_order(
        FileBlock(name, one.dtype, one.shape, (0,) * len(one.shape), one.shape) for name, one in tensors.items()
    )


def first_bytes(path: Path, count: int) -> bytes:
    """Returns the first ``count`` bytes of a file, or of the file behind a link."""
    with open_plain(Path(os.path.realpath(path))) as file:
        return file.read(count)


def read_small(path: Path) -> bytes:
    """Returns the bytes of a file. Raises CheckpointError with the reason where it cannot be read."""
    try:
        return LocalFolder(path.parent).get(path.name)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}.") from error
