"""The modes of exchange between a worker and its servers (D.7): what happens to the gradients of one step.

=============  ==========================================================================================
sync           pushed, averaged over the workers and applied once; the worker goes on with the result
half_async     those of some batches are summed, pushed and waited for
async          pushed in the background, merged by sum; parameters are received in between
geo            the worker trains alone and exchanges differences every ``k_steps`` steps
=============  ==========================================================================================
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from fleet.errors import ConfigError
from fleet.ps._client import Client
from fleet.ps._geo import GeoCommunicator
from fleet.ps._sender import AsyncSender, HalfAsyncSender, SenderConfig
from fleet.ps._shards import Gradient, Keys, Rows
from fleet.ps._table_plan import TablePlan

__all__ = ["MODES", "AsyncExchange", "Exchange", "GeoExchange", "HalfAsyncExchange", "SyncExchange"]

MODES = ("sync", "half_async", "async", "geo")
Gradients = Mapping[int, Gradient | Rows]


class Exchange(Protocol):
    """One mode of one worker, on an open client that knows the tables."""

    reads_grad: bool  # takes dense gradients from the parameters' ``.grad``, not from what ``put`` is given

    def rows(self, table_id: int, keys: Keys) -> Rows:
        """Returns the rows that this worker's next forward sees."""

    def put(self, gradients: Gradients) -> None:
        """Hands over the gradients of one step; parameters of the model may change."""

    def flush(self) -> None:
        """Returns when everything that was put is applied on the servers, and the parameters are the servers'."""

    def close(self) -> None:
        """Ends threads and connections of its own, once everything is sent."""

    def abandon(self) -> None:
        """Ends them at once."""


class SyncExchange:
    """All workers take each step together."""

    reads_grad = False

    def __init__(self, client: Client, plan: TablePlan) -> None:
        self.client, self.plan = client, plan

    def rows(self, table_id: int, keys: Keys) -> Rows:
        """Returns the rows after the steps this worker has pushed."""
        rows: Rows = self.client.wait(self.client.pull({table_id: keys}))[table_id]
        return rows

    def put(self, gradients: Gradients) -> None:
        """Pushes, and takes over what the servers made of all workers' gradients."""
        pushed = self.client.push(gradients)
        self._receive(lambda: self.client.wait(pushed))

    def flush(self) -> None:
        """Takes over the parameters."""
        self._receive()

    def close(self) -> None:
        """Has nothing of its own."""

    abandon = close

    def _receive(self, before: Callable[[], Any] = lambda: None) -> None:
        wanted = dict.fromkeys((part.table_id for part in self.plan.dense), None)
        pulled = self.client.pull(wanted) if wanted else None  # on its way while the push is waited for
        before()
        if pulled is not None:
            values = self.client.wait(pulled)
            for part in self.plan.dense:
                part.assign(values[part.table_id])


class _Mailbox:
    """The newest values of dense tables, on their way from a receiving thread to the one that trains."""

    def __init__(self, plan: TablePlan) -> None:
        self._plan = plan
        self._lock = threading.Lock()
        self._values: dict[int, Rows] | None = None

    def receive(self, client: Client) -> None:
        """Pulls the dense tables."""
        if self._plan.dense:
            wanted = dict.fromkeys((part.table_id for part in self._plan.dense), None)
            values = client.wait(client.pull(wanted, wait_for_others=False))
            with self._lock:
                self._values = values

    def deliver(self) -> None:
        """Copies what has come into the parameters."""
        with self._lock:
            values, self._values = self._values, None
        if values is not None:
            for part in self._plan.dense:
                part.assign(values[part.table_id])


