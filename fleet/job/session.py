"""Session: the job of one ``fleet.init``, the strategies of its plan, and the models and optimizers in them."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fleet.checkpoint.to_group import StateMesh
from fleet.common.log import LOGGER
from fleet.env import Environment
from fleet.errors import ConfigError, OptionWarning
from fleet.job.axes import COPY_AXES, MODEL_AXES, make_axes
from fleet.job.job import Job
from fleet.job.listener import Listener
from fleet.job.wrapped_model import WrappedModel
from fleet.options import DistributedStrategy
from fleet.strategies._declare.optimizer_kinds import check_parts_of_model
from fleet.strategies._declare.strategy import JobKind, Stage, StepCounter, Strategy
from fleet.strategies._declare.strategy_plan import Plan, plan
from fleet.strategies._shared import norm
from fleet.strategies._shared.experts import share_experts
from fleet.strategies._shared.mesh import make_mesh, plan_axes, plan_expert_axes
from fleet.strategies._shared.parameter_layout import layout_of, mark_parts
from fleet.strategies._shared.renormalized import check_counted, check_renormalized
from fleet.strategies.amp.explicit_scaler import follow_scalers
from fleet.strategies.pipeline import Pipeline
from fleet.strategies.pipeline.descriptions import StagedLayers
from fleet.training.fleet_model import FleetModel
from fleet.training.fleet_optimizer import FleetOptimizer
from fleet.training.placement import check_placement, move_model, move_state

if TYPE_CHECKING:
    from fleet.ps_job.server_job import ServerJob
    from fleet.role_maker import RoleMakerBase

Wrapped = TypeVar("Wrapped")
_PUBLICATION = "fleet.ps.publishing.publication"  # loaded by fleet.ps.publish; collective jobs load nothing of fleet.ps


@dataclass(eq=False, kw_only=True)
class Session:
    """Wraps the models and optimizers of one job in the strategies of its plan."""

    job: Job
    role_maker: RoleMakerBase
    plan: Plan
    models: list[FleetModel] = field(default_factory=list)
    optimizers: list[FleetOptimizer] = field(default_factory=list)
    strategies: list[Strategy] = field(default_factory=list)
    degrees: dict[str, int] = field(default_factory=dict)
    server_job: ServerJob | None = None
    _moved: set[Tensor] = field(default_factory=set)  # parameters that distributed_model moved to the GPU
    _norms: norm.MeshNorm | None = None
    _unfollow_scalers: Callable[[], None] = field(init=False)

    def __post_init__(self) -> None:
        self.job.models = self.models
        self.job.optimizers = self.optimizers
        try:
            self.job.listeners.tell("options_asked", "fleet.init()", self.options)
        except BaseException:
            self.job.leave_roll_call()
            raise
        self._make_strategies()
        self.role_maker.set_util(self.job.util)
        self.job.listeners.add(_StrategiesHear(self))
        self._unfollow_scalers = follow_scalers(self.job)

    @property
    def options(self) -> DistributedStrategy:
        """The options of the plan."""
        return cast("DistributedStrategy", self.job.options)

    def adopt(self, options: DistributedStrategy) -> None:
        """Replaces the options and the plan; models that are already wrapped are wrapped again where possible.

        Raises ConfigError when the new options cannot run, or when a model was already changed in place.
        """
        if self.server_job is not None and self.server_job.connected is not None:
            raise ConfigError(
                "distributed_optimizer(strategy=...) was called after fleet.init_worker(): the job trains already, and "
                "one with parameter servers has one optimizer. Put all parameters into its groups."
            )
        # A script may go on changing its strategy object; the job keeps what was checked.
        options = copy.deepcopy(options)
        self.job.listeners.tell("options_asked", "fleet.distributed_optimizer()", options)
        new_plan = plan(options, self.job.world_size, collective=self.job.collective)
        if self.models and options != self.options:
            stuck = [step.name for step in self.plan.steps if step.stage == Stage.MODULE or step.in_place]
            if stuck or self.optimizers:
                raise ConfigError(
                    "distributed_optimizer(strategy=...) sets options other than those the model was wrapped with "
                    f"({self.plan}). Give the strategy to fleet.init(), or call distributed_optimizer() first."
                )
        self.job.listeners.tell("options_chosen", options)
        self.job.options = options
        self.plan = new_plan
        self._make_strategies()
        for model in self.models:
            model.rewrap(model.module)  # drops the old wrapper and its hooks
            module, chain = self._wrapped(model.module)
            model.replace_module(module)
            model.rewrap(chain)
            self.job.listeners.tell("model_wrapped", model)

    def become_served(self) -> None:
        """Turns a single process that trains alone into one whose updates happen on servers.

        Strategies that work in both kinds of job (amp, recompute and the like) stay around the models.

        Raises ConfigError when options of collective training are on, because it has already begun.
        """
        if strange := [step.name for step in self.plan.steps if not step.in_ps_job]:
            raise ConfigError(
                f"fleet.init_worker(): the job has no servers and trains with {', '.join(strange)}, which parameter "
                "servers do not support. Turn these options off, or omit init_worker()."
            )
        # Strategies that both plans have are kept, with their state. Everything is checked before anything changes.
        made = plan(self.options, self.job.world_size, collective=False)
        known = {type(strategy): strategy for strategy in self.strategies}
        strategies = [known.get(step) or step(_config_of(step, self.options), self.job) for step in made.steps]
        fresh = [strategy for strategy in strategies if type(strategy) not in known]
        for optimizer in self.optimizers:
            self.job.listeners.tell("optimizer_unwrapped", optimizer.user_optimizer)
        for strategy in fresh:
            for model in self.models:
                strategy.check_model(model.module)
            for optimizer in self.optimizers:
                strategy.check_optimizer(optimizer.user_optimizer)
        self.job.collective = False
        self.plan = made
        self._use(strategies)
        for note in made.notes:
            LOGGER.warning(note)
        for optimizer in self.optimizers:
            optimizer.optimizer = self._stepped(optimizer.user_optimizer)
        for strategy in fresh:  # a_sync, which changes embeddings in place and wraps no model
            for model in self.models:
                strategy.prepare_model(model.module)

    def wrap_model(self, module: nn.Module, loss_fn: Any = None) -> FleetModel:
        """Returns ``module`` with every strategy of the plan around it; nothing changes when one refuses it."""
        if isinstance(module, FleetModel):
            raise ConfigError("distributed_model() was called with a model that it had returned; pass your module.")
        if not isinstance(module, nn.Module):
            raise ConfigError(f"distributed_model() takes a torch.nn.Module, got {module!r}.")
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(
                f"distributed_model() got a {type(module).__name__} of torch.jit, whose methods Python cannot wrap. "
                "Pass the module that you gave to torch.jit.script() or torch.jit.trace(); strategy.to_static compiles "
                "it."
            )
        check_placement(module, self.job.device)
        acting = [strategy.name for strategy in self.strategies if not isinstance(strategy, JobKind)]
        if acting and any(model.module is module for model in self.models):
            raise ConfigError(
                "distributed_model() was already called for this module, and "
                f"{', '.join(acting)} {_acts(acting)} in it. Use the model that it returned (parameters may "
                "be added to it), or call fleet.init() and wrap a new module."
            )
        # All checks come before the first strategy changes anything.
        mark_parts(module)
        share_experts(module, self.job.axes)
        for strategy in self.strategies:
            strategy.check_model(module)
        if self.job.collective and self.job.world_size > 1:
            check_renormalized(module)
        if self.job.collective and self.job.axes.size(*COPY_AXES) > 1:
            check_counted(module)
        for listener in self.job.listeners.hearing["before_wrap"]:
            listener.before_wrap(module)
        module = self._cut(module, loss_fn)
        self._moved |= move_model(module, self.job.device, [optimizer.user_optimizer for optimizer in self.optimizers])
        module, chain = self._wrapped(module)
        model = _model_class(module)(module, chain, self.job)
        states = StateMesh(self.job.axes, self.job.device)
        if states.has_stages:
            model.note_names_elsewhere(states.names(list(module.state_dict())))
        self.models.append(model)
        self.job.listeners.tell("model_wrapped", model)
        return model

    def _cut(self, module: nn.Module, loss_fn: Any) -> nn.Module:
        """Returns the stage of ``module`` on this worker, with ``loss_fn``, where a pipeline cuts it."""
        pipeline = next((strategy for strategy in self.strategies if isinstance(strategy, Pipeline)), None)
        found = module if pipeline is None else pipeline.cut_model(module, loss_fn)
        if found is not module and self.optimizers:
            raise ConfigError(
                "pipeline_configs['split'] cuts the model, and distributed_optimizer() has been called: it would keep "
                "parameters of other stages. Call distributed_model() first."
            )
        if loss_fn is not None:
            if not isinstance(found, StagedLayers):
                raise ConfigError(
                    f"distributed_model(model, loss_fn=...): {type(module).__name__} is not cut into stages, and your "
                    "loop computes the loss. Omit loss_fn, or turn strategy.pipeline on and set "
                    "pipeline_configs['split']."
                )
            found.set_loss(loss_fn)
        is_read = pipeline is not None or isinstance(found, StagedLayers) or not self.job.collective
        if self.options.is_set("pipeline_configs") and not is_read:
            LOGGER.warning(
                f"pipeline_configs was set and changes nothing: 'pipeline' is off, and {type(module).__name__} is no "
                "PipelineLayer, whose train_batch reads it."
            )
        return found

    def wrap_optimizer(self, optimizer: Optimizer) -> FleetOptimizer:
        """Returns ``optimizer`` with every strategy of the plan around it; nothing changes when one refuses it."""
        if isinstance(optimizer, FleetOptimizer):
            raise ConfigError("distributed_optimizer() was called with an optimizer that it had returned.")
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(f"distributed_optimizer() takes a torch.optim.Optimizer, got {optimizer!r}.")
        if self.server_job is None and (publication := sys.modules.get(_PUBLICATION)) is not None:
            publication.refuse_asked()
        self.job.listeners.tell("optimizer_unwrapped", optimizer)
        if self.job.collective and self.job.axes.size(*MODEL_AXES) > 1:
            parameters = (p for group in optimizer.param_groups for p in group["params"])
            check_parts_of_model(optimizer, has_parts=any(layout_of(p) is not None for p in parameters))
        for strategy in self.strategies:
            strategy.check_optimizer(optimizer)
        move_state(optimizer, self._moved)
        if self.job.record.server_endpoints:
            for note in self.plan.notes:
                LOGGER.warning(note)
        wrapped = FleetOptimizer(self._stepped(optimizer), self.job, optimizer)
        self.optimizers.append(wrapped)
        for listener in self.job.listeners.hearing["optimizer_wrapped"]:
            listener.optimizer_wrapped(wrapped, optimizer)
        return wrapped

    def close(self) -> None:
        """Releases everything the strategies hold; the session is over."""
        # The roll call first: others that wait for this worker hear at once that it has ended.
        self.job.closed = True
        self.job.leave_roll_call()
        self.job.listeners.tell("close")
        for strategy in self.strategies:
            strategy.close()
        self._use([])
        norm.remove(self._norms)
        self._unfollow_scalers()
        if self.server_job is not None:
            self.server_job.close()

    def release_groups(self) -> None:
        """Releases every process group; nothing trains afterwards, though the script still holds its model.

        The parameters of a sharded model keep theirs. No thread of such a group runs Python.
        """
        for model in self.models:
            model.release_group()
        self.job.release_groups()

    def _make_strategies(self) -> None:
        for strategy in self.strategies:
            strategy.close()
        self._make_mesh()
        self._use([step(_config_of(step, self.options), self.job) for step in self.plan.steps])

    def _use(self, strategies: list[Strategy]) -> None:
        self.strategies = strategies
        self.job.strategies = strategies

    def _make_mesh(self) -> None:
        """Arranges the workers by axis; every worker does so at the same point, when it starts or adopts options."""
        if not self.job.collective:
            return
        job = self.job
        degrees = plan_axes(self.options, self.job.world_size)
        experts = plan_expert_axes(self.options, self.job.world_size)
        # Options that change no degree keep the groups.
        if degrees != self.degrees or experts != self.job.axes.experts:
            timeout_s = Environment().float("PADDLE_PG_TIMEOUT") / 1000
            job.axes = make_axes(degrees, self.job.global_rank, job.process_group, timeout_s, experts)
            if job.process_group is not None:
                job.mesh = make_mesh(job.axes, job.process_group, self.job.device.type)
        self.degrees = degrees
        norm.remove(self._norms)
        if job.process_group is not None and job.axes.size(*MODEL_AXES, "sharding", "ep") > 1:
            self._norms = norm.MeshNorm(job)
            norm.install(self._norms)
        if job.roll_call is not None:
            job.roll_call.described = job.axes.described

    def _stepped(self, optimizer: Optimizer) -> Optimizer:
        """Returns ``optimizer`` as all strategies wrap it."""
        chain = optimizer
        for strategy in sorted(self.strategies, key=lambda s: s.stage.of_optimizer):
            chain = _returned(strategy.wrap_optimizer(chain), strategy, "wrap_optimizer")
        # Step counters are outermost: they decide which calls of step() reach the others as updates.
        for strategy in self.strategies:
            if isinstance(strategy, StepCounter):
                chain = strategy.wrap_steps(chain)
        return chain

    def _wrapped(self, module: nn.Module) -> tuple[nn.Module, nn.Module]:
        """Returns the user's module after MODULE-stage strategies, and the outermost wrapper of all strategies."""
        names = [name for name, _ in module.named_parameters()]
        for strategy in self.strategies:
            strategy.prepare_model(module)
        chain = module
        for strategy in self.strategies:
            chain = _returned(strategy.wrap_model(chain), strategy, "wrap_model")
            if strategy.stage == Stage.MODULE:
                module = chain
            if (now := [name for name, _ in module.named_parameters()]) != names:
                before, after = next((a, b) for a, b in zip_longest(names, now) if a != b)
                raise ConfigError(
                    f"strategy {strategy.name!r} renamed parameters of the model: {before!r} is {after!r} now. A "
                    "strategy keeps the names, so that a state saved without it can be loaded. Turn it off, or tell "
                    "its author."
                )
        return module, chain


