"""Fleet: every public call, each a few lines that delegate to the session."""

from __future__ import annotations

import atexit
import copy
import gc
import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from torch import nn
from torch.optim import Optimizer

from fleet.checkpoint import save_load
from fleet.common.log import LOGGER, set_log_level
from fleet.elastic.health import Health
from fleet.errors import ConfigError, NotInitializedError, OptionWarning
from fleet.job.running import Running, running_job
from fleet.job.session import Session
from fleet.job.start import start_session
from fleet.job.util import HostArray, UtilBase
from fleet.options import DistributedStrategy, check_strategy, mark_copied
from fleet.paddle import group_sharded
from fleet.paddle.topology import HybridCommunicateGroup, communicate_group
from fleet.ps.embeddings.batch_rows import check_batches
from fleet.ps_job.inference_model import save_model
from fleet.ps_job.version_mark import mark_version
from fleet.role_maker import RoleMakerBase
from fleet.strategies.amp.amp import Amp
from fleet.strategies.amp.explicit_scaler import share_scaler
from fleet.trackers.run_log import RunLog
from fleet.training.fleet_model import FleetModel
from fleet.training.fleet_optimizer import FleetOptimizer

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor

    from fleet.features.transforms import Transforms
    from fleet.ps_job.server_job import ServerJob

Path = str | os.PathLike[str]
_Batch = TypeVar("_Batch")


# UtilBase() without a job works in the running one, which it cannot import: a job has a UtilBase.
UtilBase.running = staticmethod(running_job)


