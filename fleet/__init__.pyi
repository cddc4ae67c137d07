# Made by `make docs`; a change belongs into the code that it is made from.
"""The ``paddle.distributed.fleet`` programming model on PyTorch.

``import fleet`` and ``from fleet import fleet`` give the same object: this package, whose calls are those of one
:class:`fleet.facade.Fleet`. Names are resolved at first use, so that the launcher, which lives in ``fleet.launch``,
starts without torch.

Example:
    >>> from fleet import fleet
    >>> fleet.init(is_collective=True)
    >>> optimizer = fleet.distributed_optimizer(optimizer)
    >>> model = fleet.distributed_model(model)
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, overload

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import fleet as fleet
from fleet import base as base
from fleet import checkpoint as checkpoint
from fleet import clip as clip
from fleet import data_generator as data_generator
from fleet import dataset as dataset
from fleet import elastic as elastic
from fleet import env as env
from fleet import errors as errors
from fleet import features as features
from fleet import incubate as incubate
from fleet import launch as launch
from fleet import layers as layers
from fleet import meta_parallel as meta_parallel
from fleet import metrics as metrics
from fleet import moe as moe
from fleet import optimizer as optimizer
from fleet import options as options
from fleet import parallel as parallel
from fleet import ps as ps
from fleet import regularizer as regularizer
from fleet import role_maker as role_maker
from fleet import strategies as strategies
from fleet import trackers as trackers
from fleet import utils as utils
from fleet.clip import ClipGradByGlobalNorm as ClipGradByGlobalNorm
from fleet.clip import ClipGradByNorm as ClipGradByNorm
from fleet.clip import ClipGradByValue as ClipGradByValue
from fleet.data_generator import MultiSlotDataGenerator as MultiSlotDataGenerator
from fleet.data_generator import MultiSlotStringDataGenerator as MultiSlotStringDataGenerator
from fleet.dataset.factory import DatasetFactory as DatasetFactory
from fleet.dataset.in_memory import InMemoryDataset as InMemoryDataset
from fleet.dataset.kafka import KafkaSource as KafkaSource
from fleet.dataset.parquet import ParquetDataset as ParquetDataset
from fleet.dataset.queue import QueueDataset as QueueDataset
from fleet.dataset.stream import StreamDataset as StreamDataset
from fleet.dataset.training import infer_from_dataset as infer_from_dataset
from fleet.dataset.training import train_from_dataset as train_from_dataset
from fleet.estimate.memory import estimate_memory as estimate_memory
from fleet.facade import Fleet as Fleet
from fleet.facade import Path, _Batch
from fleet.features.transforms import Transforms
from fleet.job.session import Session
from fleet.job.util import HostArray
from fleet.job.util import UtilBase as UtilBase
from fleet.layers.mpu.mp_ops import split as split
from fleet.options import BuildStrategy as BuildStrategy
from fleet.options import DistributedStrategy as DistributedStrategy
from fleet.options import ExecutionStrategy as ExecutionStrategy
from fleet.paddle.data_parallel_layer import DataParallel as DataParallel
from fleet.paddle.strategy_factory import StrategyFactory as StrategyFactory
from fleet.paddle.topology import CommunicateTopology as CommunicateTopology
from fleet.paddle.topology import HybridCommunicateGroup as HybridCommunicateGroup
from fleet.paddle.topology import ParallelMode as ParallelMode
from fleet.parallel import ParallelEnv as ParallelEnv
from fleet.parallel import get_rank as get_rank
from fleet.parallel import get_world_size as get_world_size
from fleet.parallel import spawn as spawn
from fleet.ps import CountFilterEntry as CountFilterEntry
from fleet.ps import ProbabilityEntry as ProbabilityEntry
from fleet.ps import ShowClickEntry as ShowClickEntry
from fleet.ps import SparseEmbedding as SparseEmbedding
from fleet.ps import SparseEmbeddings as SparseEmbeddings
from fleet.role_maker import PaddleCloudRoleMaker as PaddleCloudRoleMaker
from fleet.role_maker import Role as Role
from fleet.role_maker import RoleMakerBase
from fleet.role_maker import UserDefinedRoleMaker as UserDefinedRoleMaker
from fleet.strategies._shared.segments import recompute as recompute
from fleet.strategies._shared.segments import recompute_sequential as recompute_sequential
from fleet.trackers.update_loss import update_loss as update_loss
from fleet.training.fleet_model import FleetModel as FleetModel
from fleet.training.fleet_optimizer import FleetOptimizer as FleetOptimizer
from fleet.training.update_mean import mean as mean

__all__ = [
    "BuildStrategy",
    "ClipGradByGlobalNorm",
    "ClipGradByNorm",
    "ClipGradByValue",
    "CommunicateTopology",
    "CountFilterEntry",
    "DataParallel",
    "DatasetFactory",
    "DistributedStrategy",
    "ExecutionStrategy",
    "Fleet",
    "FleetModel",
    "FleetOptimizer",
    "HybridCommunicateGroup",
    "InMemoryDataset",
    "KafkaSource",
    "MultiSlotDataGenerator",
    "MultiSlotStringDataGenerator",
    "PaddleCloudRoleMaker",
    "ParallelEnv",
    "ParallelMode",
    "ParquetDataset",
    "ProbabilityEntry",
    "QueueDataset",
    "Role",
    "ShowClickEntry",
    "SparseEmbedding",
    "SparseEmbeddings",
    "StrategyFactory",
    "StreamDataset",
    "UserDefinedRoleMaker",
    "UtilBase",
    "all_reduce",
    "amp_init",
    "barrier_worker",
    "base",
    "checkpoint",
    "clear_grad",
    "clear_gradient",
    "clear_gradients",
    "clip",
    "data_generator",
    "data_rank",
    "data_replicas",
    "dataset",
    "distributed_model",
    "distributed_optimizer",
    "distributed_scaler",
    "elastic",
    "env",
    "errors",
    "estimate_memory",
    "explain",
    "features",
    "fleet",
    "fp16_guard",
    "get_hybrid_communicate_group",
    "get_log_level_code",
    "get_log_level_name",
    "get_loss_scaling",
    "get_lr",
    "get_rank",
    "get_world_size",
    "group_sharded_parallel",
    "heartbeat",
    "incubate",
    "infer_from_dataset",
    "init",
    "init_parallel_env",
    "init_server",
    "init_worker",
    "is_coordinator",
    "is_first_worker",
    "is_server",
    "is_worker",
    "launch",
    "layers",
    "load",
    "load_model",
    "load_one_table",
    "local_device_ids",
    "local_rank",
    "log",
    "mark_version",
    "mean",
    "meta_parallel",
    "metrics",
    "minimize",
    "moe",
    "node_num",
    "nranks",
    "optimizer",
    "options",
    "parallel",
    "preempted",
    "prefetch",
    "prepare_context",
    "print_table_stat",
    "ps",
    "rank",
    "recompute",
    "recompute_sequential",
    "regularizer",
    "role_maker",
    "run_server",
    "save",
    "save_group_sharded_model",
    "save_inference_model",
    "save_one_table",
    "save_persistables",
    "server_endpoints",
    "server_index",
    "server_num",
    "set_date",
    "set_log_level",
    "set_lr",
    "set_state_dict",
    "shrink",
    "spawn",
    "split",
    "split_files",
    "state_dict",
    "step",
    "stop_worker",
    "strategies",
    "trackers",
    "train_from_dataset",
    "update_loss",
    "utils",
    "worker_endpoints",
    "worker_index",
    "worker_num",
    "world_device_ids",
    "world_size",
]
__version__: str

def all_reduce(input: Any, mode: str = "sum") -> HostArray:
    """Returns the sum, minimum or maximum of ``input`` (number or array) over all workers."""

def amp_init(
    place: object = None, scope: object = None, test_program: object = None, use_fp16_test: bool = False
) -> None:
    """Checks that mixed precision is ready in the last distributed optimizer; see ``FleetOptimizer.amp_init``."""

def barrier_worker() -> None:
    """Returns when every worker has called it.

    With parameter servers in sync and async mode, parameters and rows then hold every step before it.
    """

def clear_grad() -> None:
    """Clears the gradients of the last distributed optimizer."""

def clear_gradient() -> None:
    """Clears the gradients of the last distributed optimizer."""

def clear_gradients() -> None:
    """Clears the gradients of the last distributed optimizer."""

def data_rank() -> int:
    """Returns the index of this worker's rows, from 0 below :meth:`data_replicas`.

    Workers that hold one copy of the model together (mp, pp, sep, cp) have the same, and must be given the same
    rows. Without such axes it is :meth:`worker_index`.

    Example:
        >>> fleet.data_rank(), fleet.data_replicas()  # mp 2 on workers 0 and 1: one replica
        (0, 1)
    """

def data_replicas() -> int:
    """Returns the number of workers, or of groups that hold one copy of the model, that train on different rows."""

def distributed_model(model: nn.Module, loss_fn: Any = None) -> FleetModel:
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

def distributed_optimizer(optimizer: Optimizer, strategy: DistributedStrategy | None = None) -> FleetOptimizer:
    """Returns ``optimizer`` with the options applied; it stays a ``torch.optim.Optimizer``.

    A ``strategy`` given here replaces the one given to ``fleet.init``, with a warning when both were given.

    Raises:
        NotInitializedError: before ``fleet.init``.
        ConfigError: an option that is on cannot work with this optimizer.
    """

def distributed_scaler(scaler: Any) -> Any:
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

def explain(strategy: DistributedStrategy | None = None, world_size: int | None = None) -> str:
    """Prints the effects of ``strategy`` (by default the one in force) in their order, its warnings and refusals.

    Without ``strategy``, after ``distributed_model()``, it also says which parameters of this worker are divided,
    as by ``tensor_parallel_configs["plan"]``: how many, along which dimension, and their bytes. In a job with
    parameter servers it says which embeddings have their rows there, and how these begin.
    """

def fp16_guard() -> AbstractContextManager[Any]:
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

def get_hybrid_communicate_group() -> HybridCommunicateGroup:
    """Returns this worker's coordinate along every axis of the mesh, and the process groups."""

