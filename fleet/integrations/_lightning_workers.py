"""Shared base of Fleet's strategies for Lightning Fabric and for its Trainer: workers, options, states.

[Note: Who says what]
The processes exist before Lightning runs: the launcher, torchrun or srun has started them, and says how many there are,
on which devices. Lightning asks for the same things (``devices``, ``num_nodes``, ``accelerator``), so a script's values
there are compared with the job. Lightning hands ``devices`` on to no strategy, and "auto" looks like 1 on a CPU
once it is parsed: the arguments are read where its connector got them.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import fleet
from fleet.common.extras import install_line
from fleet.env import Environment
from fleet.errors import CheckpointError, ConfigError, UnsupportedOptionError
from fleet.job.axes import MODEL_AXES
from fleet.job.running import running_session
from fleet.job.session import Session
from fleet.job.start import choose_device
from fleet.options import DistributedStrategy, check_strategy
from fleet.role_maker import PaddleCloudRoleMaker
from fleet.role_maker.record import SINGLE, RoleRecord
from fleet.strategies.sharding.sharding import stage_of
from fleet.training.fleet_model import FleetModel
from fleet.training.fleet_optimizer import FleetOptimizer

try:
    from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
    from lightning.fabric.utilities.rank_zero import rank_zero_only
    from lightning_utilities.core.rank_zero import rank_zero_only as rank_zero_only_of_utilities
except ImportError as error:
    raise ImportError(
        f"Fleet's strategies for Lightning need the package lightning ({error}); {install_line('lightning')}."
    ) from error

Sent = TypeVar("Sent")

_AUTO = ("auto", None, -1, "-1")
_HALF_ON_CPU = ("16-mixed", "16", 16)


class FleetEnvironment(ClusterEnvironment):
    """The job in Lightning's terms: ranks and sizes come from the starter of the workers."""

    def __init__(self, record: RoleRecord) -> None:
        super().__init__()
        self._record = record

    @property
    def creates_processes_externally(self) -> bool:
        """True: the workers run already."""
        return True

    @property
    def main_address(self) -> str:
        """The host of the rendezvous."""
        return self._record.master_host

    @property
    def main_port(self) -> int:
        """The port of the rendezvous; 0 in a single process."""
        return self._record.master_port

    @staticmethod
    def detect() -> bool:
        """False: only Fleet's strategies use it."""
        return False

    def world_size(self) -> int:
        """Number of workers in the job."""
        return self._record.world_size

    def set_world_size(self, size: int) -> None:
        """Leaves the size as the job has it."""

    def global_rank(self) -> int:
        """Rank of this worker in the job."""
        return self._record.global_rank

    def set_global_rank(self, rank: int) -> None:
        """Leaves the rank as the job has it."""

    def local_rank(self) -> int:
        """Rank of this worker on its node."""
        return self._record.local_rank

    def node_rank(self) -> int:
        """Index of this worker's node."""
        return (self._record.global_rank - self._record.local_rank) // self._record.local_world_size


