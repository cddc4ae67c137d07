"""ItemIndex: the items of a table by their vectors, nearest first, while the table is trained."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fleet.common.own_thread import OwnThread
from fleet.common.whole_numbers import count_of
from fleet.errors import ConfigError, FleetError
from fleet.ps.publishing.versions import Version
from fleet.ps.serving.changes import Changes
from fleet.ps.serving.follow_thread import FollowThread, check_interval
from fleet.ps.serving.inverted_lists import InvertedLists, count_lists, import_faiss
from fleet.ps.serving.item_vectors import Answer, Approximate, ItemVectors
from fleet.ps.serving.local_rows import LocalState, Position
from fleet.ps.serving.reader import Reader, is_tensor
from fleet.ps.table.layout import Float32s, Int64s

Encode = Callable[[Int64s, Float32s], Any]
Keep = Callable[[Int64s], Any]
_METRICS = ("inner_product", "cosine")
_KINDS = ("exact", "ivf")
_ENCODED = 1 << 14  # rows that encode gets at once
_MOST = 1 << 20  # ids of an answer


@dataclass(frozen=True, slots=True)
class _Indexed:
    items: ItemVectors
    rows: LocalState
    rebuilds: int = 0


class ItemIndex:
    """Finds the items whose vectors are nearest to a query, among the rows of one table of ``reader``.

    It holds every id of the table that ``keep`` allows, and follows additions, changes and deletions; a way back to
    older rows too. Searches may come from any number of threads, and each sees the items of one state. Vectors are in
    memory, as float32.

    ``"exact"`` compares a query with every item. ``"ivf"`` divides the items into lists by k-means, and compares a
    query with the nearest lists, and with every item that has changed since; when an eighth of the items has, the lists
    are made anew. With fewer than 10,000 items, or than 39 for each of ``nlist``, it is exact.

    Args:
        reader: of a folder.
        table: the table's name.
        encode: the item tower: gets ids (int64 [n]) and their rows (float32 [n, dim]), and returns vectors [n, d], an
            array or a tensor. All rows are encoded anew when the reader is taken to another version or back; when
            anything else that vectors depend on has changed, call :meth:`rebuild`. ``None``: the rows are the vectors.
        keep: which ids are items: gets ids (int64 [n]), returns a mask (bool [n]), an array or a tensor.
            :meth:`rebuild` asks for all of them again. ``None``: all are.
        metric: ``"inner_product"`` or ``"cosine"``, the inner product of vectors of length 1. The cosine of a vector of
            zeros is 0.
        kind: ``"exact"`` or ``"ivf"``, which needs the package faiss (``pip install '.[retrieval]'`` in the clone).
        nlist: ivf: how many lists; ``None``: twice the square root of the items.
        nprobe: ivf: how many lists a query is compared with, at most ``nlist``: more find more, and take longer.
            ``None``: an eighth of them, at least 8.

    Raises:
        ConfigError: an argument is wrong, the reader is of Redis or servers, or faiss is not installed.
        FleetError: a vector is not finite.

    Example:
        >>> table = fleet.ps.SparseTable(fleet.ps.SparseTableConfig("item", 2))
        >>> table.add(np.array([7, 8, 9]), np.array([[1, 0], [0, 1], [1, 1]], np.float32))
        >>> saved = fleet.ps.save_table(table, "item_rows")
        >>> index = fleet.ps.ItemIndex(fleet.ps.Reader("item_rows"), "item")
        >>> ids, scores = index.search(np.array([[2.0, 1.0]]), k=2)
        >>> len(index), ids.tolist(), scores.shape
        (3, [[9, 7]], (1, 2))
    """

    def __init__(
        self,
        reader: Reader,
        table: str,
        *,
        encode: Encode | None = None,
        keep: Keep | None = None,
        metric: str = "inner_product",
        kind: str = "exact",
        nlist: int | None = None,
        nprobe: int | None = None,
    ) -> None:
        _check_arguments(reader, {"encode": encode, "keep": keep}, metric, kind)
        self._nlist = _checked_count("nlist", nlist, kind)
        self._nprobe = _checked_count("nprobe", nprobe, kind)
        if self._nlist is not None and self._nprobe is not None and self._nprobe > self._nlist:
            raise ConfigError(
                f"fleet.ps.ItemIndex(nlist={nlist!r}, nprobe={nprobe!r}): nprobe is how many of the nlist lists a "
                "query is compared with, so at most as many."
            )
        self._label = f"fleet.ps.ItemIndex({table!r})"
        self._reader = reader
        self._table = table
        self._encode = encode
        self._keep = keep
        self._metric = metric
        self._kind = kind
        self._changing = threading.Lock()
        self._builder: OwnThread | None = None
        self._is_closed = False
        self._follower = FollowThread(
            self._follow,
            f"{self._label} keeps its items",
            "fleet-index",
            is_urgent=lambda: self._reader.has_turned(self._state.rows),
            afterwards=reader.read_ahead,
        )
        self._state = self._made_anew()

    @property
    def position(self) -> dict[int, Position]:
        """How far the rows of the items are, by server, as :attr:`Reader.position`."""
        self._check_open()
        return dict(self._state.rows.positions)

    @property
    def version(self) -> Version | None:
        """The version whose rows the items are of, as :attr:`Reader.version`."""
        self._check_open()
        return self._state.rows.version

    def __len__(self) -> int:
        """Returns how many items there are."""
        return len(self._state.items)

    def search(self, queries: Any, k: int) -> Any:
        """Returns the ids and scores of the ``k`` items nearest to each query, nearest first.

        Args:
            queries: float [n, d], an array, a list or a tensor.
            k: from 1 to 1,048,576; may be above the number of items.

        Returns:
            ids int64 [n, k] and scores float32 [n, k]: tensors on the queries' device for a tensor, otherwise arrays.
            Of equal scores the smaller id is first. Behind the last item ids are -1 and scores -inf, which no item has.

        Raises:
            ConfigError: queries are of another shape, or not finite; k is not an integer in its range.
        """
        ids, scores = self._search(self._state, queries, k)
        if is_tensor(queries):
            import torch

            return torch.from_numpy(ids).to(queries.device), torch.from_numpy(scores).to(queries.device)
        return ids, scores

    def recall(self, queries: Any, k: int) -> float:
        """Returns which part of the ids of the exact answers :meth:`search` finds; 1 for an index without items.

        Both answers are of the same state. Arguments and errors are those of :meth:`search`.
        """
        state = self._state  # read once: another thread may put a newer one there
        answers = [self._search(state, queries, k, exact=exact) for exact in (False, True)]
        found, wanted = ([row[score > -np.inf] for row, score in zip(*answer, strict=True)] for answer in answers)
        count = sum(map(len, wanted))
        return sum(map(len, map(np.intersect1d, found, wanted))) / count if count else 1.0

    def refresh(self) -> bool:
        """Takes up the newest rows, and returns whether there were any; until then searches see the older items.

        The reader is refreshed as well. Rows that have changed are encoded, no others.

        Raises:
            CheckpointError: the newest rows cannot be read; the items from before stay.
            FleetError: a vector is not finite; the items from before stay.
        """
        self._check_open()
        found = self._refresh()
        self._build_if_due()
        return found

    def rebuild(self) -> None:
        """Encodes every row anew and puts all of them in place at once, for an ``encode`` that has changed."""
        self._check_open()
        with self._changing:
            self._state = self._made_anew(self._state.rebuilds + 1)

    def follow(self, every_s: float = 1.0) -> ItemIndex:
        """Calls :meth:`refresh` every ``every_s`` seconds in a thread, until :meth:`close`; returns this index.

        The reader needs no ``follow`` of its own. An error is logged once and the next round tries again; the older
        items stay. A brake (:func:`fleet.ps.roll_back`) is taken up without waiting for the next round. Lists of
        ``"ivf"`` are made anew in another thread, while rounds go on.
        """
        check_interval("index.follow", every_s)
        self._follower.stop()
        self._check_open()
        self._follower.start(every_s)
        return self

    def close(self) -> None:
        """Ends :meth:`follow`; the reader stays open. A second call does nothing."""
        self._is_closed = True
        self._follower.stop()
        if self._builder is not None:
            self._builder.join()

    def __enter__(self) -> ItemIndex:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside --------------------------------------------------------------------------------------------------

    def _search(self, state: _Indexed, queries: Any, k: int, *, exact: bool = False) -> Answer:
        self._check_open()
        count = count_of(k)
        if count is None or count > _MOST:
            raise ConfigError(
                f"index.search(k={k!r}) takes an integer from 1 to {_MOST}: an answer has k ids for each query, also "
                "where there are fewer items."
            )
        vectors = _array(queries)
        if vectors.ndim != 2 or vectors.dtype.kind not in "fiu" or vectors.shape[1] != state.items.dim:
            raise ConfigError(
                f"index.search(): queries are {vectors.dtype} {list(vectors.shape)}; they must be numbers [n, "
                f"{state.items.dim}], a row for each query."
            )
        prepared = self._prepared(vectors)
        if (bad := _not_finite(prepared)).any():
            raise ConfigError(
                f"index.search(): query {int(bad.argmax())} has a NaN, or numbers without a finite length."
            )
        return state.items.search(prepared, count, exact=exact)

    def _refresh(self) -> bool:
        with self._changing:
            self._reader.refresh()
            before = self._state
            changes = self._reader.changes(self._table, before.rows)
            if changes.state is before.rows:
                return False
            # A version has a program of its own: encode may return another vector for a row that is the same.
            turned = self._encode is not None and changes.state.version != before.rows.version
            self._state = self._made_anew(before.rebuilds + 1) if turned else self._after(before, changes)
            return True

    def _after(self, state: _Indexed, every: Changes) -> _Indexed:
        changes = self._kept(every)
        vectors = self._vectors(changes, state.items.dim)
        return replace(state, items=state.items.applied(changes.ids, vectors, changes.deleted), rows=changes.state)

    def _made_anew(self, rebuilds: int = 0) -> _Indexed:
        changes = self._kept(self._reader.changes(self._table))
        vectors = self._vectors(changes, None)
        items = ItemVectors(vectors.shape[1]).applied(changes.ids, vectors, changes.deleted)
        return _Indexed(items.rebuilt(self._lists_of), changes.state, rebuilds)

    def _follow(self) -> None:
        self._refresh()
        if self._builder is not None and self._builder.is_alive():
            return
        builder = self._builder
        self._builder = None
        if builder is not None:
            builder.result()
        if self._state.items.is_due:
            self._builder = OwnThread(self._build_if_due, name="fleet-index-lists", say=None)
            self._builder.start()

    def _build_if_due(self) -> None:
        state = self._state
        if not state.items.is_due:
            return
        built = replace(state, items=state.items.rebuilt(self._lists_of))
        with self._changing:
            if self._state.rebuilds != state.rebuilds:  # these vectors are of another encode
                return
            # Changes that came meanwhile are applied to the new lists, too.
            self._state = self._after(built, self._reader.changes(self._table, state.rows))

    def _lists_of(self, vectors: Float32s) -> Approximate | None:
        nlist = count_lists(len(vectors), self._nlist) if self._kind == "ivf" else 0
        return InvertedLists(vectors, nlist, self._nprobe) if nlist else None

    def _kept(self, changes: Changes) -> Changes:
        """Returns the changes in which ids that are no items are deleted."""
        if self._keep is None:
            return changes
        mask = _array(self._keep(changes.ids))
        if mask.dtype != np.bool_ or mask.shape != changes.ids.shape:
            raise ConfigError(
                f"{self._label}: keep returned {mask.dtype} {list(mask.shape)} for {len(changes.ids)} ids; it must "
                f"return bools [{len(changes.ids)}], one for each id."
            )
        gone = np.concatenate([changes.deleted, changes.ids[~mask]])
        return replace(changes, ids=changes.ids[mask], rows=changes.rows[mask], deleted=gone)

    def _vectors(self, changes: Changes, dim: int | None) -> Float32s:
        """Returns the vectors of the changed rows; raises unless they are finite, with ``dim`` columns."""
        found: Any = changes.rows
        if self._encode is not None:
            spans = [slice(start, start + _ENCODED) for start in range(0, max(1, len(changes.ids)), _ENCODED)]
            found = np.concatenate([self._encoded(changes.ids[span], changes.rows[span], dim) for span in spans])
        vectors = self._prepared(found)
        if (bad := _not_finite(vectors)).any():
            raise FleetError(
                f"{self._label}: the vector of id {changes.ids[bad.argmax()]} and {int(bad.sum()) - 1} others have a "
                "NaN, or numbers without a finite length. Training has diverged, or encode is wrong."
            )
        return vectors

    def _encoded(self, ids: Int64s, rows: Float32s, dim: int | None) -> Any:
        assert self._encode is not None
        vectors = _array(self._encode(ids, rows))
        fits = vectors.ndim == 2 and vectors.dtype.kind == "f" and len(vectors) == len(ids) and vectors.shape[1]
        if not fits or (dim is not None and vectors.shape[1] != dim):
            raise ConfigError(
                f"{self._label}: encode returned {vectors.dtype} {list(vectors.shape)} for {len(ids)} ids; it must "
                f"return floating-point numbers [{len(ids)}, {dim or 'd'}], a row for each id, d from 1."
            )
        return vectors

    def _prepared(self, vectors: Any) -> Float32s:
        """Returns the vectors whose inner products are the scores."""
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused by the callers
            found: Float32s = np.ascontiguousarray(vectors, np.float32)
            if self._metric == "inner_product":
                return found
            # In float64: squares of float32 numbers neither overflow nor vanish there.
            lengths = np.linalg.norm(found.astype(np.float64), axis=1, keepdims=True)
            return (found / np.where(lengths == 0, 1.0, lengths)).astype(np.float32)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConfigError(f"{self._label} is closed; make another one.")
        self._follower.check()


def _check_arguments(reader: object, functions: dict[str, object], metric: object, kind: object) -> None:
    if not isinstance(reader, Reader):
        raise ConfigError(f'fleet.ps.ItemIndex(reader={reader!r:.100}) takes a fleet.ps.Reader, as in Reader("rows").')
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise ConfigError(f"fleet.ps.ItemIndex({name}={function!r:.100}) takes a function, or None.")
    for name, value, choices in (("metric", metric, _METRICS), ("kind", kind, _KINDS)):
        if value not in choices:
            raise ConfigError(f"fleet.ps.ItemIndex({name}={value!r}) takes one of {list(choices)}.")
    if kind == "ivf":
        import_faiss('fleet.ps.ItemIndex(kind="ivf")')


def _checked_count(name: str, value: object, kind: str) -> int | None:
    if value is None:
        return None
    count = count_of(value)
    if count is None:
        raise ConfigError(f"fleet.ps.ItemIndex({name}={value!r}) takes an integer from 1, or None.")
    if kind != "ivf":
        raise ConfigError(f'fleet.ps.ItemIndex({name}={value!r}) is for kind="ivf"; kind is {kind!r}.')
    return count


def _array(values: Any) -> Any:
    if is_tensor(values):
        return values.detach().cpu().float().numpy() if values.is_floating_point() else values.detach().cpu().numpy()
    try:
        return np.asarray(values)
    except ValueError:
        raise ConfigError(
            "index.search(): queries are lists of unequal lengths; they must be numbers [n, d]."
        ) from None


def _not_finite(vectors: Float32s) -> Any:
    """Returns which vectors have no finite length; a product of two others is finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        return ~np.isfinite(np.einsum("nd,nd->n", vectors, vectors))
