"""Batches: workers write down what their DataLoaders gave, and one process gets the batches of all, joined."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from fleet.verify.generator_states import generator_states, kept_states, set_states
from fleet.verify.record_files import RecordFile, read_record
from fleet.verify.tensor_digest import content
from fleet.verify.tensor_files import load_tensors, pack, save_tensors, unpack
from fleet.verify.user_lines import user_site


class CannotReplay(Exception):
    """One process cannot be given what the workers had; the text says why."""


class ReplayedBatches:
    """What the DataLoaders of this process give.

    A batch is written down once a model is trained with it; batches of an evaluation are not. With ``sources``, the
    folders of the workers' records in the order of their samples, a DataLoader gives their batches joined.
    """

    def __init__(self, record: RecordFile, entered: Callable[[bool], None], sources: Sequence[Path] = ()) -> None:
        self.record, self.entered, self.sources = record, entered, list(sources)
        self._sites: Counter[str] = Counter()
        self._rounds: Counter[str] = Counter()
        self._pending: dict[str, tuple[dict[str, Any], list[Tensor]]] = {}
        self._described: set[str] = set()
        self._files = 0
        self._table = _table_of(self.sources)
        self.lengths = _lengths_of(self.sources)

    def key_of(self, loader: Any) -> str:
        """Returns the name of a DataLoader, equal on every worker: the line that made it."""
        key: str = loader.__dict__.get("_fleet_key", "")
        if not key:
            site = user_site()
            self._sites[site] += 1
            key = f"{site}#{self._sites[site]}"
            loader.__dict__["_fleet_key"] = key
        return key

    def begin(self, loader: Any) -> tuple[str, int]:
        """Returns the loader's name and the number of this loop over it."""
        key = self.key_of(loader)
        self._rounds[key] += 1
        if key not in self._described:
            self._described.add(key)
            self.record.write("loader", key=key, **_facts(loader))
        sampler = getattr(loader, "sampler", None)
        self.record.write("round", key=key, round=self._rounds[key], epoch=getattr(sampler, "epoch", None))
        return key, self._rounds[key]

    def gave(
        self, key: str, number: tuple[int, int], batch: Any, indices: Any, samples: Any, states: Any = None
    ) -> None:
        """Keeps a batch until it is known whether a model is trained with it.

        ``states`` are those of the generators when it was asked for.
        """
        tensors: list[Tensor] = []
        try:
            packed = pack(batch, tensors)
        except TypeError as error:
            self.record.write("unpacked", key=key, why=str(error))
            return
        facts = {"key": key, "round": number[0], "n": number[1], "packed": packed, "indices": indices}
        facts["samples"] = samples
        if states is not None:
            facts["states"] = states
        self._pending[key] = (facts, [tensor.detach().clone() for tensor in tensors])

    def trained(self) -> None:
        """Writes down the batches that were given since the last call."""
        for facts, tensors in self._pending.values():
            self._files += 1
            name = f"batch{self._files}.npz"
            save_tensors(self.record.folder / name, {str(j): tensor for j, tensor in enumerate(tensors)})
            self.record.write("batch", file=name, rows=rows_of(tensors), **facts)
        self._pending.clear()

    def evaluated(self) -> None:
        """Forgets the batches that were given since the last call."""
        self._pending.clear()

    def ended(self, key: str, number: tuple[int, int]) -> None:
        """Notes that a loop came to the end of its loader."""
        self._pending.pop(key, None)
        self.record.write("round_end", key=key, round=number[0], n=number[1])

    def joined(self, loader: Any, key: str, number: int) -> Iterator[Any] | None:
        """Returns the workers' batches of this loop, joined; ``None`` where no model was trained with them."""
        if not any(table.get((key, number)) for table in self._table):
            return None
        return self._joined(loader, key, number)

    def _joined(self, loader: Any, key: str, number: int) -> Iterator[Any]:
        loops = [table.get((key, number), []) for table in self._table]
        for n, parts in enumerate(zip(*loops, strict=False)):
            if number == 1 and n == 0:
                self._compare_data(loader, key, parts)
            files = [source / part["file"] for source, part in zip(self.sources, parts, strict=True)]
            tensors = [list(load_tensors(file).values()) for file in files]
            self.entered(False)
            yield unpack(parts[0]["packed"], [_join(group) for group in zip(*tensors, strict=True)])

    def _compare_data(self, loader: Any, key: str, parts: Sequence[dict[str, Any]]) -> None:
        """Notes whether the data set gives this process what it gave the workers for the same samples."""
        equal = False
        if all(part["indices"] is not None for part in parts) and not isinstance(loader.dataset, IterableDataset):
            self.entered(True)  # what the data set draws here is no draw of the training loop
            with kept_states() as states, suppress(Exception):
                equal = _gives_the_same(loader, parts, states)
        self.record.write("data", key=key, equal=equal)


def _gives_the_same(loader: Any, parts: Sequence[dict[str, Any]], states: dict[str, Any]) -> bool:
    """Returns whether the data set gives what it gave the workers, if need be with the generators as they were.

    That these are seeded is known where worker 0 had the states that this process has.
    """
    if all(_rows_from(loader, part["indices"]) == part["rows"] for part in parts):
        return True
    if parts[0].get("states") != states:
        return False
    for part in parts:
        set_states(part["states"])
        if _rows_from(loader, part["indices"]) != part["rows"]:
            return False
    return True


