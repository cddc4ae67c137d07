"""The modes of exchange between a worker and its servers (D.7): what happens to the gradients of one step.

=============  ==========================================================================================
sync           pushed, averaged over the workers and applied once; the worker continues with the result
half_async     summed over some batches, pushed and waited for
async          pushed in the background, merged by sum; parameters are received in between
geo            the worker trains alone and exchanges differences every ``k_steps`` steps
=============  ==========================================================================================
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol

import numpy as np

from fleet.errors import ConfigError
from fleet.ps.client.client import Client, TakeChanged, Ticket
from fleet.ps.client.merge import with_distinct_ids
from fleet.ps.client.shards import Gradient, Keys, Rows
from fleet.ps.wire.positions import Positions
from fleet.ps.worker.dense_part import DensePart
from fleet.ps.worker.geo import GeoCommunicator
from fleet.ps.worker.row_replicas import OLD_S, make_replicas
from fleet.ps.worker.sender import AsyncSender, HalfAsyncSender, Push, SenderConfig
from fleet.ps.worker.served_embedding import ServedEmbedding
from fleet.ps.worker.table_plan import TablePlan

MODES = ("sync", "half_async", "async", "geo")
Gradients = Mapping[int, Gradient | Rows]


class Coming:
    """Rows that were requested one step ahead."""

    def __init__(self, exchange: _ServersOwn, ticket: Ticket, table_id: int) -> None:
        self._exchange = exchange
        self._ticket = ticket
        self._table_id = table_id
        self._asked_at = exchange.client.step
        self._flushes = exchange.flushes

    def rows(self) -> Rows | None:
        """Waits for them; returns ``None`` when they are older than a step, or from before a flush."""
        client = self._exchange.client
        if client.step > self._asked_at + 1 or self._exchange.flushes > self._flushes:
            return None
        rows: Rows = client.wait(self._ticket)[self._table_id]
        return rows


class ServerExchange(Protocol):
    """One mode of one worker, on an open client that knows the tables."""

    reads_grad: bool  # takes dense gradients from the parameters' ``.grad``, not from what ``put`` is given

    def rows(self, table_id: int, keys: Keys) -> Rows:
        """Returns the rows that this worker's next forward sees."""

    def ahead(self, table_id: int, keys: Keys) -> Coming | None:
        """Requests the rows of the next step; returns ``None`` where they are here already.

        Raises:
            ConfigError: the mode does not allow rows that are a step old.
        """

    def check(self, is_step: bool = False) -> None:
        """Raises ConfigError if the script has changed parameters that the servers hold.

        Before a step (``is_step``) it looks less closely where this brings no new values.
        """

    def excuse(self) -> None:
        """Lets pass what the script writes before the next values from the servers."""

    def meeting(self) -> None:
        """Sends what waits: this worker is about to stand at a barrier."""

    def met(self) -> None:
        """Makes parameters and rows those of the servers, behind a barrier."""

    def put(self, gradients: Gradients, positions: Positions | None = None) -> None:
        """Takes the gradients of one step; the model's parameters may change.

        ``positions`` say which events of streams they and those before them hold.
        """

    def flush(self) -> None:
        """Waits until everything that was put is applied on the servers; the parameters are then the servers'."""

    def close(self) -> None:
        """Sends everything, then ends its own threads and connections."""

    def abandon(self) -> None:
        """Ends them without sending."""


