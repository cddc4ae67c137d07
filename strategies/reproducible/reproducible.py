"""reproducible: weights, optimizer state and losses have the same bits on any number of workers, through resizes."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fleet.errors import ConfigError, OptionWarning
from fleet.job.axes import COPY_AXES
from fleet.job.logical_workers import LogicalWorkers, hosted_blocks
from fleet.strategies._declare.fields import Config, Values, setting
from fleet.strategies._declare.strategy import GradientKeeper, Guide, Stage, StepCounter
from fleet.strategies._gradients.flat import broadcast_from_rank_0
from fleet.strategies._shared.mesh import plan_axes
from fleet.strategies._shared.optimizer_wrapper import LR_SCALE
from fleet.strategies.reproducible.logical_gradients import LogicalGradients
from fleet.strategies.reproducible.once_an_update import OnceAnUpdate
from fleet.strategies.reproducible.other_optimizers import OtherOptimizers
from fleet.strategies.reproducible.same_kernels import differences, kernels_of, pin_kernels
from fleet.strategies.reproducible.steady_weights import SteadyWeights
from fleet.strategies.reproducible.tree import kept_sums, whole_nodes
from fleet.strategies.reproducible.turn_buffers import TurnBuffers
from fleet.strategies.reproducible.turn_optimizer import TurnOptimizer

if TYPE_CHECKING:
    from fleet.job.job import Job

_LOCAL = "its workers train on their own between averages, so the result depends on their number"
_OWN_TREE = "the sum over the workers is made in the tree of 'reproducible', and this option has another exchange"
SCALED_RATE = (
    "fleet.elastic.scale_lr() makes the learning rate follow the number of workers, and with 'reproducible' an update "
    "has the batches of all logical workers on any number of them. Leave the call out."
)
# Axes along which the workers hold parts, beside mp and pp, whose degrees turn an option on that has a conflict.
_PARTS = ("sep", "cp", "ep")


@dataclass(frozen=True, kw_only=True)
class ReproducibleConfig(Config, option="reproducible_configs"):
    """How many logical workers there are, and with how many threads each computes."""

    logical_workers: int = setting(
        8, "logical workers for the whole training; at least as many as there will ever be processes", at_least=1
    )
    threads: int = setting(
        1, "threads of each process, whatever their number: sums in other threads round differently", at_least=1
    )


class Reproducible(StepCounter, GradientKeeper):
    """Lets processes host logical workers in turns, and adds their gradients in one tree."""

    name = "reproducible"
    meaning = "Give weights, optimizer state and losses the same bits on any number of workers, through resizes."
    stage = Stage.SHARD
    Config = ReproducibleConfig
    conflicts = {
        "localsgd": _LOCAL,
        "adaptive_localsgd": _LOCAL,
        "dgc": _OWN_TREE,
        "fp16_allreduce": _OWN_TREE,
        "use_hierarchical_allreduce": _OWN_TREE,
        "sync_batch_norm": "it averages statistics over processes, and logical workers of one process run in turns",
        "pipeline": "the micro-batches of a pipeline add up inside train_batch, in an order of their own",
        "tensor_parallel": "its workers hold parts of layers, whose sums depend on the number of parts",
        "to_static": "compiled kernels are chosen anew in each process, by measurements",
    }
    steps_together = True
    model_effect = (
        "runs the batches of this process's logical workers one after the other, each with its own random numbers and "
        "with the buffers of logical worker 0"
    )
    optimizer_effect = "updates at the last batch of an update, with the sum of a fixed tree over all logical workers"
    guide = Guide(
        when="A run must be repeated, compared or audited bit by bit, while its number of workers changes.",
        cost="A process with several logical workers runs their batches one after the other, as gradient_merge does; "
        "between them it keeps up to log2(V / N) + 1 sums of gradients. V and N powers of two send as many bytes as "
        "data_parallel, other numbers more. One thread for each process. A loop goes over ElasticSampler(data, "
        "batch_size=B).batches(loader), over a dataset of Fleet, or over fleet.elastic.logical_ranks().",
        formula="g = T(g_0, ..., g_{V-1}) / V; T of n terms is T(the first 2^k) + T(the rest), 2^k the largest below n",
        source="logical workers: Li et al., 2023, EasyScale, SC'23; Or et al., 2022, VirtualFlow, MLSys",
        example={"reproducible": True, "reproducible_configs": {"logical_workers": 4}},
    )

    @classmethod
    def replaces(cls, options: Values) -> Mapping[str, Sequence[str]]:
        """Returns data_parallel and gradient_merge, whose options it honours."""
        exchange = ("fuse_all_reduce_ops", "fuse_grad_size_in_MB", "last_comm_group_size_MB", "gradient_scale_configs")
        return {
            "data_parallel": (*exchange, "find_unused_parameters"),
            "gradient_merge": ("gradient_merge", "gradient_merge_configs"),
        }

    @classmethod
    def problem(cls, options: Values, world_size: int) -> str | None:
        """Returns the reason when there are too few logical workers, or workers hold parts of the model."""
        num = options["reproducible_configs"].logical_workers
        if num < world_size:
            return (
                f"reproducible_configs['logical_workers'] is {num}, and there are {world_size} workers: each hosts one "
                "logical worker at least. Start fewer workers, or, before the training begins, set more."
            )
        try:
            degrees = {**plan_axes(options, world_size), "ep": options["hybrid_configs"].ep_degree}
        except ConfigError:
            return None  # hybrid names the fault
        if divided := [axis for axis in _PARTS if degrees.get(axis, 1) > 1]:
            return (
                f"'reproducible' is on and the {divided[0]} degree is {degrees[divided[0]]}: these workers hold parts "
                f"of a sequence or of the experts, whose sums depend on their number. Set {divided[0]}_degree to 1."
            )
        return _problem_of_sharding(options)

    @classmethod
    def effects(cls, options: Values, world_size: int) -> tuple[str, str]:
        """Returns the effects, with the hosts, the sums kept between turns, and the bytes sent."""
        num = options["reproducible_configs"].logical_workers
        if num < world_size:
            return cls.model_effect, cls.optimizer_effect
        blocks = hosted_blocks(num, world_size)
        processes = f"{world_size} process{'' if world_size == 1 else 'es'}"
        kept = max(kept_sums(num, block) for block in blocks)
        copies = f"; keeps up to {kept} cop{'y' if kept == 1 else 'ies'} of the gradients between turns" if kept else ""
        merged = rounds_per_update(options)
        rounds = f", after {merged} rounds of them" if merged > 1 else ""
        return (
            f"{num} logical workers on {processes}: {_sizes(blocks)}; {cls.model_effect}",
            f"{cls.optimizer_effect}{rounds}{copies}{_sent(num, blocks)}",
        )

    def __init__(self, config: Any, job: Job) -> None:
        """Makes the logical workers of ``job`` and pins its threads."""
        super().__init__(config, job)
        self._threads_before = torch.get_num_threads()
        pin_kernels(config.threads, job.device)
        axes = job.axes
        num_hosts = max(axes.data_replicas, 1)
        self._logical = LogicalWorkers(
            config.logical_workers, num_hosts, axes.data_rank, rounds_per_update(job.options)
        )
        self._logical.kernels = kernels_of(job.device)
        job.logical = self._logical
        self._logical.begins.append(self._begin_turn)
        self._group = axes.group(*COPY_AXES)
        self._gradients: list[LogicalGradients] = []
        self._buffers = TurnBuffers(lambda: job.models, self._logical, self._group)
        self._weights = SteadyWeights(lambda: job.models, self._logical)
        self._once = OnceAnUpdate(self._logical, lambda: job.optimizers, lambda: job.models)
        self._others = OtherOptimizers(job, self._logical)
        self._has_met = False

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raises ConfigError for LBFGS, which runs batches by itself, and for a rate that depends on the workers."""
        if any(LR_SCALE in group for group in optimizer.param_groups):
            raise ConfigError(SCALED_RATE)
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError(
                "'reproducible' updates after the batches of all logical workers, and torch.optim.LBFGS runs its "
                "closure as often as it likes in one step(). Use another optimizer, or turn reproducible off."
            )

    def use_scaler(self, scaler: Any) -> None:
        """Raises ConfigError without amp, and in a batch: amp has scaled some of the update, on each process others."""
        super().use_scaler(scaler)
        if scaler.is_enabled() and self._logical.is_open:
            raise ConfigError(
                "A GradScaler steps that fleet.distributed_scaler() was not told of. With 'reproducible' all batches "
                "of an update have one scale: write scaler = fleet.distributed_scaler(scaler) before the loop."
            )

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Returns ``model``, which starts from worker 0's parameters and buffers, as the seed of the job does."""
        if self._group is not None:
            broadcast_from_rank_0([*model.parameters(), *model.buffers()], self._group)
        self._meet()
        return model

    def note_parameters(self, model: nn.Module, added: Mapping[str, nn.Parameter]) -> None:
        """Makes new parameters equal worker 0's."""
        if added and self._group is not None:
            broadcast_from_rank_0([*added.values()], self._group)
        self._weights.follow()
        for gradients in self._gradients:
            gradients.note_parameters()

    def wrap_steps(self, optimizer: Optimizer) -> Optimizer:
        """Returns an optimizer that updates at the last batch of an update."""
        options = self.job.options
        fuses = options["fuse_all_reduce_ops"]
        workers = self._logical.num if options["gradient_scale_configs"].scale_strategy == "avg" else 1
        rounds = self._logical.rounds_per_update if options["gradient_merge_configs"].avg else 1
        gradients = LogicalGradients(
            self._gradients, self._logical, self._group,
            bucket_MiB=options["fuse_grad_size_in_MB"] if fuses else 0.0,
            last_bucket_MiB=options["last_comm_group_size_MB"] if fuses else 0.0,
            divisor=float(workers * rounds),
            notes_pass=self._weights.note_pass,
        )  # fmt: skip
        self._gradients.append(gradients)
        return TurnOptimizer(optimizer, gradients, self._buffers)

    def averaged_batches(self) -> int:
        """Returns the number of batches of this process in an update."""
        return len(self._logical.ranks) * self._logical.rounds_per_update

    def held_gradients(self, parameters: Sequence[Tensor]) -> Any:
        """Yields the gradients of ``parameters`` that are set aside."""
        for gradients in self._gradients:
            yield from gradients.held(parameters)

    def note_clear(self, parameters: Sequence[Tensor]) -> None:
        """Drops the gradients of the present batch."""
        for gradients in self._gradients:
            gradients.note_clear(parameters)

    def close(self) -> None:
        """Gives torch its threads back."""
        self._once.close()
        self._others.close()
        self.job.logical = None
        torch.set_num_threads(self._threads_before)

    def _begin_turn(self, rank: int) -> None:
        """Begins an update, unless rounds wait for theirs; a loop that evaluates has rounds too."""
        if not any(gradients.steps for gradients in self._gradients):
            self._logical.first_round = self._logical.round

    def _meet(self) -> None:
        """Makes worker 0's seed the job's, and warns where the workers compute with different kernels."""
        logical = self._logical
        if self._has_met or logical.num_hosts == 1:
            return
        self._has_met = True
        own = json.dumps([torch.initial_seed(), logical.kernels])
        said = [json.loads(f"{text}") for text in self.job.util.all_gather(own)]
        logical.agree_on_seed(said[0][0])
        found = (
            differences(said[0][1], kernels, "on worker 0", f"on worker {r}") for r, (_, kernels) in enumerate(said)
        )
        if first := next(filter(None, found), ""):
            warnings.warn(
                f"'reproducible': the bits hold for workers of one kind, and these differ: {first}.",
                OptionWarning,
                stacklevel=5,
            )


