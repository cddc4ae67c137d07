"""Fleet's scripts: the strategy of ``--strategy``, options that one process leaves out, and Fleet's own updates."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from fleet import facade
from fleet.checks.copies import Copies
from fleet.job.job import Job
from fleet.job.logical_workers import LogicalWorkers
from fleet.job.roll_call import RollCall
from fleet.job.running import running_session
from fleet.options import DistributedStrategy
from fleet.strategies import REGISTRY
from fleet.strategies._shared.optimizer_wrapper import OptimizerWrapper
from fleet.strategies._shared.update_rule import RuleWrapper
from fleet.strategies.pipeline import micro_batches
from fleet.strategies.pipeline.step import PipelineStep
from fleet.trackers.run_log import RunLog
from fleet.training.fleet_model import FleetModel
from fleet.training.fleet_optimizer import FleetOptimizer
from fleet.verify.engines.training_engine import EngineJob, EngineListener, RunPlan, TrainingEngine, UpdateListener

# Options that only divide or exchange the work: one process trains without them.
DIVIDING = (
    "sharding",
    "tensor_parallel",
    "recompute",
    "fp16_allreduce",
    "localsgd",
    "adaptive_localsgd",
    "dgc",
    "to_static",
    "use_hierarchical_allreduce",
    "sync_batch_norm",
)
_MODEL_AXES = ("mp", "pp", "sep", "cp", "ep")


class FleetEngine(TrainingEngine):
    """What ``fleet.init`` started, the models and optimizers that it wraps, and its pipelines."""

    wrappers = (FleetModel, OptimizerWrapper)

    def install(self, listener: EngineListener, plan: RunPlan) -> None:
        """Makes Fleet's steps and calls of all workers tell ``listener``, and chooses the options of the run."""
        PipelineStep.losses = listener.around_losses(PipelineStep.losses)  # type: ignore[method-assign]
        FleetOptimizer.step = listener.around_step(FleetOptimizer.step)  # type: ignore[method-assign]
        watch_rule_steps(listener)
        RollCall.meet = _meeting(listener, RollCall.meet)  # type: ignore[method-assign]
        LogicalWorkers.begin_turn = _turning(listener, LogicalWorkers.begin_turn)  # type: ignore[method-assign]
        _choose_options(plan)
        if plan.alone:
            pieces: Any = micro_batches
            pieces._rows = _by_copy(pieces._rows, plan.copies)

    def is_wrapper(self, module: nn.Module) -> bool:
        """Returns whether ``module`` is Fleet's wrapper, or the wrapper of a strategy between it and the user's."""
        if super().is_wrapper(module):
            return True
        session = running_session()
        if session is None:
            return False
        inner = [model.module for model in session.models]
        held = {id(one) for one in module.modules()}
        return not any(module is one for one in inner) and any(id(one) in held for one in inner)

    def job(self, model: nn.Module | None) -> EngineJob | None:
        """Returns what ``fleet.init`` made of this process."""
        session = running_session()
        if session is None:
            return None
        plan = tuple(step.name for step in session.plan.steps)
        return EngineJob(
            engine="fleet",
            data_rank=session.job.data_rank,
            parts=_is_divided(session.job),
            notes=tuple(session.plan.notes),
            plan=plan,
            computing=tuple(name for name in plan if name not in (*DIVIDING, "data_parallel")),
            logical=0 if session.job.logical is None else session.job.logical.num,
        )

    def parameters(self, models: list[nn.Module]) -> Mapping[str, Tensor] | None:
        """Returns the whole parameters of divided models, and those of a pipeline, which runs its stages by itself."""
        session = running_session()
        if session is None or (models and not _is_divided(session.job)):
            return None
        if not _is_divided(session.job):
            return {name: value for model in session.models for name, value in model.named_parameters()}
        first = session.job.global_rank == 0
        states = [model.full_state_dict(keep=first) for model in session.models]
        tensors = {n: value for state in states for n, value in state.items() if isinstance(value, Tensor)}
        return {name: value for name, value in tensors.items() if value.is_floating_point()}

    def initial_state(self) -> Mapping[str, Tensor] | None:
        """Returns the whole weights of layers that each worker has drawn a part of."""
        session = running_session()
        if session is None or not session.job.collective:
            return None
        if session.job.axes.size("pp") > 1 or session.job.axes.size("mp") == 1:
            return None
        state = session.models[0].full_state_dict(keep=session.job.global_rank == 0)
        return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _is_divided(job: Job) -> bool:
    return job.collective and job.axes.size(*_MODEL_AXES) > 1