def get_log_level_code() -> int:
    """Returns the level of the project's log as a number."""

def get_log_level_name() -> str:
    """Returns the level of the project's log by name."""

def get_loss_scaling() -> float:
    """Returns the loss scale of the last distributed optimizer."""

def get_lr() -> float:
    """Returns the learning rate of the last distributed optimizer."""

def group_sharded_parallel(
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

def heartbeat(pause: bool = False) -> None:
    """Tells the launcher that this worker is alive; each step of a distributed optimizer does so, too.

    With ``--heartbeat_timeout``, a worker that stays silent for that long is killed. Call this in long work between
    two steps: for each batch of an evaluation, or once before it with ``pause=True``, which allows silence until
    the next step or call. It takes less than a microsecond, and is a no-op where nothing listens.

    Example:
        >>> fleet.heartbeat(pause=True)
    """

def init(
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

def init_parallel_env() -> dist.ProcessGroup | None:
    """Runs the rendezvous and returns the process group of the workers; the basic form, without options.

    A single process gets a warning and ``None``. A second call returns the existing group.
    """

def init_server(dirname: Path | None = None, var_names: Sequence[str] | None = None) -> None:
    """Prepares this parameter server; with ``dirname``, loads the rows and parameters of an earlier save.

    Args:
        dirname: a folder that ``save_persistables`` wrote, with any number of servers.
        var_names: loads only these sparse tables, named after the model's embeddings.

    Raises:
        NotInitializedError: before ``fleet.init``, or ``dirname`` is given and the model is not known yet.
        ConfigError: ``dirname`` is not a folder, or a name is not a sparse table's.
    """

def init_worker(scopes: object = None) -> None:
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

def is_coordinator() -> bool:
    """Returns False: this project has no coordinator role."""

def is_first_worker() -> bool:
    """Returns whether this process is worker 0."""

def is_server() -> bool:
    """Returns whether this process is a parameter server."""

def is_worker() -> bool:
    """Returns whether this process trains."""

def load(path: str, **kwargs: Any) -> Any:
    """Returns what :meth:`save` wrote; never runs code from the file."""

def load_model(path: Path, mode: int = 0) -> None:
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

def load_one_table(table_id: int | str, path: Path, mode: int = 0) -> None:
    """Makes the servers load one table, by its name or number, as :meth:`load_model` does."""

def local_device_ids() -> list[int]:
    """Returns the device ids of this worker."""

def local_rank() -> int:
    """Returns the rank of this worker on its node; 0 in a single process."""

def log(values: Mapping[str, Any], step: int | None = None, *, total_steps: int = 0) -> dict[str, float]:
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

def mark_version(name: str, *, keep: int = 5, save: Path | None = None, model: Path | None = None) -> None:
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

def minimize(
    loss: Tensor, startup_program: object = None, parameter_list: Any = None, no_grad_set: Any = None
) -> tuple[list[None], list[tuple[nn.Parameter, Tensor]]]:
    """Updates the parameters of the last distributed optimizer; see ``FleetOptimizer.minimize``."""

def node_num() -> int:
    """Returns the number of hosts the workers run on."""

def nranks() -> int:
    """Returns the number of workers; ``nranks`` and ``world_size`` are the same."""

def preempted() -> bool:
    """Returns whether the job was asked to stop and all workers have agreed that this is the last step.

    The result is the same on every worker after the same step, so that all can save now. It stays False without
    ``--preempt_grace``. With a ``fleet.elastic.Checkpoint`` there is no need to call it: where the loop begins its
    next batch, the checkpoint is written and the process exits with ``fleet.elastic.PREEMPTED``.

    Example:
        >>> fleet.preempted()
        False
    """

def prefetch(loader: Iterable[_Batch]) -> Iterable[_Batch]:
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

def prepare_context(strategy: object = None) -> dist.ProcessGroup | None:
    """Calls :meth:`init_parallel_env`; the name in older releases."""

def print_table_stat(table_id: int | str, pass_id: int = 0, threshold: float = 0.0) -> None:
    """Prints how many rows and bytes a table has over all servers.

    Args:
        table_id: name of the table, which is that of its module, or its number.
        pass_id: a number that the line shows.
        threshold: refused above 0: servers do not count rows by their score.
    """

def rank() -> int:
    """Returns the rank of this worker in the job; ``rank`` is the same."""

def run_server() -> None:
    """Serves until every worker has called ``stop_worker`` (or has been silent too long)."""

def save(obj: Any, path: str) -> None:
    """Writes ``obj`` to exactly ``path``, atomically; see ``fleet.load``."""

def save_group_sharded_model(model: FleetModel, output: str, optimizer: FleetOptimizer | None = None) -> None:
    """Writes the full states to ``output``/model.pdmodel and model.pdopt; every worker must call it.

    Worker 0 writes; every call returns once the files exist.

    Raises:
        ConfigError: Fleet did not return the model or the optimizer.
        CheckpointError: ``output`` is a file, or cannot be written.
    """

def save_inference_model(
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

def save_one_table(table_id: int | str, path: Path, mode: int = 0) -> None:
    """Makes the servers write one table, by its name or number, as :meth:`save_persistables` does."""

def save_persistables(
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

@overload
def server_endpoints(to_string: Literal[False] = False) -> list[str]:
    """Returns the address of every parameter server, as a list or joined by commas."""

@overload
def server_endpoints(to_string: Literal[True]) -> str:
    """Returns the address of every parameter server, as a list or joined by commas."""

@overload
def server_endpoints(to_string: bool) -> list[str] | str:
    """Returns the address of every parameter server, as a list or joined by commas."""

def server_index() -> int:
    """Returns the index of this parameter server; raises ConfigError on a worker."""

def server_num() -> int:
    """Returns the number of parameter servers."""

session: Session
"""What ``fleet.init`` set up."""

def set_date(table_id: int | str, day_id: str | int) -> None:
    """Advances a table by one day, for tables that delete rows unseen for long; worker 0 triggers it.

    Args:
        table_id: name of the table, which is that of its module, or its number.
        day_id: the new day. The servers ignore the day they were told last, so that a worker 0 that restarts may
            repeat its call.
    """

def set_log_level(level: int | str) -> None:
    """Sets the level of the project's log."""

def set_lr(value: float) -> None:
    """Sets the learning rate of the last distributed optimizer."""

def set_state_dict(state_dict: dict[str, Any]) -> None:
    """Loads a state into the last distributed optimizer."""

def shrink(threshold: float | None = None) -> int:
    """Deletes rows that are not worth keeping; every worker calls it. Worker 0 gets the number of rows deleted.

    Args:
        threshold: the least score of a row that is kept (for tables without accessor: the least number of
            pushes). ``None`` takes ``delete_threshold`` and ``delete_after_unseen_days`` of each table's accessor,
            and skips tables without one. Rows of ``nn.Embedding`` are kept unless their table has an accessor.

    Raises:
        ConfigError: no table has rows to delete in this way; raised on every worker, and nothing is deleted.
    """

def split_files(files: list[str]) -> list[str]:
    """Returns this worker's shard of ``files``; the 1.x name of ``fleet.util.get_file_shard``."""

def state_dict() -> dict[str, Any]:
    """Returns the state of the last distributed optimizer."""

def step() -> None:
    """Steps the last distributed optimizer."""

def stop_worker() -> None:
    """Sends the pending updates and leaves the job; the servers exit when all workers have left."""

util: UtilBase
"""Collective operations on host arrays, file shards, printing on one rank; a script may assign its own."""

@overload
def worker_endpoints(to_string: Literal[False] = False) -> list[str]:
    """Returns the address of every worker, as a list or joined by commas."""

@overload
def worker_endpoints(to_string: Literal[True]) -> str:
    """Returns the address of every worker, as a list or joined by commas."""

@overload
def worker_endpoints(to_string: bool) -> list[str] | str:
    """Returns the address of every worker, as a list or joined by commas."""

def worker_index() -> int:
    """Returns the rank of this worker in the job; ``rank`` is the same."""

def worker_num() -> int:
    """Returns the number of workers; ``nranks`` and ``world_size`` are the same."""

def world_device_ids() -> list[int]:
    """Returns the device ids of every worker, in rank order."""

def world_size() -> int:
    """Returns the number of workers; ``nranks`` and ``world_size`` are the same."""