def _sizes(blocks: Sequence[range]) -> str:
    """Returns how many logical workers each process hosts, in words."""
    sizes = [len(block) for block in blocks]
    if len(sizes) <= 8:
        return ", ".join(map(str, sizes))
    first = sizes.count(sizes[0])
    if first == len(sizes):
        return f"{sizes[0]} each"
    return f"{sizes[0]} on each of the first {first}, {sizes[-1]} on each of the others"


def _sent(num: int, blocks: Sequence[range]) -> str:
    """Returns the bytes of an update beside those of data_parallel, in words; see [Note: The exchange]."""
    if len(blocks) == 1:
        return ""
    sums = sum(len(list(whole_nodes(num, block))) for block in blocks)
    if sums == len(blocks):
        return "; the processes send as many bytes as with data_parallel"
    # Half of data_parallel's bytes are the sums, one of each process; the other half is sent back alike.
    factor = (sums / len(blocks) + 1) / 2
    return (
        f"; the processes send {factor:.3g} times the bytes of data_parallel, for their {len(blocks)} blocks are "
        f"{sums} nodes of the tree"
    )


def rounds_per_update(options: Values) -> int:
    """Returns how many batches of each logical worker make an update, as ``gradient_merge`` asks for."""
    return int(options["gradient_merge_configs"].k_steps) if options["gradient_merge"] else 1


def _problem_of_sharding(options: Values) -> str | None:
    config = options["sharding_configs"]
    hybrid = options["hybrid_configs"]
    on = options["sharding"] or hybrid.sharding_degree > 1
    if not on:
        return None
    if config.stage > 1 or hybrid.sharding_configs.split_param:
        return (
            f"'reproducible' is on and sharding_configs['stage'] is {max(config.stage, 2)}: stages 2 and 3 reduce each "
            "gradient in an exchange of their own, whose sums depend on the number of workers. Set it to 1."
        )
    merged = {
        "sharding_configs['gradient_merge_acc_step']": config.gradient_merge_acc_step,
        "hybrid_configs['sharding_configs']['accumulate_steps']": hybrid.sharding_configs.accumulate_steps,
    }
    for key, count in merged.items():
        if count > 1:
            return (
                f"'reproducible' is on and {key} is {count}. Set it to 1, and gradient_merge_configs['k_steps'] in its "
                "place."
            )
    return None