class HalfAsyncExchange:
    """The gradients of ``num_batches`` batches are one push of their sum."""

    reads_grad = False

    def __init__(self, client: Client, plan: TablePlan, num_batches: int) -> None:
        self.client = client
        self._mailbox = _Mailbox(plan)
        self._sender = HalfAsyncSender(client, num_batches, self._mailbox.receive)

    def rows(self, table_id: int, keys: Keys) -> Rows:
        """Returns the rows as they are on the servers."""
        rows: Rows = self.client.wait(self.client.pull({table_id: keys}, wait_for_others=False))[table_id]
        return rows

    def put(self, gradients: Gradients) -> None:
        """Keeps the gradients, or pushes them with those of the batches before."""
        self._sender.put(gradients)
        self._mailbox.deliver()

    def flush(self) -> None:
        """Pushes what waits and takes over the parameters."""
        self._sender.flush()
        self._mailbox.receive(self.client)
        self._mailbox.deliver()

    def close(self) -> None:
        """Has nothing of its own."""

    abandon = close


class AsyncExchange:
    """Threads push in the background while the next batch is computed.

    Args:
        client: pulls rows.
        plan: the tables.
        config: the queues.
        others: open clients with known tables, one per thread as :class:`AsyncSender` takes them.
    """

    reads_grad = True

    def __init__(self, client: Client, plan: TablePlan, config: SenderConfig, others: Sequence[Client]) -> None:
        self.client, self._plan, self._others = client, plan, list(others)
        self._mailbox = _Mailbox(plan)
        additive = [table_id for table_id, table in plan.configs.items() if table.adds_up]
        self._sender = AsyncSender(self._others, config, self._mailbox.receive, additive)

    def rows(self, table_id: int, keys: Keys) -> Rows:
        """Returns the rows as they are on the servers."""
        rows: Rows = self.client.wait(self.client.pull({table_id: keys}, wait_for_others=False))[table_id]
        return rows

    def put(self, gradients: Gradients) -> None:
        """Queues the gradients, and takes over parameters that have come meanwhile."""
        self.client.step += 1
        late = {part.table_id: part for part in self._plan.dense if part.has_gradients()}
        self._sender.put({**gradients, **late}, step=self.client.step)
        self._mailbox.deliver()

    def waiting(self) -> dict[int, int]:
        """Returns, per table, how many gradients are in its queue."""
        return self._sender.waiting()

    def flush(self) -> None:
        """Waits for the queues, then takes over the parameters."""
        self._sender.flush()
        for client in self._others:
            client.flush()
        self._mailbox.receive(self.client)
        self._mailbox.deliver()

    def close(self) -> None:
        """Sends what waits, and ends threads and their connections."""
        try:
            self._sender.stop()
        finally:
            for client in self._others:
                client.close()

    def abandon(self) -> None:
        """Ends threads and their connections, whatever waits."""
        for client in self._others:
            client.close()
        self._sender.abort()


class GeoExchange:
    """Rows and parameters are trained here by SGD; differences travel every ``k_steps`` steps.

    Args:
        client: an open client with known tables.
        plan: the tables.
        k_steps: steps between exchanges.
        train_dense: one step of the user's optimizer on the parameters.
    """

    reads_grad = True

    def __init__(self, client: Client, plan: TablePlan, k_steps: int, train_dense: Callable[[], Any]) -> None:
        self._plan, self._train_dense = plan, train_dense
        self._values = {part.table_id: part.values() for part in plan.dense}
        self._geo = GeoCommunicator(client, k_steps, [part.table_id for part in plan.sparse], self._values)
        self._groups = {part.table_id: part.group for part in plan.sparse}

    def rows(self, table_id: int, keys: Keys) -> Rows:
        """Returns this worker's own rows."""
        return self._geo.rows(table_id, keys)

    def put(self, gradients: Gradients) -> None:
        """Trains one step, and exchanges when it is the turn."""
        self._train_dense()
        for table_id, gradient in gradients.items():
            group = self._groups.get(table_id)
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
        """Has nothing of its own."""

    abandon = close

    def _exchange(self, exchange: Callable[[], Any]) -> None:
        for part in self._plan.dense:
            self._values[part.table_id][:] = part.values()
        exchange()
        for part in self._plan.dense:
            part.assign(self._values[part.table_id])


def check_mode(mode: str) -> None:
    """Raises ConfigError unless ``mode`` is one of :data:`MODES`."""
    if mode not in MODES:
        raise ConfigError(f"parameter-server mode {mode!r}: it is one of {list(MODES)}.")
