"""ServerJob: one process's part in a parameter-server job, as the session keeps it.

A worker has a trainer, a server has the configurations that it will serve by. Without servers in the environment a
single process starts one inside itself.
"""

from __future__ import annotations

import os
import secrets
import ssl
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleet.checks.absent_workers import AbsentWorkers
from fleet.env import Environment
from fleet.errors import ConfigError, NotInitializedError, OptionWarning
from fleet.launch.processes.report import LEFT_SERVERS_WAITING
from fleet.ps.client.client import Client
from fleet.ps.client.client_config import ONCE, ClientConfig
from fleet.ps.client.shards import TableMap
from fleet.ps.embeddings.batch_rows import BatchRows, LooksUp, Prefetched
from fleet.ps.publishing.publication import Publication, take_asked
from fleet.ps.server.server import Server
from fleet.ps.server.server_config import ServerConfig
from fleet.ps.server.server_files import load_tables
from fleet.ps.server.server_process import Prepare, Watch, run_servers
from fleet.ps.server.server_state import ServerState
from fleet.ps.table.layout import SparseTableConfig
from fleet.ps.wire.row_form import Remainders
from fleet.ps.wire.transport import SocketTransport
from fleet.ps.worker.connection import TrainerConfig, WorkerConnection
from fleet.ps.worker.sender import SenderConfig
from fleet.ps.worker.served_model import ServedModel
from fleet.ps.worker.table_configs import configure_table
from fleet.ps.worker.table_plan import TablePlan, plan_tables
from fleet.ps.worker.table_spellings import settings_of_tables
from fleet.ps.worker.trainer import Trainer
from fleet.ps_job.hybrid_job import make_hybrid_trainer
from fleet.ps_job.load_warning import LoadWarning
from fleet.ps_job.server_metrics import Metrics
from fleet.ps_job.server_settings import (
    Keeping,
    other_places,
    read_bound_socket,
    read_count,
    read_keeping,
    read_places,
    read_seconds,
    read_server_tls,
    read_standbys,
    read_worker_tls,
    thread_note,
)
from fleet.ps_job.user_secret import read_job_secret
from fleet.strategies._shared.served_optimizer import check_hooks
from fleet.strategies.a_sync import ASync, publication_of
from fleet.strategies.asp import Asp
from fleet.training.batch_loops import BatchLoops

if TYPE_CHECKING:
    from fleet.job.job import Job

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_OWN_CONNECTIONS = 256  # of one worker to the server inside it
_QUEUE_VARIABLES = {
    "max_merge_var_num": "FLAGS_communicator_max_merge_var_num",
    "send_queue_size": "FLAGS_communicator_send_queue_size",
    "send_wait_times": "FLAGS_communicator_send_wait_times",
    "thread_pool_size": "FLAGS_communicator_thread_pool_size",
    "min_send_grad_num_before_recv": "FLAGS_communicator_min_send_grad_num_before_recv",
    "independent_recv_thread": "FLAGS_communicator_independent_recv_thread",
}