class SyncExchange:
    """All workers take each step together."""

    reads_grad = True

    def __init__(self, client: Client, plan: TablePlan) -> None:
        self.client = client
        self.plan = plan
        self._spare: dict[int, Rows | None] = {}  # memory for dense gradients; new memory costs as much as sending them
        self._replicas = make_replicas(client, plan, before_lookup=self._begin)
        self._has_begun = False
        self._reached = client.step  # the parameters hold all steps up to this one
        if client.step:  # the last step of a worker that was restarted may be pending
            self.flush()

    def check(self, is_step: bool = False) -> None:
        """Raises ConfigError if the script has changed dense parameters."""
        self.plan.watch.check(self._ask)

    def excuse(self) -> None:
        """Lets pass what the script writes before the next step."""
        self.plan.watch.excuse()

    def meeting(self) -> None:
        """Does nothing: nothing waits."""

    def rows(self, table_id: int, keys: Keys) -> Rows:
        """Returns the rows after the steps this worker has pushed."""
        rows: Rows = self.client.wait(self.client.pull({table_id: keys}))[table_id]
        return rows

    def ahead(self, table_id: int, keys: Keys) -> Coming | None:
        """Refuses."""
        raise ConfigError(
            "prefetch() asks for rows before the step that changes them is done, but in sync training every step sees "
            "all steps before it. Omit prefetch, or set a_sync to True."
        )

    def _begin(self) -> None:
        """Waits before the first lookup, as a pull does: a worker that was restarted may find its last step pending."""
        if not self._has_begun and self._replicas is not None:
            self._has_begun = True
            self.settle()
            self._replicas.expire()

    def put(self, gradients: Gradients, positions: Positions | None = None) -> None:
        """Pushes, and takes the parameters that the servers made of all workers' gradients."""
        spare = self._spare
        self._spare = {}  # after a failure a request may still refer to it
        self.plan.watch.excuse()  # a step that fails may have written a part
        takes = {part.table_id: part.assign for part in self.plan.dense}
        with nullcontext() if self._replicas is None else self._replicas.pushing() as changed:
            with self.client.places([part.table_id for part in self.plan.dense if part.has_gradients()]) as places:
                everything = self._everything(gradients, places, spare)
                ticket = self.client.push(everything, positions=positions, out=takes, changed=changed)
            self.client.wait(ticket)
        self._receive([part for part in self.plan.dense if part.table_id not in ticket.given])  # they had no gradient
        self.plan.watch.note()
        self._spare = spare
        self._reached = self.client.step

    def _everything(
        self, gradients: Gradients, places: Mapping[int, Rows], spare: dict[int, Rows | None]
    ) -> dict[int, Gradient | Rows]:
        """Returns all gradients of a step; dense ones come first, and lie in ``places`` where there are some."""
        everything: dict[int, Gradient | Rows] = {}
        for part in self.plan.dense:
            values = gradients.get(part.table_id)
            if values is None and part.table_id in places:
                values = part.gradients(places[part.table_id], for_others=True)
            elif values is None:
                values = spare[part.table_id] = part.gradients(spare.get(part.table_id))
            if values is not None:
                everything[part.table_id] = values
        for table_id, value in gradients.items():
            if isinstance(value, Gradient):
                everything[table_id] = with_distinct_ids([value])
        return everything

    def settle(self) -> None:
        """Waits until every server has applied the steps that this worker pushed, also where it had no share."""
        for part in self.plan.sparse[:1]:
            table = self.client.tables[part.table_id]
            ids = np.arange(64)
            while table.num_servers > 1 and not all(len(places) for places in table.split(ids)):  # type: ignore[arg-type]
                ids = np.arange(2 * len(ids))
            self.client.wait(self.client.pull({part.table_id: ids}, create=False))

    def flush(self) -> None:
        """Takes the servers' parameters."""
        self.plan.watch.excuse()
        self._receive(self.plan.dense)
        self.plan.watch.note()
        if self._replicas is not None:
            self._replicas.expire()
        self._reached = self.client.step

    def met(self) -> None:
        """Takes what the others changed if they took steps while this worker stood at a barrier.

        Otherwise the parameters stay untouched, so a forward from before the barrier still has its backward.
        """
        if self.client.step != self._reached:
            self.flush()

    def close(self) -> None:
        """Makes lookups ask this worker again, which refuses; it has no threads."""
        if self._replicas is not None:
            self._replicas.leave()

    abandon = close

    def _receive(self, parts: Sequence[DensePart]) -> None:
        if parts:
            takes = {part.table_id: part.assign for part in parts}
            self.client.wait(self.client.pull(dict.fromkeys(takes), out=takes))

    def _ask(self) -> dict[int, Rows]:
        return self.client.wait(self.client.pull(self.plan.dense_ids))


