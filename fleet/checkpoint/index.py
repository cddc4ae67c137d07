"""Index: the content of a checkpoint, with the file and the bytes of every piece of every tensor.

[Note: The format]
A checkpoint is a folder: data files in the safetensors format, one per writer, and ``index.json``. A tensor has a name,
a type, the shape of the whole and pieces; a piece is a box of the whole (offsets and sizes) that lies contiguously in
one file. Pieces of a tensor may overlap where several workers held the same numbers; together they cover it. Everything
else stands in ``values``. A state that only one worker can load carries that worker's rank in its name.

Every file has the CRC-32 of each of its blocks, so that a reader of some bytes verifies those and no others. The index
has its own SHA-256. It is written last, by one rename: a folder without an index is no checkpoint.

Each worker leaves a record, an index of its own file alone; the index is the union of all records.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any

from fleet.errors import CheckpointError

INDEX = "index.json"
OBJECTS = "#objects"  # the value with kind and class of each object of a checkpoint
FORMAT = "fleet-checkpoint"
VERSION = 2
BLOCK_BYTES = 1 << 20
MOST_DEPTH = 100  # of values inside a value
_MOST_DIMS = 64  # torch computes with no more
# Bytes of one number, by torch's name of the type, and the name of the type in the safetensors format.
DTYPES = {
    "float64": (8, "F64"), "complex64": (8, "C64"), "int64": (8, "I64"), "uint64": (8, "U64"),
    "float32": (4, "F32"), "int32": (4, "I32"), "uint32": (4, "U32"),
    "float16": (2, "F16"), "bfloat16": (2, "BF16"), "int16": (2, "I16"), "uint16": (2, "U16"),
    "int8": (1, "I8"), "uint8": (1, "U8"), "bool": (1, "BOOL"),
    "float8_e4m3fn": (1, "F8_E4M3"), "float8_e5m2": (1, "F8_E5M2"),
    "float8_e4m3fnuz": (1, "F8_E4M3FNUZ"), "float8_e5m2fnuz": (1, "F8_E5M2FNUZ"),
}  # fmt: skip


@dataclass(frozen=True)
class Piece:
    """A box of a whole tensor, and where its bytes lie.

    Attributes:
        file: the name of the data file.
        begin: the first byte, counted from the beginning of the file.
        offsets: where the box begins in the whole tensor.
        sizes: its shape.
    """

    file: str
    begin: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """How many numbers it holds."""
        return prod(self.sizes)

    def lies_in(self, shape: tuple[int, ...]) -> bool:
        """Returns whether it is a box of a tensor of ``shape``."""
        return len(self.offsets) == len(self.sizes) == len(shape) and all(
            offset >= 0 and length >= 0 and offset + length <= whole
            for offset, length, whole in zip(self.offsets, self.sizes, shape, strict=True)
        )


@dataclass
class TensorEntry:
    """One tensor of a checkpoint.

    Attributes:
        dtype: torch's name of the type: ``"float32"``.
        shape: of the whole tensor.
        pieces: together they cover the whole.
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: list[Piece] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * DTYPES[self.dtype][0]


@dataclass(frozen=True)
class DataFile:
    """Length of one data file, and the CRC-32 of each of its blocks of ``BLOCK_BYTES``; the last may be shorter."""

    num_bytes: int
    sums: tuple[int, ...]