class ServerJob:
    """The state behind ``fleet.init_server``, ``init_worker``, ``run_server``, ``stop_worker`` and the like.

    Args:
        job: a job with servers, or a single process that may start one in itself.
        become_served: turns a single process that trains alone into one whose updates happen on servers.
    """

    def __init__(self, job: Job, become_served: Callable[[], None]) -> None:
        self._job = job
        self._turn_served = become_served
        job.meet_at_server = self.meet_at_server
        job.is_between_served_steps = self._is_between_steps
        self._environment = Environment()
        self._parts: list[tuple[ServerConfig, Prepare | None]] = []  # by server of this process
        self._server_tls: ssl.SSLContext | None = None
        self._watch: Watch = lambda machine, is_new: lambda: None
        self._embedded: Server | None = None
        self._metrics: list[Callable[[], None]] = []  # functions that end them
        self._publication: Publication | None = None
        self.trainer: Trainer | None = None
        self._has_served = False
        self._said: set[LooksUp] = set()  # modules whose rows fleet.prefetch does not request

    # -- worker --------------------------------------------------------------------------------------------------

    def start_worker(self) -> None:
        """Connects this worker; afterwards the optimizer's steps go to the servers.

        Raises:
            NotInitializedError: model or optimizer were not given to Fleet.
            ConfigError: they cannot be served, or training was started before.
            PSError: a server did not come in time.
        """
        if self.trainer is not None:
            raise ConfigError("fleet.init_worker() was called twice. Call fleet.init() first to train once more.")
        job = self._job
        if not job.record.server_endpoints and job.collective:
            self._turn_served()
        strategy = self._strategy()
        plan = self.plan()
        metrics = self._read_metrics()
        # What model, optimizer and strategy refuse is found before a server is started or connected.
        self._read_publication(strategy)
        endpoints = list(job.record.server_endpoints) or [self._start_embedded(strategy)]
        self.trainer = trainer = self._open_trainer(strategy, plan, endpoints, metrics)
        for model in job.models if not strategy.hybrid else ():
            model.module.register_load_state_dict_pre_hook(LoadWarning(trainer.connection))
        rank = job.global_rank
        note = thread_note(self._environment, endpoints[0], job.record.world_size)
        if note and rank == 0:
            job.say(note)
        job.say(f"init rpc client with trainer_id {rank}")
        mode = f"{strategy.mode}, dense gradients among the workers" if strategy.hybrid else strategy.mode
        job.say(f"Communicator start ({mode}, servers {','.join(endpoints)})")

    def _open_trainer(self, strategy: ASync, plan: TablePlan, endpoints: Sequence[str], metrics: Metrics) -> Trainer:
        """Returns a connected trainer, whose metrics are served; what fails ends the server inside this process."""
        served = strategy.served
        assert served is not None
        trainer: Trainer | None = None
        try:
            # Reads settings of the connection, which may be refused: they need the address of the server.
            trainer = self._make_trainer(strategy, plan, endpoints)
            served.connect(trainer)
            trainer.open()
            if self._embedded is not None:
                self._metrics.append(metrics.serve_server(self._embedded.state, 0, endpoints[0]))
            self._metrics.append(metrics.serve_worker(trainer.connection, self._job.global_rank, endpoints))
        except BaseException:
            served.trainer = None
            if trainer is not None:
                trainer.abandon()
            self.close()
            raise
        return trainer

    def stop_worker(self) -> None:
        """Sends the waiting gradients and leaves the job; servers end when every worker has left."""
        trainer = self.running()
        connection = trainer.connection
        try:
            connection.running().check()
        except ConfigError as error:  # the job has ended well otherwise
            connection.excuse_writes()
            warnings.warn(f"fleet.stop_worker(): {error}", OptionWarning, stacklevel=3)
        # The model gets the final values while the servers are still there to give them.
        try:
            connection.flush()
            trainer.plan.refresh_weights()
            trainer.close()
            if self._embedded is not None:
                self._embedded.finish_publishing()
                self._embedded.stop()
                self._embedded.forget()
        finally:
            self.close()

    def prefetch(self, loader: Iterable[Any], *, may_read_ahead: bool = True) -> Prefetched:
        """Returns the batches of ``loader``; while a trainer is connected, their rows are requested in advance.

        Args:
            loader: any iterable.
            may_read_ahead: where the mode allows it, read one batch ahead of the loop; lookups whose ids are in no
                batch are said.

        Raises:
            NotInitializedError: by the loop, before training was started.
        """
        rows: BatchRows | None = None

        def connected() -> BatchRows | None:
            nonlocal rows
            trainer = self.running() if self.trainer is None else self.connected
            if trainer is None:
                return None
            if rows is None:
                said_to = (self._job.say, self._said) if may_read_ahead else (lambda line: None, None)
                rows = BatchRows(trainer.plan.modules, *said_to)
            return rows

        def reads_ahead() -> bool:
            trainer = self.connected
            if trainer is None or not may_read_ahead or not trainer.connection.may_read_ahead:
                return False
            return trainer.connection.reads_streams or not self._counts_batches

        return Prefetched(loader, connected, reads_ahead)

    @property
    def _counts_batches(self) -> bool:
        """Whether a checkpoint saves the position of data that takes a batch for trained when it gives the next."""
        loops = self._job.listeners.get(BatchLoops)
        return bool(loops.checkpoints) and loops.is_running

    @property
    def publication(self) -> Publication | None:
        """Where rows are published, once the job has started."""
        return self._publication

    @property
    def connected(self) -> Trainer | None:
        """The trainer between ``init_worker`` and ``stop_worker``, else ``None``."""
        return None if self.trainer is None or self.trainer.connection.stopped else self.trainer

    def meet_at_server(self) -> bool:
        """Waits for the other workers at a server; returns False where no server is connected yet."""
        trainer = self.connected
        if trainer is not None:
            trainer.meetings.meet("fleet.worker")
        return trainer is not None

    def _is_between_steps(self) -> bool:
        trainer = self.connected
        return trainer is not None and not trainer.is_stepping()

    def before_save(self) -> None:
        """Brings the weights of ``nn.Embedding`` modules up to date; the model is about to hand its state out."""
        trainer = self.connected
        if trainer is not None:
            trainer.plan.refresh_weights()

    def running(self) -> Trainer:
        """Returns the trainer; raises NotInitializedError before ``init_worker`` and after ``stop_worker``."""
        if self.trainer is None:
            raise NotInitializedError("the parameter servers are not connected. Call fleet.init_worker() first.")
        if self.trainer.connection.stopped:
            raise NotInitializedError("the parameter servers were let go by fleet.stop_worker().")
        return self.trainer

    def plan(self) -> TablePlan:
        """Returns the tables of the wrapped model and optimizer."""
        job = self._job
        strategy = self._strategy()
        if strategy.served is None or not (job.models or _trains_alone(strategy)):
            missing = "distributed_optimizer" if strategy.served is None else "distributed_model"
            raise NotInitializedError(
                f"the tables are made for a model and its optimizer, and fleet.{missing}() was not called. Call both "
                "before fleet.init_worker() and fleet.init_server()."
            )
        options = job.options
        tables = settings_of_tables(options["sparse_table_configs"], options["fleet_desc_configs"])
        plan = plan_tables(
            [model.module for model in job.models],
            strategy.served.optimizer,
            geo=strategy.mode == "geo",
            adam_d2sum=options["adam_d2sum"],
            dense_here=strategy.hybrid,
            mask_of=next((s.masks.of for s in job.strategies if isinstance(s, Asp)), None),
            configure=lambda config: configure_table(config, tables.get(config.name)),
        )
        plan.ids_of(list(tables), "sparse_table_configs")  # settings of a table that does not exist are a mistake
        check_hooks(strategy.served.optimizer, any(part.place is not None for part in plan.sparse))
        return plan

    # -- server --------------------------------------------------------------------------------------------------

    def init_server(self, dirname: str | None, var_names: Sequence[str] | None) -> None:
        """Sets the tables that the server starts with: empty ones, or the tables of a save.

        Raises:
            ConfigError: ``dirname`` is no folder, or no sparse table has one of the names.
        """
        record = self._job.record
        keeping = read_keeping(self._environment, record.global_rank)
        self._server_tls = read_server_tls(self._environment)
        shared = replace(
            self._server_config(self._strategy(), keeping), num_workers=record.world_size, secret=self._secret()
        )
        if dirname is None and var_names is not None:
            raise ConfigError(
                f"fleet.init_server(var_names={var_names!r}) says what to load and not from where; give the folder as "
                "dirname."
            )
        metrics = self._read_metrics()
        index = record.global_rank
        configs = self._shards(shared, index)
        self._watch = lambda machine, is_new: metrics.serve_server(
            machine, index, configs[0].endpoint, waits=not is_new
        )
        self._parts = [
            (config, None if dirname is None else self._loader(config, dirname, var_names)) for config in configs
        ]
        if keeping.note:
            self._job.say(keeping.note)

    def _shards(self, shared: ServerConfig, process: int) -> list[ServerConfig]:
        """Returns the configs of the servers of this process: of every shard where they can move, else one."""
        servers = self._job.record.server_endpoints
        places = read_places(self._environment, servers)
        if not places:
            return [replace(shared, index=process, **self._pair(process))]
        assert shared.folder is not None
        return [
            replace(
                shared,
                index=shard,
                endpoint=endpoint,
                places=places,
                standby=endpoint != servers[shard],
                folder=shared.folder / f"shard-{shard}",
            )
            for shard, endpoint in enumerate(places[process])
        ]

    def _pair(self, index: int) -> dict[str, Any]:
        """Returns the settings by which a server and its standby differ; without a standby the endpoint alone."""
        servers = self._job.record.server_endpoints
        standbys = read_standbys(self._environment, servers)
        if not standbys:
            return {"endpoint": servers[index]}
        is_standby = self._environment.bool("FLEET_PS_STANDBY")
        pair = (servers[index], standbys[index])
        return {"endpoint": pair[is_standby], "peer": pair[not is_standby], "standby": is_standby}

    def run_server(self) -> None:
        """Serves until every worker has left."""
        if not self._parts:
            raise NotInitializedError("fleet.run_server() needs fleet.init_server() first.")
        self._has_served = True
        first = self._parts[0][0]
        transport = SocketTransport(
            server_tls=self._server_tls,
            client_tls=read_worker_tls(self._environment) if first.peer or first.places else None,
            bound=read_bound_socket(self._environment),
        )
        say = self._job.say
        publish = self._read_publication(self._strategy())
        parts = [(replace(config, publish=publish), prepare) for config, prepare in self._parts]
        run_servers(parts, transport=transport, notify=say, watch=self._watch)

    def check_ended(self) -> None:
        """Ends this process with code 1 when it is a server that trains a model and never served, at its exit.

        Its workers would wait for it; so the launcher ends the job at once. A worker that has not left the servers says
        so in its log, where the launcher reads it. After an exception nothing is printed: its traceback is there.
        """
        if getattr(sys, "last_value", None) is not None:
            return
        if self.connected is not None and self._job.record.server_endpoints:
            print(
                f"Worker {self._job.global_rank} {LEFT_SERVERS_WAITING}: what it has not sent is lost, and the servers "
                "take it for one that will come back. Call it on every worker, also where a worker ends early.",
                file=sys.stderr,
                flush=True,
            )
        begun = self._job.optimizers or self._parts
        is_server = (self._environment.raw("TRAINING_ROLE") or "").strip().upper() == "PSERVER"
        if self._has_served or not begun or not is_server:
            return
        print(
            f"Parameter server {self._job.global_rank} ended without serving: the script did not call "
            "fleet.run_server(), so its workers would wait for it. Write if fleet.is_server(): fleet.init_server(); "
            "fleet.run_server() after distributed_optimizer() and distributed_model().",
            file=sys.stderr,
        )
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # os._exit() writes nothing out; sys.exit() has no effect on the code at exit
        os._exit(1)

    def _loader(self, config: ServerConfig, dirname: str, var_names: Sequence[str] | None) -> Prepare:
        job = self._job
        if not Path(dirname).is_dir():
            raise ConfigError(f"fleet.init_server({dirname!r}): there is no such folder.")
        plan = self.plan()
        ids = None if var_names is None else plan.ids_of(_names(var_names))
        count = len(job.record.server_endpoints)

        def prepare(machine: ServerState) -> None:
            maps = {key: TableMap(key, table, count) for key, table in plan.configs.items()}
            machine.create_tables({key: table.spec(config.index) for key, table in maps.items()})
            loaded = load_tables(machine, config, {"dirname": dirname, "tables": ids})
            job.say(f"parameter server {config.index}: loaded {loaded['rows']} rows from {dirname}")

        return prepare

    # -- inside --------------------------------------------------------------------------------------------------

    def _strategy(self) -> ASync:
        found = next((s for s in self._job.strategies if isinstance(s, ASync)), None)
        if found is None:
            raise NotInitializedError(
                "this job has no parameter servers yet. Call fleet.init_worker(), which starts one in this process."
            )
        return found

    def _start_embedded(self, strategy: ASync) -> str:
        read_standbys(self._environment, ())  # refuses them here
        config = self._server_config(strategy, read_keeping(self._environment, 0))
        # The only worker is in the same process: it cannot be lost alone, however long it pauses.
        config = replace(
            config,
            secret=secrets.token_hex(32).encode(),
            lease_s=max(3600.0, config.lease_s),
            max_connections=config.max_connections or _OWN_CONNECTIONS,
        )
        self._embedded = Server(config, notify=self._job.say)
        self._embedded.start()
        return self._embedded.endpoint

    def _server_config(self, strategy: ASync, keeping: Keeping) -> ServerConfig:
        """Returns the configuration that all servers of the job share."""
        name = "FLEET_PS_MAX_CONNECTIONS"
        return ServerConfig(
            mode="sync" if strategy.mode == "sync" else "async",
            staleness=strategy.staleness,
            job=self._environment.str("PADDLE_JOB_ID"),
            folder=keeping.folder,
            level=keeping.level,
            skips_damage=self._environment.bool("FLEET_PS_SKIP_DAMAGE"),
            lease_s=read_seconds(self._environment, "FLEET_PS_LEASE"),
            max_connections=read_count(self._environment, name) if self._environment.has(name) else None,
            publish=self._read_publication(strategy),
        )

    def _read_publication(self, strategy: ASync) -> Publication | None:
        """Returns where rows are published, by ``fleet.ps.publish`` or the options.

        Raises:
            ConfigError: both say where, or a table does not exist.
        """
        if self._publication is None:
            asked = take_asked()
            option = publication_of(strategy.config)
            if asked is not None and option is not None:
                raise ConfigError(
                    "fleet.ps.publish() was called and a_sync_configs['publish'] is set; a job publishes to one sink. "
                    "Remove one of them."
                )
            self._publication = asked or option
        found = self._publication
        if found is not None and found.tables is not None and strategy.served is not None and self._job.models:
            known = {config.name for config in self.plan().configs.values() if isinstance(config, SparseTableConfig)}
            if missing := sorted(found.tables - known):
                raise ConfigError(
                    f"fleet.ps.publish(tables={sorted(found.tables)!r}): there is no sparse table {missing[0]!r}; the "
                    f"model has {sorted(known)}."
                )
        return found

    def _stop_embedded(self) -> None:
        server = self._embedded
        self._embedded = None
        if server is not None:
            server.stop()

    def close(self) -> None:
        """Ends the server inside this process, if there is one, and the metrics."""
        self._stop_metrics()
        self._stop_embedded()

    def _read_metrics(self) -> Metrics:
        record = self._job.record
        return Metrics(self._environment, len(record.server_endpoints) or 1, record.world_size, self._job.say)

    def _stop_metrics(self) -> None:
        while self._metrics:
            self._metrics.pop()()

    def _secret(self) -> bytes:
        """Returns the secret of the server inside this process, else the job's, see :func:`read_job_secret`."""
        if self._embedded is not None and self._embedded.config.secret is not None:
            return self._embedded.config.secret
        return read_job_secret(self._environment, self._job.record.server_endpoints)

    def _client_maker(self, endpoints: Sequence[str], strategy: ASync) -> Callable[[int], Client]:
        job = self._job
        record = job.record
        environment = self._environment
        places = read_places(environment, record.server_endpoints)
        base = ClientConfig(
            endpoints=endpoints,
            rank=record.global_rank,
            num_workers=record.world_size,
            secret=self._secret(),
            job=environment.str("PADDLE_JOB_ID"),
            deadline_s=read_seconds(environment, "FLEET_PS_DEADLINE"),
            start_timeout_s=read_seconds(environment, "FLAGS_stop_check_timeout"),
            shares_memory=environment.bool("FLEET_PS_SHARED_MEMORY"),
            standbys=read_standbys(environment, endpoints if record.server_endpoints else ()),
            places=[other_places(places, *one) for one in enumerate(endpoints)] if places else (),
        )
        absent = AbsentWorkers(job, is_sync=strategy.mode == "sync")
        remainders = Remainders()  # of all connections: a table may change from one to another
        # A server inside this process needs no TLS.
        transport = SocketTransport(client_tls=read_worker_tls(environment) if self._embedded is None else None)
        client_id = secrets.randbits(64) | 1  # one process, whatever the number of its connections

        def make(channel: int) -> Client:
            # The channels from ONCE up carry the rows that tables start from, which are not rounded.
            form = strategy.config.wire if channel < ONCE else "float32"
            config = replace(base, channel=channel, heartbeat=channel == 0, wire=form)
            return Client(
                config,
                transport=transport,
                notify=job.say,
                client_id=client_id,
                remainders=remainders,
                look_after=absent.look_after,
            )

        return make

    def _make_trainer(self, strategy: ASync, plan: TablePlan, endpoints: Sequence[str]) -> Trainer:
        served = strategy.served
        config = self._trainer_config(strategy)
        make_client = self._client_maker(endpoints, strategy)
        assert served is not None
        if strategy.hybrid:
            return make_hybrid_trainer(self._job, plan, config, make_client, served.optimizer)
        return Trainer(ServedModel(WorkerConnection(plan, config, make_client, served.train_here)))

    def _trainer_config(self, strategy: ASync) -> TrainerConfig:
        config = strategy.config
        environment = self._environment
        return TrainerConfig(
            mode=strategy.mode,
            k_steps=config.k_steps,
            sender=_sender_config(config, environment),
            staleness=strategy.staleness,
            num_batches=read_count(environment, "CPU_NUM"),
            launch_barrier=config.launch_barrier,
            check_finite=environment.bool("FLAGS_check_nan_inf"),
            user_call=_user_call,
        )


