"""Geo mode: each worker trains its own copy, and every ``k_steps`` steps the workers exchange differences.

For a row (or the dense values) with the worker's value ``local`` and ``old``, the value at the last exchange::

    delta = (local - old) / num_workers;  old += delta;  the server adds delta
    then, for what others have changed:   local += server - old;  old = server

Only rows that changed here are sent, and only rows that others changed come back (D.7 of Fleet's communicator modes).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fleet.errors import ConfigError
from fleet.ps.client.client import Client
from fleet.ps.client.shards import Gradient, Keys, Rows
from fleet.ps.embeddings.served_embedding import ServedEmbedding
from fleet.ps.table.ids import KeyPlaces, in_pieces, train_rows
from fleet.ps.wire.positions import Positions
from fleet.ps.worker.exchange_modes import Gradients
from fleet.ps.worker.table_plan import TablePlan

Places: TypeAlias = NDArray[np.int64]
_NUM_KNOWN = 3  # batches: the one that is trained, the next one if its rows were requested, and one looked up between


def _pieces(size: int) -> Iterator[slice]:
    """Yields slices of ``size`` elements that stay in the processor's cache through several operations."""
    return (slice(start, start + (1 << 15)) for start in range(0, size, 1 << 15))


class GeoRows:
    """The rows of one sparse table that this worker has used: its own values and those of the last exchange."""

    def __init__(self, dim: int) -> None:
        self._local = np.empty((0, dim), np.float32)
        self.old = np.empty((0, dim), np.float32)
        self.keys = np.empty(0, np.int64)  # by place
        self._touched = np.zeros(0, np.bool_)
        self._num_rows = 0  # used; the arrays above have room for more
        self._index = KeyPlaces()

    @property
    def local(self) -> Rows:
        """This worker's rows, by place."""
        return self._local

    def find(self, keys: Keys) -> Places:
        """Returns the place of each key, -1 where it is unknown."""
        return self._index.find(keys)

    def insert(self, keys: Keys, rows: Rows) -> None:
        """Adds unknown, distinct keys with the server's rows."""
        first = self._num_rows
        end = self._num_rows + len(keys)
        # At least doubled, so that keys that come a few at a time cost a copy only now and then.
        if end > len(self.keys):
            self._grow(max(end, 2 * len(self.keys)))
        self.keys[first:end] = keys
        self.local[first:end] = self.old[first:end] = rows
        self._num_rows = end
        self._index.add(self.keys[:end], first)

    def _grow(self, size: int) -> None:
        for name in ("keys", "_local", "old", "_touched"):
            array = getattr(self, name)
            larger = np.zeros((size, *array.shape[1:]), array.dtype)
            larger[: self._num_rows] = array[: self._num_rows]
            setattr(self, name, larger)

    def touch(self, places: Places) -> None:
        """Notes that rows were changed here."""
        self._touched[places] = True

    def take_deltas(self, num_workers: int) -> Gradient:
        """Returns the differences for the server to add, and counts them as exchanged."""
        places = np.flatnonzero(self._touched)
        delta = self.local.take(places, 0)
        old = self.old.take(places, 0)
        delta -= old
        # Divided by the workers, so that the server's sum of all deltas is the mean of their changes.
        delta /= np.float32(num_workers)
        old += delta
        self.old[places] = old
        self._touched[places] = False
        return Gradient(self._keys_at(places), delta)

    def train(self, places: Places, gradient: Rows, learning_rate: float) -> None:
        """Does ``local -= learning_rate * gradient`` for distinct places."""
        trained = self.local.take(places, 0)
        trained -= np.float32(learning_rate) * gradient
        self.local[places] = trained
        self.touch(places)

    def _keys_at(self, places: Places) -> Keys:
        return self.keys[places]

    def receive(self, keys: Keys, rows: Rows) -> None:
        """Takes the changes of others; keys that are unknown here come with their first use."""
        places = self.find(keys)
        known = places >= 0
        places = places[known]
        rows = rows[known]
        # The change made here since the last exchange stays; only the part of the others is added.
        self.local[places] += rows - self.old[places]
        self.old[places] = rows


class WholeGeoRows(GeoRows):
    """All rows of a table, in the memory of a tensor that training reads and changes: the place of a row is its id.

    Args:
        weight: float32 [n, dim] on the CPU, with the servers' values.
    """

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight.detach()  # and no array of it: share_memory_() gives the tensor other memory
        self.old = self.local.copy()
        self._touched = np.zeros(len(self.local), np.bool_)

    @property
    def local(self) -> Rows:
        """The rows where the tensor has them now."""
        rows: Rows = self._weight.numpy()
        return rows

    def find(self, keys: Keys) -> Places:
        """Returns the keys, which are the places."""
        return keys

    def train(self, places: Places, gradient: Rows, learning_rate: float) -> None:
        """Does ``local -= learning_rate * gradient``; places may repeat."""
        train_rows(self.local, places, gradient, learning_rate, self._touched)

    def _keys_at(self, places: Places) -> Keys:
        return places


