"""BatchRows: the rows of a whole batch, requested in one message for all tables before the model looks them up.

[Note: How the ids of a batch are known before its lookups]
Eager modules look up one table after the other, so a batch alone does not say which of its numbers are whose ids.
While the loop works with a batch, each lookup is heard, and its ids are searched among the batch's tensors: a whole
tensor, or neighbouring columns of it. The place that was found is where the next batch has the ids of that lookup. Each
lookup compares its ids with those whose rows were requested, see [Note: Rows that were requested before their lookup],
so a place that was right by chance costs a message and is searched anew. Ids that are in no batch are computed inside
the model; after a few batches nobody searches for them any more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fleet.errors import ConfigError
from fleet.ps.client.shards import Keys
from fleet.ps.embeddings.lookup import ExpectedRows, Request, RowLookup, TrainedRows

_TRIES = 3  # batches in which the ids of a lookup are searched in vain
_DEPTH = 4  # of containers in a batch
_END = object()


class LooksUp(Protocol):
    """A module that looks up rows of one table."""

    lookup: RowLookup

    def keys_of(self, ids: Tensor) -> Keys:
        """Returns what the lookup is given for ``ids``; raises for ids that it refuses."""


@dataclass(frozen=True)
class IdPlace:
    """Where ids are in a batch: ``width`` columns of a tensor from ``start`` on along ``dim``; 0: the whole tensor."""

    path: tuple[Any, ...]  # keys, indices and names of attributes
    dim: int = 0
    start: int = 0
    width: int = 0

    def read(self, batch: Any) -> Tensor | None:
        """Returns the ids of ``batch``, int64 or another type of integer; ``None`` where it has none there."""
        for step in self.path:
            try:
                batch = getattr(batch, step.name) if isinstance(step, _Attribute) else batch[step]
            except (KeyError, IndexError, TypeError, AttributeError):
                return None
        tensor = _tensor_of(batch)
        if tensor is None:
            return None
        if self.width:
            if tensor.ndim <= self.dim or tensor.shape[self.dim] < self.start + self.width:
                return None
            tensor = tensor.narrow(self.dim, self.start, self.width)
        tensor = tensor.detach().cpu()
        return tensor.long() if tensor.is_floating_point() else tensor


@dataclass(frozen=True)
class _Attribute:
    name: str


def _tensor_of(value: Any) -> Tensor | None:
    """Returns ``value`` as a tensor if it may hold ids: integers, or floats, which some models cast."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "iuf":
        value = torch.from_numpy(value)
    if not isinstance(value, Tensor) or value.dtype is torch.bool or value.is_complex() or value.requires_grad:
        return None
    return value if value.layout is torch.strided and not value.is_nested else None


