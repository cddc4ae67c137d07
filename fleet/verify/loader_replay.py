"""Batches: workers write down what their DataLoaders gave, and one process gets the batches of all, joined."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from fleet.verify.draw_joins import filled_up
from fleet.verify.generator_states import generator_states, kept_states, set_states
from fleet.verify.record_files import RecordFile, read_record
from fleet.verify.tensor_digest import content
from fleet.verify.tensor_files import load_tensors, pack, save_tensors, unpack
from fleet.verify.user_lines import user_site

_OWN_LENGTHS = (
    "the batches of the workers have different shapes (padded to their own longest sample), and the data set and the "
    "collate_fn of the loader do not give one process all of their samples in one batch"
)


_MOST_AHEAD = 64  # batches of one loop that are kept before a model is trained with them


class CannotReplay(Exception):
    """One process cannot be given what the workers had; the text says why."""


class ReplayedBatches:
    """What the DataLoaders of this process give.

    A batch is written down once a model is trained with it; batches of an evaluation are not. With ``sources``, the
    folders of the workers' records in the order of their samples, a DataLoader gives their batches joined or, where
    ``in_turn``, one after the other.
    """

    def __init__(
        self,
        record: RecordFile,
        entered: Callable[[bool], None],
        sources: Sequence[Path] = (),
        *,
        in_turn: bool = False,
    ) -> None:
        self.record = record
        self.entered = entered
        self.sources = list(sources)
        self.in_turn = in_turn
        self._sites: Counter[str] = Counter()
        self._rounds: Counter[str] = Counter()
        self._pending: dict[str, list[tuple[dict[str, Any], list[Tensor]]]] = {}
        self._evaluated: set[str] = set()
        self._given: Counter[str] = Counter()  # batches of each loader since a model was trained
        self._newest = ""
        self._taking = False  # whether several batches are taken, each of which is trained with afterwards
        self._described: set[str] = set()
        self.asking: _Loop | None = None  # the loop that waits for its next batch
        self._files = 0
        self._padded = False
        self._table = _table_of(self.sources)
        first = read_record(self.sources[0], "loader", "round_end", "last") if self.sources else []
        loaders = [one for one in first if one["kind"] == "loader"]
        self._workers_keys = {one["key"] for one in loaders}
        # Loops that came to the end of their loader.
        self._over = {(one["key"], one["round"]) for one in first if one["kind"] != "loader"}
        turns = len(self.sources) if in_turn else 1
        self.lengths = {one["key"]: turns * one["length"] for one in loaders if one["length"] is not None}

    @property
    def has_begun(self) -> bool:
        """Whether a loop over a DataLoader has begun."""
        return bool(self._rounds)

    def key_of(self, loader: Any) -> str:
        """Returns the name of a DataLoader, equal on every worker: the line that made it."""
        key: str = loader.__dict__.get("_fleet_key", "")
        if not key:
            site = user_site()
            self._sites[site] += 1
            key = f"{site}#{self._sites[site]}"
            loader.__dict__["_fleet_key"] = key
        return key

    def begin(self, loader: Any, outer: Any = None) -> tuple[str, int]:
        """Returns the loader's name and the number of this loop over it, or over the loader ``outer`` around it."""
        key = self.key_of(loader)
        if self._table and key not in self._workers_keys:
            key = loader.__dict__["_fleet_key"] = self._instead_of(key)
        self._rounds[key] += 1
        if key not in self._described:
            self._described.add(key)
            length = _length(loader if outer is None else outer)
            self.record.write("loader", key=key, **{**_facts(loader), "length": length})
        sampler = getattr(loader, "sampler", None)
        self.record.write("round", key=key, round=self._rounds[key], epoch=getattr(sampler, "epoch", None))
        return key, self._rounds[key]

    def _instead_of(self, key: str) -> str:
        """Returns the name of the loader whose place one with the unknown name ``key`` takes in this process.

        A script may make its loader on one line where it divides the data, and on another where it does not.
        """
        trained = {name for table in self._table for name, _ in table}
        missing = [name for name in trained if int(name.rpartition("#")[2]) > self._sites[name.rpartition("#")[0]]]
        return missing[0] if len(missing) == 1 else key

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
        for seen in self._evaluated:
            self._pending.pop(seen, None)
        self._evaluated.clear()
        kept = self._pending.get(key, [])
        # A loop may take several batches and then train with each, or pass over some: one process does so, too.
        follows = bool(kept) and kept[-1][0]["round"] == number[0] and len(kept) < _MOST_AHEAD
        kept = kept if follows or self._taking else []
        self._pending[key] = [*kept, (facts, [tensor.detach().clone() for tensor in tensors])]
        self._given[key] = 1 if self._taking else self._given[key] + 1
        self._newest = key

    def trained(self) -> None:
        """Writes down the batches that were given since the last call, but for those of an evaluation in between.

        A pass without gradients makes one batch no evaluation: a teacher sees what a model is about to be trained with.
        """
        for key, kept in self._pending.items():
            if key in self._evaluated and self._given[key] > 1:
                continue
            self._write(kept)
        self._pending.clear()
        self._evaluated.clear()
        self._given.clear()

    def _write(self, kept: Sequence[tuple[dict[str, Any], list[Tensor]]]) -> None:
        for facts, tensors in kept:
            self._files += 1
            name = f"batch{self._files}.npz"
            save_tensors(self.record.folder / name, {str(j): tensor for j, tensor in enumerate(tensors)})
            self.record.write("batch", file=name, rows=rows_of(tensors), **facts)

    def evaluated(self) -> None:
        """Notes a pass without gradients through the newest batch: it is forgotten once a loader gives another one."""
        if self._newest in self._pending:
            self._evaluated.add(self._newest)

    def ended(self, key: str, number: tuple[int, int], *, is_trained: bool = False) -> None:
        """Notes that a loop came to the end of its loader; ``is_trained`` keeps its last batch."""
        if not self._taking and not is_trained:
            self._pending.pop(key, None)
        self.record.write("round_end", key=key, round=number[0], n=number[1])

    def around_batches(self, take: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a call that takes several batches, each of which a model is trained with afterwards."""

        @wraps(take)
        def taken(*args: Any, **kwargs: Any) -> Any:
            self._taking = True
            try:
                return take(*args, **kwargs)  # hands on
            finally:
                self._taking = False

        return taken

    def around_loop(
        self, loop: Callable[..., Any], base: Callable[[Any], Any], is_last: Callable[[Any], bool], *, own_batches: bool
    ) -> Callable[..., Any]:
        """Returns ``__iter__`` of a loader around the DataLoader ``base(loader)``, which may take batches ahead.

        ``own_batches`` says that what it gives are batches of that one; ``is_last(loader)`` that it gave the last.
        """

        @wraps(loop)
        def iterated(loader: Any) -> Any:
            inside = base(loader)
            inside.__dict__["_fleet_ahead"] = own_batches
            if self.sources:
                return loop(loader)
            return _Loop(self, inside, loop(loader), *self.begin(inside, loader), is_last=partial(is_last, loader))

        return iterated

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
            groups = tensors if self.in_turn else [self._whole(loader, parts, list(zip(*tensors, strict=True)))]
            for part, group in zip(parts, groups, strict=False):
                self.entered(False)
                yield unpack(part["packed"], group)
        ahead = "_fleet_ahead" in loader.__dict__ or "_fleet_looks_ahead" in loader.__dict__
        if loops[0] and ahead and (key, number) not in self._over:
            # The workers' loop went on: a loader that looks ahead is not to take the last batch for the end.
            yield unpack(part["packed"], group)

    def _whole(self, loader: Any, parts: Sequence[dict[str, Any]], groups: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Returns each tensor of one batch, which the workers had in parts; padded to the longest of all workers."""
        if not any(_is_padded(group) for group in groups):
            return [_join(group) for group in groups]
        filled: list[Tensor] = []
        if all(part["indices"] is not None for part in parts) and not isinstance(loader.dataset, IterableDataset):
            self.entered(True)  # what the collator draws here is no draw of the training loop
            with kept_states(), suppress(Exception):
                samples = [loader.dataset[i] for part in parts for i in part["indices"]]
                pack(loader.collate_fn(samples), filled)
        if len(filled) != len(groups):
            raise CannotReplay(_OWN_LENGTHS)
        if not self._padded:
            self._padded = True
            self.record.write("padded", key=parts[0]["key"])
        return [
            _pad(group, like) if _is_padded(group) else _join(group) for group, like in zip(groups, filled, strict=True)
        ]

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
    return torch.cat(list(parts))


def _is_padded(parts: Sequence[Tensor]) -> bool:
    """Returns whether the rows of the parts have different shapes."""
    return any(part.ndim and part.shape[1:] != parts[0].shape[1:] for part in parts)


def _pad(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """Returns the parts below each other, filled up with what ``like`` has there: all samples in one batch."""
    made = filled_up(like, parts) if like.dtype == parts[0].dtype else None
    if made is None:
        raise CannotReplay(_OWN_LENGTHS)
    return made


def _table_of(sources: Sequence[Path]) -> list[dict[tuple[str, int], list[dict[str, Any]]]]:
    tables: list[dict[tuple[str, int], list[dict[str, Any]]]] = []
    for source in sources:
        table: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for one in read_record(source, "batch"):
            table.setdefault((one["key"], one["round"]), []).append(one)
        tables.append(table)
    return tables


def _facts(loader: Any) -> dict[str, Any]:
    sampler, divided, fill = (None, 1, 0) if isinstance(loader.dataset, IterableDataset) else _sampler_of(loader)
    planned = None if sampler is None else _length(sampler)
    return {
        "iterable": isinstance(loader.dataset, IterableDataset),
        "samples": _length(loader.dataset),
        "planned": planned if planned is None else -(-planned // divided),
        "length": _length(loader),
        "batch_size": loader.batch_size,
        "sampler": type(sampler).__name__,
        "replicas": getattr(sampler, "num_replicas", divided if divided > 1 else None),
        "fill": fill,
        "shuffles": bool(getattr(sampler, "shuffle", False)) and hasattr(sampler, "set_epoch"),
    }


def _sampler_of(loader: Any) -> tuple[Any, int, int]:
    """Returns what chooses the samples, among how many workers its batches are dealt out, and how many fill an epoch.

    A ``batch_sampler=`` of the user's leaves a loader's own sampler unused; one may deal out the batches of another.
    """
    batches = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    divided, fill = 1, 0
    while hasattr(batches, "batch_sampler"):
        divided *= getattr(batches, "num_processes", 1)
        fill = divided * (getattr(batches, "batch_size", 0) or 0) if getattr(batches, "even_batches", False) else fill
        batches = batches.batch_sampler
    sampler = getattr(batches, "sampler", batches)
    if isinstance(sampler, DistributedSampler):
        fill += max(0, sampler.total_size - (_length(sampler.dataset) or 0))
    return sampler, divided, fill


def _length(thing: Any) -> int | None:
    try:
        return len(thing)
    except TypeError:
        return None


class _Loop:
    """An iterator over a DataLoader, or over a loader around it, that tells what it gives.

    ``source`` is torch's iterator over the DataLoader; None where its batches are not those of this loop.
    """

    def __init__(
        self,
        batches: ReplayedBatches,
        loader: Any,
        inner: Any,
        key: str,
        number: int,
        *,
        source: Any = None,
        is_last: Callable[[], bool] = lambda: False,
    ) -> None:
        self._is_last = is_last
        self.loader = loader
        self.source = source
        self._batches = batches
        self._inner = inner
        self._key = key
        self._round = number
        self._n = 0
        self._late: Callable[[], None] | None = None  # tells of a batch that was taken ahead of training

    def __iter__(self) -> _Loop:
        return self

    def __len__(self) -> int:
        return len(self._inner)  # hands on

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # hands on

    def __next__(self) -> Any:
        self._batches.entered(True)
        before, self._batches.asking = self._batches.asking, self
        try:
            batch = next(self._inner)  # hands on
        except StopIteration:
            if self._late is None:
                self._batches.ended(self._key, (self._round, self._n))
            else:  # the last batch is trained with from now on
                self._tell(None)
                self._batches.ended(self._key, (self._round, self._n), is_trained=True)
            raise
        finally:
            self._batches.asking = before
            self._batches.entered(before is not None)
        known = {} if self.source is None else self.source.__dict__
        asked = known.get("_fleet_asked", [])
        indices = _numbers(asked[self._n]) if self._n < len(asked) else None
        samples = None if indices is None else [_sample(self.loader.dataset, i) for i in indices]
        states = known.get("_fleet_states") if (self._round, self._n) == (1, 0) else None
        self._tell(partial(self._batches.gave, self._key, (self._round, self._n), batch, indices, samples, states))
        if self._is_last():
            self._batches.record.write("last", key=self._key, round=self._round)
        self._n += 1
        return batch

    def _tell(self, give: Callable[[], None] | None) -> None:
        """Tells of a batch; of one that is taken to look ahead, when the next is taken and this one is trained with."""
        if "_fleet_looks_ahead" in self.loader.__dict__:
            taken = give
            give = self._late
            self._late = taken
        if give is not None:
            give()


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

    @wraps(build)
    def built(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)  # hands on
        batches.key_of(self)

    def iterated(self: Any) -> Any:
        outer = batches.asking
        batches.entered(True)
        try:
            begun = iterate(self)
        finally:
            batches.entered(outer is not None)
        if outer is not None and outer.loader is self:  # a loader around this one takes the batches
            outer.source = begun if self.__dict__["_fleet_ahead"] else None
            return begun
        key, number = batches.begin(self)
        joined = batches.joined(self, key, number)
        return _Loop(batches, self, begun, key, number, source=begun) if joined is None else joined

    def long(self: Any) -> int:
        known = batches.lengths.get(self.__dict__.get("_fleet_key", ""))
        return length(self) if known is None else known

    loader: Any = DataLoader
    loader.__init__, loader.__iter__, loader.__len__ = built, iterated, long
    _watch_indices()


def _watch_indices() -> None:
    """Makes the iterators of loaders keep the indices that they have asked for, and the generators' states then."""
    inner: Any = _BaseDataLoaderIter
    ask, reset = inner._next_index, inner._reset

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

    inner._next_index, inner._reset = asked, cleared