def _rows_from(loader: Any, indices: Sequence[int]) -> list[str]:
    tensors: list[Tensor] = []
    pack(loader.collate_fn([loader.dataset[i] for i in indices]), tensors)
    return rows_of(tensors)


def rows_of(tensors: Sequence[Tensor]) -> list[str]:
    """Returns a hash of each sample in the tensors of a batch."""
    sizes = Counter(tensor.shape[0] for tensor in tensors if tensor.ndim)
    if not sizes:
        return []
    size = sizes.most_common(1)[0][0]
    whole = [tensor for tensor in tensors if tensor.ndim and tensor.shape[0] == size]
    return ["".join(content(tensor[i]) for tensor in whole) for i in range(size)]


def _join(parts: Sequence[Tensor]) -> Tensor:
    first = parts[0]
    if first.ndim == 0:
        if all(torch.equal(part, first) for part in parts):
            return first
        raise CannotReplay("the batches hold numbers without a dimension that differ between the workers")
    if any(part.shape[1:] != first.shape[1:] for part in parts):
        raise CannotReplay("the batches of the workers have different shapes (padded to their own longest sample)")
    return torch.cat(list(parts))


def _table_of(sources: Sequence[Path]) -> list[dict[tuple[str, int], list[dict[str, Any]]]]:
    tables: list[dict[tuple[str, int], list[dict[str, Any]]]] = []
    for source in sources:
        table: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for one in read_record(source, "batch"):
            table.setdefault((one["key"], one["round"]), []).append(one)
        tables.append(table)
    return tables


def _lengths_of(sources: Sequence[Path]) -> dict[str, int]:
    found: dict[str, int] = {}
    for source in sources[:1]:
        for one in read_record(source, "loader"):
            if one["length"] is not None:
                found[one["key"]] = one["length"]
    return found


def _facts(loader: Any) -> dict[str, Any]:
    sampler = None if isinstance(loader.dataset, IterableDataset) else loader.sampler
    return {
        "iterable": isinstance(loader.dataset, IterableDataset),
        "samples": _length(loader.dataset),
        "planned": None if sampler is None else _length(sampler),
        "length": _length(loader),
        "batch_size": loader.batch_size,
        "sampler": type(sampler).__name__,
        "replicas": getattr(sampler, "num_replicas", None),
        "shuffles": bool(getattr(sampler, "shuffle", False)) and hasattr(sampler, "set_epoch"),
    }


def _length(thing: Any) -> int | None:
    try:
        return len(thing)
    except TypeError:
        return None


class _Loop:
    """An iterator over a DataLoader that tells what it gives."""

    def __init__(self, batches: ReplayedBatches, loader: Any, inner: Any, key: str, number: int) -> None:
        self._batches, self._data, self._inner = batches, loader.dataset, inner
        self._key, self._round, self._n = key, number, 0

    def __iter__(self) -> _Loop:
        return self

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __next__(self) -> Any:
        self._batches.entered(True)
        try:
            batch = next(self._inner)
        except StopIteration:
            self._batches.ended(self._key, (self._round, self._n))
            raise
        finally:
            self._batches.entered(False)
        asked = self._inner.__dict__.get("_fleet_asked", [])
        indices = _numbers(asked[self._n]) if self._n < len(asked) else None
        samples = None if indices is None else [_sample(self._data, i) for i in indices]
        states = self._inner.__dict__.get("_fleet_states") if (self._round, self._n) == (1, 0) else None
        self._batches.gave(self._key, (self._round, self._n), batch, indices, samples, states)
        self._n += 1
        return batch


def _numbers(index: Any) -> list[int] | None:
    try:
        return [int(i) for i in index] if isinstance(index, list | tuple) else [int(index)]
    except (TypeError, ValueError):
        return None


def _sample(data: Any, index: int) -> int:
    """Returns the index of a sample in the data set that subsets are made of."""
    while isinstance(data, Subset):
        data, index = data.dataset, int(data.indices[index])
    return index


def install_batches(batches: ReplayedBatches) -> None:
    """Makes every DataLoader of this process tell ``batches`` what it gives, or give what the workers had."""
    build: Any = DataLoader.__init__
    iterate, length = DataLoader.__iter__, DataLoader.__len__
    inner: Any = _BaseDataLoaderIter
    ask, reset = inner._next_index, inner._reset

    @wraps(build)
    def built(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        batches.key_of(self)

    def iterated(self: Any) -> Any:
        batches.entered(True)
        try:
            begun = iterate(self)
        finally:
            batches.entered(False)
        key, number = batches.begin(self)
        joined = batches.joined(self, key, number)
        return _Loop(batches, self, begun, key, number) if joined is None else joined

    def long(self: Any) -> int:
        known = batches.lengths.get(self.__dict__.get("_fleet_key", ""))
        return length(self) if known is None else known

    def asked(self: Any) -> Any:
        index = ask(self)
        known = self.__dict__.setdefault("_fleet_asked", [])
        if not known:
            self.__dict__["_fleet_states"] = generator_states()
        known.append(index)
        return index

    def cleared(self: Any, *args: Any, **kwargs: Any) -> None:
        self.__dict__["_fleet_asked"] = []
        reset(self, *args, **kwargs)

    loader: Any = DataLoader
    loader.__init__, loader.__iter__, loader.__len__ = built, iterated, long
    inner._next_index, inner._reset = asked, cleared