class _Mailbox:
    """The newest values of dense tables, on their way from a receiving thread to the one that trains."""

    def __init__(self, plan: TablePlan) -> None:
        self._plan = plan
        self._lock = threading.Lock()
        self._arrived: tuple[Mapping[int, Rows], int] | None = None
        self._spare: Mapping[int, Rows] | None = None  # for the next values: new memory costs as much as receiving
        self.reached = 0  # the parameters hold every worker's steps up to this one, where the servers count them

    def receive(self, client: Client, wait_for_others: bool = False) -> None:
        """Pulls the dense tables."""
        if self._plan.dense:
            values = self._take_spare()
            ticket = client.pull(self._plan.dense_ids, out=values, wait_for_others=wait_for_others)
            client.wait(ticket)
            self._put(values, ticket)

    def exchange(self, client: Client, push: Push, changed: TakeChanged | None = None) -> None:
        """Makes a push whose answer brings the dense tables, and the rows that ``changed`` takes."""
        values = self._take_spare()
        ticket = push(out={table_id: partial(_fill, rows) for table_id, rows in values.items()}, changed=changed)
        client.wait(ticket)
        rest = {table_id: rows for table_id, rows in values.items() if table_id not in ticket.given}
        if rest:  # they had no gradient
            client.wait(client.pull(dict.fromkeys(rest), out=rest, wait_for_others=False))
        if values:
            self._put(values, ticket)

    @property
    def is_full(self) -> bool:
        """Whether values have arrived."""
        return self._arrived is not None

    def deliver(self, only_new: bool = False) -> None:
        """Copies what has arrived into the parameters; with ``only_new`` unless they have the same values already."""
        with self._lock:
            arrived, self._arrived = self._arrived, None
        if arrived is None:
            return
        values, self.reached = arrived
        watch = self._plan.watch
        kept = watch.values or {}
        if only_new and kept and not watch.is_excused and all(np.array_equal(kept[key], values[key]) for key in kept):
            return
        for part in self._plan.dense:
            part.assign(values[part.table_id])
        watch.note(values)
        with self._lock:
            self._spare = kept

    def _take_spare(self) -> Mapping[int, Rows]:
        with self._lock:
            spare, self._spare = self._spare, None
        return spare or {part.table_id: np.empty(part.config.size, np.float32) for part in self._plan.dense}

    def _put(self, values: Mapping[int, Rows], ticket: Ticket) -> None:
        with self._lock:
            if self._arrived is not None:
                self._spare = self._arrived[0]
            self._arrived = values, ticket.reached or 0


def _fill(rows: Rows, values: Rows, start: int = 0) -> None:
    rows[start : start + len(values)] = values


class _ServersOwn:
    """Rows and parameters as they are on the servers, or as fresh as the bound on staleness requires.

    The bound is that of stale synchronous parallel training (Ho et al., NIPS 2013): what step t begins with holds the
    gradients of every worker's steps up to t - bound.
    """

    _receives_here = False  # values arrive in the step itself

    def __init__(self, client: Client, plan: TablePlan) -> None:
        self.client = client
        self._plan = plan
        self._mailbox = _Mailbox(plan)
        self._mailbox.reached = client.step
        self._bound = client.staleness
        self.flushes = 0  # a load or a shrink comes after one, and changes more than training does

    def check(self, is_step: bool = False) -> None:
        """Raises ConfigError if the script has changed dense parameters."""
        # All values were kept, so there is nothing to ask.
        self._plan.watch.check(dict, is_last=not is_step or self._receives_here or self._mailbox.is_full)

    def excuse(self) -> None:
        """Lets pass what the script writes before the next values from the servers."""
        self._plan.watch.excuse()

    def met(self) -> None:
        """Takes the servers' parameters, unless this worker has them: a forward from before keeps its backward."""
        self._mailbox.receive(self.client)
        self._mailbox.deliver(only_new=True)

    def rows(self, table_id: int, keys: Keys) -> Rows:
        """Returns the rows; with a bound, once no other worker is further behind."""
        self._prepare(self.client.step)
        rows: Rows = self.client.wait(self._pull(table_id, keys, self.client.step))[table_id]
        return rows

    def ahead(self, table_id: int, keys: Keys) -> Coming:
        """Requests the rows of the next step, one step older than without."""
        if self._bound == 0:
            raise ConfigError(
                "prefetch() asks for rows before the step that changes them is done, but "
                "a_sync_configs['max_staleness'] is 0. Omit prefetch, or allow a staleness of 1 or more."
            )
        step = self.client.step + 1
        self._prepare(step)
        return Coming(self, self._pull(table_id, keys, step), table_id)

    def _pull(self, table_id: int, keys: Keys, step: int) -> Ticket:
        return self.client.pull({table_id: keys}, step=step, wait_for_others=self._bound is not None)

    def _prepare(self, step: int) -> None:
        """Prepares a pull for ``step``."""

    def _take_parameters(self) -> None:
        """Takes what has arrived; with a bound, waits for parameters that are fresh enough for the next step."""
        self._mailbox.deliver()
        step = self.client.step
        if self._bound is not None and self._plan.dense and self._mailbox.reached < step - self._bound:
            self._prepare(step)
            self._mailbox.receive(self.client, wait_for_others=True)
            self._mailbox.deliver()


