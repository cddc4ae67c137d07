"""sharding: each worker keeps a part of the optimizer state, the gradients and the parameters (ZeRO)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fleet.errors import ConfigError
from fleet.job.axes import COPY_AXES
from fleet.strategies._declare.degrees import asked_degrees, plan_degrees
from fleet.strategies._declare.fields import Config, Values, setting
from fleet.strategies._declare.strategy import GradientKeeper, Guide, Stage, StepCounter
from fleet.strategies._gradients.accumulator import AccumulatingOptimizer, Accumulator, InModel, accumulate
from fleet.strategies._gradients.gradient_exchange import exchanging_in
from fleet.strategies._gradients.passes import Passes, passes_of
from fleet.strategies._gradients.set_aside import SetAside
from fleet.strategies._shared.mesh import copies_mesh, plan_axes
from fleet.strategies.sharding.owners import PartitionedOptimizer
from fleet.strategies.sharding.units import (
    check_any_stage,
    check_apart,
    check_divided,
    check_divisible,
    check_types,
    find_anchors,
    plan_units,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from fleet.job.job import Job
    from fleet.strategies.sharding.divided_model import DividedModule, Division, ShardedOptimizer
    from fleet.strategies.sharding.unit_order import UnitOrder
    from fleet.strategies.sharding.whole_model import RowsOptimizer, WholeModule

_MIB = 1024 * 1024
_NO_PROGRAM = "it rewrites a static program, and torch runs none"


@dataclass(frozen=True, kw_only=True)
class ShardingConfig(Config, option="sharding_configs"):
    """What is divided, among how many workers, and in which units."""

    sharding_degree: int = setting(
        -1, "workers that share one copy of the state; -1 takes all that the other degrees leave", at_least=-1
    )
    mp_degree: int = setting(1, "workers that share the weights of a layer; 1 leaves it to hybrid_configs", at_least=1)
    pp_degree: int = setting(1, "stages of the pipeline; 1 leaves it to hybrid_configs", at_least=1)
    dp_degree: int = setting(1, "copies of the sharded model", at_least=1)
    stage: int = setting(
        1, "1 divides the optimizer state, 2 the gradients too, 3 the parameters too", choices=(1, 2, 3)
    )
    sharding_segment_strategy: str = setting(
        "segment_broadcast_MB",
        "how the model is cut into units: by size, or at named modules",
        choices=("segment_broadcast_MB", "segment_anchors"),
    )
    segment_broadcast_MB: float = setting(
        32.0, "size in MiB of a unit that is gathered at once; in stages 1 and 2, of what is sent at once", above=0
    )
    segment_anchors: tuple[str, ...] = setting([], "qualified names of the modules that are units")
    gradient_merge_acc_step: int = setting(1, "batches per update, as gradient_merge has k_steps", at_least=1)
    hybrid_dp: bool = setting(
        False, "data parallelism around the shards", no_meaning="it is the old name of dp_degree > 1; set dp_degree"
    )
    optimize_offload: bool = setting(
        False, "keep the optimizer state in host memory; in stage 3 the parts and their gradients too"
    )
    optimize_cast: bool = setting(False, "keep casts on the optimizer's side", no_meaning=_NO_PROGRAM)
    pp_allreduce_in_optimize: bool = setting(
        False, "exchange gradients once per step and not once per micro-batch; torch's schedules always do"
    )
    _dp_as_optimizer_sharding: bool = setting(False, "internal switch of Paddle", no_meaning=_NO_PROGRAM)
    enable_tuning: bool = setting(False, "internal switch of Paddle's tuner", no_meaning=_NO_PROGRAM)
    use_calc_stream: bool = setting(False, "communicate on the compute stream", no_meaning=_NO_PROGRAM)

    def __post_init__(self) -> None:
        """Checks each key, and that sharding_degree is -1 or positive."""
        super().__post_init__()
        if self.sharding_degree == 0:
            raise ConfigError("sharding_configs['sharding_degree'] is 0; it must be -1 or at least 1.")


class Sharding(StepCounter, GradientKeeper):
    """Divides optimizer state, gradients and parameters among workers."""

    name = "sharding"
    meaning = "Divide optimizer state, gradients and parameters among workers (ZeRO stages 1, 2 and 3)."
    stage = Stage.SHARD
    Config = ShardingConfig
    after = ("pipeline", "data_parallel")
    conflicts = {
        "gradient_merge": "sharding adds up batches by itself; set sharding_configs['gradient_merge_acc_step'] instead",
        "localsgd": "localsgd averages whole models, and a sharded worker holds a part of one",
        "adaptive_localsgd": "adaptive_localsgd averages whole models, and a sharded worker holds a part of one",
        "dgc": "dgc needs every worker's whole gradient, and a sharded worker holds a part of it",
        "fp16_allreduce": "sharding reduces gradients to their owners and sums none over all workers",
        "use_hierarchical_allreduce": "sharding reduces gradients to their owners and sums none over all workers",
    }
    in_place = True
    steps_together = True
    model_effect = (
        "stage 1 leaves the model to data_parallel; stage 2 divides gradients; stage 3 divides parameters too, and "
        "gathers a unit when it runs"
    )
    optimizer_effect = "updates only what this worker owns, with state for that alone"
    guide = Guide(
        when="The optimizer state, the gradients or the model itself do not fit into the memory of one worker.",
        cost="Stage 1 sends the parameters once per step in addition to the gradients. Stage 2 does so too, and sends "
        "half as much of the gradients; stage 3 gathers the parameters twice per batch. In stages 2 and 3 an exchanged "
        "gradient is a part (a DTensor), which post-accumulate hooks get too. Its norm is spread over the workers: "
        "p.grad.norm().item() is refused, p.grad.norm().full_tensor().item() is the number. In stage 3 "
        "model.parameters() are parts too: a weight penalty in the loss adds p.full_tensor().square().sum(). The "
        "gradient of p.full_tensor() is exchanged as all others are, so a loss may use it with the worker's own rows. "
        "What is assigned to .data is written into the part. A gradient penalty (backward through "
        "torch.autograd.grad(..., create_graph=True)) and a second backward of one forward need stage 1 or 2: in stage "
        "3 the gathered parameters are gone by then. In stages 2 and 3 every worker must use the same parameters in a "
        "batch, unless find_unused_parameters is set; with it, stage 3 gathers the whole model for a batch, and "
        "reduces its gradients after backward.",
        formula="memory per worker, Adam in float32, P parameters, N workers: stage 1: 8P + 8P/N, 2: 4P + 12P/N bytes "
        "and buckets, 3: 16P/N bytes and the largest unit",
        source="Rajbhandari et al., 2020, ZeRO, arXiv 1910.02054; torch's fully_shard",
        example={"sharding": True, "sharding_configs": {"sharding_degree": 2, "stage": 2}},
    )

    @classmethod
    def chosen(cls, options: Values) -> bool:
        """Returns whether the switch is on or a sharding degree is above 1."""
        return bool(options["sharding"] or options["hybrid_configs"].sharding_degree > 1)

    @classmethod
    def replaces(cls, options: Values) -> Mapping[str, Sequence[str]]:
        """Returns data_parallel in stages 2 and 3; stage 1 needs it to exchange the gradients."""
        honoured = ("gradient_scale_configs", "find_unused_parameters")
        return {"data_parallel": honoured} if stage_of(options) > 1 else {}

    @classmethod
    def problem(cls, options: Values, world_size: int) -> str | None:
        """Returns the reason when the degrees of ``sharding_configs`` do not fit together or the number of workers.

        When only ``hybrid_configs`` asks for sharding, its own check of the degrees applies.
        """
        reason = _problem_of_settings(options) or _problem_of_stages(options)
        if reason is not None:
            return reason
        config: ShardingConfig = options["sharding_configs"]
        if not options["sharding"]:
            return _problem_of_hybrid(options)
        hybrid = options["hybrid_configs"].sharding_degree
        free = config.sharding_degree == -1
        if hybrid not in (1, config.sharding_degree) and not free:
            return (
                f"sharding_configs['sharding_degree'] is {config.sharding_degree} and "
                f"hybrid_configs['sharding_degree'] is {hybrid}. Set both to the same number, or turn sharding off."
            )
        dp_agrees = options["hybrid_configs"].dp_degree in (-1, config.dp_degree)
        if not dp_agrees and not (free and config.dp_degree == 1):
            return (
                f"sharding_configs['dp_degree'] is {config.dp_degree} and hybrid_configs['dp_degree'] is "
                f"{options['hybrid_configs'].dp_degree}. Set both to the same number, or leave the second at -1."
            )
        if config.pp_degree > 1 and not options["pipeline"]:
            return (
                f"sharding_configs['pp_degree'] is {config.pp_degree} while 'pipeline' is off. "
                f"Turn pipeline on, or set pp_degree to 1."
            )
        if config.dp_degree > 1 and config.sharding_degree == 1:
            return (
                f"sharding_configs['dp_degree'] is {config.dp_degree} and ['sharding_degree'] is 1, which divides "
                f"nothing. Set sharding_degree, or turn sharding off: plain data parallelism needs no option."
            )
        option, degrees = asked_degrees(options)
        if option == "hybrid_configs":
            return None  # hybrid checks its degrees itself
        try:
            plan_degrees(option, degrees, world_size)
        except ConfigError as error:
            return str(error)
        return None

    @classmethod
    def effects(cls, options: Values, world_size: int) -> tuple[str, str]:
        """Returns the effects on the model and on the optimizer, with the number of workers that share."""
        try:
            degree = plan_axes(options, world_size)["sharding"]
        except ConfigError:  # shown as a problem
            return cls.model_effect, cls.optimizer_effect
        default = ", which takes all that the other degrees leave" if -1 in asked_degrees(options)[1].values() else ""
        return f"sharding_degree={degree}{default}; {cls.model_effect}", cls.optimizer_effect

    @classmethod
    def notes(cls, options: Values, world_size: int) -> tuple[str, ...]:
        """Returns remarks on settings that change nothing here."""
        config: ShardingConfig = options["sharding_configs"]
        if world_size == 1:
            merges = (
                f", and merges {config.gradient_merge_acc_step} batches" if config.gradient_merge_acc_step > 1 else ""
            )
            return (f"sharding divides nothing with one worker: it keeps everything{merges}.",)
        found = []
        if stage_of(options) < 3:
            keys = ("sharding_segment_strategy", "segment_anchors")
            found = [
                f"sharding_configs[{key!r}] changes nothing in stage {stage_of(options)}: the model is not divided "
                "into units."
                for key in keys
                if getattr(config, key) != getattr(ShardingConfig(), key)
            ]
        elif config.segment_anchors and config.sharding_segment_strategy != "segment_anchors":
            found = [
                "sharding_configs['segment_anchors'] changes nothing: ['sharding_segment_strategy'] is "
                "'segment_broadcast_MB'."
            ]
        if config.optimize_offload and not torch.cuda.is_available():
            found.append("sharding_configs['optimize_offload'] changes nothing on the CPU: the state is there already.")
        return tuple(found)

    def __init__(self, config: Any, job: Job) -> None:
        """Reads the degrees, the stage and the number of batches from the options."""
        super().__init__(config, job)
        hybrid = job.options["hybrid_configs"].sharding_configs
        self.zero_stage = stage_of(job.options)
        self._per_update: int = config.gradient_merge_acc_step
        self._per_exchange: int = hybrid.accumulate_steps
        self._accumulators: list[Accumulator] = []
        self._models: list[Passes] = []
        self._buffer_bytes = min(config.segment_broadcast_MB, hybrid.comm_buffer_size_MB) * _MIB
        self._sum_first = not hybrid.use_reduce_avg
        self._order: UnitOrder | None = None
        self._whole: list[WholeModule] = []
        self._of_rows: list[RowsOptimizer] = []
        self._divided: list[DividedModule] = []
        self._optimizers: list[ShardedOptimizer] = []
        self._replaced: dict[nn.Parameter, nn.Parameter] = {}

    @property
    def _alone(self) -> bool:
        mesh = self.job.mesh
        return mesh is None or "sharding" not in (mesh.mesh_dim_names or ())

    @property
    def _counts(self) -> bool:
        """Whether not every backward pass exchanges or not every step updates."""
        return self._per_update > 1 or self._per_exchange > 1

    @property
    def _mesh(self) -> DeviceMesh:
        assert self.job.mesh is not None
        return self.job.mesh

    def check_model(self, model: nn.Module) -> None:
        """Raises ConfigError when an anchor is wrong, or a parameter cannot be divided."""
        if not self._alone:
            check_apart(model.named_parameters())
        if self.zero_stage > 1 and not self._alone:
            check_divisible(model, self.zero_stage)
        if self.zero_stage == 3 and not self._alone:
            check_types(model, self._units(model))

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raises ConfigError when the optimizer cannot update a part of the parameters."""
        if not self._alone or self._per_update > 1:
            check_any_stage(optimizer)
        if not self._alone and self.zero_stage > 1:
            check_divided(optimizer)
            for accumulator in self._accumulators:
                accumulator.check_give([p for group in optimizer.param_groups for p in group["params"]])

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Returns the module to call: stage 2 wraps it and divides gradients, stage 3 divides the module."""
        for accumulator in self._accumulators:
            accumulator.follow()
        if self._alone:
            return model
        if self.zero_stage == 1:
            self._count_batches(model)
            return model
        if not any(True for _ in model.parameters()):
            return model
        # Stages 2 and 3 are imported where they are used: torch's part of them takes a second.
        if self.zero_stage == 2:
            from fleet.strategies.sharding.whole_model import WholeModule

            whole = WholeModule(model, self._division(), self._agreed_order(), self._buffer_bytes)
            self._whole.append(whole)
            for rows in self._of_rows:
                rows.divide_state()
            self._count_batches(whole)
            return whole
        from fleet.strategies.sharding.divided_model import divide_model

        divided, replaced = divide_model(model, self._units(model), self._division())
        self._divided.append(divided)
        self._replaced.update(replaced)
        for optimizer in self._optimizers:
            optimizer.repoint(replaced)
        for old in replaced:
            # Kept only to recognise them in a later optimizer; their memory must not stay.
            old.data = old.data.new_empty(0)
        self._count_batches(divided)
        return divided

    def wrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Returns an optimizer that updates this worker's part."""
        if self._alone:
            return optimizer
        if self.zero_stage == 1:
            group = self._mesh.get_group("sharding")
            experts = self.job.axes.group("moe_sharding")
            offload = self.config.optimize_offload
            return PartitionedOptimizer(optimizer, group, self._buffer_bytes, offload, experts)
        if self.zero_stage == 2:
            from fleet.strategies.sharding.whole_model import RowsOptimizer

            offload = self.config.optimize_offload
            of_rows = RowsOptimizer(optimizer, self._whole, self._agreed_order(), self._buffer_bytes, offload)
            self._of_rows.append(of_rows)
            return of_rows
        from fleet.strategies.sharding.divided_model import ShardedOptimizer

        sharded = ShardedOptimizer(optimizer, self._divided, drops=not self._counts)
        sharded.repoint({**self._replaced, **self._gathered_now()})
        self._optimizers.append(sharded)
        return sharded

    def wrap_steps(self, optimizer: Optimizer) -> Optimizer:
        """Returns an optimizer that updates once for several batches, where the options ask for it."""
        if not self._counts:
            return optimizer
        everyone = self._accumulators
        made = {"per_update": self._per_update, "per_exchange": self._per_exchange}
        accumulator: Accumulator
        if self._per_update > 1 and (self._alone or self.zero_stage < 3):
            accumulator = SetAside(
                self.name, everyone, per_update=self._per_update, models=self._models,
                global_rank=self.job.global_rank,
            )  # fmt: skip
        elif self._alone:
            return optimizer  # gradients of several backward passes add up by themselves
        else:
            accumulator = (InModel if self.zero_stage == 3 else Accumulator)(self.name, everyone, **made)
        everyone.append(accumulator)
        return AccumulatingOptimizer(optimizer, accumulator)

    def merges(self) -> bool:
        """Returns whether ``gradient_merge_acc_step`` is above 1."""
        return self._per_update > 1

    def averaged_batches(self) -> int:
        """Returns ``gradient_merge_acc_step``."""
        return self._per_update

    def held_gradients(self, parameters: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yields the gradients of ``parameters`` that are set aside, or wait in divided models."""
        for accumulator in self._accumulators:
            yield from accumulator.held(parameters)
        for divided in self._divided:
            yield from divided.local_gradients(parameters)

    def note_clear(self, parameters: Sequence[Tensor]) -> None:
        """Drops what the present batch has added up; raises ConfigError where it cannot be dropped."""
        for accumulator in self._accumulators:
            accumulator.note_clear(parameters)
        if not self._counts:
            for divided in self._divided:
                divided.drop_local(parameters)

    def note_parameters(self, model: nn.Module, added: Mapping[str, nn.Parameter]) -> None:
        """Merges unfrozen parameters too; raises ConfigError when parameters were added to a divided model."""
        for accumulator in self._accumulators:
            accumulator.note_parameters()
        if added and self.zero_stage > 1 and not self._alone:
            raise ConfigError(
                f"{next(iter(added))!r} was added to the model after distributed_model(), and sharding stage "
                f"{self.zero_stage} divided what was there then. Complete the model first, or set "
                "sharding_configs['stage'] to 1."
            )

    def close(self) -> None:
        """Releases the models and the optimizers."""
        self._models = []
        for whole in self._whole:
            whole.close()
        self._whole.clear()  # the optimizers hold the lists
        self._divided.clear()
        self._of_rows = []
        self._optimizers = []
        self._replaced = {}

    def _units(self, model: nn.Module) -> list[str]:
        if self.config.sharding_segment_strategy == "segment_anchors":
            return find_anchors(model, self.config.segment_anchors)
        return plan_units(model, self._buffer_bytes)

    def _division(self) -> Division:
        from fleet.strategies.sharding.divided_model import Division

        job = self.job
        mesh = self._mesh
        average = job.options["gradient_scale_configs"].scale_strategy == "avg"
        # Stage 3 adds batches up in the reduced parts, so its exchange divides by their number too. In stage 2 each
        # batch is divided when its gradients are set aside.
        replicas = job.axes.data_replicas
        merged = self._per_update if self.zero_stage == 3 else 1
        find_unused = job.options["find_unused_parameters"]
        # The divisor None lets FSDP2 average by itself; any other one makes it sum first, see divide_model().
        plain = average and merged == 1 and replicas == job.axes.size(*COPY_AXES)
        return Division(
            mesh=copies_mesh(mesh, job.axes),
            process_group=job.axes.group(*COPY_AXES),
            divisor=None if plain else float((replicas if average else 1) * merged),
            sum_first=self._sum_first,
            offload=self.config.optimize_offload,
            find_unused=find_unused,
            order=None if find_unused else self._agreed_order(),
        )

    def _agreed_order(self) -> UnitOrder:
        from fleet.strategies.sharding.unit_order import UnitOrder

        self._order = self._order or UnitOrder(self._meet)
        return self._order

    def _meet(self, call: str) -> None:
        """Returns when all workers have made ``call``; raises where one makes another."""
        if (roll_call := self.job.roll_call) is not None:
            self.job.beat(pause=True)  # the others may arrive late
            roll_call.meet(call)
            self.job.beat()

    def _count_batches(self, model: nn.Module) -> None:
        """Lets ``model`` exchange gradients only in the backward pass that completes an update."""
        if self._counts and exchanging_in(model) is not None:  # otherwise nothing in it is trained
            self._models.append(passes_of(model))
            accumulate(self._models[-1], self._accumulators)

    def _gathered_now(self) -> dict[nn.Parameter, nn.Parameter]:
        """Gives gathered parameters up; returns the part for each of them."""
        # A script may have made its optimizer between forward and backward, from gathered parameters.
        before = [dict(divided.module.named_parameters(remove_duplicate=False)) for divided in self._divided]
        for divided in self._divided:
            divided.reshard()
        after = [dict(divided.module.named_parameters(remove_duplicate=False)) for divided in self._divided]
        return {
            gathered: after[place][name]
            for place, names in enumerate(before)
            for name, gathered in names.items()
            if after[place][name] is not gathered
        }


def stage_of(options: Values) -> int:
    """Returns the ZeRO stage: ``sharding_configs['stage']``, and at least 2 when ``split_param`` is on."""
    stage = cast(int, options["sharding_configs"].stage)
    return max(stage, 2) if options["hybrid_configs"].sharding_configs.split_param else stage


def _problem_of_settings(options: Values) -> str | None:
    config: ShardingConfig = options["sharding_configs"]
    anchored = config.sharding_segment_strategy == "segment_anchors" and stage_of(options) == 3
    if anchored and not config.segment_anchors:
        return (
            "sharding_configs['sharding_segment_strategy'] is 'segment_anchors' and ['segment_anchors'] is []. "
            "Set segment_anchors to names from model.named_modules(), such as ['layer1', 'layer2']."
        )
    steps = options["hybrid_configs"].sharding_configs.accumulate_steps
    if steps > 1 and config.gradient_merge_acc_step > 1:
        return (
            f"sharding_configs['gradient_merge_acc_step'] is {config.gradient_merge_acc_step} and "
            f"hybrid_configs['sharding_configs']['accumulate_steps'] is {steps}. The first counts step() calls, the "
            "second backward passes before one step(). Set one of them."
        )
    return None


def _problem_of_stages(options: Values) -> str | None:
    """Returns the reason when parts would be gathered or reduced for every micro-batch of a pipeline."""
    stage = stage_of(options)
    ep = options["hybrid_configs"].ep_degree
    if stage > 1 and ep > 1:
        return (
            f"sharding_configs['stage'] is {stage} and hybrid_configs['ep_degree'] is {ep}: stages 2 and 3 divide "
            "every parameter among all workers of the sharding axis, and each expert is on some of them only. Set "
            "sharding_configs['stage'] to 1, which divides the optimizer state, or ep_degree to 1."
        )
    steps = options["hybrid_configs"].sharding_configs.accumulate_steps
    if asked_degrees(options)[1]["pp"] == 1:
        return None
    merged = {
        "sharding_configs['gradient_merge_acc_step']": options["sharding_configs"].gradient_merge_acc_step,
        "hybrid_configs['sharding_configs']['accumulate_steps']": steps,
    }
    for key, count in merged.items():
        if count > 1:
            return (
                f"{key} is {count}, and a pipeline adds up micro-batches already. Set it to 1, and "
                "pipeline_configs['accumulate_steps'] to the number of micro-batches."
            )
    if stage == 1:
        return None
    return (
        f"sharding_configs['stage'] is {stage} and the pipeline has several stages, in which forward and backward of "
        "different micro-batches take turns: every one of them would reduce the gradients again, and stage 3 gather "
        "the parameters. Set sharding_configs['stage'] to 1, which divides the optimizer state, or pp_degree to 1."
    )


def _problem_of_hybrid(options: Values) -> str | None:
    """Returns the reason when sharding_configs names other degrees than hybrid_configs, which asks for sharding."""
    config = options["sharding_configs"]
    hybrid = options["hybrid_configs"]
    for key in ("sharding_degree", "dp_degree"):
        mine = getattr(config, key)
        theirs = getattr(hybrid, key)
        if mine not in (getattr(ShardingConfig(), key), theirs):
            return (
                f"sharding_configs[{key!r}] is {mine} and hybrid_configs[{key!r}] is {theirs}, while 'sharding' is "
                f"off, so hybrid_configs decides. Set both to the same number, or turn sharding on."
            )
    return None
