"""BatchRows: the rows of a whole batch, requested in one message for all tables before the model looks them up.

[Note: How the ids of a batch are known before its lookups]
Eager modules look up one table after the other, so a batch alone does not say which of its numbers are whose ids.
While the loop works with a batch, each lookup is heard, and its ids are searched at the places of the batch that
:mod:`fleet.ps.embeddings.id_places` lists. The place that was found is where the next batch has the ids of that lookup.
Each lookup compares its ids with those whose rows were requested, see [Note: Rows that were requested before their
lookup], so a place that was right by chance costs a message and is searched anew. Ids that are in no batch are computed
inside the model; after a few batches nobody searches for them any more. Nor are rows requested any longer of a lookup
that has refused them in a few batches: its loop changes the ids of a batch, or steps between batch and lookup.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from fleet.errors import ConfigError
from fleet.ps.client.shards import Keys
from fleet.ps.embeddings.id_places import FoundIds, HostTensors, IdPlace, places_of, tensors_of
from fleet.ps.embeddings.lookup import ExpectedRows, RowLookup, TrainedRows, expect_together

_TRIES = 3  # batches in which the ids of a lookup are searched in vain
_REFUSALS = 8  # requests in turn that were in vain: a barrier or a save makes two of them
_END = object()


class LooksUp(Protocol):
    """A module that looks up rows of one table."""

    lookup: RowLookup

    def keys_of(self, ids: FoundIds) -> Keys:
        """Returns what the lookup is given for ``ids``; raises for ids that it refuses."""


# A module, and how often the batch was looked up in it before.
_Call: TypeAlias = tuple[LooksUp, int]


class _IdPlaces:
    """The places at which the lookups of a loop find their ids."""

    def __init__(self, say: Callable[[str], None], said: set[LooksUp]) -> None:
        self._say = say
        self._said = said
        self.known: dict[_Call, IdPlace] = {}
        self._vain: dict[_Call, int] = defaultdict(int)
        self._refused: dict[_Call, int] = defaultdict(int)
        self._given_up: set[_Call] = set()
        self._last: IdPlace | None = None

    def succeed(self, call: _Call) -> None:
        """Notes that the rows requested for a call were looked up."""
        self._vain.pop(call, None)
        self._refused.pop(call, None)

    def retry(self) -> None:
        """Searches again for what was searched in vain."""
        self._vain.clear()
        self._given_up.clear()

    def learn(self, call: _Call, ids: Keys, batch: Any, was_requested: bool) -> None:
        """Notes where ``batch`` has the ids of a call that found no requested rows, though there were some or not."""
        if call in self._given_up:
            return
        known = self.known.get(call)
        on_host: HostTensors = {}  # as the batch is now: the loop may have changed it
        is_right = known is not None and _has(known, batch, on_host, call[0], ids)
        # Known ids may have come without a request, as those of the first batches.
        if is_right and not was_requested:
            return
        place = known if is_right else self._search(call[0], ids, batch, on_host)
        self._refused[call] += was_requested
        self._vain[call] += place is None
        if place is not None:
            self.known[call] = self._last = place
        if self._vain[call] >= _TRIES or self._refused[call] >= _REFUSALS:
            self._give_up(call, is_found=place is not None)

    def _search(self, module: LooksUp, ids: Keys, batch: Any, on_host: HostTensors) -> IdPlace | None:
        places = places_of(batch, len(ids))
        # Models read their features in order: the place behind the last one comes first.
        first = places.index(self._last) + 1 if self._last in places else 0
        ordered = (*places[first:], *places[:first])
        return next((place for place in ordered if _has(place, batch, on_host, module, ids)), None)

    def _give_up(self, call: _Call, is_found: bool) -> None:
        self.known.pop(call, None)
        self._given_up.add(call)
        module, number = call
        # The rows of a second lookup after a step, say, while those of the first one come together.
        is_extra = is_found and any((module, before) in self.known for before in range(number))
        if is_extra or module in self._said:
            return
        self._said.add(module)
        reason = (
            "other rows than were requested when the loop took the batch: the loop changes the ids afterwards, or "
            "takes a step between batch and lookup"
            if is_found
            else "ids that no batch holds: no tensor of the batch that the loop took last, in dicts, lists, tuples, "
            "dataclasses or KeyedJaggedTensors. So they are lists of Python numbers, which are not looked through, are "
            "computed in the model, or are those of another batch"
        )
        self._say(
            f"fleet.prefetch(): {module.lookup.label} looks up {reason}. Such rows are requested at each lookup, in a "
            "message of their own."
        )


def _has(place: IdPlace, batch: Any, on_host: HostTensors, module: LooksUp, ids: Keys) -> bool:
    found = place.read(batch, on_host)
    if found is None:
        return False
    try:
        return np.array_equal(module.keys_of(found), ids)
    except (IndexError, ConfigError):  # numbers that are no ids of this module
        return False


_Requested: TypeAlias = tuple[_Call, ExpectedRows]


class BatchRows:
    """Requests the rows of coming batches for the lookups of a model.

    Args:
        modules: of the model, whose rows are on servers.
        say: receives each line meant for the user.
        said: modules of which a line was said; the loops of a job share them, as those of its epochs.
    """

    def __init__(
        self, modules: Sequence[LooksUp], say: Callable[[str], None] = print, said: set[LooksUp] | None = None
    ) -> None:
        self._by_lookup = {id(module.lookup): module for module in modules}
        self._modules = list(modules)
        self._places = _IdPlaces(say, set() if said is None else said)
        self._batch: Any = None
        self._calls: dict[LooksUp, int] = defaultdict(int)
        self._has_trained = False
        self._trains = False  # in this pass over the loader: its batches are looked up with gradients only
        self._requested: list[_Requested] = []  # of the batch at hand
        self._unheard: set[_Call] = set()  # calls of this batch whose rows were requested
        self._is_due = False
        self._is_running = False
        self._outer: BatchRows | None = None  # the loop in which this one runs

    def request(self, batch: Any, is_next: bool) -> list[_Requested]:
        """Requests the rows of ``batch``, for the next step while this one is computed, or for this step."""
        calls: list[_Call] = []
        asked = []
        on_host: HostTensors = {}
        for call, place in self._places.known.items():
            module = call[0]
            found = place.read(batch, on_host)
            if found is None or not isinstance(module.lookup.source, TrainedRows):
                continue
            try:
                asked.append((module.lookup, module.keys_of(found)))
            except (IndexError, ConfigError):
                continue  # the lookup says what is wrong, at the line of the model
            calls.append(call)
        requested = zip(calls, expect_together(asked, is_next), strict=True)
        return [(call, expected) for call, expected in requested if expected is not None]

    def begin(self, batch: Any, requested: list[_Requested] | None = None) -> None:
        """Hears the lookups from here on: the loop works with ``batch``, and the rows of the last one are forgotten.

        Args:
            batch: of the loop.
            requested: what :meth:`request` has returned for it; by default its first lookup requests the rows of all,
                as the batch is then.
        """
        self.forget(self._requested)
        self._take(requested or [])
        self._batch = batch
        self._is_due = requested is None
        self._calls.clear()
        for module in self._modules:
            outer = module.lookup.loop
            if outer is not self:
                self._outer = outer if isinstance(outer, BatchRows) else None
                module.lookup.loop = self
        self._is_running = True

    def _take(self, requested: list[_Requested]) -> None:
        self._requested = requested
        self._unheard = {call for call, _ in requested}

    def begin_lookup(self) -> None:
        """Requests the rows of the batch if they are due."""
        # An evaluation inside the loop is none of this batch's lookups.
        if self._is_due and (torch.is_grad_enabled() or not self._trains):
            self._is_due = False
            self._take(self.request(self._batch, False))

    def may_take(self, expected: ExpectedRows) -> bool:
        """Returns whether the lookup at hand may take these rows.

        An evaluation inside a training loop may not: what was requested lacks the steps since.
        """
        if torch.is_grad_enabled():
            return True
        return not self._trains and any(own is expected for _, own in self._requested)

    def end(self) -> None:
        """Hears no lookups any more, and forgets what was requested."""
        self._batch = None
        self._is_due = False
        self._is_running = False
        self._trains = False
        # This may have been a loop inside another one, whose batch is looked up again from here on.
        while self._outer is not None and not self._outer._is_running:
            self._outer = self._outer._outer
        for module in self._modules:
            if module.lookup.loop is self:
                module.lookup.loop = self._outer
        self._outer = None
        self.forget(self._requested)
        self._requested = []

    @staticmethod
    def forget(requested: list[_Requested]) -> None:
        """Forgets those of the requested rows that no lookup took."""
        for (module, _), expected in requested:
            module.lookup.give_up(expected)

    def end_lookup(self, lookup: RowLookup, ids: Keys, was_expected: bool) -> None:
        """Learns where the batch has the ids, unless their rows were expected."""
        trains = torch.is_grad_enabled()
        self._trains |= trains
        if trains and not self._has_trained:  # what was heard before was an evaluation
            self._has_trained = True
            self._calls.clear()
            self._places.retry()
        module = self._by_lookup.get(id(lookup))
        if module is None or trains is not self._has_trained:
            return
        call = (module, self._calls[module])
        self._calls[module] += 1
        was_requested = call in self._unheard
        self._unheard.discard(call)
        if was_expected:
            self._places.succeed(call)
        elif len(ids):
            self._places.learn(call, ids, self._batch, was_requested)


class Prefetched:
    """The batches of a loader, whose rows are requested before the model looks them up.

    Args:
        loader: any iterable of batches.
        connected: returns what requests rows; ``None`` where no rows are on servers.
        reads_ahead: returns whether rows may be requested for the next step; asked when the loader has given a batch.
    """

    def __init__(
        self, loader: Iterable[Any], connected: Callable[[], BatchRows | None], reads_ahead: Callable[[], bool]
    ) -> None:
        self.loader = loader
        self._connected = connected
        self._reads_ahead = reads_ahead

    def __iter__(self) -> Iterator[Any]:
        rows = self._connected()
        if rows is None:
            yield from self.loader
            return
        batches = iter(self.loader)
        try:
            batch = next(batches, _END)
            if batch is not _END:
                yield from (_ahead if self._reads_ahead() else _at_once)(batch, batches, rows)
        finally:
            rows.end()

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __reduce__(self) -> NoReturn:
        raise ConfigError(
            "fleet.prefetch(loader): its batches belong to the connection of this worker and cannot be pickled or "
            "copied. Give another process its loader, and call fleet.prefetch in the loop."
        )

    def __getattr__(self, name: str) -> Any:
        if name in ("loader", "_connected", "_reads_ahead"):  # a copy that is being made has none yet
            raise AttributeError(name)
        return getattr(self.loader, name)


def check_batches(loader: object) -> None:
    """Raises ConfigError unless ``loader`` is an iterable that may be one of batches."""
    gives = hasattr(type(loader), "__iter__") or hasattr(type(loader), "__getitem__")
    if not gives or isinstance(loader, nn.Module | str | bytes):
        raise ConfigError(
            f"fleet.prefetch({loader!r:.60}) received a {type(loader).__name__}; it takes an iterable of batches, "
            "as in for batch in fleet.prefetch(loader)."
        )


def _at_once(batch: Any, batches: Iterator[Any], rows: BatchRows) -> Iterator[Any]:
    """Yields ``batch`` and the others; the first lookup in each requests the rows of all.

    Not earlier: a save in between would hold rows of ids that nobody looked up, and the loop may change the batch.
    """
    while batch is not _END:
        rows.begin(batch)
        yield batch
        batch = next(batches, _END)


def _ahead(batch: Any, batches: Iterator[Any], rows: BatchRows) -> Iterator[Any]:
    """Yields ``batch`` and the others, each when the rows of the one behind it were requested."""
    first = {path: tensor.clone() for path, tensor in tensors_of(batch).items()}
    coming: list[_Requested] = []
    try:
        while batch is not _END:
            # An error of the loader belongs behind the batches that came before it.
            failure = None
            try:
                following = next(batches, _END)
            except Exception as error:
                following = _END
                failure = error
            _check_unchanged(batch, first)
            first = {}
            requested = coming
            coming = [] if following is _END else rows.request(following, True)
            rows.begin(batch, requested)
            yield batch
            if failure is not None:
                raise failure
            batch = following
    finally:
        rows.forget(coming)


def _check_unchanged(batch: Any, values: Mapping[tuple[Any, ...], Tensor]) -> None:
    """Raises ConfigError where the loader has written the next batch over ``batch``, whose tensors had ``values``."""
    now = tensors_of(batch)
    if any(path not in now or not _are_equal(now[path], tensor) for path, tensor in values.items()):
        raise ConfigError(
            "fleet.prefetch(loader) reads one batch ahead of the loop, and this loader gives the memory of one batch "
            "to the next, so the loop would see the next batch's values. Let it make a new tensor for each batch, or "
            "iterate over the loader itself."
        )


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(torch.all((one == other) | (one != one) & (other != other)))
