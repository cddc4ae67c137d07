"""Items: the tensors of a checkpoint as this worker holds them, its blocks of them, and sources that fill them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fleet.checkpoint.boxes import HeldBox, copy_from, divided_among, row_range
from fleet.checkpoint.data_files import DataReader, FileBlock, file_order
from fleet.checkpoint.index import DTYPES, Index, Piece, TensorEntry, tensor_names
from fleet.checkpoint.storage import Folder
from fleet.errors import CheckpointError, did_you_mean

_CHUNK_BYTES = 4 << 20  # of a file that is read


@dataclass(frozen=True)
class Item:
    """One tensor of a checkpoint, as far as this worker holds it.

    Attributes:
        name: its name in the checkpoint.
        shape: the shape of the whole tensor.
        boxes: the boxes of it that this worker holds.
        holders: the ranks, in order, that hold the same boxes.
        alone: whether the first holder writes all of it, because the copies may differ.
    """

    name: str
    shape: tuple[int, ...]
    boxes: Sequence[HeldBox]
    holders: tuple[int, ...]
    alone: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """The type of the numbers."""
        return self.boxes[0].view.dtype


def written_by(items: Iterable[Item], rank: int) -> list[tuple[FileBlock, Tensor]]:
    """Returns the blocks of ``items`` that worker ``rank`` writes, with views of their numbers, in the order of a file.

    Raises CheckpointError for a type that the files cannot hold.
    """
    groups: dict[tuple[int, ...], list[tuple[Item, HeldBox]]] = {}
    for item in items:
        holders = item.holders[:1] if item.alone else item.holders
        if rank in holders:
            groups.setdefault(holders, []).extend((item, box) for box in item.boxes)
    # Workers with the same boxes divide one list of them, so they must see it in one order: that of the items.
    written: list[tuple[FileBlock, Tensor]] = []
    for holders, pairs in groups.items():
        boxes = [box for _, box in pairs]
        for place, box in divided_among(boxes, holders.index(rank), len(holders)):
            item = pairs[place][0]
            dtype = f"{box.view.dtype}".removeprefix("torch.")
            if dtype not in DTYPES:
                raise CheckpointError(
                    f"save(): {item.name!r} has the type {dtype}, which safetensors files cannot hold."
                )
            written.append((FileBlock(item.name, dtype, item.shape, box.offsets, tuple(box.view.shape)), box.view))
    return sorted(written, key=lambda pair: file_order(pair[0]))


def raw_bytes(views: Iterable[Tensor]) -> Iterator[Any]:
    """Yields the bytes of each of ``views``; a view that is contiguous on the host is not copied."""
    for view in views:
        yield view.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def copy_into(buffer: Any, written: Sequence[tuple[FileBlock, Tensor]]) -> None:
    """Copies the numbers of ``written`` into ``buffer``, one after the other as in a file."""
    begin = 0
    for block, view in written:
        if block.num_bytes:
            count = view.numel()
            place = torch.frombuffer(buffer, dtype=view.dtype, count=count, offset=begin)
            place.view(view.shape).copy_(view)
        begin += block.num_bytes


class Wanted:
    """The boxes that this worker wants filled from saved tensors.

    Attributes:
        boxes: by the name of the tensor.
    """

    def __init__(self) -> None:
        self.boxes: dict[str, list[HeldBox]] = {}
        self._wholes: dict[str, Tensor] = {}

    def add(self, name: str, boxes: Iterable[HeldBox]) -> None:
        """Wants ``boxes`` of the tensor ``name``."""
        self.boxes.setdefault(name, []).extend(boxes)

    def add_whole(self, source: StateSource, name: str, device: torch.device | None = None) -> Tensor:
        """Wants all of the tensor ``name``; returns the memory that will hold it. Raises CheckpointError."""
        entry = source.known(name)
        whole = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device=device)
        self.add(name, [HeldBox((0,) * whole.dim(), whole)])
        return whole

    def add_inside(self, source: StateSource, value: Any) -> None:
        """Wants the tensors inside ``value``, an encoded one, which :meth:`tensor` returns."""
        for name in tensor_names(value):
            self._wholes[name] = self.add_whole(source, name)

    def tensor(self, name: str) -> Tensor:
        """Returns a tensor inside a value, once it is filled."""
        return self._wholes[name]


class StateSource:
    """A saved state: an index, and tensors that fill boxes of this worker.

    Args:
        index: what the state holds.
        path: how errors name the state.
    """

    def __init__(self, index: Index, path: str) -> None:
        self.index = index
        self._path = path
        self._below: dict[str, list[str]] = {}
        for name in (*index.tensors, *index.values):
            parent, _, last = name.rpartition("/")
            self._below.setdefault(parent, []).append(last)

    def below(self, name: str) -> list[str]:
        """Returns the last parts of the names of tensors and values directly below ``name``."""
        return self._below.get(name, [])

    def entry(self, name: str) -> TensorEntry | None:
        """Returns the tensor with the first or second name ``name``, or ``None``."""
        return self.index.tensors.get(self.index.aliases.get(name, name))

    def known(self, name: str) -> TensorEntry:
        """Returns the tensor ``name``. Raises CheckpointError for an unknown name."""
        entry = self.entry(name)
        if entry is None:
            raise CheckpointError(f"{self._path!r} holds no {name!r}.{did_you_mean(name, self.index.tensors)}")
        return entry

    def verify_all(self, wanted: Iterable[Wanted]) -> None:
        """Reads and verifies the bytes that :meth:`fill_all` copies. Raises CheckpointError."""
        raise NotImplementedError

    def fill_all(self, wanted: Iterable[Wanted]) -> None:
        """Fills the boxes of all ``wanted``, in the order of the index. Raises CheckpointError."""
        raise NotImplementedError

    def are_equal(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """Returns for each of ``pairs`` of names whether the two tensors are equal."""
        raise NotImplementedError

    def close(self) -> None:
        """Closes the files of the source."""

    def _in_order(self, wanted: Iterable[Wanted]) -> Iterator[tuple[str, list[HeldBox]]]:
        """Yields the wanted names, in the order of the index, and the boxes of each."""
        together: dict[str, list[HeldBox]] = {}
        for name, boxes in (pair for one in wanted for pair in one.boxes.items()):
            self.known(name)
            together.setdefault(self.index.aliases.get(name, name), []).extend(boxes)
        return ((name, together[name]) for name in self.index.tensors if name in together)


class SavedTensors(StateSource):
    """The tensors of one checkpoint in a folder, read as they are asked for.

    Args:
        folder: the folder of the checkpoint.
        index: its index.
        check_sums: verify every block that is touched.
    """

    def __init__(self, folder: Folder, index: Index, check_sums: bool = True) -> None:
        super().__init__(index, folder.path)
        self._folder = folder
        self._check_sums = check_sums
        self._readers: dict[str, DataReader] = {}

    @property
    def num_read(self) -> int:
        """Bytes read so far."""
        return sum(reader.num_read for reader in self._readers.values())

    def verify_all(self, wanted: Iterable[Wanted]) -> None:
        """Reads and verifies the bytes that :meth:`fill_all` copies. Raises CheckpointError."""
        for name, boxes in self._in_order(wanted):
            self.verify(name, boxes)

    def fill_all(self, wanted: Iterable[Wanted]) -> None:
        """Fills the boxes of all ``wanted``, reading no more than they need. Raises CheckpointError."""
        for name, boxes in self._in_order(wanted):
            self.fill(name, boxes)

    def are_equal(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """Returns for each of ``pairs`` of names whether the two tensors are equal."""
        return [torch.equal(self.whole(one), self.whole(other)) for one, other in pairs]

    def fill(self, name: str, boxes: Sequence[HeldBox]) -> None:
        """Copies the tensor ``name`` into ``boxes``, reading no more than they need. Raises CheckpointError."""
        for box, part, dtype, data in self._read(name, boxes):
            copy_from(part, torch.frombuffer(data, dtype=dtype).view(part.sizes), [box])

    def verify(self, name: str, boxes: Sequence[HeldBox] | None = None) -> None:
        """Reads and verifies the boxes, or without any the whole tensor ``name``. Raises CheckpointError."""
        if boxes is None:
            shape = self.known(name).shape
            boxes = [HeldBox((0,) * len(shape), torch.empty(shape, device="meta"))]
        for _ in self._read(name, boxes):
            pass

    def _read(self, name: str, boxes: Sequence[HeldBox]) -> Iterator[tuple[HeldBox, Piece, torch.dtype, memoryview]]:
        """Yields a box, the rows of a piece that it needs, and their type and bytes."""
        entry = self.known(name)
        seen = set()
        dtype: torch.dtype = getattr(torch, entry.dtype)
        for piece in entry.pieces:
            # Several stages of a pipeline may have written the same box, as of a tied embedding.
            if (piece.offsets, piece.sizes) in seen or not piece.numel:
                continue
            seen.add((piece.offsets, piece.sizes))
            for box in boxes:
                for first, last in _in_chunks(piece, entry, row_range(piece, box)):
                    part, end = _rows_of(piece, dtype, first, last)
                    reader = self._reader(piece.file)
                    yield box, part, dtype, reader.range(part.begin, end)
                    reader.release(part.begin, end)

    def whole(self, name: str) -> Tensor:
        """Returns the whole tensor ``name``, in new memory."""
        wanted = Wanted()
        whole = wanted.add_whole(self, name)
        self.fill(name, wanted.boxes[name])
        return whole

    def close(self) -> None:
        """Closes the files."""
        for reader in self._readers.values():
            reader.close()

    def _reader(self, name: str) -> DataReader:
        if name not in self._readers:
            label = f"{self._folder.path}/{name}"
            described = self.index.files[name]
            self._readers[name] = DataReader(self._folder.open_ranges(name), described, label, self._check_sums)
        return self._readers[name]


def _rows_of(piece: Piece, dtype: torch.dtype, first: int, last: int) -> tuple[Piece, int]:
    """Returns the rows of ``piece`` from ``first`` up to ``last`` as a piece, and where its bytes end."""
    if not piece.sizes:
        return piece, piece.begin + dtype.itemsize
    row = piece.numel // piece.sizes[0] * dtype.itemsize
    offsets = (piece.offsets[0] + first, *piece.offsets[1:])
    part = Piece(piece.file, piece.begin + first * row, offsets, (last - first, *piece.sizes[1:]))
    return part, piece.begin + last * row


def _in_chunks(piece: Piece, entry: TensorEntry, rows: tuple[int, int] | None) -> Iterator[tuple[int, int]]:
    """Yields ``rows`` a few at a time: verified and copied while they are in the processor's cache, then released."""
    if rows is not None:
        row = piece.numel // (piece.sizes[0] if piece.sizes else 1) * DTYPES[entry.dtype][0]
        step = max(1, _CHUNK_BYTES // row)
        for first in range(rows[0], rows[1], step):
            yield first, min(first + step, rows[1])


def misfits(items: Mapping[str, tuple[int, ...]], found: Mapping[str, TensorEntry | None]) -> list[str]:
    """Returns, as texts, which ``items`` (names and whole shapes) differ from the entries of a checkpoint."""
    missing = [name for name in items if found.get(name) is None]
    shapes = [
        f"{name!r} is {list(entry.shape)} in the checkpoint and {list(shape)} here"
        for name, shape in items.items()
        if (entry := found.get(name)) is not None and entry.shape != shape
    ]
    texts = [f"missing: {missing[:6]!r} ({len(missing)} in all)"] if missing else []
    return texts + ([f"of another shape: {'; '.join(shapes[:4])} ({len(shapes)} in all)"] if shapes else [])