@dataclass
class Index:
    """The content of a checkpoint.

    Attributes:
        tensors: by name; a worker's own have ``"@RANK/"`` in front of their name.
        aliases: second names of tensors, each with the first.
        values: everything but tensors, by name, as :mod:`fleet.checkpoint.values` encodes it.
        files: the data files by name.
        job: the job that saved: ``world_size``, ``degrees``; empty in a converted checkpoint.
    """

    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    files: dict[str, DataFile] = field(default_factory=dict)
    job: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Returns the text of ``index.json``."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "block_bytes": BLOCK_BYTES,
            "job": self.job,
            "files": {name: {"bytes": f.num_bytes, "crc32": list(f.sums)} for name, f in self.files.items()},
            "tensors": {
                name: {
                    "dtype": entry.dtype,
                    "shape": list(entry.shape),
                    "pieces": [[p.file, p.begin, list(p.offsets), list(p.sizes)] for p in entry.pieces],
                }
                for name, entry in self.tensors.items()
            },
            "aliases": self.aliases,
            "values": self.values,
        }
        return json.dumps({**content, "sha256": _sum_of(content)})

    @classmethod
    def from_json(cls, text: str | bytes, label: str, is_record: bool = False) -> Index:
        """Returns the index with the JSON ``text``, checked.

        Every piece lies inside its tensor and its file afterwards, and the pieces cover every tensor, except in the
        record of one worker. Raises CheckpointError that begins with ``label`` for a damaged index, or another format
        or version.
        """
        try:
            content = json.loads(text)
            stated = content.pop("sha256")
            if content["format"] != FORMAT:
                raise CheckpointError(f"{label} has the format {content['format']!r}; {FORMAT!r} is read.")
            if content["version"] != VERSION or content["block_bytes"] != BLOCK_BYTES:
                raise CheckpointError(
                    f"{label} has version {content['version']}, and this package reads version {VERSION}. Read it with "
                    "the package that wrote it, or a later one."
                )
            if stated != _sum_of(content):
                raise CheckpointError(f"{label} does not match its SHA-256: it was damaged or edited later.")
            index = cls(
                tensors={name: _entry(found) for name, found in content["tensors"].items()},
                aliases=dict(content["aliases"]),
                values=dict(content["values"]),
                files={n: DataFile(_int(f["bytes"]), _ints(f["crc32"])) for n, f in content["files"].items()},
                job=dict(content["job"]),
            )
            index.check(label, is_record)
            return index
        except CheckpointError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{label} is damaged ({type(error).__name__}: {error}).") from error

    def check(self, label: str, is_record: bool = False) -> None:
        """Raises CheckpointError that begins with ``label`` unless the index is consistent; see :meth:`from_json`."""
        for name, entry in self.tensors.items():
            if entry.dtype not in DTYPES:
                raise CheckpointError(
                    f"{label}: {name!r} has the type {entry.dtype!r}, which this package cannot read."
                )
            size = DTYPES[entry.dtype][0]
            if not is_shape(entry.shape, size):
                raise CheckpointError(f"{label}: {name!r} has the shape {[*entry.shape]!r:.200}, which no tensor has.")
            for piece in entry.pieces:
                file = self.files.get(piece.file)
                if (
                    file is None
                    or not piece.lies_in(entry.shape)
                    or not 0 <= piece.begin <= file.num_bytes - piece.numel * size
                ):
                    raise CheckpointError(f"{label}: a piece of {name!r} lies outside its tensor or its file.")
        for name, file in self.files.items():
            is_plain = bool(name) and not name.startswith(".") and not {"/", "\\", "\0"} & set(name)
            if not is_plain or file.num_bytes < 0 or len(file.sums) != -(-file.num_bytes // BLOCK_BYTES):
                raise CheckpointError(f"{label}: the file {name!r} is described wrongly.")
        # A small file whose bytes stood for many pieces would unfold to any size.
        places = sorted(
            (piece.file, piece.begin, piece.begin + piece.numel * DTYPES[entry.dtype][0], name)
            for name, entry in self.tensors.items()
            for piece in entry.pieces
            if piece.numel
        )
        for (here, _, end, name), (there, begin, _, _) in pairwise(places):
            if here == there and begin < end:
                raise CheckpointError(f"{label}: byte {begin} of {here!r} stands for {name!r} and for another piece.")
        self._check_values(label, is_record)
        if not is_record:  # one worker's aliases may name tensors that only the others write
            self._check_whole(label)

    def _check_values(self, label: str, is_record: bool) -> None:
        """Raises CheckpointError for a value that is too deep, names a missing tensor, or is not of its kind."""
        known = {*self.tensors, *self.aliases}
        for name, value in self.values.items():
            for tensor in tensor_names(value, f"{label}: {name!r}"):
                if not isinstance(tensor, str) or not (is_record or tensor in known):
                    raise CheckpointError(f"{label}: {name!r} names the tensor {tensor!r:.200}, which is missing.")
            if name.rpartition("/")[2].startswith("groups@") and not (
                isinstance(value, list) and all(map(_is_group, value))
            ):
                raise CheckpointError(f"{label}: {name!r} are no groups of an optimizer.")
        kinds = self.values.get(OBJECTS, {})
        if not isinstance(kinds, dict) or not all(_are_texts(pair) and len(pair) == 2 for pair in kinds.values()):
            raise CheckpointError(f"{label}: {OBJECTS!r} does not say of what kind each object is.")
        sizes = [self.job.get("world_size", 1), *self.job.get("degrees", {}).values()]
        if not all(type(size) is int and size > 0 for size in sizes) or not _are_texts(self.job.get("own", [])):
            raise CheckpointError(f"{label}: 'job' does not describe a job.")

    def _check_whole(self, label: str) -> None:
        for alias, name in self.aliases.items():
            if name not in self.tensors:
                raise CheckpointError(f"{label}: {alias!r} stands for {name!r}, which is missing.")
            if alias in self.tensors:
                raise CheckpointError(f"{label}: {alias!r} is a tensor, and stands for {name!r} as well.")
        if missing := self.holes():
            raise CheckpointError(f"{label}: parts of {missing[:4]!r} are missing ({len(missing)} tensors in all).")

    def holes(self) -> list[str]:
        """Returns the names of tensors that the pieces do not cover, as after the loss of a record."""
        return [name for name, entry in self.tensors.items() if not _is_covered(name, entry)]

    @classmethod
    def merged(cls, records: Iterable[Index]) -> Index:
        """Returns the union of ``records``, with the first of several values under one name.

        Raises CheckpointError when two workers mean different tensors by one name, or parts are missing.
        """
        union = cls()
        for record in records:
            for name, entry in record.tensors.items():
                kept = union.tensors.setdefault(name, TensorEntry(entry.dtype, entry.shape))
                if (kept.dtype, kept.shape) != (entry.dtype, entry.shape):
                    raise CheckpointError(
                        f"Two workers saved different tensors as {name!r}: {kept.dtype} {list(kept.shape)} and "
                        f"{entry.dtype} {list(entry.shape)}. Build the same model on every worker."
                    )
                kept.pieces.extend(entry.pieces)
            union.files.update(record.files)
            union.job = union.job or record.job
            for name, other in record.aliases.items():
                union.aliases.setdefault(name, other)
            for name, value in record.values.items():
                union.values.setdefault(name, value)
        # One worker may know a name as an alias and another, without the tie, write a tensor under it.
        union.aliases = {alias: name for alias, name in union.aliases.items() if alias not in union.tensors}
        if missing := union.holes() + [name for name in union.aliases.values() if name not in union.tensors]:
            raise CheckpointError(f"No worker saved some parts of {missing[:4]!r} ({len(missing)} tensors in all).")
        return union


def _entry(found: Mapping[str, Any]) -> TensorEntry:
    pieces = [
        Piece(str(file), _int(begin), _ints(offsets), _ints(sizes)) for file, begin, offsets, sizes in found["pieces"]
    ]
    return TensorEntry(str(found["dtype"]), _ints(found["shape"]), pieces)


def _int(number: Any) -> int:
    if type(number) is not int:
        raise ValueError(f"{number!r} is no whole number")
    return number


def _ints(numbers: Sequence[Any]) -> tuple[int, ...]:
    return tuple(_int(number) for number in numbers)


def _sum_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _are_texts(found: Any) -> bool:
    return isinstance(found, list) and all(isinstance(text, str) for text in found)


def _is_group(found: Any) -> bool:
    """Returns whether ``found`` is a group of an optimizer; a converted one lacks shapes and keys."""
    if not isinstance(found, dict) or not _are_texts(found.get("params")):
        return False
    settings = found.get("settings")
    if not isinstance(settings, dict) or settings.get("$", "dict") != "dict":
        return False
    keys = found.get("keys", [])
    shapes = found.get("shapes", [None] * len(found["params"]))
    return (
        isinstance(keys, list)
        and not any(isinstance(key, list | dict) for key in keys)
        and isinstance(shapes, list)
        and len(shapes) == len(found["params"])
        and all(shape is None or (isinstance(shape, list) and is_shape(shape)) for shape in shapes)
    )


def merged_groups(stages: Iterable[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Returns the parameter groups of an optimizer, each with the parameters of all ``stages`` once.

    A group has ``params``, ``shapes`` and ``keys``, and the encoded ``settings`` of the first stage; the shapes of a
    converted one are ``None``.
    """
    merged: list[dict[str, Any]] = []
    for stage in stages:
        for number, group in enumerate(stage):
            if number == len(merged):
                merged.append({**group, "params": [], "shapes": [], "keys": []})
            one = merged[number]
            known = set(one["params"])
            shapes = group.get("shapes") or [None] * len(group["params"])
            for parameter, shape in zip(group["params"], shapes, strict=True):
                if parameter not in known:
                    one["params"].append(parameter)
                    one["shapes"].append(shape)
            one["keys"] += [key for key in group.get("keys", ()) if key not in one["keys"]]
    return merged


def tensor_names(encoded: Any, label: str = "checkpoint") -> list[str]:
    """Returns the names of the tensors inside an ``encoded`` value.

    Raises CheckpointError, with ``label``, for more than ``MOST_DEPTH`` levels.
    """
    names: list[str] = []
    level = [encoded]
    # Level by level and not by recursion: a file decides about the depth, and Python's stack would end first.
    for _ in range(MOST_DEPTH):
        inner: list[Any] = []
        for one in level:
            if isinstance(one, list):
                inner += one
            elif isinstance(one, dict) and one.get("$") in ("tensor", "array"):
                names.append(one["name"])
            elif isinstance(one, dict):
                inner += one.values()
        level = inner
    if level:
        raise CheckpointError(f"{label}: values lie more than {MOST_DEPTH} deep in each other, as in no state.")
    return names


def is_shape(shape: Sequence[Any], size: int = 1) -> bool:
    """Returns whether a tensor can have ``shape`` with numbers of ``size`` bytes."""
    are_lengths = all(type(length) is int and length >= 0 for length in shape)
    return are_lengths and len(shape) <= _MOST_DIMS and prod(max(1, length) for length in shape) * size < 2**63


_Box = tuple[tuple[int, ...], tuple[int, ...]]


def _is_covered(name: str, entry: TensorEntry) -> bool:
    """Returns whether the pieces cover the whole; raises CheckpointError for more overlaps than a save has."""
    boxes = sorted({(piece.offsets, piece.sizes) for piece in entry.pieces if piece.numel})
    left: list[_Box] = [((0,) * len(entry.shape), entry.shape)] if prod(entry.shape) else []
    # Boxes of a save leave a few regions each. Boxes made to leave ever more would keep a reader busy for hours.
    steps = 64 * len(boxes) + 256
    for box in boxes:
        steps -= len(left)
        if steps < 0:
            raise CheckpointError(f"{name!r}: its {len(boxes)} pieces overlap each other as those of no save do.")
        left = [rest for region in left for rest in _without(region, box)]
    return not left


def _without(region: _Box, box: _Box) -> Iterator[_Box]:
    """Yields the parts of ``region``, as boxes, that lie outside ``box``."""
    offsets = [*region[0]]
    sizes = [*region[1]]
    begins = [*map(max, offsets, box[0])]
    ends = [min(o + s, p + t) for o, s, p, t in zip(offsets, sizes, *box, strict=True)]
    if any(begin >= end for begin, end in zip(begins, ends, strict=True)):
        yield region
        return
    for dim, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        last = offsets[dim] + sizes[dim]
        for first, stop in ((offsets[dim], begin), (end, last)):
            if first < stop:
                yield (*offsets[:dim], first, *offsets[dim + 1 :]), (*sizes[:dim], stop - first, *sizes[dim + 1 :])
        # The next dimensions are cut out of the slab that the box occupies along this one.
        offsets[dim] = begin
        sizes[dim] = end - begin
