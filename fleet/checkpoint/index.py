"""Index: what a checkpoint holds, and in which bytes of which file every piece of every tensor lies.

[Note: The format]
A checkpoint is a folder: data files in the safetensors format, one per writer, and ``index.json``. A tensor has a name,
a type, the shape of the whole and pieces; a piece is a box of the whole (offsets and sizes) that lies contiguously in
one file. Pieces of a tensor may overlap where several workers held the same numbers; together they cover it. What is no
tensor stands in ``values``. A worker's own state, which no other can load, has the worker's rank.

Every file has the CRC-32 of each of its blocks, so that a reader of some bytes verifies those and no others. The index
has the SHA-256 of itself. It is written last, by one rename: a folder without an index is no checkpoint.

Each worker leaves a record, an index of its own file alone; the index is the union of all records.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from fleet.errors import CheckpointError

INDEX = "index.json"
OBJECTS = "#objects"  # the value that says of what kind, and of which class, each object of a checkpoint is
FORMAT = "fleet-checkpoint"
VERSION = 2
BLOCK_BYTES = 1 << 20
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
    """What a checkpoint holds.

    Attributes:
        tensors: by name; a worker's own have ``"@RANK/"`` in front of their name.
        aliases: names of tensors that are another one under a second name.
        values: what is no tensor, by name, as :mod:`fleet.checkpoint.values` encodes it.
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
        """Returns the index whose text this is.

        Raises CheckpointError that begins with ``label`` for a damaged index or one of another format or version. What
        it says of bytes and boxes is consistent after that: every piece lies inside its tensor and its file, and unless
        it is the record of one worker, the pieces cover every tensor.
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
        """Raises CheckpointError that begins with ``label`` unless it is consistent; see :meth:`from_json`."""
        for name, entry in self.tensors.items():
            if entry.dtype not in DTYPES:
                raise CheckpointError(
                    f"{label}: {name!r} has the type {entry.dtype!r}, which this package cannot read."
                )
            if any(length < 0 for length in entry.shape):
                raise CheckpointError(f"{label}: {name!r} has the shape {list(entry.shape)}.")
            size = DTYPES[entry.dtype][0]
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
        if not is_record:  # a worker may know a second name of a tensor of which the others write every part
            self._check_whole(label)

    def _check_whole(self, label: str) -> None:
        for alias, name in self.aliases.items():
            if name not in self.tensors:
                raise CheckpointError(f"{label}: {alias!r} stands for {name!r}, which is missing.")
            if alias in self.tensors:
                raise CheckpointError(f"{label}: {alias!r} is a tensor, and stands for {name!r} as well.")
        if missing := self.holes():
            raise CheckpointError(f"{label}: parts of {missing[:4]!r} are missing ({len(missing)} tensors in all).")

    def holes(self) -> list[str]:
        """Returns the names of tensors that the pieces do not cover, which a lost record leaves."""
        return [name for name, entry in self.tensors.items() if not _is_covered(entry)]

    @classmethod
    def merged(cls, records: Iterable[Index]) -> Index:
        """Returns the union of ``records``; of a value that several have, the first is taken.

        Raises CheckpointError when two workers mean different tensors by one name, or parts are missing.
        """
        found = cls()
        for record in records:
            for name, entry in record.tensors.items():
                kept = found.tensors.setdefault(name, TensorEntry(entry.dtype, entry.shape))
                if (kept.dtype, kept.shape) != (entry.dtype, entry.shape):
                    raise CheckpointError(
                        f"Two workers saved different tensors as {name!r}: {kept.dtype} {list(kept.shape)} and "
                        f"{entry.dtype} {list(entry.shape)}. Build the same model on every worker."
                    )
                kept.pieces.extend(entry.pieces)
            found.files.update(record.files)
            found.job = found.job or record.job
            for name, other in record.aliases.items():
                found.aliases.setdefault(name, other)
            for name, value in record.values.items():
                found.values.setdefault(name, value)
        for alias in [name for name in found.aliases if name in found.tensors]:
            del found.aliases[alias]
        if missing := found.holes() + [name for name in found.aliases.values() if name not in found.tensors]:
            raise CheckpointError(f"No worker saved some parts of {missing[:4]!r} ({len(missing)} tensors in all).")
        return found


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


def _is_covered(entry: TensorEntry) -> bool:
    """Returns whether the pieces cover the whole; boxes that partly overlap are counted exactly."""
    boxes = {(piece.offsets, piece.sizes) for piece in entry.pieces}
    whole = prod(entry.shape)
    if whole == 0:
        return True
    if sum(prod(sizes) for _, sizes in boxes) < whole:
        return False
    edges = [
        sorted({0, size} | {o[d] for o, _ in boxes} | {o[d] + s[d] for o, s in boxes})
        for d, size in enumerate(entry.shape)
    ]
    return _covered_from((), edges, [*boxes])


def _covered_from(
    corner: tuple[int, ...], edges: Sequence[Sequence[int]], boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
) -> bool:
    """Returns whether ``boxes``, all of which hold ``corner`` in the first dimensions, cover every cell of the rest."""
    dim = len(corner)
    if not boxes or dim == len(edges):
        return bool(boxes)
    cells = edges[dim][:-1]
    return all(
        _covered_from((*corner, at), edges, [(o, s) for o, s in boxes if o[dim] <= at < o[dim] + s[dim]])
        for at in cells
    )
