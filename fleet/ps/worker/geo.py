"""Geo mode: each worker trains its own copy, and every ``k_steps`` steps the workers exchange differences.

For a row (or the dense values) with the worker's value ``local`` and ``old``, the value at the last exchange::

    delta = (local - old) / num_workers;  old += delta;  the server adds delta
    then, for what others have changed:   local += server - old;  old = server

Only rows that changed here are sent, and only rows that others changed come back (D.7 of Fleet's communicator modes).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fleet.errors import ConfigError
from fleet.ps.client.client import Client
from fleet.ps.client.shards import Gradient, Keys, Rows
from fleet.ps.table.ids import KeyPlaces, in_pieces, train_rows


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

    def find(self, keys: Keys) -> NDArray[np.int64]:
        """Returns the place of each key, -1 where it is unknown."""
        return self._index.find(keys)

    def insert(self, keys: Keys, rows: Rows) -> None:
        """Adds unknown, distinct keys with the server's rows."""
        first = self._num_rows
        end = self._num_rows + len(keys)
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

    def touch(self, places: NDArray[np.int64]) -> None:
        """Notes that rows were changed here."""
        self._touched[places] = True

    def take_deltas(self, num_workers: int) -> Gradient:
        """Returns what the server must add, and counts it as exchanged."""
        places = np.flatnonzero(self._touched)
        delta, old = self.local.take(places, 0), self.old.take(places, 0)
        delta -= old
        delta /= np.float32(num_workers)
        old += delta
        self.old[places] = old
        self._touched[places] = False
        return Gradient(self._keys_at(places), delta)

    def train(self, places: NDArray[np.int64], gradient: Rows, learning_rate: float) -> None:
        """Does ``local -= learning_rate * gradient`` for distinct places."""
        trained = self.local.take(places, 0)
        trained -= np.float32(learning_rate) * gradient
        self.local[places] = trained
        self.touch(places)

    def _keys_at(self, places: NDArray[np.int64]) -> Keys:
        return self.keys[places]

    def receive(self, keys: Keys, rows: Rows) -> None:
        """Takes the changes of others; keys that are unknown here come with their first use."""
        places = self.find(keys)
        known = places >= 0
        places = places[known]
        rows = rows[known]
        self.local[places] += rows - self.old[places]
        self.old[places] = rows


class WholeGeoRows(GeoRows):
    """All rows of a table, in the memory of a tensor that training reads and changes: the place of a row is its id.

    Args:
        weight: float32 [n, dim] on the CPU, with the servers' values.
    """

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight.detach()  # no array of it: share_memory_() moves what a tensor holds
        self.old = self.local.copy()
        self._touched = np.zeros(len(self.local), np.bool_)

    @property
    def local(self) -> Rows:
        """The rows where the tensor has them now."""
        rows: Rows = self._weight.numpy()
        return rows

    def find(self, keys: Keys) -> NDArray[np.int64]:
        """Returns the keys, which are the places."""
        return keys

    def train(self, places: NDArray[np.int64], gradient: Rows, learning_rate: float) -> None:
        """Does ``local -= learning_rate * gradient``; places may repeat."""
        train_rows(self.local, places, gradient, learning_rate, self._touched)

    def _keys_at(self, places: NDArray[np.int64]) -> Keys:
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
        self._spare: dict[int, Rows] = {}  # memory for dense differences, then for what is pulled
        self._steps = self._exchanges = 0
        self._rows_change = threading.Lock()  # a lookup adds rows, whichever thread of the script makes it
        self._found: dict[int, tuple[Keys, NDArray[np.int64]]] = {}  # a step trains the keys that it reads

    def _take_whole(self, whole: Mapping[int, Tensor]) -> None:
        if whole:
            self._client.pull_changes(list(whole))  # what was added until now comes with all rows
        for table_id, weight in whole.items():
            rows = weight.detach().numpy()
            for ids in in_pieces(len(rows)):
                rows[ids] = self._client.wait(self._client.pull({table_id: ids}))[table_id]

    def rows(self, table_id: int, keys: Keys) -> Rows:
        """Returns this worker's rows of ``keys``, float32 [n, dim]; those it has not seen come from the servers."""
        with self._rows_change:
            places = self._known(table_id, keys)  # before `local` is read: new rows can replace it
            rows: Rows = self._rows[table_id].local.take(places, 0)
        return rows

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
            self._rows[table_id].train(self._known(table_id, gradient.ids), gradient.rows, learning_rate)

    def _known(self, table_id: int, keys: Keys) -> NDArray[np.int64]:
        """Returns the places of ``keys``; fetches those that this worker has not seen."""
        last = self._found.get(table_id)
        if last is not None and last[0] is keys:
            return last[1]
        rows = self._rows[table_id]
        places = rows.find(keys)
        if isinstance(rows, WholeGeoRows):
            return places
        if len(places) and places.min() < 0:
            unknown = np.unique(keys[places < 0])
            rows.insert(unknown, self._client.wait(self._client.pull({table_id: unknown}))[table_id])
            places = rows.find(keys)
        self._found[table_id] = keys, places
        return places

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
            old, delta = self._old_dense[table_id], memory[table_id]
            for piece in _pieces(len(values)):
                np.subtract(values[piece], old[piece], out=delta[piece])
                delta[piece] /= np.float32(workers)
                old[piece] += delta[piece]
            deltas[table_id] = delta
        client.wait(client.add(deltas))
        if self._rows:
            for table_id, (keys, values) in client.pull_changes(list(self._rows)).items():
                self._rows[table_id].receive(keys, values)
        if self._dense:
            found = client.wait(client.pull(dict.fromkeys(self._dense), out=memory, wait_for_others=False))
            for table_id, values in self._dense.items():
                old, new = self._old_dense[table_id], found[table_id]
                for piece in _pieces(len(values)):
                    values[piece] += new[piece] - old[piece]
                    old[piece] = new[piece]
        self._spare = memory
        self._exchanges += 1
