"""Trainer: a worker's side of training with parameter servers, from the first connection to the goodbye."""

from __future__ import annotations

import math
import os
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor
from torch.autograd.graph import increment_version

from fleet.errors import (
    ConfigError,
    NanInfError,
    NotInitializedError,
    PSError,
    UnsupportedOptionError,
)
from fleet.ps.client.client import Client, NothingLoaded
from fleet.ps.client.shards import Gradient, Keys, Rows
from fleet.ps.embeddings.lookup import ComingRows, TrainedRows
from fleet.ps.embeddings.served_embedding import ServedEmbedding
from fleet.ps.embeddings.served_weight import as_plain
from fleet.ps.table.rules import LEARNING_RATE
from fleet.ps.wire.messages import DISAGREE, HOW_WISHED, LOAD_WISH
from fleet.ps.worker.async_exchange import AsyncExchange, HalfAsyncExchange
from fleet.ps.worker.covered_rank import LostRanks
from fleet.ps.worker.dense_part import DensePart
from fleet.ps.worker.exchange_modes import ServerExchange, SyncExchange, check_mode
from fleet.ps.worker.geo import GeoExchange
from fleet.ps.worker.joining import check_nothing_lost, give_initial_values, rejoin, wait_for_values
from fleet.ps.worker.sender import SenderConfig
from fleet.ps.worker.stream_progress import StreamProgress, resumption_of
from fleet.ps.worker.table_plan import TablePlan
from fleet.ps.worker.untrained import read_local_file, warn_unlike

_OPEN: weakref.WeakSet[Trainer] = weakref.WeakSet()
_ENDS = {"load": (NothingLoaded, "loaded"), "save": (PSError, "saved"), "shrink": (PSError, "deleted")}
# Names of barriers. The workers count each name apart, so a save cannot meet the start of another process.
START = "fleet.start"
READY = "fleet.ready"
SAVE = "fleet.save"
BUFFERS = "fleet.buffers"


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


