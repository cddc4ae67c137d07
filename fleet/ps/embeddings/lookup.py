"""RowLookup: the rows of one module's ids as a leaf tensor, and the gradients that backward left on such tensors.

Forward requests each distinct id once. Backward leaves the sum over all its places in the gradient of the leaf. Only
then is the leaf kept, so a forward without backward costs nothing and pushes nothing.

[Note: Rows that were requested before their lookup]
``expect`` notes ids whose rows are on their way, requested for one table by ``prefetch`` of a module or for all tables
of a batch by :class:`fleet.ps.embeddings.batch_rows.BatchRows`. A lookup takes them only where its own ids are the same
and the rows are as fresh as the mode asks; otherwise it asks for its rows itself. So what was requested can cost a
message, and never a wrong row.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.errors import ConfigError, NotInitializedError
from fleet.ps.client.merge import merge_gradients
from fleet.ps.client.shards import Gradient, Keys, Rows
from fleet.ps.embeddings.leaf_gradient import LeafGradient, LeafPart
from fleet.ps.table.ids import UniqueKeys
from fleet.ps.table.layout import SparseTableConfig
from fleet.ps.table.sparse_table import SparseTable

Counts = NDArray[np.float32]
_NO_ROWS = np.empty((0, 0), np.float32)


RowSource: TypeAlias = "LocalRows | TrainedRows"


class ComingRows(Protocol):
    """Rows of some tables that have been requested."""

    def rows(self, table_id: int, part: slice) -> Rows | None:
        """Waits for the rows of a part of one table's ids; returns ``None`` if they are too old by now."""


# Requests rows by table, in one message to each server: for the next step, or (False) for this one.
Request: TypeAlias = Callable[[Mapping[int, Keys], bool], ComingRows]


class HearsLookups(Protocol):
    """A loop whose lookups are heard while it works with a batch."""

    def begin_lookup(self) -> None:
        """Called before a lookup, which takes the rows that are requested here."""

    def may_take(self, expected: ExpectedRows) -> bool:
        """Returns whether the lookup at hand may take these rows, which were requested for its ids."""

    def end_lookup(self, lookup: RowLookup, ids: Keys, was_expected: bool) -> None:
        """Called with the ids of a lookup, and whether their rows were expected."""


@dataclass(frozen=True, eq=False, slots=True)
class RequestedRows:
    """Rows on their way to one lookup: a part of those that were requested of its table."""

    coming: ComingRows
    table_id: int
    part: slice

    def take(self) -> Rows | None:
        """Waits for the rows; returns ``None`` if they are too old by now."""
        return self.coming.rows(self.table_id, self.part)


@dataclass(frozen=True, eq=False, slots=True)
class ExpectedRows:
    """Rows that were requested before the lookup of ``ids``."""

    ids: Keys
    keys: Keys  # the distinct ones of ``ids``
    inverse: NDArray[np.int32]
    requested: RequestedRows

    def is_of(self, ids: Keys) -> bool:
        """Returns whether the rows are those of ``ids``, in this order."""
        # Bytes are compared in a tenth of the time of np.array_equal, which every lookup would pay.
        return len(ids) == len(self.ids) and ids.tobytes() == self.ids.tobytes()


class LocalRows:
    """Rows of a table in this process, for a module that is not connected to servers.

    Example:
        >>> LocalRows(SparseTableConfig("ads", 4)).rows(np.array([7])).shape
        (1, 4)
    """

    trains = False  # whether gradients are sent back
    asked = 0

    def __init__(self, config: SparseTableConfig) -> None:
        self.config = config
        self.table = SparseTable(replace(config, bounds=None))  # the limits are those of servers

    def rows(self, keys: Keys) -> Rows:
        """Returns the rows of ``keys``; new ids get the initial weights that servers would give them."""
        return self.table.pull(keys)


class TrainedRows:
    """Rows of a table on servers, which its optimizer trains.

    Args:
        table_id: the table.
        rows: returns a fresh float32 [n, dim] array of the rows of distinct keys.
        request: requests rows before their lookup.
        is_open: whether the servers can be asked.

    Attributes:
        asked: the number of rows that lookups have asked for.
    """

    trains = True

    def __init__(
        self, table_id: int, rows: Callable[[Keys], Rows], request: Request, is_open: Callable[[], bool]
    ) -> None:
        self.table_id = table_id
        self.rows = rows
        self.request = request
        self.is_open = is_open
        self.asked = 0

    def refuse(self, reason: str) -> None:
        """Makes every request raise ConfigError from now on."""

        def ask(*args: object) -> NoReturn:
            raise ConfigError(reason)

        self.rows = self.request = ask

    def __deepcopy__(self, memo: dict[int, object]) -> TrainedRows:
        return self


