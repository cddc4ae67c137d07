"""The modes of exchange between a worker and its servers (D.7), and the sync mode.

=============  ==========================================================================================
sync           pushed, averaged over the workers and applied once; the worker continues with the result
half_async     summed over some batches, pushed and waited for
async          pushed in the background, merged by sum; parameters are received in between
geo            the worker trains alone and exchanges differences every ``k_steps`` steps
=============  ==========================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Protocol

import numpy as np

from fleet.errors import ConfigError
from fleet.ps.client.client import Client, Ticket
from fleet.ps.client.merge import with_distinct_ids
from fleet.ps.client.shards import Gradient, Keys, Rows
from fleet.ps.embeddings.lookup import ComingRows
from fleet.ps.wire.positions import Positions
from fleet.ps.worker.dense_part import DensePart
from fleet.ps.worker.row_replicas import make_replicas
from fleet.ps.worker.table_plan import TablePlan

MODES = ("sync", "half_async", "async", "geo")
Gradients = Mapping[int, Gradient | Rows]


class ServerExchange(Protocol):
    """One mode of one worker, on an open client that knows the tables."""

    reads_grad: bool  # takes dense gradients from the parameters' ``.grad``, not from what ``put`` is given

    def rows(self, table_id: int, keys: Keys) -> Rows:
        """Returns the rows that this worker's next forward sees."""

    @property
    def may_read_ahead(self) -> bool:
        """Whether the mode allows rows that are a step old."""

    def request(self, wanted: Mapping[int, Keys], is_next: bool) -> ComingRows:
        """Requests distinct rows by table, in one message to each server.

        Args:
            wanted: ids by table; they may repeat.
            is_next: the rows of the next step, before this one is done.

        Raises:
            ConfigError: the mode does not allow rows that are a step old.
        """

    def check(self, is_step: bool = False) -> None:
        """Raises ConfigError if the script has changed parameters that the servers hold.

        Before a step (``is_step``) it looks less closely where this brings no new values.
        """

    def excuse(self) -> None:
        """Lets pass writes of the script until the next values come from the servers."""

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


class _AsksServers(Protocol):
    client: Client
    # Flushes and barriers so far: a load or a shrink comes after one and changes more than training does, and what
    # follows a barrier sees every step before it.
    flushes: int


class TicketRows:
    """Rows that a pull brings, good until the step after those that were pushed when it was made.

    A flush or a barrier in between makes them too old.

    Args:
        exchange: of the pull.
        ticket: the pull.
        steps: steps of this worker that the rows may lack.
    """

    def __init__(self, exchange: _AsksServers, ticket: Ticket, steps: int = 0) -> None:
        self._exchange = exchange
        self._ticket = ticket
        self._until = exchange.client.step + steps
        self._flushes = exchange.flushes

    def rows(self, table_id: int, part: slice) -> Rows | None:
        """Waits for rows of one table; returns ``None`` when they are too old, or from before a flush or a barrier."""
        client = self._exchange.client
        if client.step > self._until or self._exchange.flushes > self._flushes:
            return None
        rows: Rows = client.wait(self._ticket)[table_id]
        return rows[part]


class SyncExchange:
    """All workers take each step together."""

    reads_grad = True
    may_read_ahead = False

    def __init__(self, client: Client, plan: TablePlan) -> None:
        self.client = client
        self.flushes = 0
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
        """Lets pass writes of the script until the next step."""
        self.plan.watch.excuse()

    def meeting(self) -> None:
        """Does nothing: nothing waits."""

    def rows(self, table_id: int, keys: Keys) -> Rows:
        """Returns the rows after the steps this worker has pushed."""
        rows: Rows = self.client.wait(self.client.pull({table_id: keys}))[table_id]
        return rows

    def request(self, wanted: Mapping[int, Keys], is_next: bool) -> TicketRows:
        """Requests rows after the steps this worker has pushed; refuses to request those of the next step."""
        if is_next:
            raise ConfigError(
                "prefetch() asks for rows before the step that changes them is done, but in sync training every step "
                "sees all steps before it. Omit it, iterate over fleet.prefetch(loader), or set a_sync to True."
            )
        return TicketRows(self, self.client.pull(wanted))

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
        # The answer brings the tables of the push; the others had no gradient here, but may have had one elsewhere.
        self._receive([part for part in self.plan.dense if part.table_id not in ticket.given])
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
        self.flushes += 1
        self.plan.watch.excuse()
        self._receive(self.plan.dense)
        self.plan.watch.note()
        if self._replicas is not None:
            self._replicas.expire()
        self._reached = self.client.step

    def met(self) -> None:
        """Takes the servers' parameters if other workers took steps while this one stood at a barrier.

        Otherwise the parameters stay untouched, so a forward from before the barrier still has its backward.
        """
        if self.client.step != self._reached:
            self.flush()
        self.flushes += 1

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


def check_mode(mode: str) -> None:
    """Raises ConfigError unless ``mode`` is one of :data:`MODES`."""
    if mode not in MODES:
        raise ConfigError(f"parameter-server mode {mode!r}: it is one of {list(MODES)}.")