def _leaves(batch: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """Yields the tensors of a batch with the way to each."""
    tensor = _tensor_of(batch)
    if tensor is not None:
        yield path, tensor
    elif len(path) < _DEPTH:
        for step, value in _members(batch):
            yield from _leaves(value, (*path, step))


def _members(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, list | tuple):
        return enumerate(value)
    if is_dataclass(value):
        return [(_Attribute(field.name), getattr(value, field.name)) for field in fields(value)]
    return ()


def _places(batch: Any, count: int) -> list[IdPlace]:
    """Returns where a batch has ``count`` ids or, where padding is left out of them, more."""
    found = []
    for path, tensor in _leaves(batch):
        if tensor.numel() >= count:
            found.append(IdPlace(path))
        for dim in sorted({1, tensor.ndim - 1} - {0}) if tensor.ndim > 1 else ():
            size = tensor.shape[dim]
            each = tensor.numel() // max(size, 1)
            widths = {1, count // each if each and not count % each else 1}
            found += [
                IdPlace(path, dim, start, width)
                for width in sorted(widths)
                for start in range(size - width + 1)
                if each * width >= count
            ]
    return found


class _IdPlaces:
    """The places at which the lookups of a loop find their ids."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.known: dict[tuple[LooksUp, int], IdPlace] = {}
        self._vain: dict[tuple[LooksUp, int], int] = defaultdict(int)
        self._last: IdPlace | None = None

    def search(self, call: tuple[LooksUp, int], ids: Keys, batch: Any) -> None:
        """Notes where ``batch`` has the ids of a call: a module, and how often the batch was looked up in it before."""
        known = self.known.get(call)
        # Known ids may have come without a request: of the first batches, after a flush, or in geo mode.
        if self._vain[call] >= _TRIES or (known is not None and _has(known, batch, call[0], ids)):
            return
        places = _places(batch, len(ids))
        # Models read their features in order: the place behind the last one comes first.
        first = places.index(self._last) + 1 if self._last in places else 0
        for place in (*places[first:], *places[:first]):
            if _has(place, batch, call[0], ids):
                self.known[call] = self._last = place
                return
        self.known.pop(call, None)
        self._vain[call] += 1
        if self._vain[call] == _TRIES:
            self._say(
                f"fleet.prefetch(): {call[0].lookup.label} looks up ids that no batch holds, so they are computed in "
                "the model. Their rows are requested at each lookup, in a message of their own."
            )


def _has(place: IdPlace, batch: Any, module: LooksUp, ids: Keys) -> bool:
    tensor = place.read(batch)
    if tensor is None:
        return False
    try:
        return np.array_equal(module.keys_of(tensor), ids)
    except (IndexError, ConfigError):  # numbers that are no ids of this module
        return False


class BatchRows:
    """Requests the rows of coming batches for the lookups of a model.

    Args:
        modules: by table.
        request: requests rows, see :data:`fleet.ps.embeddings.lookup.Request`.
        say: receives each line meant for the user.
    """

    def __init__(
        self, modules: Mapping[int, Sequence[LooksUp]], request: Request, say: Callable[[str], None] = print
    ) -> None:
        self._tables = {id(module): table_id for table_id, group in modules.items() for module in group}
        self._by_lookup = {id(module.lookup): module for group in modules.values() for module in group}
        self._modules = [module for group in modules.values() for module in group]
        self._request = request
        self._places = _IdPlaces(say)
        self._batch: Any = None
        self._calls: dict[LooksUp, int] = defaultdict(int)
        self._with_gradients: bool | None = None  # of the loop; lookups of the other kind belong to no batch of it
        self._expected: list[tuple[RowLookup, ExpectedRows]] = []
        self._leftover: list[tuple[RowLookup, ExpectedRows]] = []

    def request(self, batch: Any, is_next: bool) -> None:
        """Requests the rows of ``batch``, for the next step while this one is computed, or for this step."""
        wanted: dict[int, list[tuple[LooksUp, Keys, Keys, Any]]] = defaultdict(list)
        for (module, _), place in self._places.known.items():
            tensor = place.read(batch)
            if tensor is None or not isinstance(module.lookup.source, TrainedRows):
                continue
            try:
                # A copy: the loop may write to the batch before its lookups.
                ids = np.array(module.keys_of(tensor))
            except (IndexError, ConfigError):
                continue  # the lookup says what is wrong, at the line of the model
            wanted[self._tables[id(module)]].append((module, ids, *module.lookup.distinct(ids)))
        if not wanted:
            return
        asked = {table_id: np.concatenate([keys for _, _, keys, _ in calls]) for table_id, calls in wanted.items()}
        coming = self._request(asked, is_next)
        if coming is None:
            return
        for calls in wanted.values():
            start = 0
            for module, ids, keys, inverse in calls:
                assert module.lookup.source is not None
                module.lookup.source.asked += len(keys)
                rows = ExpectedRows(ids, keys, inverse, coming, start)
                module.lookup.expect(rows)
                self._expected.append((module.lookup, rows))
                start += len(keys)

    def begin(self, batch: Any, requested: int) -> None:
        """Hears the lookups from here on: the loop works with ``batch``.

        ``requested`` of the rows that were requested last belong to a later batch; what earlier batches left is
        forgotten.
        """
        self._forget(self._leftover)
        kept = len(self._expected) - requested
        self._leftover = self._expected[:kept]
        self._expected = self._expected[kept:]
        self._batch = batch
        self._calls.clear()
        for module in self._modules:
            module.lookup.heard = self._hear

    @property
    def num_expected(self) -> int:
        """How many lookups of batches that did not begin are expected."""
        return len(self._expected)

    def end(self) -> None:
        """Hears no lookups any more, and forgets what was requested."""
        self._batch = None
        for module in self._modules:
            if module.lookup.heard == self._hear:
                module.lookup.heard = None
        self._forget(self._leftover)
        self._forget(self._expected)

    @staticmethod
    def _forget(rows: list[tuple[RowLookup, ExpectedRows]]) -> None:
        for lookup, expected in rows:
            lookup.give_up(expected)
        rows.clear()

    def _hear(self, lookup: RowLookup, ids: Keys, was_expected: bool) -> None:
        if self._with_gradients is None:
            self._with_gradients = torch.is_grad_enabled()
        module = self._by_lookup.get(id(lookup))
        if module is None or torch.is_grad_enabled() is not self._with_gradients:
            return
        call = (module, self._calls[module])
        self._calls[module] += 1
        if not was_expected and len(ids):
            self._places.search(call, ids, self._batch)


class Prefetched:
    """The batches of a loader, whose rows are requested before the model looks them up.

    Args:
        loader: any iterable of batches.
        connected: returns what requests rows, and whether it may be asked for those of the next step; ``None`` where
            no rows are on servers.
    """

    def __init__(self, loader: Iterable[Any], connected: Callable[[], tuple[BatchRows, bool] | None]) -> None:
        self.loader = loader
        self._connected = connected

    def __iter__(self) -> Iterator[Any]:
        connected = self._connected()
        if connected is None:
            yield from self.loader
            return
        rows, reads_ahead = connected
        try:
            yield from _ahead(self.loader, rows) if reads_ahead else _at_once(self.loader, rows)
        finally:
            rows.end()

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name in ("loader", "_connected"):  # a copy that is being made has none yet
            raise AttributeError(name)
        return getattr(self.loader, name)


def _at_once(loader: Iterable[Any], rows: BatchRows) -> Iterator[Any]:
    """Yields each batch when its rows were requested for the step that it is for."""
    for batch in loader:
        rows.begin(batch, 0)
        rows.request(batch, False)
        yield batch


def _ahead(loader: Iterable[Any], rows: BatchRows) -> Iterator[Any]:
    """Yields each batch when the rows of the one behind it were requested."""
    batches = iter(loader)
    batch = next(batches, _END)
    first = {path: tensor.clone() for path, tensor in _leaves(batch)}
    while batch is not _END:
        following = next(batches, _END)
        _check_unchanged(batch, first)
        first = {}
        before = rows.num_expected
        if following is not _END:
            rows.request(following, True)
        rows.begin(batch, rows.num_expected - before)
        yield batch
        batch = following


def _check_unchanged(batch: Any, values: Mapping[tuple[Any, ...], Tensor]) -> None:
    """Raises ConfigError where the loader has written the next batch over ``batch``, whose tensors had ``values``."""
    now = dict(_leaves(batch))
    if any(path not in now or not _are_equal(now[path], tensor) for path, tensor in values.items()):
        raise ConfigError(
            "fleet.prefetch(loader) reads one batch ahead of the loop, and this loader gives the memory of one batch "
            "to the next, so the loop would see the next batch's values. Let it make a new tensor for each batch, or "
            "iterate over the loader itself."
        )


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(torch.all((one == other) | (one != one) & (other != other)))