def _user_call() -> str:
    """Returns the call of Fleet that the script is in, with the script's line."""
    # The outermost frame inside the package is the function that the script called.
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_back.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    outside = frame.f_back or frame
    return f"fleet.{frame.f_code.co_name}() at {os.path.relpath(outside.f_code.co_filename)}:{outside.f_lineno}"


def _sender_config(config: Any, environment: Environment) -> SenderConfig:
    """Returns the queues of ``a_sync_configs``; Fleet's FLAGS_communicator_* win where they are set."""
    values = {name: getattr(config, name) for name in _QUEUE_VARIABLES}
    for name, variable in _QUEUE_VARIABLES.items():
        if environment.has(variable):
            is_switch = name == "independent_recv_thread"
            values[name] = environment.bool(variable) if is_switch else read_count(environment, variable)
    return SenderConfig(**values)


def _names(var_names: Sequence[str]) -> list[str]:
    if not isinstance(var_names, list | tuple) or not all(isinstance(name, str) for name in var_names):
        raise ConfigError(f"fleet.init_server(var_names={var_names!r}) takes a list of names of sparse tables.")
    return list(var_names)


def _trains_alone(strategy: ASync) -> bool:
    """Returns whether the servers can train the optimizer's parameters without its model, as in Fleet 1.x.

    Rows are found in the model, and in a hybrid job the model exchanges the gradients.
    """
    assert strategy.served is not None
    return not strategy.hybrid and all(p.numel() for group in strategy.served.param_groups for p in group["params"])