class FleetWorkers:
    """The part of a Lightning strategy that is the same in Fabric and in the Trainer.

    Args:
        framework: "Fabric" or "Trainer", for messages.
        strategy: the options, as given by the user.
    """

    def __init__(self, framework: str, strategy: DistributedStrategy | Mapping[str, Any] | None) -> None:
        self._framework = framework
        self._options = read_options(strategy)
        session = running_session()
        self._record = PaddleCloudRoleMaker(is_collective=True).record if session is None else session.job.record
        asked = () if self._options is None else ("a_sync", "a_sync_configs")
        if self._record.server_endpoints or any(self._options.is_set(name) for name in asked if self._options):
            raise UnsupportedOptionError(
                f"{framework}(strategy=FleetStrategy(...)): the job has parameter servers, or strategy.a_sync is on. "
                "Servers have a life of their own (fleet.run_server, fleet.init_worker), for which Lightning's loops "
                "have no place. Train with Fleet's loop: docs/ps/README.md."
            )
        # A session that runs has chosen its device; a second choice could name another.
        self._device = choose_device(self._record, Environment()) if session is None else session.job.device
        # Two packages have a decorator each; without the rank every worker would print as the first.
        for only in (rank_zero_only, rank_zero_only_of_utilities):
            only.__dict__["rank"] = self._record.global_rank

    def _lightning_arguments(self) -> dict[str, Any]:
        """Returns the arguments of Lightning's own base class."""
        local = self._record.local_rank
        devices = [torch.device(self._device.type, at) for at in range(self._record.local_world_size)]
        if self._device.type == "cpu":
            devices = [self._device] * len(devices)
        # Lightning finds the worker's device at its local rank; the device's own number may be another.
        devices[local] = self._device
        return {"parallel_devices": devices, "cluster_environment": FleetEnvironment(self._record)}

    # ---- the job ---------------------------------------------------------------------------------------------------

    @property
    def session(self) -> Session:
        """The session of ``fleet.init``; raises NotInitializedError before Lightning has started the strategy."""
        return fleet.session

    @property
    def root_device(self) -> torch.device:
        """The device of this worker."""
        return self._device

    @property
    def is_distributed(self) -> bool:
        """Whether workers train on different rows, so that Lightning gives each its share of them."""
        return self._replicas()[1] > 1

    @property
    def num_nodes(self) -> int:
        """Number of hosts that the workers run on."""
        return self._record.num_nodes

    @num_nodes.setter
    def num_nodes(self, number: int) -> None:
        """Leaves the number as the job has it; :func:`check_arguments` has compared the two."""

    def _replicas(self) -> tuple[int, int]:
        session = running_session()
        if session is None:
            return self._record.global_rank, self._record.world_size
        return session.job.data_rank, session.job.data_replicas

    def _configure_launcher(self) -> None:
        """Compares the script's arguments for Lightning with the job, and starts no process."""
        check_arguments(self._framework, caller_names("__init__", kind="Connector"), self._record, self._device)

    def _start(self, sync_batch_norm: bool = False) -> None:
        """Joins the job, or takes part in the session that the script has started.

        Raises ConfigError when the script has started one with other options.
        """
        options = self._options
        session = running_session()
        if sync_batch_norm:
            # A copy: the user's strategy stays as it was written.
            options = read_options(None if options is None else options.to_dict()) or DistributedStrategy()
            options.sync_batch_norm = True
        if session is None or session.job.closed:
            fleet.init(is_collective=True, strategy=options)
        elif sync_batch_norm and not session.options["sync_batch_norm"]:
            raise ConfigError(
                f"{self._framework}(sync_batchnorm=True): fleet.init() has started a session without "
                "strategy.sync_batch_norm. Set it there."
            )
        elif self._options is not None and options != session.options:
            raise ConfigError(
                f"{self._framework}(strategy=FleetStrategy(strategy)): the options differ from those of the session "
                "that runs already. A job has one strategy: call fleet.init() with it and write FleetStrategy(), or "
                "leave fleet.init() out."
            )
        self._check_session()

    def _check_session(self) -> None:
        session = self.session
        if not session.job.collective:
            raise UnsupportedOptionError(
                f"{self._framework}(strategy=FleetStrategy(...)) needs fleet.init(is_collective=True)."
            )
        if session.job.axes.size("pp") > 1 or session.options["pipeline"]:
            raise UnsupportedOptionError(
                "strategy.pipeline and hybrid_configs['pp_degree'] above 1 run forward and backward of micro-batches "
                f"inside model.train_batch(), and Lightning's {self._framework} calls them one after the other by "
                "itself. Set pp_degree to 1, or train with Fleet's loop: docs/guides/hybrid.md."
            )

        if session.options["reproducible"]:
            raise UnsupportedOptionError(
                "strategy.reproducible gives each logical worker whole batches and random numbers of its own, and "
                f"Lightning's {self._framework} divides the rows among the processes by itself. Turn it off, or train "
                "with Fleet's loop, over sampler.batches(loader) of a fleet.elastic.ElasticSampler(data, batch_size=B)."
            )
        for axis in ("sep", "cp", "ep"):
            if session.job.axes.size(axis) > 1:
                raise UnsupportedOptionError(
                    f"hybrid_configs['{axis}_degree'] above 1 has not been tried in Lightning's loops, and is refused "
                    "until it is. Set it to 1, or train with Fleet's loop: docs/guides/hybrid.md."
                )

    @property
    def _divides_parameters(self) -> bool:
        """Whether sharding leaves a part of each parameter on every worker."""
        session = self.session
        return session.job.axes.size("sharding") > 1 and stage_of(session.options) == 3

    # ---- exchanges -------------------------------------------------------------------------------------------------

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Returns ``tensor``, in place: the mean (default), sum, minimum or maximum over the workers.

        Other values are returned as they are.
        """
        if not isinstance(tensor, Tensor) or not dist.is_initialized():
            return tensor
        name = reduce_op.lower() if isinstance(reduce_op, str) else reduce_op
        is_mean = name in ("mean", "avg", dist.ReduceOp.AVG)
        op = dist.ReduceOp.SUM if is_mean or name is None else name
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op.upper()) if isinstance(op, str) else op, group=group)
        if not is_mean:
            return tensor
        size = dist.get_world_size(group)
        return tensor.div_(size) if tensor.is_floating_point() else tensor.copy_(tensor / size)

    all_reduce = reduce

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Returns the ``tensor`` of every worker, shape [workers, ...]; without a job of several, ``tensor`` itself.

        Args:
            tensor: has one shape on all workers.
            group: the workers; all by default.
            sync_grads: whether gradients flow back to the worker that a row came from.
        """
        if not dist.is_initialized():
            return tensor
        if sync_grads:
            rows: Tensor = _Gathered.apply(tensor, group)  # type: ignore[no-untyped-call]
            return rows
        return _gathered(tensor.detach(), group)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Returns when every worker has called it; raises RendezvousError when one does not."""
        session = running_session()
        if session is not None:
            session.job.meet(f"{self._framework}'s barrier()")

    def broadcast(self, obj: Sent, src: int = 0) -> Sent:
        """Returns the ``obj`` of worker ``src`` on every worker: numbers, texts, tensors, lists and dictionaries.

        Raises ConfigError on every worker for an object that could run code where it is received.
        """
        session = running_session()
        if session is None or not dist.is_initialized():
            return obj
        mine = _packed(obj) if session.job.global_rank == src else b""
        size = torch.tensor([len(mine)], dtype=torch.int64, device=self._device)
        dist.broadcast(size, src=src)
        # The size 0 tells every worker of the refusal; raising on ``src`` alone would leave the others waiting.
        if not int(size):
            raise ConfigError(
                f"{self._framework}: broadcast() takes numbers, texts, tensors, lists and dictionaries of them, and "
                f"worker {src} passed a {type(obj).__name__ if session.job.global_rank == src else 'different object'}."
            )
        data = torch.zeros(int(size), dtype=torch.uint8, device=self._device)
        if session.job.global_rank == src:
            data.copy_(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
        dist.broadcast(data, src=src)
        return obj if session.job.global_rank == src else _unpacked(bytes(data.cpu().numpy()))

    # ---- models, optimizers and their states -----------------------------------------------------------------------

    def _wrapped(self, module: nn.Module) -> FleetModel:
        """Returns ``module`` as ``fleet.distributed_model`` returns it; wrapped once, also when Lightning asks again.

        Raises ConfigError where an option replaces the module itself.
        """
        found = self._found(module)
        if found is not None:
            return found
        model = fleet.distributed_model(module)
        if model.module is not module:
            raise ConfigError(
                f"{self._framework}(strategy=FleetStrategy(...)): an option replaced {type(module).__name__} itself by "
                f"a {type(model.module).__name__}, and Lightning goes on with yours. Make it a part of a module."
            )
        return model

    def _found(self, module: nn.Module | None) -> FleetModel | None:
        """Returns the wrapped model whose module is ``module``, if there is one."""
        session = running_session()
        models = [] if session is None else session.models
        return next((model for model in models if model.module is module or model is module), None)

    def _wrapped_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Returns ``optimizer`` as ``fleet.distributed_optimizer`` returns it, unless it comes from there."""
        return optimizer if isinstance(optimizer, FleetOptimizer) else fleet.distributed_optimizer(optimizer)

    def _whole_model_state(self, module: nn.Module) -> dict[str, Any]:
        """Returns the state of one process, names and shapes included; every worker calls it.

        Where workers hold parts of the model, the others than worker 0 get ``{}``.
        """
        model = self._found(module)
        if model is None:
            return module.state_dict()
        return model.full_state_dict(keep=self._record.global_rank == 0 or not model._states.is_collective())

    def _whole_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns the state that any number of workers loads; every worker calls it.

        Raises CheckpointError in the middle of a gradient_merge window, whose sums differ between the workers.
        """
        if not isinstance(optimizer, FleetOptimizer):
            return optimizer.state_dict()
        if optimizer.merges() and optimizer.is_out_of_step and self._record.world_size > 1:
            raise CheckpointError(
                "A checkpoint was to be written between two updates of gradient_merge: every worker has merged "
                "gradients of its own, and worker 0 writes for all. Save after an update: let the number of batches "
                "of an epoch, or every_n_train_steps, be a multiple of k_steps."
            )
        divides = self.session.job.axes.size(*MODEL_AXES, "sharding", "ep") > 1
        return optimizer.full_state_dict(keep=self._record.global_rank == 0 or not divides)

    def _load_model_state(self, module: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
        """Loads a whole state, also into a divided model; every worker calls it."""
        (self._found(module) or module).load_state_dict(state, strict=strict)

    def _safely(self, weights_only: bool | None) -> bool:
        """Returns True, for Lightning's ``weights_only``; raises ConfigError where the script asks for False."""
        if weights_only is False:
            raise ConfigError(
                f"{self._framework}: weights_only=False would run code from the checkpoint. Leave it out; name the "
                "classes that a file of yours needs with torch.serialization.add_safe_globals([...])."
            )
        return True

    def _check_precision(self, plugin: Any, supported: tuple[type, ...]) -> None:
        """Lets a GradScaler of ``plugin`` skip the same steps on all workers.

        Raises ConfigError for a precision that Fleet does not know, or next to strategy.amp.
        """
        precision = plugin.precision
        name = type(plugin).__name__
        is_known = isinstance(plugin, supported) or not type(plugin).__module__.startswith("lightning.")
        if not is_known and precision != "32-true":
            raise UnsupportedOptionError(
                f"{self._framework}(precision={precision!r}): {name} is not supported with FleetStrategy. Use "
                "'bf16-mixed', '16-mixed', 'bf16-true', '16-true', '64-true' or strategy.amp."
            )
        if precision != "32-true" and self.session.options["amp"]:
            raise ConfigError(
                f"{self._framework}(precision={precision!r}) and strategy.amp both choose the type of each operation. "
                "Leave precision out, or turn strategy.amp off."
            )
        if getattr(plugin, "scaler", None) is not None:
            if self.session.options["gradient_merge"]:
                raise ConfigError(
                    f"{self._framework}(precision={precision!r}) skips steps that overflow, and "
                    "strategy.gradient_merge counts them. Leave precision out and set strategy.amp = True."
                )
            fleet.distributed_scaler(plugin.scaler)