class HalfAsyncExchange(_ServersOwn):
    """Pushes the sum of the gradients of ``num_batches`` batches."""

    reads_grad = False
    _receives_here = True

    def __init__(self, client: Client, plan: TablePlan, num_batches: int) -> None:
        super().__init__(client, plan)
        self._sender = HalfAsyncSender(client, num_batches, self._mailbox.receive)
        self._told = client.step

    def _prepare(self, step: int) -> None:
        if self._bound is not None and self.client.step > self._told:  # by a push, or by a barrier
            self._told = self.client.step
            self.client.wait(self.client.push({}, step=self._told))

    def put(self, gradients: Gradients, positions: Positions | None = None) -> None:
        """Keeps the gradients, or pushes them with those of the earlier batches."""
        self._sender.put(gradients, positions)
        self._take_parameters()

    def flush(self) -> None:
        """Pushes what waits and takes the servers' parameters."""
        self.flushes += 1
        self._sender.flush()
        self.met()

    def meeting(self) -> None:
        """Does nothing: a push is the sum of ``num_batches`` batches at a barrier, too."""

    def close(self) -> None:
        """Does nothing: it has no threads or connections of its own."""

    abandon = close


class AsyncExchange(_ServersOwn):
    """Threads push in the background while the next batch is computed.

    Args:
        client: pulls rows.
        plan: the tables.
        config: the queues.
        others: open clients with known tables, one per thread as :class:`AsyncSender` takes them.
    """

    reads_grad = True

    def __init__(self, client: Client, plan: TablePlan, config: SenderConfig, others: Sequence[Client]) -> None:
        super().__init__(client, plan)
        self._others = list(others)
        additive = [table_id for table_id, table in plan.configs.items() if table.adds_up]
        self._replicas = None
        if self._bound is None:
            # No pull makes training wait for its servers; unless lookups do, training would only fill the queues.
            self._replicas = make_replicas(self._others[-1], plan, OLD_S, lambda: self._sender.keep_up())
        # With a bound the values must say which steps they hold; with several threads no push has all tables.
        is_one = self._bound is None and len(self._others) == 1
        self._sender = AsyncSender(self._others, config, self._receive, additive, self._exchange if is_one else None)

    def _exchange(self, client: Client, push: Push) -> None:
        if self._replicas is None:
            self._mailbox.exchange(client, push)
        elif self._replicas.is_due:
            with self._replicas.receiving() as changed:
                self._mailbox.exchange(client, push, changed)
        else:  # an answer brings rows, too
            client.wait(push())
            self._receive(client)

    def _receive(self, client: Client) -> None:
        self._mailbox.receive(client)
        if self._replicas is not None:
            self._replicas.receive()

    def _prepare(self, step: int) -> None:
        if self._bound is not None:
            self._sender.need(self.client.step, step - self._bound)

    def put(self, gradients: Gradients, positions: Positions | None = None) -> None:
        """Queues the gradients, and takes parameters that have arrived."""
        self.client.step += 1
        late = {part.table_id: part for part in self._plan.dense if part.has_gradients()}
        self._sender.put({**gradients, **late}, step=self.client.step, positions=positions)
        self._take_parameters()

    def waiting(self) -> dict[int, int]:
        """Returns, per table, how many gradients are in its queue."""
        return self._sender.waiting()

    def flush(self) -> None:
        """Waits for the queues, then takes the servers' parameters."""
        self.flushes += 1
        self._sender.flush()
        for client in self._others:
            client.flush()
        self.met()

    def meeting(self) -> None:
        """Waits until the servers have this worker's steps."""
        self._sender.flush()

    def met(self) -> None:
        """Takes the servers' parameters, and makes the next lookup see what they have by then."""
        super().met()
        if self._replicas is not None:
            self._replicas.expire()

    def close(self) -> None:
        """Sends what waits, and ends threads and their connections."""
        self._leave_weights()
        try:
            self._sender.stop()
        finally:
            for client in self._others:
                client.close()

    def abandon(self) -> None:
        """Ends threads and their connections without sending."""
        self._leave_weights()
        for client in self._others:
            client.close()
        self._sender.abort()

    def _leave_weights(self) -> None:
        if self._replicas is not None:
            self._replicas.leave()


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

    def ahead(self, table_id: int, keys: Keys) -> None:
        """Does nothing: the rows are here."""

    def check(self, is_step: bool = False) -> None:
        """Does nothing: what a script writes is part of the difference that this worker sends."""

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
        """Makes lookups ask this worker again, which refuses; it has no threads or connections of its own."""
        for module in self._served:
            module.lookup.whole = None

    abandon = close

    def _exchange(self, exchange: Callable[[], Any]) -> None:
        for part in self._plan.dense:
            part.values(self._values[part.table_id])
        exchange()
        for part in self._plan.dense:
            part.assign(self._values[part.table_id])


def check_mode(mode: str) -> None:
    """Raises ConfigError unless ``mode`` is one of :data:`MODES`."""
    if mode not in MODES:
        raise ConfigError(f"parameter-server mode {mode!r}: it is one of {list(MODES)}.")