class Fleet:
    """The calls of the ``fleet`` namespace; the package binds one instance of it to its own name."""

    def __init__(self, running: Running | None = None) -> None:
        self._running = Running() if running is None else running
        self._init_had_strategy = False
        self._util: Any = None

    @property
    def _session(self) -> Session | None:
        return self._running.session

    @_session.setter
    def _session(self, session: Session | None) -> None:
        self._running.session = session

    # ---- start ---------------------------------------------------------------------------------------------------

    def init(
        self,
        role_maker: RoleMakerBase | None = None,
        is_collective: bool = False,
        strategy: DistributedStrategy | None = None,
        log_level: int | str = "INFO",
    ) -> Fleet:
        """Joins the job: reads the role, orders the options or refuses them, and runs the rendezvous.

        Works under this project's launcher, torchrun, srun, mpirun and Kubeflow, and in a single process. The
        strategy is copied; later changes to the object have no effect.

        Raises:
            ConfigError: an argument, an option or the environment is wrong. Nothing was started.
            RendezvousError: not every worker joined in time; the message lists the absent ranks.

        Example:
            >>> fleet.init(is_collective=True)
        """
        positional: tuple[object, ...] = (role_maker, is_collective)
        if any(isinstance(argument, DistributedStrategy) for argument in positional):
            raise ConfigError(
                "fleet.init() got a DistributedStrategy where the role maker or is_collective goes. Name it: "
                "fleet.init(is_collective=True, strategy=strategy)."
            )
        if isinstance(role_maker, bool):
            raise ConfigError(f"fleet.init({role_maker}): a role maker comes first. Write is_collective={role_maker}.")
        if not isinstance(is_collective, bool):
            raise ConfigError(f"fleet.init(is_collective=...) takes True or False, got {is_collective!r}.")
        if role_maker is not None and not isinstance(role_maker, RoleMakerBase):
            raise ConfigError(f"fleet.init(role_maker=...) takes a role maker, got {role_maker!r}.")
        check_strategy("fleet.init(strategy=...)", strategy)
        set_log_level(log_level)
        options = copy.deepcopy(strategy) or DistributedStrategy()
        self._session = start_session(role_maker, is_collective, options, self._running.end)
        self._init_had_strategy = strategy is not None
        if strategy is not None:
            mark_copied(strategy, "fleet.init()", self._session.job)
        # Registered once, however often a script calls init.
        atexit.unregister(self._close)
        atexit.register(self._close)
        return self

    def init_parallel_env(self) -> dist.ProcessGroup | None:
        """Runs the rendezvous and returns the process group of the workers; the basic form, without options.

        A single process gets a warning and ``None``. A second call returns the existing group.
        """
        if self._session is None or not self._session.job.collective:
            self.init(is_collective=True)
        session = self._need("init_parallel_env")
        if session.job.world_size < 2:
            warnings.warn(
                "init_parallel_env(): one process was started, so there is nothing to connect. "
                "Start several with: python -m fleet.launch --nproc_per_node=2 SCRIPT",
                OptionWarning,
                stacklevel=2,
            )
        return session.job.process_group

    def prepare_context(self, strategy: object = None) -> dist.ProcessGroup | None:
        """Calls :meth:`init_parallel_env`; the name in older releases."""
        return self.init_parallel_env()

    # ---- who am I ------------------------------------------------------------------------------------------------

    def is_first_worker(self) -> bool:
        """Returns whether this process is worker 0."""
        return self.is_worker() and self.worker_index() == 0

    def worker_index(self) -> int:
        """Returns the rank of this worker in the job; ``rank`` is the same."""
        return self._need("worker_index").job.global_rank

    rank = worker_index

    def worker_num(self) -> int:
        """Returns the number of workers; ``nranks`` and ``world_size`` are the same."""
        return self._need("worker_num").job.world_size

    nranks = worker_num
    world_size = worker_num

    def data_rank(self) -> int:
        """Returns the index of this worker's rows, from 0 below :meth:`data_replicas`.

        Workers that hold one copy of the model together (mp, pp, sep, cp) have the same, and must be given the same
        rows. Without such axes it is :meth:`worker_index`.

        Example:
            >>> fleet.data_rank(), fleet.data_replicas()  # mp 2 on workers 0 and 1: one replica
            (0, 1)
        """
        return self._need("data_rank").job.data_rank

    def data_replicas(self) -> int:
        """Returns the number of workers, or of groups that hold one copy of the model, that train on different rows."""
        return self._need("data_replicas").job.data_replicas

    def node_num(self) -> int:
        """Returns the number of hosts the workers run on."""
        return self._need("node_num").job.record.num_nodes

    def local_rank(self) -> int:
        """Returns the rank of this worker on its node; 0 in a single process."""
        return self._need("local_rank").job.local_rank

    def local_device_ids(self) -> list[int]:
        """Returns the device ids of this worker."""
        return list(self._need("local_device_ids").job.record.local_device_ids)

    def world_device_ids(self) -> list[int]:
        """Returns the device ids of every worker, in rank order."""
        return list(self._need("world_device_ids").job.record.world_device_ids)

    def is_worker(self) -> bool:
        """Returns whether this process trains."""
        return bool(self._need("is_worker").role_maker.is_worker())

    def is_server(self) -> bool:
        """Returns whether this process is a parameter server."""
        return bool(self._need("is_server").role_maker.is_server())

    def is_coordinator(self) -> bool:
        """Returns False: this project has no coordinator role."""
        self._need("is_coordinator")
        return False

    @overload
    def worker_endpoints(self, to_string: Literal[False] = False) -> list[str]: ...

    @overload
    def worker_endpoints(self, to_string: Literal[True]) -> str: ...

    @overload
    def worker_endpoints(self, to_string: bool) -> list[str] | str: ...

    def worker_endpoints(self, to_string: bool = False) -> list[str] | str:
        """Returns the address of every worker, as a list or joined by commas."""
        endpoints = list(self._need("worker_endpoints").job.record.worker_endpoints)
        return ",".join(endpoints) if to_string else endpoints

    @overload
    def server_endpoints(self, to_string: Literal[False] = False) -> list[str]: ...

    @overload
    def server_endpoints(self, to_string: Literal[True]) -> str: ...

    @overload
    def server_endpoints(self, to_string: bool) -> list[str] | str: ...

    def server_endpoints(self, to_string: bool = False) -> list[str] | str:
        """Returns the address of every parameter server, as a list or joined by commas."""
        endpoints = list(self._need("server_endpoints").job.record.server_endpoints)
        return ",".join(endpoints) if to_string else endpoints

    def server_num(self) -> int:
        """Returns the number of parameter servers."""
        return len(self._need("server_num").job.record.server_endpoints)

    def server_index(self) -> int:
        """Returns the index of this parameter server; raises ConfigError on a worker."""
        session = self._need("server_index")
        if not self.is_server():
            raise ConfigError("fleet.server_index() is for parameter servers; this process is a worker.")
        return int(session.role_maker.server_index())

    # ---- among workers -------------------------------------------------------------------------------------------

    @property
    def util(self) -> UtilBase:
        """Collective operations on host arrays, file shards, printing on one rank; a script may assign its own."""
        return self._need("util").job.util if self._util is None else self._util

    @util.setter
    def util(self, util: Any) -> None:
        self._util = util

    def split_files(self, files: list[str]) -> list[str]:
        """Returns this worker's shard of ``files``; the 1.x name of ``fleet.util.get_file_shard``."""
        return self._need("split_files").job.util.get_file_shard(files)

    def barrier_worker(self) -> None:
        """Returns when every worker has called it.

        With parameter servers in sync and async mode, parameters and rows then hold every step before it.
        """
        self.util.barrier("worker")

    def all_reduce(self, input: Any, mode: str = "sum") -> HostArray:
        """Returns the sum, minimum or maximum of ``input`` (number or array) over all workers."""
        return self.util.all_reduce(input, mode)

    def log(self, values: Mapping[str, Any], step: int | None = None, *, total_steps: int = 0) -> dict[str, float]:
        """Returns the mean of each value over the workers, written by worker 0 to the trackers of the job.

        ``strategy.trackers`` and the launcher's ``--tracker`` name the trackers; without one nothing is written. Every
        worker makes the call, with the same names: it is one exchange. In a parameter-server job, whose workers do not
        step together, there is no exchange, and worker 0 writes its own values.

        Args:
            values: numbers by name; tensors of one element count as numbers.
            step: the step of the values; by default the number of steps of the distributed optimizers, with
                ``fleet.elastic.Checkpoint`` including the steps before a restart.
            total_steps: how many steps the whole run makes, where ``tracker_configs["total_steps"]`` did not say it;
                the page of the job then shows the time that is left. 0: not known.

        Raises:
            NotInitializedError: before ``fleet.init``.
            ConfigError: a value is no number, or the workers' names or steps differ.
            RendezvousError: a worker does not make the call.

        Example:
            >>> fleet.log({"loss": loss, "lr": optimizer.get_lr()})
        """
        return self._need("log").job.listeners.get(RunLog).log(values, step, total_steps)

    # ---- wrapping ------------------------------------------------------------------------------------------------

    def distributed_model(self, model: nn.Module, loss_fn: Any = None) -> FleetModel:
        """Returns ``model`` ready for distributed training; every worker then has worker 0's parameters.

        Calls run the wrapped module; everything else (attributes, methods, ``state_dict`` names) is the user's. In
        a single process the result behaves like the plain module.

        Args:
            model: your module.
            loss_fn: the loss of ``train_batch``, where pipeline_configs['split'] cuts a plain module into stages.

        Raises:
            NotInitializedError: before ``fleet.init``.
            ConfigError: an option that is on cannot work with this model.
        """
        return self._need("distributed_model").wrap_model(model, loss_fn)

    def distributed_optimizer(
        self, optimizer: Optimizer, strategy: DistributedStrategy | None = None
    ) -> FleetOptimizer:
        """Returns ``optimizer`` with the options applied; it stays a ``torch.optim.Optimizer``.

        A ``strategy`` given here replaces the one given to ``fleet.init``, with a warning when both were given.

        Raises:
            NotInitializedError: before ``fleet.init``.
            ConfigError: an option that is on cannot work with this optimizer.
        """
        session = self._need("distributed_optimizer")
        check_strategy("fleet.distributed_optimizer(strategy=...)", strategy)
        if strategy is not None:
            if self._init_had_strategy and strategy != session.options:
                warnings.warn(
                    "fleet.distributed_optimizer(strategy=...) replaces the strategy given to fleet.init().",
                    OptionWarning,
                    stacklevel=2,
                )
            session.adopt(strategy)
            mark_copied(strategy, "fleet.distributed_optimizer()", session.job)
        return session.wrap_optimizer(optimizer)

    def distributed_scaler(self, scaler: Any) -> Any:
        """Returns ``scaler``, a ``torch.amp.GradScaler``, which from then on skips the same steps on all workers.

        While batches of one update add up, its scale stays. With ``strategy.amp`` on, amp leaves the scaling of the
        loss to it. A scaler that was not passed is treated so from the first step that it makes.

        Raises:
            NotInitializedError: before ``fleet.init``.
            ConfigError: ``scaler`` is not a GradScaler; gradients of several batches add up and amp is off; dgc is on.

        Example:
            >>> scaler = fleet.distributed_scaler(torch.amp.GradScaler())
            >>> scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()
        """
        session = self._need("distributed_scaler")
        return share_scaler(scaler, session.job, session.strategies)

    def fp16_guard(self) -> AbstractContextManager[Any]:
        """Returns a context: a model with pure 16-bit computation that uses it computes in 16 bits only inside it.

        It is a no-op before ``fleet.init``, and unless ``amp_configs`` has ``use_pure_fp16`` or ``use_pure_bf16``
        together with ``use_fp16_guard``. A module outside it computes in float32, also on 16-bit tensors that come
        from inside; functions such as ``torch.matmul`` take tensors as they are.

        Example:
            >>> def forward(self, x):
            ...     with fleet.fp16_guard():
            ...         x = self.body(x)
            ...     return self.head(x)
        """
        strategies = self._session.strategies if self._session is not None else []
        amp = next((strategy for strategy in strategies if isinstance(strategy, Amp)), None)
        return nullcontext() if amp is None else amp.guard()

    def amp_init(
        self, place: object = None, scope: object = None, test_program: object = None, use_fp16_test: bool = False
    ) -> None:
        """Checks that mixed precision is ready in the last distributed optimizer; see ``FleetOptimizer.amp_init``."""
        self._last_optimizer("amp_init").amp_init(place, scope, test_program, use_fp16_test)

    def get_loss_scaling(self) -> float:
        """Returns the loss scale of the last distributed optimizer."""
        return self._last_optimizer("get_loss_scaling").get_loss_scaling()

    def minimize(
        self,
        loss: Tensor,
        startup_program: object = None,
        parameter_list: Any = None,
        no_grad_set: Any = None,
    ) -> tuple[list[None], list[tuple[nn.Parameter, Tensor]]]:
        """Updates the parameters of the last distributed optimizer; see ``FleetOptimizer.minimize``."""
        return self._last_optimizer("minimize").minimize(loss, startup_program, parameter_list, no_grad_set)

    def group_sharded_parallel(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        level: str,
        scaler: Any = None,
        group: dist.ProcessGroup | None = None,
        offload: bool = False,
        sync_buffers: bool = False,
        buffer_max_size: int = 2**23,
        segment_size: int = 2**20,
        sync_comm: bool = False,
        dp_group: dist.ProcessGroup | None = None,
        exclude_layer: list[Any] | None = None,
    ) -> tuple[FleetModel, FleetOptimizer, Any]:
        """Returns model, optimizer and scaler with the state sharded over the workers, without a strategy.

        Args:
            model: the user's module; load a checkpoint before this call.
            optimizer: the user's optimizer.
            level: ``"os"`` shards the optimizer state, ``"os_g"`` also the gradients, ``"p_g_os"`` also the parameters.
            scaler: a ``torch.amp.GradScaler`` or ``None``.
            group: the workers that share one copy; ``None`` is all.
            offload: keep the optimizer state in host memory (with "os_g" and "p_g_os" also gradients and shards).
            sync_buffers: accepted; buffers always come from worker 0 before each training forward.
            buffer_max_size: bytes that are gathered or sent at once.
            segment_size: accepted; it has no effect.
            sync_comm: accepted; it has no effect.
            dp_group: workers that hold replicas of what ``group`` shares.
            exclude_layer: must be empty.

        Raises:
            NotInitializedError: before ``fleet.init``.
            ConfigError: an argument is wrong, or options are on that need ``distributed_model``.

        Example:
            >>> model, optimizer, scaler = fleet.group_sharded_parallel(model, optimizer, "p_g_os")
        """
        session = self._need("group_sharded_parallel")
        group_sharded.check_arguments(level, buffer_max_size, segment_size, sync_comm, exclude_layer)
        wrapped, stepped = group_sharded.shard_by_groups(
            session, model, optimizer, level, group=group, dp_group=dp_group, offload=offload,
            buffer_max_size=buffer_max_size,
        )  # fmt: skip
        return wrapped, stepped, None if scaler is None else self.distributed_scaler(scaler)

    def save_group_sharded_model(self, model: FleetModel, output: str, optimizer: FleetOptimizer | None = None) -> None:
        """Writes the full states to ``output``/model.pdmodel and model.pdopt; every worker must call it.

        Worker 0 writes; every call returns once the files exist.

        Raises:
            ConfigError: Fleet did not return the model or the optimizer.
            CheckpointError: ``output`` is a file, or cannot be written.
        """
        session = self._need("save_group_sharded_model")
        group_sharded.save_states(model, output, optimizer, session.job.global_rank == 0)
        self.barrier_worker()

    def get_hybrid_communicate_group(self) -> HybridCommunicateGroup:
        """Returns this worker's coordinate along every axis of the mesh, and the process groups."""
        return communicate_group(self._need("get_hybrid_communicate_group"))

    # ---- Fleet as the optimizer (its 2.0 form) ----------------------------------------------------------------------

    def step(self) -> None:
        """Steps the last distributed optimizer."""
        self._last_optimizer("step").step()

    def clear_grad(self) -> None:
        """Clears the gradients of the last distributed optimizer."""
        self._last_optimizer("clear_grad").clear_grad()

    clear_gradient = clear_gradients = clear_grad

    def get_lr(self) -> float:
        """Returns the learning rate of the last distributed optimizer."""
        return self._last_optimizer("get_lr").get_lr()

    def set_lr(self, value: float) -> None:
        """Sets the learning rate of the last distributed optimizer."""
        self._last_optimizer("set_lr").set_lr(value)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the last distributed optimizer."""
        return self._last_optimizer("state_dict").state_dict()

    def set_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state into the last distributed optimizer."""
        self._last_optimizer("set_state_dict").set_state_dict(state_dict)

    # ---- health --------------------------------------------------------------------------------------------------

    def heartbeat(self, pause: bool = False) -> None:
        """Tells the launcher that this worker is alive; each step of a distributed optimizer does so, too.

        With ``--heartbeat_timeout``, a worker that stays silent for that long is killed. Call this in long work between
        two steps: for each batch of an evaluation, or once before it with ``pause=True``, which allows silence until
        the next step or call. It takes less than a microsecond, and is a no-op where nothing listens.

        Example:
            >>> fleet.heartbeat(pause=True)
        """
        session = self._need("heartbeat")
        if pause not in (True, False):
            raise ConfigError(f"heartbeat(pause={pause!r}) takes True or False.")
        session.job.beat(pause)

    def preempted(self) -> bool:
        """Returns whether the job was asked to stop and all workers have agreed that this is the last step.

        The result is the same on every worker after the same step, so that all can save now. It stays False without
        ``--preempt_grace``. With a ``fleet.elastic.Checkpoint`` there is no need to call it: where the loop begins its
        next batch, the checkpoint is written and the process exits with ``fleet.elastic.PREEMPTED``.

        Example:
            >>> fleet.preempted()
            False
        """
        health = self._need("preempted").job.listeners.find(Health)
        return health is not None and health.is_preempted

    # ---- servers -------------------------------------------------------------------------------------------------

    def init_server(self, dirname: Path | None = None, var_names: Sequence[str] | None = None) -> None:
        """Prepares this parameter server; with ``dirname``, loads the rows and parameters of an earlier save.

        Args:
            dirname: a folder that ``save_persistables`` wrote, with any number of servers.
            var_names: loads only these sparse tables, named after the model's embeddings.

        Raises:
            NotInitializedError: before ``fleet.init``, or ``dirname`` is given and the model is not known yet.
            ConfigError: ``dirname`` is not a folder, or a name is not a sparse table's.
        """
        job = self._job("init_server", "server")
        if job is not None:
            job.init_server(None if dirname is None else _path("init_server", "dirname", dirname), var_names)

    def run_server(self) -> None:
        """Serves until every worker has called ``stop_worker`` (or has been silent too long)."""
        job = self._job("run_server", "server")
        if job is not None:
            job.run_server()

    # ---- workers -------------------------------------------------------------------------------------------------

    def init_worker(self, scopes: object = None) -> None:
        """Connects this worker to the servers; training starts from worker 0's parameters, or the servers' own.

        It waits at most FLAGS_stop_check_timeout seconds for servers that have not started, and names them. A single
        process without servers in its environment runs one itself.

        Args:
            scopes: accepted for Fleet's signature; torch has no scopes.

        Raises:
            NotInitializedError: before ``fleet.init``, ``distributed_optimizer`` or ``distributed_model``.
            ConfigError: the model cannot be served.
            PSError: servers did not start in time; the message names them.
        """
        job = self._job("init_worker", "worker")
        if job is not None:
            job.start_worker()

    def prefetch(self, loader: Iterable[_Batch]) -> Iterable[_Batch]:
        """Returns the batches of ``loader`` for a loop whose rows come in one message, whatever the number of tables.

        The rows of each batch are requested before the model looks them up: in async and geo mode, and with
        ``max_staleness`` of 1 or more, those of the next batch while this one is computed; else those of this batch
        with its first lookup, so the step sees what it would see without. In the first two batches, lookups show which
        tensors, columns or features of a batch are the ids of which table; ids that are computed inside the model are
        still requested at their lookup, which is said once. Every lookup compares its ids with the requested ones, so a
        batch of another form costs a message and changes no result; after eight such messages in turn, as in a loop
        that hashes the ids of its batches, nothing is requested for that lookup any more, which is said too.

        Where it reads ahead, a loop that is left early has taken one more batch from the loader. Data that counts a
        batch as trained when the next one is asked for (streams, and data whose position a checkpoint saves) is not
        read ahead.

        Without parameter servers the batches pass through, with a warning.

        Args:
            loader: any iterable of batches: tensors, jagged ones too, arrays and TorchRec's ``KeyedJaggedTensor``,
                alone or in dicts, lists, tuples and dataclasses. The result has its attributes, to be read.

        Raises:
            NotInitializedError: the loop begins before ``fleet.init_worker()``.
            ConfigError: ``loader`` is no iterable of batches; or, in the modes that read ahead, it writes the next
                batch into the memory of the last.

        Example:
            >>> for batch in fleet.prefetch(loader):
            ...     loss = model(batch["ids"], batch["label"])
            ...     loss.backward()
            ...     optimizer.step()
            ...     optimizer.zero_grad()
        """
        check_batches(loader)
        job = self._job("prefetch", "worker")
        return loader if job is None else job.prefetch(loader)

    def stop_worker(self) -> None:
        """Sends the pending updates and leaves the job; the servers exit when all workers have left."""
        job = self._job("stop_worker", "worker")
        if job is not None:
            job.stop_worker()

    # ---- files ---------------------------------------------------------------------------------------------------

    def save_persistables(
        self,
        executor: object = None,
        dirname: Path | None = None,
        main_program: object = None,
        mode: int = 0,
        *,
        text: bool = False,
    ) -> None:
        """Makes the servers write all tables to ``dirname``; every worker calls it and returns when they are written.

        Args:
            executor: accepted for Fleet's signature; the folder may stand in its place.
            dirname: a folder that all servers reach.
            main_program: accepted for Fleet's signature.
            mode: 0 every row; 1 the rows that changed enough since the last save; 2 the rows with a score high
                enough; 3 every row, and a day passes. 1 and 2 need an accessor on each table.
            text: writes rows as lines of text, which other programs and ``load_model`` can read; mode 0 only.

        Raises:
            PSError: another worker asks for a load; all workers raise it, nothing was saved.
        """
        folder = _folder("save_persistables", executor, dirname)
        number = _check_mode(mode)
        if not isinstance(text, bool) or (text and number):
            raise ConfigError(
                f"fleet.save_persistables(mode={mode!r}, text={text!r}): text is True or False, and True needs mode 0, "
                "which writes every row."
            )
        job = self._job("save_persistables", "worker")
        if job is not None:
            job.running().tables.save(folder, number, text=text)

    def save_inference_model(
        self,
        executor: object = None,
        dirname: Path | None = None,
        feeded_var_names: object = None,
        target_vars: object = None,
        main_program: object = None,
        export_for_deployment: bool = True,
        mode: int = 0,
        *,
        example_inputs: Sequence[Any] | None = None,
        transforms: Transforms | None = None,
    ) -> None:
        """Writes a folder from which one process predicts: all tables, and the model's state as ``model.pt``.

        Every worker calls it; worker 0 writes the state. With ``example_inputs`` it writes the dense part as a program
        too, and :class:`fleet.ps.Predictor` predicts from the folder. Without, build the model, load the state with
        ``fleet.load`` and call ``SparseEmbedding.load(dirname)`` on each embedding with unbounded ids; or make the
        program afterwards with ``python -m fleet.ps export``.

        Args:
            executor: accepted for Fleet's signature; the folder may stand in its place.
            dirname: a folder that all servers reach.
            feeded_var_names, target_vars, main_program, export_for_deployment: accepted for Fleet's signature; the
                model is the module that was given to ``distributed_model``.
            mode: as in :meth:`save_persistables`.
            example_inputs: a tuple of the model's inputs, see :func:`fleet.ps.export`.
            transforms: the transforms of raw features, written as ``transforms.json``: a service reads them with
                ``fleet.features.Transforms.load(dirname)``.
        """
        folder = _folder("save_inference_model", executor, dirname)
        number = _check_mode(mode)
        job = self._job("save_inference_model", "worker")
        if job is not None:
            model = self._need("save_inference_model").models[0]
            first = self.is_first_worker()
            save_model(job.running().tables, model, folder, number, example_inputs, transforms, first=first)

    def save_one_table(self, table_id: int | str, path: Path, mode: int = 0) -> None:
        """Makes the servers write one table, by its name or number, as :meth:`save_persistables` does."""
        folder = _path("save_one_table", "path", path)
        number = _check_mode(mode)
        job = self._job("save_one_table", "worker")
        if job is not None:
            tables = job.running().tables
            tables.save(folder, number, [tables.number(table_id)])

    def load_model(self, path: Path, mode: int = 0) -> None:
        """Makes the servers load all tables from a save; every worker calls it and continues with the loaded tables.

        The servers read and check the whole save before the first one loads. Gradients that no step has taken are
        dropped.

        Args:
            path: a folder that ``save_persistables`` wrote.
            mode: accepted; a save records what it holds.

        Raises:
            PSError: a server refuses the save, or another worker asks for another save or another call; all workers
                raise it, the message ends with "Nothing was loaded.", and servers and workers go on as before. Or a
                server failed after the check; the workers then have the servers' current state, and the message says to
                load another save before training goes on.
            CheckpointError: the optimizer's state of a hybrid job is damaged or has other shapes; nothing was loaded.
        """
        folder = _path("load_model", "path", path)
        _check_mode(mode)
        job = self._job("load_model", "worker")
        if job is not None:
            job.running().tables.load(folder)

    def load_one_table(self, table_id: int | str, path: Path, mode: int = 0) -> None:
        """Makes the servers load one table, by its name or number, as :meth:`load_model` does."""
        folder = _path("load_one_table", "path", path)
        _check_mode(mode)
        job = self._job("load_one_table", "worker")
        if job is not None:
            tables = job.running().tables
            tables.load(folder, [tables.number(table_id)])

    def mark_version(self, name: str, *, keep: int = 5, save: Path | None = None, model: Path | None = None) -> None:
        """Names the rows of this moment in the folder that ``fleet.ps.publish`` writes; every worker calls it.

        Every step before the call is in the version, on all servers, and none after it; in geo mode workers exchange
        first, as before a save, and what each has not sent then is in no version. It returns when the folder has
        the version, and waits for a folder that cannot be written; the log says so. No row is copied: the files that
        the folder has stay as long as the version does. Readers read it by its name, and
        :func:`fleet.ps.roll_back` takes all of them back to it.

        Args:
            name: 1 to 64 letters, digits, ``_``, ``-`` and ``.``; given once. The same call for the same rows, as by a
                worker that was restarted, does nothing.
            keep: how many versions stay, this one included; older ones are removed, but not the one that readers were
                taken back to.
            save: a folder that all servers reach, for :meth:`save_persistables` after it; ``fleet.load_model(save)``
                takes the training back to the version.
            model: a folder of ``fleet.ps.export`` or ``save_inference_model(example_inputs=...)`` that servers and
                workers reach: its program is copied and goes with the rows in a :class:`fleet.ps.Predictor`. Or a
                folder of several such folders, as of two towers: a Predictor takes the one with its folder's name.

        Raises:
            ConfigError: rows are not published to a folder, or an argument is wrong; nothing was marked.
            PSError: a server refuses it, as when other rows have the name.
        """
        job = self._job("mark_version", "worker")
        if job is not None:
            mark_version(job, name, keep, save, model)

    # ---- the life of rows ----------------------------------------------------------------------------------------

    def shrink(self, threshold: float | None = None) -> int:
        """Deletes rows that are not worth keeping; every worker calls it. Worker 0 gets the number of rows deleted.

        Args:
            threshold: the least score of a row that is kept (for tables without accessor: the least number of
                pushes). ``None`` takes ``delete_threshold`` and ``delete_after_unseen_days`` of each table's accessor,
                and skips tables without one. Rows of ``nn.Embedding`` are kept unless their table has an accessor.

        Raises:
            ConfigError: no table has rows to delete in this way; raised on every worker, and nothing is deleted.
        """
        number = isinstance(threshold, int | float) and not isinstance(threshold, bool)
        if threshold is not None and not (number and math.isfinite(threshold) and threshold >= 0):
            raise ConfigError(
                f"fleet.shrink(threshold={threshold!r}) takes a number of 0 or more, the least score of a row that "
                "is kept, or None for the settings of each table."
            )
        job = self._job("shrink", "worker")
        return 0 if job is None else job.running().tables.shrink(threshold)

    def print_table_stat(self, table_id: int | str, pass_id: int = 0, threshold: float = 0.0) -> None:
        """Prints how many rows and bytes a table has over all servers.

        Args:
            table_id: name of the table, which is that of its module, or its number.
            pass_id: a number that the line shows.
            threshold: refused above 0: servers do not count rows by their score.
        """
        if isinstance(pass_id, bool) or not isinstance(pass_id, int):
            raise ConfigError(f"print_table_stat(pass_id={pass_id!r}) takes an integer, which the line shows.")
        if threshold:
            raise ConfigError(
                f"print_table_stat(threshold={threshold!r}): rows are counted without a threshold; use 0."
            )
        job = self._job("print_table_stat", "worker")
        if job is not None:
            tables = job.running().tables
            facts = tables.facts(tables.number(table_id))
            print(f"pass {pass_id}, table {table_id}: {facts['rows']} rows, {facts['bytes']} bytes", flush=True)

    def set_date(self, table_id: int | str, day_id: str | int) -> None:
        """Advances a table by one day, for tables that delete rows unseen for long; worker 0 triggers it.

        Args:
            table_id: name of the table, which is that of its module, or its number.
            day_id: the new day. The servers ignore the day they were told last, so that a worker 0 that restarts may
                repeat its call.
        """
        if isinstance(day_id, bool) or not isinstance(day_id, str | int) or not str(day_id).strip():
            raise ConfigError(f"fleet.set_date(day_id={day_id!r}) takes the day as str or int, such as '20260131'.")
        job = self._job("set_date", "worker")
        if job is not None:
            tables = job.running().tables
            tables.set_date(tables.number(table_id), str(day_id))

    # ---- files and logs ------------------------------------------------------------------------------------------

    def save(self, obj: Any, path: str) -> None:
        """Writes ``obj`` to exactly ``path``, atomically; see ``fleet.load``."""
        save_load.save(obj, path)

    def load(self, path: str, **kwargs: Any) -> Any:
        """Returns what :meth:`save` wrote; never runs code from the file."""
        return save_load.load(path, **kwargs)

    def set_log_level(self, level: int | str) -> None:
        """Sets the level of the project's log."""
        set_log_level(level)

    def get_log_level_code(self) -> int:
        """Returns the level of the project's log as a number."""
        return LOGGER.getEffectiveLevel()

    def get_log_level_name(self) -> str:
        """Returns the level of the project's log by name."""
        import logging

        return logging.getLevelName(LOGGER.getEffectiveLevel())

    def explain(self, strategy: DistributedStrategy | None = None, world_size: int | None = None) -> str:
        """Prints the effects of ``strategy`` (by default the one in force) in their order, its warnings and refusals.

        Without ``strategy``, after ``distributed_model()``, it also says which parameters of this worker are divided,
        as by ``tensor_parallel_configs["plan"]``: how many, along which dimension, and their bytes. In a job with
        parameter servers it says which embeddings have their rows there, and how these begin.
        """
        from fleet.options.explain import explain

        check_strategy("fleet.explain(strategy)", strategy)
        options = self._need("explain").options if strategy is None else strategy
        size = world_size or (self._session.job.world_size if self._session else 2)
        models = [model.module for model in self._session.models] if strategy is None and self._session else []
        return explain(options, size, collective=not _has_servers(self._session, options), models=models)

    # ---- session -------------------------------------------------------------------------------------------------

    @property
    def session(self) -> Session:
        """What ``fleet.init`` set up."""
        return self._need("session")

    def _close(self) -> None:
        """Ends the process group at exit.

        The holders of the group go first: destroying it joins gloo's threads, and a thread that releases its last
        piece of work while Python is already exiting crashes the process. A reducer that is the last holder would
        destroy the group without giving up the GIL, for which such a thread may wait: both would wait forever.
        """
        import torch.distributed as dist

        from fleet.job.process_group import is_in_group

        had_group = is_in_group() or (self._session is not None and self._session.job.has_group)
        if self._session is not None:
            if self._session.server_job is not None:
                self._session.server_job.check_ended()
            self._session.close()
            self._session.release_groups()
            self._session = None
        if had_group:  # with a large heap this takes a while, and without a group it is useless
            gc.collect()
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()

    def _need(self, call: str) -> Session:
        if self._session is None:
            raise NotInitializedError(f"fleet.{call} needs fleet.init() first.")
        return self._session

    def _job(self, call: str, role: str) -> ServerJob | None:
        """Returns this process's job; warns and returns ``None`` where the call has nothing to act on."""
        session = self._need(call)
        job = session.server_job
        if job is None:
            warnings.warn(
                f"fleet.{call}() has no effect: this job has no parameter servers. Start them with "
                "fleet.init(is_collective=False) and PADDLE_PSERVERS_IP_PORT_LIST, or the launcher's --server_num.",
                OptionWarning,
                stacklevel=3,
            )
            return None
        own = "server" if self.is_server() else "worker"
        if own != role:
            raise ConfigError(f"fleet.{call}() is for {role}s; this process is a {own}. Check fleet.is_{role}() first.")
        return job

    def _last_optimizer(self, call: str) -> FleetOptimizer:
        session = self._need(call)
        if not session.optimizers:
            raise NotInitializedError(f"fleet.{call}() needs fleet.distributed_optimizer() first.")
        return session.optimizers[-1]