def read_options(strategy: DistributedStrategy | Mapping[str, Any] | None) -> DistributedStrategy | None:
    """Returns the user's options, given as a strategy or a dictionary; ``None`` without any.

    Raises ConfigError for anything else, and for an option that does not exist.
    """
    if isinstance(strategy, Mapping):
        options = DistributedStrategy()
        options.update(strategy)
        return options
    check_strategy("FleetStrategy(strategy)", strategy)
    return strategy


def caller_names(*functions: str, kind: str = "Fabric") -> dict[str, Any]:
    """Returns the local names of the calling method of Lightning; see [Note: Who says what].

    Args:
        functions: names of the method.
        kind: the end of the name of its object's class.

    Example:
        >>> caller_names("__init__", kind="Connector")
        {}
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in functions and type(frame.f_locals.get("self")).__name__.endswith(kind):
            return dict(frame.f_locals)
        frame = frame.f_back
    return {}


def check_arguments(framework: str, given: Mapping[str, Any], record: RoleRecord, device: torch.device) -> None:
    """Raises ConfigError where ``given``, a script's arguments to Lightning, differs from the job."""
    number = record.local_world_size
    devices = given.get("devices", "auto")
    asked = list(_indices(devices)) if devices not in _AUTO else []
    how = f"python -m fleet.launch --nproc_per_node={len(asked)} SCRIPT"
    if asked and len(asked) != number:
        started = "no launcher" if record.source == SINGLE else record.source
        raise ConfigError(
            f"{framework}(devices={devices!r}) asks for {len(asked)} processes on this node, and {started} started "
            f"{number}. FleetStrategy starts none: leave devices out, or start the script with {how}."
        )
    if asked and not isinstance(devices, int) and device.type == "cuda" and device.index not in asked:
        raise ConfigError(
            f"{framework}(devices={devices!r}) does not hold GPU {device.index}, which this worker was given. Leave "
            "devices out, and name the GPUs to the launcher: --gpus=0,1."
        )
    nodes = given.get("num_nodes", 1)
    if nodes not in (1, record.num_nodes):
        raise ConfigError(
            f"{framework}(num_nodes={nodes!r}): the job runs on {record.num_nodes} node(s). Leave num_nodes out, or "
            f"start the script on each node with python -m fleet.launch --nnodes={nodes} SCRIPT."
        )
    if given.get("precision") in _HALF_ON_CPU and device.type == "cpu":
        raise ConfigError(
            f"{framework}(precision={given['precision']!r}): on a CPU Lightning takes bfloat16 in the place of "
            "float16. Write precision='bf16-mixed', or strategy.amp = True with amp_configs['dtype']."
        )


def _indices(devices: Any) -> Iterator[int]:
    """Yields the indices in ``devices``: a count, a list, or one of these as text."""
    if isinstance(devices, str):
        devices = [int(part) for part in devices.split(",") if part.strip()] if "," in devices else int(devices)
    yield from (range(devices) if isinstance(devices, int) else devices)


class _Gathered(torch.autograd.Function):
    """The tensors of all workers; the gradient of a row is the sum of all workers' gradients for it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _gathered(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total[dist.get_rank(ctx.group)], None


def _gathered(tensor: Tensor, group: Any) -> Tensor:
    rows = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, tensor.contiguous(), group=group)
    return torch.stack(rows)


def _packed(obj: Any) -> bytes:
    """Returns ``obj`` as a file of torch; empty where reading it could run code."""
    buffer = io.BytesIO()
    try:
        torch.save(obj, buffer)
        _unpacked(buffer.getvalue())
    except Exception:  # whatever the object's own __reduce__ raises; the workers are told together
        return b""
    return buffer.getvalue()


def _unpacked(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
