"""A lost worker's rank, in whose name this worker reads streams and pushes until the rank's own process is back.

[Note: How partitions move]
Nothing is moved: the partitions of rank A stay A's. When A's lease has ended on every server, a worker B opens a second
client under rank A. That HELLO does what A's own restart does: it fences off A's old process and answers with A's
points, and B forms A's next batches from there, under A's step numbers (see :mod:`fleet.ps.server.stream_points`). A
step of the loop holds batches of one rank, and goes to the servers through that rank's clients. A restarted A fences
off B in the same way: B drops the gradients that it had not sent, whose events A then reads again. So every hand-over
is a restart of rank A, as exact as one.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from fleet.errors import PSError
from fleet.ps.client.client import Client
from fleet.ps.client.shards import Gradient, Rows
from fleet.ps.worker.async_exchange import AsyncExchange
from fleet.ps.worker.sender import SenderConfig
from fleet.ps.worker.stream_progress import resume
from fleet.ps.worker.table_plan import TablePlan

_ASK_EVERY = 8  # questions in the time of a lease


class CoveredRank:
    """One rank that this worker covers.

    Args:
        client: an open deputy of the rank that knows the tables.
        exchange: sends the steps of the rank.

    Attributes:
        progress: how far the rank's streams are read.
        ended: why this worker has ceased to cover the rank; empty while it does.
    """

    def __init__(self, client: Client, exchange: AsyncExchange) -> None:
        self.rank = client.config.rank
        self.ended = ""
        self._client = client
        self._exchange = exchange
        self.progress = resume(client)

    def put(self, gradients: Mapping[int, Gradient | Rows]) -> None:
        """Takes the gradients of one step; drops them once the rank has gone back to its own process."""
        if self.ended:
            self.progress.is_open = False
            return
        try:
            self.progress.put(self._exchange, self._client, gradients)
        except PSError as error:
            self.end(str(error))

    def flush(self) -> None:
        """Waits until everything that was put is applied."""
        if not self.ended:
            try:
                self._exchange.flush()
                self._client.flush()
            except PSError as error:
                self.end(str(error))

    def end(self, why: str) -> None:
        """Leaves the rank without sending what waits."""
        if not self.ended:
            self.ended = why
            self._exchange.abandon()
            self._client.close()


class LostRanks:
    """Looks for ranks whose workers were lost, and covers them.

    Args:
        client: this worker's own, open.
        plan: the tables.
        config: the queues of async mode.
        notify: receives each line meant for the user.
    """

    def __init__(self, client: Client, plan: TablePlan, config: SenderConfig, notify: Callable[[str], None]) -> None:
        self._client = client
        self._plan = plan
        self._config = config
        self._notify = notify
        lease_s = min(float(welcome["lease_s"]) for welcome in client.welcomes())
        self._every_s = lease_s / _ASK_EVERY
        self._asked_at = time.monotonic()
        self._covered: dict[int, CoveredRank] = {}
        self.current: CoveredRank | None = None  # the rank of the batch that the loop has; None: this worker's own

    def look(self) -> list[CoveredRank]:
        """Returns the ranks that this worker covers, now and then with one more."""
        self._drop_ended()
        now = time.monotonic()
        if now - self._asked_at >= self._every_s * (1 + len(self._covered)):  # who covers none is first
            self._asked_at = now
            states = [facts["workers"] for facts in self._client.stat()]
            for rank in range(len(states[0])):
                if all(workers[rank]["state"] == "expired" for workers in states) and self._cover(rank):
                    break
        return list(self._covered.values())

    def _drop_ended(self) -> None:
        for rank, covered in list(self._covered.items()):
            if covered.ended:
                del self._covered[rank]
                self._notify(f"this worker no longer reads the streams of worker {rank}: {covered.ended}")

    def _cover(self, rank: int) -> bool:
        process = secrets.randbits(64) | 1
        clients = [self._client.deputy(rank, number, process) for number in range(self._config.num_clients + 1)]
        try:
            for client in clients:
                client.open()
                client.create_tables(self._plan.configs)
        except PSError:  # its worker is back, or another one was faster
            for client in clients:
                client.close()
            return False
        self._covered[rank] = CoveredRank(clients[0], AsyncExchange(clients[0], self._plan, self._config, clients[1:]))
        self._notify(f"worker {rank} is lost: this worker reads its streams from where it was, until it is back")
        return True

    def flush(self) -> None:
        """Waits until everything that was put for covered ranks is applied."""
        for covered in self._covered.values():
            covered.flush()

    def end(self) -> None:
        """Leaves all ranks without sending what waits."""
        for covered in self._covered.values():
            with suppress(PSError):
                covered.end("this worker ends")
        self._covered = {}
