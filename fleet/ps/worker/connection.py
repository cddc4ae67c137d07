"""WorkerConnection: a worker's open client, the exchange of its mode, and the lookups that ask it for rows."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fleet.errors import NotInitializedError, UnsupportedOptionError
from fleet.ps.client.client import Client
from fleet.ps.client.shards import Keys, Rows
from fleet.ps.embeddings.lookup import ComingRows, TrainedRows
from fleet.ps.worker.async_exchange import AsyncExchange, HalfAsyncExchange
from fleet.ps.worker.covered_rank import LostRanks
from fleet.ps.worker.exchange_modes import ServerExchange, SyncExchange, check_mode
from fleet.ps.worker.geo import GeoExchange
from fleet.ps.worker.joining import check_nothing_lost, check_same_mode
from fleet.ps.worker.sender import SenderConfig
from fleet.ps.worker.stream_progress import StreamProgress, resume
from fleet.ps.worker.table_plan import TablePlan

_STARTED: weakref.WeakSet[WorkerConnection] = weakref.WeakSet()


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """How a worker trains.

    Args:
        mode: one of :data:`fleet.ps.worker.exchange_modes.MODES`.
        k_steps: steps between the exchanges of geo mode.
        sender: the queues of async mode.
        staleness: how many steps of other workers a step may lack (async, half-async); ``None``: any number.
        num_batches: batches per push of half-async mode.
        launch_barrier: all workers wait for each other before the first step.
        check_finite: a gradient with a NaN or Inf raises and is not pushed.
        user_call: returns the script's current call, for messages.
    """

    mode: str = "async"
    k_steps: int = 0
    sender: SenderConfig = field(default_factory=SenderConfig)
    staleness: int | None = None
    num_batches: int = 1
    launch_barrier: bool = True
    check_finite: bool = False
    user_call: Callable[[], str] = str

    def __post_init__(self) -> None:
        check_mode(self.mode)


class WorkerConnection:
    """Connects the lookups of a plan's modules to the servers, and keeps the exchange of gradients for parameters.

    Args:
        plan: the tables.
        config: how to train.
        make_client: returns an unopened client on the channel with the given number.
        train_dense: one step of the user's optimizer, for geo mode.
        exchanged: the tables whose gradients go to the servers; by default all of ``plan``.

    Attributes:
        opened: the main client, ``None`` before :meth:`open`.
        exchange: ``None`` before :meth:`start` and after :meth:`stop`.
        streams: how far this worker has read its streams; ``None`` where it reads none.
        lost_ranks: reads the streams of workers that were lost; ``None`` where the mode does not allow it.
        stopped: training has ended, by :meth:`abandon`.
    """

    def __init__(
        self,
        plan: TablePlan,
        config: TrainerConfig,
        make_client: Callable[[int], Client],
        train_dense: Callable[[], Any] = lambda: None,
        exchanged: TablePlan | None = None,
    ) -> None:
        self.plan = plan
        self.config = config
        self.exchanged = exchanged or plan
        self.opened: Client | None = None
        self.exchange: ServerExchange | None = None
        self.streams: StreamProgress | None = None
        self.lost_ranks: LostRanks | None = None
        self.stopped = False
        self._sender = config.sender.for_tables(len(plan.configs)) if config.mode == "async" else config.sender
        self._make_client = make_client
        self._train_dense = train_dense
        self._sources = [
            TrainedRows(key, partial(self._ask, key), self.request_rows, lambda: self.exchange is not None)
            for key in (table.table_id for table in plan.sparse)
        ]

    @property
    def client(self) -> Client:
        """The worker's main client."""
        if self.opened is None:
            raise NotInitializedError("the parameter servers are not connected. Call fleet.init_worker() first.")
        return self.opened

    # -- start and end -------------------------------------------------------------------------------------------

    def open(self) -> Client:
        """Connects the main client, and agrees with the servers on mode and tables."""
        # Noted before it connects: a start that fails half-way must close it.
        self.opened = client = self._make_client(0)
        client.open()
        check_same_mode(client, self.config.mode, self.config.staleness)
        check_nothing_lost(client.stat())
        client.create_tables(self.plan.configs)
        return client

    def connect(self, channel: int) -> Client:
        """Returns another open client that knows the tables."""
        client = self._make_client(channel)
        client.open()
        client.create_tables(self.plan.configs)
        return client

    def start(self) -> None:
        """Starts the exchange; lookups then ask the servers."""
        self._use(self._make_exchange(self.client))
        _STARTED.add(self)

    def restart(self) -> None:
        """Begins to exchange anew: the rows and values that the exchange has kept are from before a load."""
        self.client.stat()  # or raises, if a server is gone; the exchange then stays
        self.stop()
        self.start()

    def stop(self, *, sends: bool = True) -> None:
        """Ends the exchange, with ``sends`` once it has sent what waits; lookups then raise."""
        exchange = self.exchange
        self._use(None)  # before the exchange ends, so that no lookup asks a closed client
        if exchange is not None:
            (exchange.close if sends else exchange.abandon)()

    def abandon(self) -> None:
        """Ends the exchange without sending, and disconnects without a goodbye."""
        self.stopped = True
        if self.lost_ranks is not None:
            self.lost_ranks.end()
        self.stop(sends=False)
        if self.opened is not None:
            self.opened.close()

    def running(self) -> ServerExchange:
        """Returns the exchange; raises NotInitializedError before :meth:`start` and after :meth:`stop`."""
        if self.stopped:
            raise NotInitializedError("training has ended: fleet.stop_worker() was called.")
        if self.exchange is None:
            raise NotInitializedError("the parameter servers are not connected. Call fleet.init_worker() first.")
        return self.exchange

    def _make_exchange(self, client: Client) -> ServerExchange:
        config = self.config
        if config.mode == "sync":
            return SyncExchange(client, self.exchanged)
        if config.mode == "geo":
            return GeoExchange(client, self.exchanged, config.k_steps, self._train_dense)
        if config.mode == "half_async":
            return HalfAsyncExchange(client, self.exchanged, config.num_batches)
        others = [self.connect(number + 1) for number in range(self._sender.num_clients)]
        return AsyncExchange(client, self.exchanged, self._sender, others)

    # -- rows ----------------------------------------------------------------------------------------------------

    def request_rows(self, wanted: Mapping[int, Keys], is_next: bool) -> ComingRows:
        """Requests rows by table before their lookup: for the next step while this one is computed, or for this one."""
        if is_next and self.streams is not None:
            self.streams.check_ahead()
        return self.running().request(wanted, is_next)

    @property
    def reads_streams(self) -> bool:
        """Whether pushes carry positions in streams, which know of batches that the loop took in advance."""
        return self.streams is not None

    @property
    def may_read_ahead(self) -> bool:
        """Whether rows of the next step may be requested while this one is computed."""
        return self.running().may_read_ahead and (self.streams is None or self.streams.may_read_ahead)

    @property
    def pulled(self) -> int:
        """The number of rows that lookups have asked for."""
        return sum(source.asked for source in self._sources)

    def _use(self, exchange: ServerExchange | None) -> None:
        """Makes lookups ask the exchange itself; without one they raise."""
        # Every lookup pays for each function on its way, so the exchange is asked directly, and not through self.
        self.exchange = exchange
        for table, source in zip(self.plan.sparse, self._sources, strict=True):
            source.rows = partial(self._ask if exchange is None else exchange.rows, source.table_id)
            for module in table.modules:
                if exchange is not None:
                    module.lookup.source = source
                module.lookup.expect_nothing()  # rows on their way come from the exchange before

    def _ask(self, table_id: int, keys: Keys) -> Rows:
        return self.running().rows(table_id, keys)

    # -- gradients -----------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Waits until all steps of this worker are applied on the servers, and as durable as their level promises.

        The parameters are then the servers'. Raises ConfigError if the script has changed some.
        """
        exchange = self.running()
        exchange.check()
        exchange.flush()
        self.client.flush()
        if self.lost_ranks is not None:
            self.lost_ranks.flush()

    def excuse_writes(self) -> None:
        """Lets pass writes of the script until the next values come from the servers: it was warned."""
        if self.exchange is not None:
            self.exchange.excuse()

    def waiting(self) -> dict[str, int]:
        """Returns, by name of the table, how many gradients wait in its queue (async)."""
        exchange = self.exchange
        counts = exchange.waiting() if isinstance(exchange, AsyncExchange) else {}
        return {part.config.name: counts.get(part.table_id, 0) for part in self.plan.parts}

    def read_streams(self) -> StreamProgress:
        """Makes the pushes carry this worker's positions in streams, and returns where it goes on.

        Raises:
            UnsupportedOptionError: geo and hybrid workers train what no push holds.
        """
        if self.streams is None:
            self.running()
            if self.config.mode == "geo" or self.exchanged is not self.plan:
                raise UnsupportedOptionError(
                    "StreamDataset: in geo and hybrid jobs a worker trains parameters of its own, which no push holds, "
                    "so events would be lost or trained twice when it is restarted. Use a_sync = True (async) or "
                    "False (sync) without hybrid_configs."
                )
            client = self.client
            config = self.config
            self.streams = resume(client)
            # Elsewhere a step needs every worker, or a standby waits for a process of each rank.
            if config.mode == "async" and config.staleness is None and not client.config.has_others:
                self.lost_ranks = LostRanks(client, self.plan, self._sender, client.notify)
        return self.streams


def _leave_all() -> None:
    for connection in list(_STARTED):
        for module in connection.plan.modules:
            module.lookup.leave()


os.register_at_fork(after_in_child=_leave_all)  # two processes on one connection would take each other's answers