def _has_servers(session: Session | None, options: DistributedStrategy) -> bool:
    """Returns whether the session's job has servers or, without a session, the job that the options are for."""
    meant = options.is_set("a_sync") or options.is_set("a_sync_configs")
    if session is None:
        return meant
    return not session.job.collective or (meant and session.server_job is not None)


def _folder(call: str, executor: object, dirname: Path | None) -> str:
    """Returns the folder, which may be passed in place of the executor of Fleet's signature."""
    return _path(call, "dirname", dirname if dirname is not None else executor)


def _path(call: str, name: str, value: object) -> str:
    """Returns the folder ``value`` as an absolute path; raises ConfigError when it cannot be one."""
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"fleet.{call}({name}={value!r}) takes the path of a folder, as str or pathlib.Path.")
    if os.path.isfile(text):
        raise ConfigError(f"fleet.{call}({name}={value!r}) takes the path of a folder, and this is a file.")
    return os.path.abspath(text)


def _check_mode(mode: object) -> int:
    """Returns ``mode``; raises ConfigError unless it is 0 to 3."""
    if isinstance(mode, bool) or not isinstance(mode, int) or not 0 <= mode <= 3:
        raise ConfigError(
            f"mode is {mode!r}; it must be 0 (every row), 1 (rows that changed), 2 (rows worth serving) or 3 (every "
            "row, and a day passes)."
        )
    return mode