class _StrategiesHear(Listener):
    """Tells the strategies of a session, its optimizers and its servers what they must hear."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def gradients_cleared(self, parameters: Sequence[Tensor]) -> None:
        """Tells the strategies that the gradients of ``parameters`` were cleared through their model."""
        for strategy in self._session.strategies:
            strategy.note_clear(parameters)

    def structure_changed(self, model: WrappedModel, added: Mapping[str, nn.Parameter]) -> None:
        """Tells the strategies that parameters of ``model`` were added, removed, frozen or unfrozen."""
        for strategy in self._session.strategies:
            strategy.note_parameters(model._chain, added)

    def before_join(self) -> None:
        """Raises ConfigError when an option needs every worker in every step, so that none may run out of batches."""
        if stuck := [strategy.name for strategy in self._session.strategies if strategy.steps_together]:
            raise ConfigError(
                f"model.join() and Join([model]) let workers have different numbers of batches, and {', '.join(stuck)} "
                "needs every worker in every step. Give all workers the same number of batches, or turn it off."
            )

    def before_save(self) -> None:
        """Warns when a state saved now would differ between workers."""
        if self._session.server_job is not None and not self._session.job.closed:
            self._session.server_job.before_save()
        for optimizer in self._session.optimizers:
            if (note := optimizer.saving_note()) is not None:
                warnings.warn(note, OptionWarning, stacklevel=4)


def _returned(made: Wrapped | None, strategy: Strategy, hook: str) -> Wrapped:
    """Returns ``made``; raises ConfigError where a strategy of another package forgot the return."""
    if made is None:
        raise ConfigError(
            f"strategy {strategy.name!r}: {type(strategy).__name__}.{hook}() returned None; it must return what it was "
            "given, or a wrapper around it. Turn the option off, or tell its author."
        )
    return made


def _model_class(module: nn.Module) -> type[FleetModel]:
    """Returns the class in which :meth:`Session.wrap_model` wraps ``module``."""
    if not isinstance(module, StagedLayers):
        return FleetModel
    from fleet.training.pipeline_model import PipelineModel  # most jobs do not need the engine that it imports

    return PipelineModel


def _config_of(step: type[Strategy], options: DistributedStrategy) -> Any:
    return options[f"{step.name}_configs"] if step.Config is not None else None


def _acts(names: Sequence[str]) -> str:
    return "acts" if len(names) == 1 else "act"
