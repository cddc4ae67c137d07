"""Fleet: every public call, each a few lines that hand over to the session."""

from __future__ import annotations

import atexit
import copy
import gc
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn
from torch.optim import Optimizer

from fleet import _checkpoint
from fleet._log import LOGGER, set_log_level
from fleet._model import FleetModel
from fleet._optimizer import FleetOptimizer
from fleet._server_calls import ServerCalls
from fleet._session import Session
from fleet._sharding_calls import ShardingCalls
from fleet._start import start_session
from fleet._util import UtilBase
from fleet.elastic._calls import HealthCalls
from fleet.errors import ConfigError, NotInitializedError, OptionWarning
from fleet.options import DistributedStrategy, mark_copied
from fleet.role_maker import RoleMakerBase
from fleet.strategies._amp_scaler import share_scaler
from fleet.strategies.amp import Amp

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor


class Fleet(ShardingCalls, ServerCalls, HealthCalls):
    """The calls of the ``fleet`` namespace; the package binds one instance of it to its own name."""

    def __init__(self) -> None:
        self._session: Session | None = None
        self._init_had_strategy = False
        self._util: Any = None

    # ---- start ---------------------------------------------------------------------------------------------------

    def init(
        self,
        role_maker: RoleMakerBase | None = None,
        is_collective: bool = False,
        strategy: DistributedStrategy | None = None,
        log_level: int | str = "INFO",
    ) -> Fleet:
        """Joins the job: reads the role, orders the options or refuses them, and meets the other workers.

        Works under this project's launcher, torchrun, srun, mpirun and Kubeflow, and in a single process. The
        strategy is copied; later changes of the object have no effect.

        Raises:
            ConfigError: an argument, an option or the environment is wrong. Nothing was started.
            RendezvousError: not every worker came in time; the message lists the absent ranks.

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
        if self._session is not None:
            self._session.close()
        self._session = start_session(role_maker, is_collective, copy.deepcopy(strategy) or DistributedStrategy())
        self._init_had_strategy = strategy is not None
        if strategy is not None:
            mark_copied(strategy, "fleet.init()", self._session)
        atexit.unregister(self._close)
        atexit.register(self._close)
        return self

    def init_parallel_env(self) -> dist.ProcessGroup | None:
        """Meets the other workers and returns their process group; the basic form, without options.

        A single process gets a warning and ``None``. A second call returns the existing group.
        """
        if self._session is None or not self._session.collective:
            self.init(is_collective=True)
        session = self._need("init_parallel_env")
        if session.world_size < 2:
            warnings.warn(
                "init_parallel_env(): one process was started, so there is nothing to connect. "
                "Start several with: python -m fleet.launch --nproc_per_node=2 SCRIPT",
                OptionWarning,
                stacklevel=2,
            )
        return session.process_group

    def prepare_context(self, strategy: object = None) -> dist.ProcessGroup | None:
        """Does what :meth:`init_parallel_env` does; the name of older releases."""
        return self.init_parallel_env()

    # ---- who am I ------------------------------------------------------------------------------------------------

    def is_first_worker(self) -> bool:
        """Returns whether this process is worker 0."""
        return self.is_worker() and self.worker_index() == 0

    def worker_index(self) -> int:
        """Returns the rank of this worker in the job; ``rank`` is the same."""
        return self._need("worker_index").global_rank

    rank = worker_index

    def worker_num(self) -> int:
        """Returns the number of workers; ``nranks`` and ``world_size`` are the same."""
        return self._need("worker_num").world_size

    nranks = worker_num
    world_size = worker_num

    def node_num(self) -> int:
        """Returns the number of hosts the workers run on."""
        return self._need("node_num").record.num_nodes

    def local_rank(self) -> int:
        """Returns the rank of this worker on its node; 0 in a single process."""
        return self._need("local_rank").local_rank

    def local_device_ids(self) -> list[int]:
        """Returns the device ids of this worker."""
        return list(self._need("local_device_ids").record.local_device_ids)

    def world_device_ids(self) -> list[int]:
        """Returns the device ids of every worker, in rank order."""
        return list(self._need("world_device_ids").record.world_device_ids)

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

    def worker_endpoints(self, to_string: bool = False) -> list[str] | str:
        """Returns the address of every worker, as a list or joined by commas."""
        endpoints = list(self._need("worker_endpoints").record.worker_endpoints)
        return ",".join(endpoints) if to_string else endpoints

    def server_endpoints(self, to_string: bool = False) -> list[str] | str:
        """Returns the address of every parameter server, as a list or joined by commas."""
        endpoints = list(self._need("server_endpoints").record.server_endpoints)
        return ",".join(endpoints) if to_string else endpoints

    def server_num(self) -> int:
        """Returns the number of parameter servers."""
        return len(self._need("server_num").record.server_endpoints)

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
        return self._need("util").util if self._util is None else self._util

    @util.setter
    def util(self, util: Any) -> None:
        self._util = util

    def split_files(self, files: list[str]) -> list[str]:
        """Returns this worker's part of ``files``; the 1.x name of ``fleet.util.get_file_shard``."""
        return self._need("split_files").util.get_file_shard(files)

    def barrier_worker(self) -> None:
        """Returns when every worker has called it."""
        self.util.barrier("worker")

    def all_reduce(self, input: Any, mode: str = "sum") -> np.ndarray | np.generic:
        """Returns the sum, minimum or maximum of ``input`` (number or array) over all workers."""
        return self.util.all_reduce(input, mode)

    # ---- wrapping ------------------------------------------------------------------------------------------------

    def distributed_model(self, model: nn.Module) -> FleetModel:
        """Returns ``model`` ready for distributed training; parameters then equal worker 0's everywhere.

        Calls run the wrapped module, everything else (attributes, methods, ``state_dict`` names) is the user's. In
        a single process the result behaves as the plain module.

        Raises:
            NotInitializedError: before ``fleet.init``.
            ConfigError: an option that is on cannot work with this model.
        """
        return self._need("distributed_model").wrap_model(model)

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
            mark_copied(strategy, "fleet.distributed_optimizer()", session)
        return session.wrap_optimizer(optimizer)

    def distributed_scaler(self, scaler: Any) -> Any:
        """Returns ``scaler``, a ``torch.amp.GradScaler``, which then skips the same steps on all workers.

        With ``strategy.amp`` on, amp leaves the scaling of the loss to it.

        Raises:
            NotInitializedError: before ``fleet.init``.
            ConfigError: ``scaler`` is no GradScaler, or gradient_merge is on without amp.

        Example:
            >>> scaler = fleet.distributed_scaler(torch.amp.GradScaler())
            >>> scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()
        """
        session = self._need("distributed_scaler")
        share_scaler(scaler, session)
        for strategy in session.strategies:
            strategy.use_scaler(scaler)
        return scaler

    def fp16_guard(self) -> AbstractContextManager[Any]:
        """Returns a context: a model with pure 16-bit computation that uses it computes in 16 bit only inside.

        It changes nothing before ``fleet.init``, and unless ``amp_configs`` has ``use_pure_fp16`` or ``use_pure_bf16``
        together with ``use_fp16_guard``.

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

    # ---- files and logs ------------------------------------------------------------------------------------------

    def save(self, obj: Any, path: str) -> None:
        """Writes ``obj`` to exactly ``path``, whole or not at all; see ``fleet.load``."""
        _checkpoint.save(obj, path)

    def load(self, path: str, **kwargs: Any) -> Any:
        """Returns what :meth:`save` wrote; never runs code from the file."""
        return _checkpoint.load(path, **kwargs)

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
        """Prints what ``strategy`` (or the one in force) does, in which order, what it warns of and refuses."""
        from fleet._explain import explain

        check_strategy("fleet.explain(strategy)", strategy)
        options = self._need("explain").options if strategy is None else strategy
        size = world_size or (self._session.world_size if self._session else 2)
        return explain(options, size, collective=not _has_servers(self._session, options))

    # ---- session -------------------------------------------------------------------------------------------------

    @property
    def session(self) -> Session:
        """What ``fleet.init`` set up."""
        return self._need("session")

    def _close(self) -> None:
        """Ends the process group at exit.

        What holds the group goes first: its end joins the threads of gloo, and one that lets go of its last piece of
        work while Python is already ending takes the process down.
        """
        import torch.distributed as dist

        had_group = dist.is_available() and dist.is_initialized()
        if self._session is not None:
            had_group = had_group or self._session.has_group
            if self._session.server_job is not None:
                self._session.server_job.check_served()
            self._session.close()
            self._session.release_groups()
            self._session = None
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()
        if had_group:  # with a large heap this takes a while, and without a group it is of no use
            gc.collect()

    def _need(self, call: str) -> Session:
        if self._session is None:
            raise NotInitializedError(f"fleet.{call} needs fleet.init() first.")
        return self._session

    def _last_optimizer(self, call: str) -> FleetOptimizer:
        session = self._need(call)
        if not session.optimizers:
            raise NotInitializedError(f"fleet.{call}() needs fleet.distributed_optimizer() first.")
        return session.optimizers[-1]


def _has_servers(session: Session | None, options: DistributedStrategy) -> bool:
    """Returns whether the job has servers: that of the session, or without one the job that the options are for."""
    meant = options.is_set("a_sync") or options.is_set("a_sync_configs")
    if session is None:
        return meant
    return not session.collective or (meant and session.server_job is not None)


def check_strategy(label: str, strategy: object) -> None:
    """Raises ConfigError unless ``strategy`` is a DistributedStrategy or ``None``."""
    if strategy is not None and not isinstance(strategy, DistributedStrategy):
        raise ConfigError(
            f"{label} takes a fleet.DistributedStrategy, got {strategy!r}. Strategy classes of older releases are not "
            "compatible; set the same options on fleet.DistributedStrategy()."
        )
