"""How each strategy enters an estimate: as it is, replayed by an exchange, without a trace, or named as not modelled.

Strategies that change the module or the optimizer of this worker alone run as they are, on fakes. Those that exchange
are replayed. A strategy in none of the lists is named in the result, so a new one is never taken for free.

[Note: Why exchanges are replayed]
torch's "fake" process group, tried with torch 2.13, does not run them on fake tensors. DistributedDataParallel reads
the data of tensors in C++ when it is made and when it rebuilds its buckets. fully_shard runs, but frees its parameters
by resizing storages, which no dispatch mode sees: 336 MiB for ResNet-18 in stage 3, where 168 are real. Moreover the
group copies nothing, as gloo does, torch registers it in ``torch.testing._internal`` only, and it would have to be the
one default group of a process that may be in a job.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fleet.estimate.divided_training import Divided, DividedGradients
from fleet.estimate.exchanged_training import Averages, Buckets, Exchange, LogicalSums, SharedUpdate
from fleet.estimate.storage_tracker import StorageTracker
from fleet.job.axes import COPY_AXES, Axes
from fleet.job.logical_workers import hosted_ranks
from fleet.strategies._declare.strategy import Strategy
from fleet.strategies._declare.strategy_plan import Plan
from fleet.strategies._shared.mesh import plan_axes, plan_expert_axes
from fleet.strategies.reproducible.reproducible import rounds_per_update
from fleet.strategies.sharding.sharding import stage_of
from fleet.strategies.sharding.units import check_any_stage, check_divided, check_divisible, find_anchors, plan_units

_MIB = 1024 * 1024

# They act on this worker's module and optimizer, and run on fakes as they do on tensors.
RUN_AS_THEY_ARE = ("recompute", "amp", "lars", "lamb", "gradient_merge")
# Exchanges and their variants, which are replayed here.
REPLAYED = ("data_parallel", "sharding", "localsgd", "adaptive_localsgd", "dgc", "fp16_allreduce", "reproducible")
# They take no memory that torch's allocator would hand out; layers of tensor_parallel are divided where they are made,
# and memory.py runs the order of a pipeline.
FREE = ("use_hierarchical_allreduce", "tensor_parallel", "pipeline")

_WHY_NOT = {
    "to_static": "the compiler fuses operations; the numbers are those of the model without it, usually more",
    "cudnn_exhaustive_search": "cuDNN's workspaces, which it tries out at the first batch, are not counted",
    "sync_batch_norm": "batch norm is counted as it is without it; what it gathers is small, but on the CPU it keeps "
    "one more copy of each normalised activation",
}


class Onlooker:
    """The session that strategies see during an estimate: the workers of the job, without a process group."""

    global_rank = 0
    collective = True
    process_group = None
    mesh = None
    divides_gradients = False

    def __init__(self, options: Any, world_size: int, device: torch.device, model: nn.Module) -> None:
        self.options = options
        self.world_size = world_size
        self.local_world_size = world_size
        self.device = device
        self.model = model
        self.axes = Axes(plan_axes(options, world_size), 0)

    def parameter_names(self) -> dict[Tensor, str]:
        """Returns the qualified name of every parameter."""
        return {p: name for name, p in self.model.named_parameters()}

    def has_equal_gradients(self, parameters: Iterable[Tensor]) -> bool:
        """Returns True: nobody is asked to agree."""
        return True


@dataclasses.dataclass
class Application:
    """The model and the optimizer as strategies have wrapped them, and what goes with them.

    Attributes:
        batches_per_update: how many batches are run for one update; a long window is cut to three, after which
            nothing new happens.
        steps_every_batch: whether ``step()`` runs after every batch, and not only after the last of a window.
    """

    model: nn.Module
    optimizer: Optimizer
    exchange: Exchange
    batches_per_update: int
    steps_every_batch: bool
    not_modelled: list[str]
    strategies: list[Strategy]

    def close(self) -> None:
        """Lets the strategies go."""
        for strategy in self.strategies:
            strategy.close()


def apply_strategies(
    plan: Plan, options: Any, model: nn.Module, optimizer: Optimizer, tracker: StorageTracker, device: torch.device,
    on_host: bool,
) -> Application:  # fmt: skip
    """Wraps ``model`` and ``optimizer``, both on fakes, as a session of the plan's workers would.

    ``on_host`` says whether the workers of the job exchange through gloo, on the CPU.
    """
    names = [step.name for step in plan.steps]
    not_modelled = [_reason(name) for name in names if name not in (*RUN_AS_THEY_ARE, *REPLAYED, *FREE)]
    onlooker: Any = Onlooker(options, plan.world_size, device, model)
    strategies = []
    for step in plan.steps:
        if step.name in RUN_AS_THEY_ARE:
            config, remarks = _shortened(step.name, options[f"{step.name}_configs"], device)
            not_modelled += remarks
            strategies.append(step(config, onlooker))
    if "sharding" in names and plan.world_size > 1:
        _check_sharding(options, model, optimizer)
    for strategy in strategies:
        strategy.check_model(model)
        strategy.check_optimizer(optimizer)
    for strategy in strategies:
        strategy.prepare_model(model)
    exchange = _exchange(plan, options, model, tracker, not_modelled, on_host=on_host)
    exchange.take_over(optimizer)
    chain = model
    wrapped = optimizer
    for strategy in strategies:
        chain = strategy.wrap_model(chain)
        wrapped = strategy.wrap_optimizer(wrapped)
        if strategy.name == "amp":
            # The loss scale is a number and not a memory; without it no step waits to read whether to happen.
            strategy.use_scaler(None)
    window = _window(names, options, plan.world_size)
    return Application(chain, wrapped, exchange, window, "gradient_merge" in names, not_modelled, strategies)


def _exchange(
    plan: Plan, options: Any, model: nn.Module, tracker: StorageTracker, not_modelled: list[str], *, on_host: bool
) -> Exchange:
    names = [step.name for step in plan.steps]
    if "reproducible" in names and "sharding" not in names:
        return LogicalSums(tracker, model, options["reproducible_configs"].logical_workers, plan.world_size)
    if "reproducible" in names:
        not_modelled.append("reproducible with sharding: the sums of its logical workers are not counted.")
    if Axes(plan_axes(options, plan.world_size), 0).size(*COPY_AXES) == 1:
        return Exchange(tracker, model)
    if "sharding" in names:
        return _sharded(plan, options, model, tracker, not_modelled, on_host=on_host)
    if "localsgd" in names or "adaptive_localsgd" in names:
        return Averages(tracker, model)
    if "pipeline" in names:
        not_modelled.append("pipeline: the buckets in which copies of a stage exchange gradients are not counted.")
        return Exchange(tracker, model)
    if "data_parallel" not in names:
        not_modelled.append("What the workers exchange: no strategy of this plan is known to exchange gradients.")
        return Exchange(tracker, model)
    wire = torch.float16 if "fp16_allreduce" in names else None
    dense_start = options["dgc_configs"].rampup_begin_step > 0
    return Buckets(tracker, model, wire_dtype=wire, sparse="dgc" in names, dense_start=dense_start)


def _sharded(
    plan: Plan, options: Any, model: nn.Module, tracker: StorageTracker, not_modelled: list[str], *, on_host: bool
) -> Exchange:
    config = options["sharding_configs"]
    degree = plan_axes(options, plan.world_size)["sharding"]
    if config.optimize_offload:
        not_modelled.append(
            "sharding_configs['optimize_offload']: what it keeps in host memory is counted as if it stayed on the "
            "device."
        )
    buffer_MiB = min(config.segment_broadcast_MB, options["hybrid_configs"].sharding_configs.comm_buffer_size_MB)
    if stage_of(options) == 1:
        experts = plan_expert_axes(options, plan.world_size).get("moe_sharding", 1)
        return SharedUpdate(tracker, model, degree, buffer_MiB * _MIB, experts)
    if stage_of(options) == 2:
        return DividedGradients(tracker, model, degree, buffer_MiB * _MIB)
    if config.sharding_segment_strategy == "segment_anchors":
        units = find_anchors(model, config.segment_anchors)
    else:
        units = plan_units(model, buffer_MiB * _MIB)
    find_unused = options["find_unused_parameters"]
    if find_unused:
        not_modelled.append(
            "find_unused_parameters: each worker has the gradients of the whole model until backward ends."
        )
    return Divided(tracker, model, units, degree, reshard=not find_unused, on_host=on_host)


def _check_sharding(options: Any, model: nn.Module, optimizer: Optimizer) -> None:
    check_any_stage(optimizer)
    if stage_of(options) > 1:
        check_divisible(model, stage_of(options))
        check_divided(optimizer)


def _window(names: list[str], options: Any, world_size: int) -> int:
    steps = 1
    if "reproducible" in names:
        turns = len(hosted_ranks(options["reproducible_configs"].logical_workers, world_size, 0))
        steps = turns * rounds_per_update(options)
    elif "gradient_merge" in names:
        steps = options["gradient_merge_configs"].k_steps
    elif "sharding" in names:
        hybrid = options["hybrid_configs"].sharding_configs
        steps = max(options["sharding_configs"].gradient_merge_acc_step, hybrid.accumulate_steps)
    return min(int(steps), 3)  # a first, a middle and a last batch: further ones allocate nothing new


def _shortened(name: str, config: Any, device: torch.device) -> tuple[Any, list[str]]:
    """Returns the configuration that an estimate can run, and remarks on its omissions."""
    if name == "gradient_merge":
        return config.updated({"k_steps": min(config.k_steps, 3)}), []
    if name == "recompute" and config.enable_offload:
        remark = (
            "recompute_configs['enable_offload']: the inputs of recomputed modules are counted as if they stayed on "
            "the device."
        )
        return config.updated({"enable_offload": False}), [remark]
    return config, []


def _reason(name: str) -> str:
    return f"{name}: {_WHY_NOT.get(name, 'this estimate does not know what it holds, and leaves it out')}."