class SharedUniqueKeys:
    """A :class:`UniqueKeys` for each thread that looks up at this moment."""

    def __init__(self) -> None:
        self._spare = [UniqueKeys()]

    def __call__(self, ids: Keys) -> tuple[Keys, NDArray[np.int32]]:
        """Returns the distinct ids, and the place of each id among them."""
        unique = self._take()
        try:
            return unique(ids)
        finally:
            self._spare.append(unique)

    def of_parts(self, parts: Sequence[Keys]) -> list[tuple[Keys, NDArray[np.int32]]]:
        """Returns for each array of ids what a call with it returns."""
        unique = self._take()
        try:
            return unique.of_parts(parts)
        finally:
            self._spare.append(unique)

    def _take(self) -> UniqueKeys:
        try:
            return self._spare.pop()
        except IndexError:
            return UniqueKeys()


distinct_together = SharedUniqueKeys().of_parts  # :meth:`RowLookup.distinct`, for the ids of several lookups


class RowLookup:
    """Finds the rows of ids for one module.

    Args:
        label: how messages name the module.
        num_counters: columns at the start of a row that are statistics and take no gradient.
        keeps_shows: the table counts shows and clicks.
        skipped: an id whose row is never trained.
        slot: the feature slot that rows of an accessor remember.
        in_weight: the module's weight has room for all rows, so a pickled module has them.
    """

    def __init__(
        self,
        label: str,
        *,
        num_counters: int = 0,
        keeps_shows: bool = False,
        skipped: int | None = None,
        slot: int | None = None,
        in_weight: bool = False,
    ) -> None:
        self.label = label
        self.source = None
        self.whole = None
        self.bring = None
        self._num_counters = num_counters
        self.keeps_shows = keeps_shows
        self._skipped = skipped
        self._slot = slot
        self._in_weight = in_weight
        self._unique = SharedUniqueKeys()
        self._ready: list[tuple[LeafPart, Gradient]] = []
        self._expected: deque[ExpectedRows] = deque()
        self.loop = None

    source: RowSource | None
    whole: Tensor | None  # a leaf that lookups read in place of the source, and that takes sparse gradients
    # Brings ``whole`` up to date where it is a replica: as far as the mode requires, or to the servers' rows of now.
    # Only lookups that train read it.
    bring: Callable[[bool], None] | None
    loop: HearsLookups | None
    is_copy = False  # of the lookup of another module, with the same table

    def find(
        self,
        ids: Keys,
        device: torch.device,
        shows: Counts | None = None,
        clicks: Counts | None = None,
        *,
        trained: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Returns the rows of the distinct ids, float32 [u, dim], and the place of each id among them, int32 [n].

        Args:
            ids: int64 [n].
            device: where both results live.
            shows, clicks: float32 [n], the counts of each id's sample; 1 and 0 by default.
            trained: the rows take gradients; False where the module's weight is frozen.
        """
        found, keys, inverse = self.rows_of(ids)
        rows = torch.from_numpy(found)
        places = torch.from_numpy(inverse)
        if device.type != "cpu":
            rows = rows.to(device)
            places = places.to(device)
        if trained and torch.is_grad_enabled():
            assert self.source is not None
            self._watch(rows, self.gradient_of(keys, inverse, shows, clicks), self.source)
        return rows, places

    def rows_of(self, ids: Keys) -> tuple[Rows, Keys, NDArray[np.int32]]:
        """Returns the rows of the distinct ids, these ids, and the place of each id among them."""
        expected = self.arrived(ids)
        if expected is not None:
            return expected
        keys, inverse = self.distinct(ids)
        return self.ask(keys), keys, inverse

    def arrived(self, ids: Keys) -> tuple[Rows, Keys, NDArray[np.int32]] | None:
        """Returns what :meth:`rows_of` does if the rows of ``ids`` were expected; each lookup begins with it."""
        if torch.jit.is_tracing():
            raise ConfigError(
                f"{self.label}: torch.jit.trace would keep the rows of this call for all calls, and its rows are those "
                "of a table. Export the model with fleet.save_inference_model(dirname, example_inputs=...)."
            )
        loop = self.loop
        if loop is not None:
            loop.begin_lookup()
        elif not self._expected:
            return None
        expected = self._take_expected(ids)
        if loop is not None:
            loop.end_lookup(self, ids, expected is not None)
        return expected

    def ask(self, keys: Keys) -> Rows:
        """Returns the rows of distinct ids."""
        assert self.source is not None
        self.source.asked += len(keys)
        return self.source.rows(keys)

    def leave(self) -> None:
        """Refuses what would ask the servers, in a process that was forked from the worker: it has no connection."""
        if self.bring is not None:
            self.whole = self.bring = None
        self.expect_nothing()
        if isinstance(self.source, TrainedRows):
            self.source.refuse(
                f"{self.label}: its rows are on the parameter servers, and this process was forked from a worker, as "
                "those of a DataLoader are: the connection is the worker's. Look up rows and read the weight in the "
                "worker itself, or give the process a clone() of what it needs."
            )

    def trains(self) -> bool:
        """Returns whether the rows are on servers that can be asked now."""
        return isinstance(self.source, TrainedRows) and self.source.is_open()

    def prefetch(self, ids: Keys) -> None:
        """Asks for the rows of the next batch; :meth:`find` takes them when it is given the same ids."""
        prefetch_together([(self, ids)])

    def expect(self, rows: ExpectedRows) -> None:
        """Notes rows that were requested for a coming lookup."""
        self._expected.append(rows)

    def forget_all_but(self, count: int) -> None:
        """Forgets what was expected first: a loop may ask for rows and never look them up."""
        while len(self._expected) > count:
            self._expected.popleft()

    def expect_nothing(self) -> None:
        """Forgets all rows that were requested."""
        self._expected.clear()

    def give_up(self, rows: ExpectedRows) -> None:
        """Forgets rows that no lookup took."""
        if rows in self._expected:
            self._expected.remove(rows)

    def distinct(self, ids: Keys) -> tuple[Keys, NDArray[np.int32]]:
        """Returns the distinct ids, and the place of each id among them."""
        return self._unique(ids)

    def _take_expected(self, ids: Keys) -> tuple[Rows, Keys, NDArray[np.int32]] | None:
        for place, expected in enumerate(self._expected):
            if expected.is_of(ids) and (self.loop is None or self.loop.may_take(expected)):
                del self._expected[place]
                rows = expected.requested.take()
                return None if rows is None else (rows, expected.keys, expected.inverse)
        return None

    def take(self) -> Gradient | None:
        """Returns the gradients since the last call, or ``None`` without any: one row per distinct id.

        Of ``whole``, one row per id of the batches.
        """
        found: list[Gradient] = []
        if self.whole is not None and self.whole.grad is not None:
            added, self.whole.grad = self.whole.grad, None
            found.append(Gradient(added._indices().numpy()[0], added._values().numpy(), distinct=False))
        for part, gradient in self._ready:
            rows = part.rows()
            gradient.rows = np.ascontiguousarray(rows[:, self._num_counters :] if self._num_counters else rows)
            found.append(self._without_skipped(gradient))
        self._ready = []
        if not found:
            return None
        return found[0] if len(found) == 1 else merge_gradients(found, self.keeps_shows)

    def drop(self) -> None:
        """Forgets the gradients, as ``zero_grad`` does."""
        for part, _ in self._ready:
            part.clear()
        self._ready = []
        if self.whole is not None:
            self.whole.grad = None

    def has_gradients(self) -> bool:
        """Returns whether a backward has left gradients since the last :meth:`take`."""
        return bool(self._ready) or (self.whole is not None and self.whole.grad is not None)

    def gradient_of(
        self, keys: Keys, inverse: NDArray[np.int32], shows: Counts | None, clicks: Counts | None
    ) -> Gradient:
        """Returns the gradient of a lookup, whose rows backward will bring."""
        gradient = Gradient(keys, _NO_ROWS)
        if self.keeps_shows:
            n = len(keys)
            gradient.shows = np.bincount(inverse, shows, n).astype(np.float32)
            if clicks is not None:
                gradient.clicks = np.bincount(inverse, clicks, n).astype(np.float32)
            if self._slot is not None:
                gradient.slots = np.full(n, self._slot, np.uint32)
        return gradient

    def keep(self, part: LeafPart, gradient: Gradient, source: RowSource) -> None:
        """Notes that backward has left the rows of ``gradient`` in ``part`` of a leaf with the rows of ``source``."""
        if not source.trains:
            raise NotInitializedError(
                f"{self.label}: backward ran before fleet.init_worker(), or the module was made after it and is on no "
                "server, so nothing would train its rows. Make modules before fleet.distributed_model(model) and call "
                "fleet.init_worker() before training, or run the forward under torch.no_grad()."
            )
        if not any(kept is part for kept, _ in self._ready):
            self._ready.append((part, gradient))

    def _watch(self, rows: Tensor, gradient: Gradient, source: RowSource) -> None:
        found = LeafGradient()
        part = LeafPart(found, 0, len(rows))

        def keep(leaf: Tensor) -> None:
            found.note(leaf)
            self.keep(part, gradient, source)

        rows.requires_grad_()
        rows.register_post_accumulate_grad_hook(keep)

    def _without_skipped(self, gradient: Gradient) -> Gradient:
        if self._skipped is None:
            return gradient
        keep = np.flatnonzero(gradient.ids != self._skipped)
        if len(keep) == len(gradient.ids):
            return gradient
        picked = [None if a is None else a[keep] for a in (gradient.shows, gradient.clicks, gradient.slots)]
        return Gradient(gradient.ids[keep], np.ascontiguousarray(gradient.rows[keep]), *picked)  # type: ignore[arg-type]

    def __deepcopy__(self, memo: dict[int, object]) -> RowLookup:
        made = self._make()()
        made.source = self.source  # both modules read one table
        made.is_copy = True
        return made

    def __reduce__(self) -> tuple[Callable[[], RowLookup], tuple[()]]:
        if self.source is not None and not self._in_weight:
            raise ConfigError(
                f"{self.label}: pickle and torch.save(module) would leave out its rows, which are not in the module. "
                "Save them with fleet.save_persistables(dirname), and the other parameters with them or as "
                "model.state_dict(); load them with embedding.load(dirname)."
            )
        return self._make(), ()

    def _make(self) -> Callable[[], RowLookup]:
        return partial(
            RowLookup, self.label, num_counters=self._num_counters, keeps_shows=self.keeps_shows, skipped=self._skipped,
            slot=self._slot, in_weight=self._in_weight,
        )  # fmt: skip


def request_together(asked: Sequence[tuple[RowLookup, Keys]], is_next: bool) -> list[RequestedRows | None]:
    """Requests the rows of distinct ids for several lookups, in one message to each server.

    Args:
        asked: lookups, perhaps of one table, and the ids of each.
        is_next: see :data:`Request`.

    Returns:
        For each lookup where its rows come; ``None`` where they are not on servers.
    """
    wanted: dict[Request, dict[int, list[Keys]]] = defaultdict(dict)
    parts: list[tuple[TrainedRows, slice] | None] = []
    for lookup, keys in asked:
        source = lookup.source
        if not isinstance(source, TrainedRows):
            parts.append(None)
            continue
        before = wanted[source.request].setdefault(source.table_id, [])
        start = sum(map(len, before))
        before.append(keys)
        parts.append((source, slice(start, start + len(keys))))
    coming = {request: request(_joined(tables), is_next) for request, tables in wanted.items()}
    found: list[RequestedRows | None] = []
    for one in parts:
        if one is None:
            found.append(None)
            continue
        source, part = one
        source.asked += part.stop - part.start
        found.append(RequestedRows(coming[source.request], source.table_id, part))
    return found


def _joined(tables: Mapping[int, Sequence[Keys]]) -> dict[int, Keys]:
    return {table_id: each[0] if len(each) == 1 else np.concatenate(each) for table_id, each in tables.items()}


def expect_together(calls: Sequence[tuple[RowLookup, Keys]], is_next: bool) -> list[ExpectedRows | None]:
    """Requests the rows of ids for several lookups; the next lookup of the same ids takes them.

    Returns what each lookup expects; ``None`` where its rows are not on servers.
    """
    distinct = distinct_together([ids for _, ids in calls])
    asked = [(lookup, keys) for (lookup, _), (keys, _) in zip(calls, distinct, strict=True)]
    found: list[ExpectedRows | None] = []
    for (lookup, ids), (keys, inverse), rows in zip(calls, distinct, request_together(asked, is_next), strict=True):
        # A copy: the loop may write to the batch before its lookups.
        expected = None if rows is None else ExpectedRows(ids.copy(), keys, inverse, rows)
        if expected is not None:
            lookup.expect(expected)
        found.append(expected)
    return found


def prefetch_together(calls: Sequence[tuple[RowLookup, Keys]]) -> None:
    """Asks for the rows of the next batch, given the ids of each lookup; the lookups of the same ids take them."""
    expect_together(calls, True)
    for lookup, _ in calls:
        lookup.forget_all_but(2)
