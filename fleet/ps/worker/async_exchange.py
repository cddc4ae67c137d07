"""The exchanges without a common step: async pushes in the background, half-async the sum of some batches.

Both pull rows from the servers, and receive dense values through a mailbox.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from fleet.errors import ConfigError
from fleet.ps.client.client import Client, TakeChanged, Ticket
from fleet.ps.client.shards import Keys, Rows
from fleet.ps.wire.positions import Positions
from fleet.ps.worker.exchange_modes import Gradients, TicketRows
from fleet.ps.worker.row_replicas import OLD_S, make_replicas
from fleet.ps.worker.sender import AsyncSender, HalfAsyncSender, Push, SenderConfig
from fleet.ps.worker.table_plan import TablePlan


class _Mailbox:
    """The newest values of dense tables, on their way from a receiving thread to the training thread."""

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
        """Copies arrived values into the parameters; with ``only_new`` unless these have the same values already."""
        # Taken out under the lock and copied without it: the receiving thread need not wait for the copy.
        with self._lock:
            arrived = self._arrived
            self._arrived = None
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
        # The watch compares with the new values from here on, so the memory of the old ones is free.
        with self._lock:
            self._spare = kept

    def _take_spare(self) -> Mapping[int, Rows]:
        with self._lock:
            spare = self._spare
            self._spare = None
        return spare or {part.table_id: np.empty(part.config.size, np.float32) for part in self._plan.dense}

    def _put(self, values: Mapping[int, Rows], ticket: Ticket) -> None:
        with self._lock:
            if self._arrived is not None:
                # The training thread has not taken the earlier values: the next ones are received into their memory.
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
        self.flushes = 0

    def check(self, is_step: bool = False) -> None:
        """Raises ConfigError if the script has changed dense parameters."""
        # All values were kept, so there is nothing to ask.
        self._plan.watch.check(dict, is_last=not is_step or self._receives_here or self._mailbox.is_full)

    def excuse(self) -> None:
        """Lets pass writes of the script until the next values come from the servers."""
        self._plan.watch.excuse()

    def met(self) -> None:
        """Takes the servers' parameters, unless this worker has them: a forward from before keeps its backward."""
        self.flushes += 1
        self._mailbox.receive(self.client)
        self._mailbox.deliver(only_new=True)

    def rows(self, table_id: int, keys: Keys) -> Rows:
        """Returns the rows; with a bound, once no other worker is further behind."""
        self._prepare(self.client.step)
        rows: Rows = self.client.wait(self._pull({table_id: keys}, self.client.step))[table_id]
        return rows

    @property
    def may_read_ahead(self) -> bool:
        """Whether rows may be a step old."""
        return self._bound != 0

    def request(self, wanted: Mapping[int, Keys], is_next: bool) -> TicketRows:
        """Requests rows; those of the next step are one step older than without."""
        if is_next and not self.may_read_ahead:
            raise ConfigError(
                "prefetch() asks for rows before the step that changes them is done, but "
                "a_sync_configs['max_staleness'] is 0. Omit it, iterate over fleet.prefetch(loader), or allow a "
                "staleness of 1 or more."
            )
        step = self.client.step + is_next
        self._prepare(step)
        return TicketRows(self, self._pull(wanted, step), steps=int(is_next))

    def _pull(self, wanted: Mapping[int, Keys], step: int) -> Ticket:
        return self.client.pull(wanted, step=step, wait_for_others=self._bound is not None)

    def _prepare(self, step: int) -> None:
        """Prepares a pull for ``step``."""

    def _take_parameters(self) -> None:
        """Takes arrived parameters; with a bound, waits until they are fresh enough for the next step."""
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
        self._sender.flush()
        self.met()

    def meeting(self) -> None:
        """Does nothing: a push is the sum of ``num_batches`` batches at a barrier, too."""

    def close(self) -> None:
        """Does nothing: the mode has neither threads nor further connections."""

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
        self._sender.flush()
        for client in self._others:
            client.flush()
        self.met()

    def meeting(self) -> None:
        """Waits until the servers have this worker's steps."""
        self._sender.flush()

    def met(self) -> None:
        """Takes the servers' parameters, and makes the next lookup ask for their rows again."""
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
        self._sender.abort()

    def _leave_weights(self) -> None:
        if self._replicas is not None:
            self._replicas.leave()
