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

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fleet.common.compatibility import check_compatibility
from fleet.common.version import __version__ as __version__

check_compatibility()

if TYPE_CHECKING:
    from fleet.facade import Fleet

# Where each public name lives; the calls of Fleet come from its one instance.
_HOMES = {
    "BuildStrategy": "fleet.options",
    "ClipGradByGlobalNorm": "fleet.clip",
    "ClipGradByNorm": "fleet.clip",
    "ClipGradByValue": "fleet.clip",
    "CommunicateTopology": "fleet.paddle.topology",
    "CountFilterEntry": "fleet.ps",
    "DataParallel": "fleet.paddle.data_parallel_layer",
    "DatasetFactory": "fleet.dataset.factory",
    "DistributedStrategy": "fleet.options",
    "ExecutionStrategy": "fleet.options",
    "Fleet": "fleet.facade",
    "FleetModel": "fleet.training.fleet_model",
    "FleetOptimizer": "fleet.training.fleet_optimizer",
    "HybridCommunicateGroup": "fleet.paddle.topology",
    "InMemoryDataset": "fleet.dataset.in_memory",
    "KafkaSource": "fleet.dataset.kafka",
    "MultiSlotDataGenerator": "fleet.data_generator",
    "MultiSlotStringDataGenerator": "fleet.data_generator",
    "PaddleCloudRoleMaker": "fleet.role_maker",
    "ParallelEnv": "fleet.parallel",
    "ParallelMode": "fleet.paddle.topology",
    "ProbabilityEntry": "fleet.ps",
    "ParquetDataset": "fleet.dataset.parquet",
    "QueueDataset": "fleet.dataset.queue",
    "StreamDataset": "fleet.dataset.stream",
    "Role": "fleet.role_maker",
    "ShowClickEntry": "fleet.ps",
    "SparseEmbedding": "fleet.ps",
    "SparseEmbeddings": "fleet.ps",
    "StrategyFactory": "fleet.paddle.strategy_factory",
    "UserDefinedRoleMaker": "fleet.role_maker",
    "UtilBase": "fleet.job.util",
    "estimate_memory": "fleet.estimate.memory",
    "get_rank": "fleet.parallel",
    "get_world_size": "fleet.parallel",
    "infer_from_dataset": "fleet.dataset.training",
    "mean": "fleet.training.update_mean",
    "recompute": "fleet.strategies._shared.segments",
    "recompute_sequential": "fleet.strategies._shared.segments",
    "spawn": "fleet.parallel",
    "split": "fleet.layers.mpu.mp_ops",
    "train_from_dataset": "fleet.dataset.training",
    "update_loss": "fleet.trackers.update_loss",
}
_MODULES = (
    "base",
    "checkpoint",
    "clip",
    "data_generator",
    "dataset",
    "elastic",
    "env",
    "errors",
    "features",
    "incubate",
    "launch",
    "layers",
    "meta_parallel",
    "metrics",
    "moe",
    "optimizer",
    "options",
    "parallel",
    "ps",
    "regularizer",
    "role_maker",
    "strategies",
    "trackers",
    "utils",
)
_CALLS = (
    "all_reduce",
    "amp_init",
    "barrier_worker",
    "clear_grad",
    "clear_gradient",
    "clear_gradients",
    "data_rank",
    "data_replicas",
    "distributed_model",
    "distributed_optimizer",
    "distributed_scaler",
    "explain",
    "fp16_guard",
    "get_hybrid_communicate_group",
    "get_log_level_code",
    "get_log_level_name",
    "get_loss_scaling",
    "get_lr",
    "group_sharded_parallel",
    "heartbeat",
    "init",
    "init_parallel_env",
    "init_server",
    "init_worker",
    "is_coordinator",
    "is_first_worker",
    "is_server",
    "is_worker",
    "load",
    "load_model",
    "load_one_table",
    "local_device_ids",
    "local_rank",
    "log",
    "mark_version",
    "minimize",
    "node_num",
    "nranks",
    "preempted",
    "prefetch",
    "prepare_context",
    "print_table_stat",
    "rank",
    "run_server",
    "save",
    "save_group_sharded_model",
    "save_inference_model",
    "save_one_table",
    "save_persistables",
    "server_endpoints",
    "server_index",
    "server_num",
    "session",
    "set_date",
    "set_log_level",
    "set_lr",
    "set_state_dict",
    "shrink",
    "split_files",
    "state_dict",
    "step",
    "stop_worker",
    "util",
    "worker_endpoints",
    "worker_index",
    "worker_num",
    "world_device_ids",
    "world_size",
)
fleet = sys.modules[__name__]

# Not these two: they raise before init, and ``from fleet import *`` asks for every name.
_NEED_INIT = ("session", "util")

__all__ = sorted(["fleet", *_HOMES, *_MODULES, *(name for name in _CALLS if name not in _NEED_INIT)])


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return import_module(f"fleet.{name}")
    if name in _CALLS:
        return getattr(_instance(), name)
    from fleet.errors import did_you_mean
    from fleet.paddle.removed_names import REMOVED_NAMES

    if name in REMOVED_NAMES:
        raise AttributeError(f"fleet.{name} does not exist: {REMOVED_NAMES[name]}.")
    raise AttributeError(f"fleet has no {name!r}.{did_you_mean(name, __all__)}")


def _instance() -> Fleet:
    """Returns the one Fleet of this process, created at first use."""
    if "_fleet" not in globals():
        from fleet.facade import Fleet
        from fleet.job.running import RUNNING

        globals()["_fleet"] = Fleet(RUNNING)
    found: Fleet = globals()["_fleet"]
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