def watch_rule_steps(listener: UpdateListener) -> None:
    """Makes the steps of Fleet's own update rules tell of their updates, as torch's optimizers do."""
    step = RuleWrapper.step

    @wraps(step)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        listener.before_update(self)
        result = step(self, *args, **kwargs)  # hands on
        listener.after_update(self)
        return result

    RuleWrapper.step = run  # type: ignore[method-assign]


def _meeting(listener: EngineListener, meet: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the roll call of all workers, which then also tells of the call that it is for."""

    @wraps(meet)
    def met(self: Any, call: str, *args: Any, **kwargs: Any) -> Any:
        with listener.collective(call):
            return meet(self, call, *args, **kwargs)

    return met


def _turning(listener: EngineListener, begin: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the beginning of a turn, which then also tells whose turn it is."""

    @wraps(begin)
    def begun(self: Any, loop: object) -> Any:
        rank = begin(self, loop)
        listener.turn_begins(self.round, rank)
        return rank

    return begun


def _choose_options(plan: RunPlan) -> None:
    """Makes ``fleet.init`` take the strategy of ``--strategy``; one process leaves out what divides the work."""
    place: Any = facade
    start = place.start_session

    def started(role_maker: Any, is_collective: bool, options: Any, *rest: Any) -> Any:
        if plan.strategy:
            options = DistributedStrategy.load(plan.strategy)
        if plan.alone:
            options = alone_options(options, plan.copies)
        session = start(role_maker, is_collective, options, *rest)
        listeners = session.job.listeners
        listeners.remove(listeners.get(Copies))  # the comparison names more than that copies came apart
        values = {name: True for name in _switches(session.options)}
        (plan.folder / "options.json").write_text(json.dumps(values), encoding="utf-8")
        return session

    place.start_session = started
    # A comparison does not belong among the runs of a tracker.
    run_log: Any = RunLog
    run_log.choose = lambda log, options: None


def _switches(options: Any) -> list[str]:
    return [name for name, one in REGISTRY.items() if one.default is False and options[name]]


def alone_options(options: Any, copies: int) -> Any:
    """Returns the options that one process trains with on the batches of ``copies`` of the model, joined.

    These are the ones that change what is computed. A micro-batch has the rows of all copies.
    """
    made = copy.deepcopy(options)
    for name in DIVIDING:
        if made[name]:
            setattr(made, name, False)
    if made["pipeline"]:
        made.pipeline_configs = {"micro_batch_size": copies * made["pipeline_configs"].micro_batch_size}
    if made.is_set("hybrid_configs"):
        made.hybrid_configs = {"dp_degree": 1, "mp_degree": 1, "pp_degree": 1, "sharding_degree": 1, "sep_degree": 1}
    return made


def _by_copy(cut: Callable[..., list[Tensor]], copies: int) -> Callable[..., list[Tensor]]:
    """Returns the cut of a batch into micro-batches, which then hold the rows of every copy."""

    @wraps(cut)
    def rows(tensor: Tensor, name: str, num_micro: int, size: int) -> list[Tensor]:
        whole = cut(tensor, name, num_micro, size)
        if copies < 2 or len(tensor) % copies or size % copies:
            return whole
        return [
            torch.cat(own) for own in zip(*(part.split(size // copies) for part in tensor.chunk(copies)), strict=True)
        ]

    return rows