class Trainer:
    """Connects the modules of a plan to the servers, and exchanges gradients for parameters.

    Args:
        plan: the tables.
        config: how to train.
        make_client: returns an unopened client on the channel with the given number.
        train_dense: one step of the user's optimizer, for geo mode.
    """

    def __init__(
        self,
        plan: TablePlan,
        config: TrainerConfig,
        make_client: Callable[[int], Client],
        train_dense: Callable[[], Any] = lambda: None,
    ) -> None:
        self.plan = plan
        self._exchanged = plan
        self.config = config
        self._make_client = make_client
        self._train_dense = train_dense
        self._weights = [m.weight for part in plan.sparse for m in part.modules if isinstance(m, ServedEmbedding)]
        self._pending: Mapping[str, Any] | None = None
        self._rates: dict[int, float] = {}
        self._client: Client | None = None
        self._exchange: ServerExchange | None = None
        self._streams: StreamProgress | None = None
        self.lost_ranks: LostRanks | None = None  # where this worker reads the streams of those that were lost
        self._said_unlike = self.stopped = False
        self._sources: dict[int, TrainedRows] = {}  # by table: where lookups get its rows
        self._pushed = 0  # rows

    @property
    def client(self) -> Client:
        """The worker's main client."""
        if self._client is None:
            raise NotInitializedError("the parameter servers are not connected. Call fleet.init_worker() first.")
        return self._client

    # -- start and end -------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Connects, agrees on the tables, and starts from the servers' parameters.

        Worker 0 gives the servers the parameters of its model, unless they have some already: from a checkpoint, or
        because this worker was restarted.
        """
        client = self._make_client(0)
        self._client = client
        client.open()
        self._check_mode(client)
        check_nothing_lost(client.stat())
        client.create_tables(self.plan.configs)
        self._rates = {}  # the rates on the servers may be those of an earlier process
        if client.config.rank == 0:
            give_initial_values(client, self.plan, self._connect)
            if not client.step:  # nobody trained yet; a restarted worker 0 has yet to resume its schedule
                self._send_rates()
        if self.config.launch_barrier or not self.plan.dense:
            client.barrier(START, self.config.user_call())
        wait_for_values(client, self.plan)  # the barrier does not wait for a worker 0 whose lease has ended
        self._take_parameters(client)
        self._take_origin(client.stat()[0]["origin"])
        if self.config.launch_barrier:
            client.barrier(READY, self.config.user_call())  # nobody trains before all have the same parameters
        rejoin(client, self._pending)  # after the barriers of the start, which a restarted worker passes again
        self._exchange = self._start_exchange(client)
        for table in self.plan.sparse:
            source = TrainedRows(
                table.table_id, self._refuse_rows, self.request_rows, lambda: self._exchange is not None
            )
            self._sources[table.table_id] = source
            for module in table.modules:
                module.lookup.source = source
        self._connect_lookups()
        self.drop_gradients()
        _OPEN.add(self)

    def close(self) -> None:
        """Sends what waits, says goodbye to the servers, and disconnects."""
        if self._client is None or self.stopped:
            return
        try:
            self.flush()
            self._stop_exchange()
            self._client.goodbye()
            self._after_goodbye()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Disconnects without a goodbye: the servers wait for a restart of this worker until its lease ends."""
        self.stopped = True
        if self.lost_ranks is not None:
            self.lost_ranks.end()
        # Lookups are disconnected before the exchange ends, so that none of them asks a closed client.
        exchange = self._exchange
        self._exchange = None
        self._connect_lookups()
        if exchange is not None:
            exchange.abandon()
        if self._client is not None:
            self._client.close()

    # -- training ------------------------------------------------------------------------------------------------

    def request_rows(self, wanted: Mapping[int, Keys], is_next: bool) -> ComingRows | None:
        """Requests rows by table before their lookup: for the next step while this one is computed, or for this one."""
        if is_next and self._streams is not None:
            self._streams.check_ahead()
        return self._running().request(wanted, is_next)

    @property
    def may_read_ahead(self) -> bool:
        """Whether rows of the next step may be requested while this one is computed."""
        return self._running().may_read_ahead and (self._streams is None or self._streams.may_read_ahead)

    @property
    def reads_streams(self) -> bool:
        """Whether pushes carry positions in streams, which know of batches that the loop took in advance."""
        return self._streams is not None

    def step(self) -> None:
        """Sends the gradients that backward left to the servers, and takes parameters from them.

        Raises:
            NanInfError: a gradient is not finite and the check is on; nothing was pushed.
            PSError: a server is lost for longer than the deadline.
        """
        exchange = self._running()
        exchange.check(is_step=True)
        reads_dense = self.config.check_finite or not exchange.reads_grad
        gradients = self._gather_gradients(self._exchanged.dense if reads_dense else ())
        if self.config.check_finite:
            self._check_finite(gradients)
        self._send_rates()
        increment_version(self._weights)  # a graph that has read them is from before this step
        if self._streams is None:
            exchange.put(gradients)
            return
        if self.lost_ranks is not None and self.lost_ranks.current is not None:
            self.lost_ranks.current.put(gradients)
            return
        exchange.put(gradients, self._streams.positions())
        if self._streams.again:  # the servers have parts of this step: it must not be merged with the next
            exchange.flush()
            self.client.step = self._streams.step_after_again()

    def read_streams(self) -> StreamProgress:
        """Makes the pushes carry this worker's positions in streams, and returns where it goes on.

        Raises:
            UnsupportedOptionError: geo and hybrid workers train what no push holds.
        """
        if self._streams is None:
            self._running()
            if self.config.mode == "geo" or self._exchanged is not self.plan:
                raise UnsupportedOptionError(
                    "StreamDataset: in geo and hybrid jobs a worker trains parameters of its own, which no push holds, "
                    "so events would be lost or trained twice when it is restarted. Use a_sync = True (async) or "
                    "False (sync) without hybrid_configs."
                )
            resumption = resumption_of(self.client.welcomes())
            self._streams = StreamProgress(resumption, self.client.step)
            if resumption.again:
                self.client.step = resumption.again[0][0] - 1
            self.lost_ranks = self._look_for_lost()
        return self._streams

    def _look_for_lost(self) -> LostRanks | None:
        config = self.client.config
        if self.config.mode != "async" or self.config.staleness is not None or config.has_others:
            return None  # the step needs every worker, or a standby waits for a process of each rank
        return LostRanks(self.client, self.plan, self.config.sender, self.client.notify)

    def flush(self) -> None:
        """Waits until all steps of this worker are applied on the servers, and as durable as their level promises.

        The parameters are then the servers'. Raises ConfigError if the script has changed some.
        """
        self.check_written()
        self._running().flush()
        self.client.flush()
        if self.lost_ranks is not None:
            self.lost_ranks.flush()

    def is_stepping(self) -> bool:
        """Returns whether the trainer steps the user's optimizer outside a step of the script."""
        return False

    @property
    def counts(self) -> dict[str, int]:
        """How many rows lookups have asked for, and of how many rows gradients were passed on."""
        return {"pulled": sum(source.asked for source in self._sources.values()), "pushed": self._pushed}

    def has_gradients(self) -> bool:
        """Returns whether rows have gradients that were not pushed."""
        modules = [module for part in self.plan.sparse for module in part.modules]
        return any(m.lookup.has_gradients() or m.weight.grad is not None for m in modules)

    def waiting(self) -> dict[str, int]:
        """Returns, by name of the table, how many gradients wait in its queue (async)."""
        exchange = self._exchange
        counts = exchange.waiting() if isinstance(exchange, AsyncExchange) else {}
        return {part.config.name: counts.get(part.table_id, 0) for part in self.plan.parts}

    def stream_lags(self) -> dict[tuple[str, ...], float]:
        """Returns how many events of the streams that this worker reads wait, by source and partition."""
        return {} if self._streams is None else self._streams.lags()

    def drop_gradients(self) -> None:
        """Forgets the gradients of rows."""
        for part in self.plan.sparse:
            for module in part.modules:
                module.forget_gradients()

    def non_finite_rows(self) -> str:
        """Returns a sentence that names the first row with a NaN or Inf in its gradient; forgets the gradients."""
        return self.plan.not_finite(self._gather_gradients(self._exchanged.dense))

    def refresh(self) -> None:
        """Copies the servers' rows into the weights of ``nn.Embedding`` modules."""
        if self._client is None or self.stopped:
            return
        for part in self.plan.sparse:
            for module in part.modules:
                if isinstance(module, ServedEmbedding):
                    module.refresh()

    def check_written(self) -> None:
        """Raises ConfigError if the script has changed parameters that the servers hold."""
        self._running().check()

    def excuse_writes(self) -> None:
        """Lets pass writes of the script until the next values come from the servers: it was warned."""
        if self._exchange is not None:
            self._exchange.excuse()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state with which a restarted worker repeats no step."""
        if self._client is None:
            return dict(self._pending or {})
        if self._exchange is not None:
            self.flush()  # steps in a queue would be lost with this process
        return self._client.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes back to a checkpoint: the servers skip the steps that they have had from this worker."""
        if self._client is None:
            self._pending = dict(state)
        else:
            rejoin(self._client, state)

    def meet(self, name: str, wish: str = "") -> str | None:
        """Waits until every worker has come to its same-numbered barrier of this name; returns their common key."""
        exchange = self._exchange
        if exchange is not None:
            exchange.check()
            exchange.meeting()
        key = self._stand(name, self.config.user_call(), wish)
        if exchange is not None:
            exchange.met()
        return key

    def _stand(self, name: str, call: str, wish: str = "") -> str | None:
        return self.client.barrier(name, call, wish)

    # -- files and the life of rows ------------------------------------------------------------------------------

    def save(self, dirname: str, mode: int, tables: list[int] | None = None, text: bool = False) -> int:
        """Makes the servers save, once every worker is here with its steps applied; returns the rows saved.

        Every worker calls it, and all return when it is done. Each one requests it, so it is done even if one dies.
        """

        def act(key: str) -> int:
            self._before_save(dirname, tables)
            rows = self.client.save(dirname, mode=mode, tables=tables, key=key, text=text)
            # The servers hold no buffers; those of worker 0 stand for all.
            if tables is None and not self.client.config.rank:
                self.plan.untrained.write(dirname)
            return rows

        where = f"{os.path.realpath(dirname)}{_of(tables)}{HOW_WISHED}{mode}{' as text' * text}"
        rows = self._do_together(f"save to {where}", act)
        if tables is None:
            self._say_unlike()
        return rows

    def _say_unlike(self) -> None:
        """Warns on worker 0, once, where the save has its buffers and another worker has other ones."""
        client = self.client
        untrained = self.plan.untrained
        names = untrained.names() if client.config.num_workers > 1 else []
        wish = f"buffers{HOW_WISHED}{untrained.digest():08x}"
        key = self._stand(BUFFERS, self.config.user_call(), wish) if names else None
        if key is not None and key.startswith(DISAGREE) and not client.config.rank and not self._said_unlike:
            self._said_unlike = True
            warn_unlike(self.config.user_call(), names)

    def load(self, dirname: str, tables: list[int] | None = None) -> None:
        """Makes the servers load a save, once every worker is here; all continue with the loaded parameters.

        Raises:
            NothingLoaded: a server has refused it; servers and workers are as before.
            PSError: a server failed while it loaded. This worker has the servers' parameters, perhaps only
                in part the save's.
        """
        self.excuse_writes()  # they are replaced
        found: list[dict[str, Tensor]] = []

        def act(key: str) -> int:
            if tables is None:
                found.append(self._read_untrained(dirname))
            return self.client.load(dirname, tables=tables, key=key)

        self._load_together(dirname, tables, act)
        if tables is None:
            self.plan.untrained.assign(found[0] if found else self._read_untrained(dirname))

    def shrink(self, threshold: float | None) -> int:
        """Makes the servers delete rows of the tables that have a criterion, once every worker is here."""
        client = self.client
        parts = self.plan.shrinking(threshold)
        rows = 0
        self._come_to_save(f"shrink tables, threshold {threshold}")
        # One worker asks for all: each shrink of a table with an accessor lets its shows and clicks decay.
        if client.config.rank == 0:
            fields = {} if threshold is None else {"threshold": float(threshold)}
            rows = sum(client.alter(part.table_id, "shrink", **fields) for part in parts)
        client.barrier(SAVE, self.config.user_call())
        return rows

    def set_date(self, table_id: int, day: str) -> None:
        """Advances the day of a table's rows, unless the servers were told the same ``day`` last."""
        if self.client.config.rank == 0:
            self.client.alter(table_id, "advance_day", day=day)

    def table_facts(self, table_id: int) -> dict[str, int]:
        """Returns rows and bytes of a table over all servers."""
        facts = [fact["tables"][str(table_id)] for fact in self.client.stat()]
        return {name: sum(int(fact[name]) for fact in facts) for name in ("rows", "bytes")}

    # -- inside --------------------------------------------------------------------------------------------------

    def _do_together(self, what: str, act: Callable[[str], int]) -> int:
        """Does ``act`` with a key that all workers doing ``what`` share; returns when all have done it.

        A restarted worker skips an act that the others have finished without it.

        Raises:
            PSError: one worker came to load and another to do something else; none has done anything.
        """
        key = self._come_to_save(what)
        found = 0 if key is None else act(f"{key}-{zlib.crc32(what.encode()):08x}")
        self.client.barrier(SAVE, self.config.user_call())
        return found

    def _load_together(self, dirname: str, tables: list[int] | None, act: Callable[[str], int]) -> None:
        """Does ``act``, which loads, on all workers; afterwards this one has the servers' parameters."""
        try:
            self._do_together(f"{LOAD_WISH}{os.path.realpath(dirname)}{_of(tables)}", act)
        except NothingLoaded:
            raise
        except PSError:
            with suppress(PSError):  # of a server that is gone; the first error says more
                self._take_loaded(self.client)
            raise
        self._take_loaded(self.client)

    def _come_to_save(self, what: str) -> str | None:
        """Waits until every worker is here with its steps applied, to do ``what``; returns the key they share."""
        self.flush()
        if self.client.state_dict()["barriers"].get(SAVE, 0) % 2:
            # The previous process did not reach the end of a save, or its act was refused: one barrier is left over.
            self._stand(SAVE, self.config.user_call())
        key = self.meet(SAVE, what)
        if key is not None and key.startswith(DISAGREE):
            kind, end = _ENDS[what.split()[0]]
            raise kind(
                f"{self.config.user_call()}: this worker asks to {what}, but not all ask for the same: "
                f"{key.removeprefix(DISAGREE)}. Every worker must make the same call, with the same folder and "
                f"settings. Nothing was {end}."
            )
        return key

    def _after_goodbye(self) -> None:
        """Hook: runs after this worker's goodbye."""

    def _before_save(self, dirname: str, tables: list[int] | None) -> None:
        """Hook: runs once all workers are here, before the save."""

    def _take_origin(self, origin: str) -> None:
        """Takes what no server holds from the save that the servers have loaded, or have written last."""
        found = self._read_untrained(origin) if origin else {}
        self.plan.untrained.assign(found if self._pending is None else {})

    def _read_untrained(self, dirname: str) -> dict[str, Tensor]:
        return self.plan.untrained.read(dirname, self._file_of)

    def _file_of(self, path: Path, absent: str) -> bytes | None:
        return read_local_file(path, absent, self.client.notify)

    def _take_parameters(self, client: Client) -> None:
        if self.plan.dense:
            values = client.wait(client.pull(self.plan.dense_ids, wait_for_others=False))
            for part in self.plan.dense:
                part.assign(values[part.table_id])
            self.plan.watch.note(values)

    def _connect(self, channel: int) -> Client:
        client = self._make_client(channel)
        client.open()
        client.create_tables(self.plan.configs)
        return client

    def _check_mode(self, client: Client) -> None:
        theirs, staleness = (client.welcomes()[0][name] for name in ("mode", "staleness"))
        wanted = "sync" if self.config.mode == "sync" else "async"
        if (theirs, staleness) != (wanted, self.config.staleness):
            raise ConfigError(
                f"this worker trains in mode {self.config.mode!r} with max_staleness {self.config.staleness}, and the "
                f"parameter servers in mode {theirs!r} with {staleness}. Call distributed_optimizer() with the same "
                "strategy on servers and workers, before fleet.init_server()."
            )

    def _running(self) -> ServerExchange:
        if self.stopped or self._exchange is None:
            raise self._not_running()
        return self._exchange

    def _not_running(self) -> NotInitializedError:
        if self.stopped:
            return NotInitializedError("training has ended: fleet.stop_worker() was called.")
        return NotInitializedError("the parameter servers are not connected. Call fleet.init_worker() first.")

    def _start_exchange(self, client: Client) -> ServerExchange:
        config = self.config
        if config.mode == "sync":
            return SyncExchange(client, self._exchanged)
        if config.mode == "geo":
            return GeoExchange(client, self._exchanged, config.k_steps, self._train_dense)
        if config.mode == "half_async":
            return HalfAsyncExchange(client, self._exchanged, config.num_batches)
        count = config.sender.thread_pool_size + config.sender.independent_recv_thread
        return AsyncExchange(client, self._exchanged, config.sender, [self._connect(i + 1) for i in range(count)])

    def _connect_lookups(self) -> None:
        """Makes lookups ask the exchange itself; without one they raise."""
        for table_id, source in self._sources.items():
            exchange = self._exchange
            source.rows = self._refuse_rows if exchange is None else partial(exchange.rows, table_id)
        for part in self.plan.sparse:
            for module in part.modules:
                module.lookup.expect_nothing()

    def _refuse_rows(self, keys: Keys) -> NoReturn:
        raise self._not_running()

    def _stop_exchange(self) -> None:
        exchange = self._exchange
        self._exchange = None
        self._connect_lookups()
        if exchange is not None:
            exchange.close()

    def _take_loaded(self, client: Client) -> None:
        """Begins to exchange anew from the servers' parameters: all that this worker keeps is from before a load."""
        self._take_parameters(client)
        self.plan.forget_gradients()
        self._restart_exchange(client)

    def _restart_exchange(self, client: Client) -> None:
        client.stat()  # or raises, if a server is gone; the exchange then stays
        self._stop_exchange()
        self._exchange = self._start_exchange(client)
        self._connect_lookups()

    def _gather_gradients(self, dense: Sequence[DensePart] = ()) -> dict[int, Gradient | Rows]:
        with as_plain():
            self.plan.check_trained()
        gradients, passed_on = self.plan.gather_gradients(dense)
        self._pushed += passed_on
        return gradients

    def _send_rates(self) -> None:
        """Tells the servers when a scheduler has changed a rate; worker 0's schedule counts.

        Raises:
            ConfigError: a rate is negative or not finite.
        """
        if self.config.mode == "geo":
            return
        rates = [(part, part.rate()) for part in self.plan.parts]
        changed = {p.table_id: rate for p, rate in rates if rate is not None and rate != self._rates.get(p.table_id)}
        if not changed:
            return
        for part, rate in rates:
            if rate is not None and not 0 <= rate < math.inf:
                raise ConfigError(
                    f"the learning rate of {part.config.name!r} is {rate}; it must be finite and not "
                    "negative. Look at the scheduler, or at what sets group['lr']."
                )
        exchange = self._exchange
        if isinstance(exchange, AsyncExchange):
            exchange.meeting()  # the servers apply what waits with the rate that it was computed for
            if self.lost_ranks is not None:
                self.lost_ranks.flush()
        elif isinstance(exchange, SyncExchange) and not self.client.config.rank:
            exchange.settle()  # a server without a share in this step may wait for the previous one
        for table_id, rate in changed.items() if not self.client.config.rank else ():
            self.client.alter(table_id, LEARNING_RATE, value=rate)
        self._rates.update(changed)

    def _check_finite(self, gradients: Mapping[int, Gradient | Rows]) -> None:
        rank = self.client.config.rank
        step = self.client.step + 1
        found = self.plan.not_finite(gradients)
        if found:
            raise NanInfError(
                f"FLAGS_check_nan_inf: worker {rank}, step {step}: {found} Nothing was pushed.", rank=rank, step=step
            )


def _of(tables: list[int] | None) -> str:
    return "" if tables is None else f", tables {tables}"


def _leave_all() -> None:
    for trainer in list(_OPEN):
        for part in trainer.plan.sparse:
            for module in part.modules:
                module.lookup.leave()


os.register_at_fork(after_in_child=_leave_all)  # two processes on one connection would take each other's answers
