"""RowLookup: the rows of one module's ids as a leaf tensor, and the gradients that backward left on such tensors.

Forward requests each distinct id once. Backward leaves the sum over all its places in the gradient of the leaf. Only
then is the leaf kept, so a forward without backward costs nothing and pushes nothing.

[Note: Rows that were requested before their lookup]
``expect`` notes ids whose rows are on their way, requested for one table by ``prefetch`` of a module or for all tables
of a batch by :class:`fleet.ps.worker.batch_rows.BatchRows`. A lookup takes them only where its own ids are the same and
the rows are as fresh as the mode asks; otherwise it asks for its rows itself. So what was requested can cost a message,
and never a wrong row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
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
from fleet.ps.table.ids import UniqueKeys
from fleet.ps.table.layout import SparseTableConfig
from fleet.ps.table.sparse_table import SparseTable

Counts = NDArray[np.float32]


RowSource: TypeAlias = "LocalRows | TrainedRows"


class ComingRows(Protocol):
    """Rows of some tables that have been requested."""

    def rows(self, table_id: int) -> Rows | None:
        """Waits for the rows of one table; returns ``None`` if they are too old by now."""


# Requests rows by table, in one message to each server: for the next step, or (False) for this one. Returns ``None``
# where the rows are here already.
Request: TypeAlias = Callable[[Mapping[int, Keys], bool], ComingRows | None]


@dataclass(frozen=True, eq=False, slots=True)
class ExpectedRows:
    """Rows on their way to one lookup: rows ``start`` to ``start + len(keys)`` of its table's."""

    ids: Keys
    keys: Keys  # the distinct ones of ``ids``
    inverse: NDArray[np.int32]
    coming: ComingRows
    start: int = 0

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
    table_id = 0

    def __init__(self, config: SparseTableConfig) -> None:
        self.table = SparseTable(replace(config, bounds=None))  # the limits are those of servers

    def rows(self, keys: Keys) -> Rows:
        """Returns the rows of ``keys``; new ids get the initial weights that servers would give them."""
        return self.table.pull(keys)

    def request(self, wanted: Mapping[int, Keys], is_next: bool) -> None:
        """Does nothing: the rows are here."""


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
        self._spare = [UniqueKeys()]  # one for each thread that looks up at this moment
        self._ready: list[tuple[Tensor, Gradient]] = []
        self._expected: deque[ExpectedRows] = deque()
        self.heard = None

    source: RowSource | None
    whole: Tensor | None  # a leaf that lookups read in place of the source, and that takes sparse gradients
    # Brings ``whole`` up to date where it is a replica: as far as the mode requires, or to the servers' rows of now.
    # Only lookups that train read it.
    bring: Callable[[bool], None] | None
    # Called with each lookup's ids, and whether their rows were expected.
    heard: Callable[[RowLookup, Keys, bool], None] | None
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
            self._watch(rows, self._gradient_of(keys, inverse, shows, clicks), self.source)
        return rows, places

    def rows_of(self, ids: Keys) -> tuple[Rows, Keys, NDArray[np.int32]]:
        """Returns the rows of the distinct ids, these ids, and the place of each id among them."""
        assert self.source is not None
        if self._expected or self.heard is not None:
            expected = self._arrived(ids)
            if self.heard is not None:
                self.heard(self, ids, expected is not None)
            if expected is not None:
                return expected
        keys, inverse = self.distinct(ids)
        self.source.asked += len(keys)
        return self.source.rows(keys), keys, inverse

    def leave(self) -> None:
        """Refuses what would ask the servers, in a process that was forked from the worker: it has no connection."""
        if self.bring is not None:
            self.whole = self.bring = None
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
        if self.source is None:
            return
        keys, inverse = self.distinct(ids)
        coming = self.source.request({self.source.table_id: keys}, True)
        if coming is not None:
            self.source.asked += len(keys)
            self.expect(ExpectedRows(ids.copy(), keys, inverse, coming))
            # Of a loop that asks for rows and never looks them up, no more than two batches are kept.
            while len(self._expected) > 2:
                self._expected.popleft()

    def expect(self, rows: ExpectedRows) -> None:
        """Notes rows that were requested for a coming lookup."""
        self._expected.append(rows)

    def expect_nothing(self) -> None:
        """Forgets all rows that were requested."""
        self._expected.clear()

    def give_up(self, rows: ExpectedRows) -> None:
        """Forgets rows that no lookup took."""
        if rows in self._expected:
            self._expected.remove(rows)

    def distinct(self, ids: Keys) -> tuple[Keys, NDArray[np.int32]]:
        """Returns the distinct ids, and the place of each id among them."""
        try:
            unique = self._spare.pop()
        except IndexError:
            unique = UniqueKeys()
        try:
            return unique(ids)
        finally:
            self._spare.append(unique)

    def _arrived(self, ids: Keys) -> tuple[Rows, Keys, NDArray[np.int32]] | None:
        assert self.source is not None
        for place, expected in enumerate(self._expected):
            if expected.is_of(ids):
                del self._expected[place]
                rows = expected.coming.rows(self.source.table_id)
                if rows is None:
                    return None
                start = expected.start
                return rows[start : start + len(expected.keys)], expected.keys, expected.inverse
        return None

    def take(self) -> Gradient | None:
        """Returns the gradients since the last call, or ``None`` without any: one row per distinct id.

        Of ``whole``, one row per id of the batches.
        """
        found: list[Gradient] = []
        if self.whole is not None and self.whole.grad is not None:
            added, self.whole.grad = self.whole.grad, None
            found.append(Gradient(added._indices().numpy()[0], added._values().numpy(), distinct=False))
        for leaf, gradient in self._ready:
            if leaf.grad is None:
                continue
            rows = leaf.grad.numpy(force=True)
            gradient.rows = np.ascontiguousarray(rows[:, self._num_counters :] if self._num_counters else rows)
            found.append(self._without_skipped(gradient))
        self._ready = []
        if not found:
            return None
        return found[0] if len(found) == 1 else merge_gradients(found, self.keeps_shows)

    def drop(self) -> None:
        """Forgets the gradients, as ``zero_grad`` does."""
        for leaf, _ in self._ready:
            leaf.grad = None
        self._ready = []
        if self.whole is not None:
            self.whole.grad = None

    def has_gradients(self) -> bool:
        """Returns whether a backward has left gradients since the last :meth:`take`."""
        if self.whole is not None and self.whole.grad is not None:
            return True
        return any(leaf.grad is not None for leaf, _ in self._ready)

    def _gradient_of(
        self, keys: Keys, inverse: NDArray[np.int32], shows: Counts | None, clicks: Counts | None
    ) -> Gradient:
        gradient = Gradient(keys, np.empty((0, 0), np.float32))
        if self.keeps_shows:
            n = len(keys)
            gradient.shows = np.bincount(inverse, shows, n).astype(np.float32)
            if clicks is not None:
                gradient.clicks = np.bincount(inverse, clicks, n).astype(np.float32)
            if self._slot is not None:
                gradient.slots = np.full(n, self._slot, np.uint32)
        return gradient

    def _watch(self, rows: Tensor, gradient: Gradient, source: RowSource) -> None:
        def keep(leaf: Tensor) -> None:
            if not source.trains:
                raise NotInitializedError(
                    f"{self.label}: backward ran before fleet.init_worker(), so nothing would train its rows. Call "
                    "fleet.init_worker() before training, or run the forward under torch.no_grad()."
                )
            if not any(kept is leaf for kept, _ in self._ready):
                self._ready.append((leaf, gradient))

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