class GeoCommunicator:
    """The exchange of one worker.

    Args:
        client: an open client; the tables named below are created.
        k_steps: training steps between two exchanges.
        sparse: ids of sparse tables.
        dense: flat float32 values of dense tables, changed in place by training and by the exchange; worker 0 must
            have set them on the servers and all workers start from the servers' values.
        whole: float32 [n, dim] on the CPU of sparse tables whose ids are 0 to n - 1, also listed in ``sparse``; their
            rows become the servers' and are then trained and exchanged in this memory.
    """

    def __init__(
        self,
        client: Client,
        k_steps: int,
        sparse: Iterable[int] = (),
        dense: dict[int, Rows] | None = None,
        whole: Mapping[int, Tensor] | None = None,
    ) -> None:
        if isinstance(k_steps, bool) or not isinstance(k_steps, int) or k_steps < 1:
            raise ConfigError(f"a_sync_configs['k_steps'] is {k_steps!r}; geo mode needs 1 or more.")
        self._client = client
        self._k_steps = k_steps
        self._take_whole(whole or {})
        self._rows = {
            table_id: WholeGeoRows(whole[table_id])
            if whole and table_id in whole
            else GeoRows(client.tables[table_id].dim)
            for table_id in sparse
        }
        self._dense = dense or {}
        self._old_dense = {table_id: values.copy() for table_id, values in self._dense.items()}
        self._spare: dict[int, Rows] = {}  # memory for dense differences, then for pulled values
        self._steps = 0
        self._rows_change = threading.Lock()  # lookups in several threads of the script add rows
        # The last keys and their places, by table: a step trains the keys that it has read.
        self._found: dict[int, list[tuple[Keys, Places]]] = {}

    def _take_whole(self, whole: Mapping[int, Tensor]) -> None:
        if whole:
            self._client.pull_changes(list(whole))  # the rows that are pulled now have all earlier additions
        for table_id, weight in whole.items():
            rows = weight.detach().numpy()
            for ids in in_pieces(len(rows)):
                rows[ids] = self._client.wait(self._client.pull({table_id: ids}))[table_id]

    def rows(self, table_id: int, keys: Keys) -> Rows:
        """Returns this worker's rows of ``keys``, float32 [n, dim]; those it has not seen come from the servers."""
        return self.rows_at(table_id, self.fetch({table_id: keys})[table_id])

    def rows_at(self, table_id: int, places: Places) -> Rows:
        """Returns this worker's rows at places that :meth:`fetch` has returned, as they are now, float32 [n, dim]."""
        with self._rows_change:
            rows: Rows = self._rows[table_id].local.take(places, 0)
        return rows

    def fetch(self, wanted: Mapping[int, Keys]) -> dict[int, Places]:
        """Takes the rows of ids that this worker has not seen from the servers, of all tables in one message.

        Returns the place of each id by table, which it keeps.
        """
        with self._rows_change:
            found = self._known(wanted)
            for table_id, keys in wanted.items():
                self._note(table_id, keys, found[table_id])
        return found

    def assign(self, table_id: int, keys: Keys, values: Rows) -> None:
        """Sets this worker's rows of distinct keys that it has read: one step of local training."""
        rows = self._rows[table_id]
        places = rows.find(keys)
        if (places < 0).any():
            raise ConfigError(f"table {table_id}: rows must be read before they are changed; call rows() first.")
        rows.local[places] = values
        rows.touch(places)

    def apply_sgd(self, table_id: int, gradient: Gradient, learning_rate: float) -> None:
        """Does ``local -= learning_rate * gradient`` for ids, distinct but in ``whole`` tables: geo trains with SGD."""
        with self._rows_change:
            places = self._known({table_id: gradient.ids})[table_id]
            self._rows[table_id].train(places, gradient.rows, learning_rate)

    def _known(self, wanted: Mapping[int, Keys]) -> dict[int, Places]:
        """Returns the places of ids by table; fetches those that this worker has not seen."""
        found = {table_id: self._places(table_id, keys) for table_id, keys in wanted.items()}
        unknown = {
            table_id: np.unique(wanted[table_id][places < 0])
            for table_id, places in found.items()
            if not isinstance(self._rows[table_id], WholeGeoRows) and len(places) and places.min() < 0
        }
        if unknown:
            for table_id, rows in self._client.wait(self._client.pull(unknown)).items():
                self._rows[table_id].insert(unknown[table_id], rows)
                found[table_id] = self._rows[table_id].find(wanted[table_id])
        return found

    def _places(self, table_id: int, keys: Keys) -> Places:
        """Returns the place of each key, -1 where it is unknown."""
        for known, places in self._found.get(table_id, ()):
            if known is keys:
                return places
        return self._rows[table_id].find(keys)

    def _note(self, table_id: int, keys: Keys, places: Places) -> None:
        last = self._found.setdefault(table_id, [])
        if all(known is not keys for known, _ in last):
            last.append((keys, places))
            del last[:-_NUM_KNOWN]

    def next_exchanges(self) -> bool:
        """Returns whether the next :meth:`step` ends with an exchange."""
        return not (self._steps + 1) % self._k_steps

    def step(self) -> bool:
        """Counts one training step and exchanges after every ``k_steps``; returns whether it did."""
        self._steps += 1
        if self._steps % self._k_steps:
            return False
        self.exchange()
        return True

    def exchange(self) -> None:
        """Sends this worker's differences and takes those of the others."""
        with self._rows_change:
            self._exchange()

    def _exchange(self) -> None:
        client = self._client
        workers = self._client.config.num_workers
        memory = self._spare or {table_id: np.empty_like(values) for table_id, values in self._dense.items()}
        self._spare = {}  # after a failure a request may still refer to it
        deltas: dict[int, Gradient | Rows] = {
            table_id: rows.take_deltas(workers) for table_id, rows in self._rows.items()
        }
        for table_id, values in self._dense.items():
            old = self._old_dense[table_id]
            delta = memory[table_id]
            for piece in _pieces(len(values)):
                np.subtract(values[piece], old[piece], out=delta[piece])
                delta[piece] /= np.float32(workers)
                old[piece] += delta[piece]
            deltas[table_id] = delta
        # The additions first: the values that are pulled afterwards hold them, as ``old`` does.
        client.wait(client.add(deltas))
        if self._rows:
            for table_id, (keys, values) in client.pull_changes(list(self._rows)).items():
                self._rows[table_id].receive(keys, values)
        if self._dense:
            found = client.wait(client.pull(dict.fromkeys(self._dense), out=memory, wait_for_others=False))
            for table_id, values in self._dense.items():
                old = self._old_dense[table_id]
                new = found[table_id]
                for piece in _pieces(len(values)):
                    values[piece] += new[piece] - old[piece]
                    old[piece] = new[piece]
        self._spare = memory


class _OwnRows:
    """Rows that this worker trains itself, each as it is when its lookup takes it."""

    def __init__(self, geo: GeoCommunicator, places: Mapping[int, Places]) -> None:
        self._geo = geo
        self._places = places

    def rows(self, table_id: int, part: slice) -> Rows:
        """Returns the rows of a part of the ids that were requested of one table."""
        return self._geo.rows_at(table_id, self._places[table_id][part])


class GeoExchange:
    """Rows and parameters are trained here by SGD; differences travel every ``k_steps`` steps.

    Args:
        client: an open client with known tables.
        plan: the tables.
        k_steps: steps between exchanges.
        train_dense: one step of the user's optimizer on the parameters.
    """

    reads_grad = True
    may_read_ahead = True

    def __init__(self, client: Client, plan: TablePlan, k_steps: int, train_dense: Callable[[], Any]) -> None:
        self._plan = plan
        self._train_dense = train_dense
        self._values = {part.table_id: part.values() for part in plan.dense}
        self._parts = {part.table_id: part for part in plan.sparse}
        served = [(part.table_id, m) for part in plan.sparse for m in part.modules if isinstance(m, ServedEmbedding)]
        self._served = [module for _, module in served]
        whole = {table_id: rows for table_id, module in served if (rows := module.read_weight()) is not None}
        self._geo = GeoCommunicator(client, k_steps, list(self._parts), self._values, whole)

    def rows(self, table_id: int, keys: Keys) -> Rows:
        """Returns this worker's own rows."""
        return self._geo.rows(table_id, keys)

    def request(self, wanted: Mapping[int, Keys], is_next: bool) -> _OwnRows:
        """Fetches the rows that this worker has not seen, of all tables in one message; the others are here."""
        return _OwnRows(self._geo, self._geo.fetch(wanted))

    def check(self, is_step: bool = False) -> None:
        """Does nothing: a write of the script is part of the difference that this worker sends."""

    excuse = meeting = met = check

    def put(self, gradients: Gradients, positions: Positions | None = None) -> None:
        """Trains one step, and exchanges every ``k_steps`` steps."""
        self._train_dense()
        for table_id, gradient in gradients.items():
            part = self._parts.get(table_id)
            group = None if part is None else part.group
            if group is not None and isinstance(gradient, Gradient):
                self._geo.apply_sgd(table_id, gradient, float(group["lr"]))
        if self._geo.next_exchanges():
            self._exchange(self._geo.step)
        else:
            self._geo.step()

    def flush(self) -> None:
        """Exchanges now."""
        self._exchange(self._geo.exchange)

    def close(self) -> None:
        """Makes lookups ask this worker again, which refuses; it has neither threads nor further connections."""
        for module in self._served:
            module.lookup.whole = None

    abandon = close

    def _exchange(self, exchange: Callable[[], Any]) -> None:
        for part in self._plan.dense:
            part.values(self._values[part.table_id])
        exchange()
        for part in self._plan.dense:
            part.assign(self._values[part.table_id])
