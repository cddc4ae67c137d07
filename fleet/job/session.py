"""Session: everything one ``fleet.init`` set up. It is passed down; nothing else in the project keeps state.

Strategies see it as ``fleet.strategies._declare.strategy.Workers``.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from fleet._log import LOGGER
from fleet.checkpoint.to_group import StateMesh
from fleet.checks.broken_exchange import UncaughtErrors, explained
from fleet.checks.first_step import TrainingChecks
from fleet.checks.same_job import check_model, check_options
from fleet.checks.same_rows import SameSequences
from fleet.elastic._health import start_health
from fleet.env import Environment
from fleet.errors import ConfigError, OptionWarning
from fleet.job.axes import COPY_AXES, MODEL_AXES, Axes, make_axes
from fleet.job.roll_call import RollCall
from fleet.job.util import UtilBase
from fleet.options import DistributedStrategy
from fleet.profile.step_watch import StepWatch
from fleet.strategies._declare.optimizer_kinds import check_parts_of_model
from fleet.strategies._declare.strategy import JobKind, Stage, StepCounter, Strategy
from fleet.strategies._declare.strategy_plan import Plan, plan
from fleet.strategies._shared import norm
from fleet.strategies._shared.experts import share_experts
from fleet.strategies._shared.mesh import make_mesh, plan_axes, plan_expert_axes
from fleet.strategies._shared.parameter_layout import layout_of, mark_parts
from fleet.strategies._shared.renormalized import check_renormalized
from fleet.strategies.pipeline import Pipeline
from fleet.strategies.pipeline.descriptions import StagedLayers
from fleet.trackers.run_log import RunLog
from fleet.training.batch_loops import BatchLoops
from fleet.training.fleet_model import FleetModel
from fleet.training.fleet_optimizer import Closure, FleetOptimizer, Step
from fleet.training.placement import check_placement, move_model, move_state

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from fleet.ps_job.server_job import ServerJob
    from fleet.role.record import RoleRecord
    from fleet.role_maker import RoleMakerBase

Wrapped = TypeVar("Wrapped")
_PUBLICATION = "fleet.ps.publishing.publication"  # loaded by fleet.ps.publish; collective jobs load nothing of fleet.ps


@dataclass(eq=False, kw_only=True)
class Session:
    """One job as this process sees it: its role, its peers, the options, and what was wrapped.

    ``host_group`` can move CPU tensors even where ``process_group`` is NCCL.
    """

    role_maker: RoleMakerBase
    record: RoleRecord
    collective: bool
    device: torch.device
    options: DistributedStrategy
    plan: Plan
    say: Callable[[str], None]
    process_group: dist.ProcessGroup | None = None
    models: list[FleetModel] = field(default_factory=list)
    optimizers: list[FleetOptimizer] = field(default_factory=list)
    strategies: list[Strategy] = field(default_factory=list)
    degrees: dict[str, int] = field(default_factory=dict)
    mesh: DeviceMesh | None = None
    axes: Axes = field(default_factory=lambda: Axes({}, 0))
    num_steps: int = 0
    closed: bool = False
    each_step: list[Callable[[], None]] = field(default_factory=list)  # called after each step of an optimizer
    means_sequences: bool = False  # sequence_mean() was called
    server_job: ServerJob | None = None
    meet_workers: Callable[..., dist.ProcessGroup] | None = None  # in a job with servers; takes the tensors' device
    _host_group: dist.ProcessGroup | None = None
    _roll_call: RollCall | None = None
    _uncaught: UncaughtErrors | None = None
    _checked: bool = False
    _moved: set[Tensor] = field(default_factory=set)  # parameters that distributed_model moved to the GPU
    _norms: norm.MeshNorm | None = None

    def __post_init__(self) -> None:
        if self.roll_call is not None:
            try:
                check_options(self.roll_call, "fleet.init()", self.options)
            except BaseException:
                self._leave_roll_call()
                raise
        self._make_strategies()
        self.util = UtilBase(self)
        self.role_maker.set_util(self.util)
        self.health = start_health(self)
        self.loops = BatchLoops(lambda: self.health)
        self.checks = TrainingChecks(self)
        self.step_watch = StepWatch(self.global_rank, self.device)
        self.run_log = RunLog(self)
        self.sequences = SameSequences(self.axes, self.device)

    @property
    def global_rank(self) -> int:
        """Rank of this worker in the job."""
        return self.record.global_rank

    @property
    def world_size(self) -> int:
        """Number of workers in the job."""
        return self.record.world_size

    @property
    def local_rank(self) -> int:
        """Rank of this worker on its node."""
        return self.record.local_rank

    @property
    def local_world_size(self) -> int:
        """Number of workers on this node."""
        return self.record.local_world_size

    @property
    def model(self) -> nn.Module | None:
        """The user's module that was wrapped last, or ``None``."""
        return self.models[-1].module if self.models else None

    def parameter_names(self) -> dict[torch.Tensor, str]:
        """Returns the qualified name of every parameter of the wrapped models."""
        return {p: name for model in self.models for name, p in model.named_parameters()}

    def parameters(self) -> Iterator[torch.Tensor]:
        """Returns the parameters of all wrapped models."""
        return (parameter for model in self.models for parameter in model.parameters())

    def parameter_sets(self) -> Iterator[Sequence[torch.Tensor]]:
        """Yields lists of parameters that every worker has one of: each model's, each optimizer's, each group's."""
        for model in self.models:
            yield list(model.parameters())
        for optimizer in self.optimizers:
            yield optimizer.parameters()
            yield from (group["params"] for group in optimizer.param_groups)

    def has_equal_gradients(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Returns whether data parallel gives every worker the same gradients for all ``parameters``."""
        exchanged = {p for model in self.models for p in model.exchanged_parameters()}
        return all(p in exchanged for p in parameters if p.requires_grad)

    @property
    def host_group(self) -> dist.ProcessGroup | None:
        """A process group that moves CPU tensors; the first access must come at the same point on every worker."""
        if self._host_group is None and self.meet_workers is not None:
            self._host_group = self.meet_workers()
        if self._host_group is None and self.process_group is not None:
            takes_cpu = "gloo" in dist.get_backend_config(self.process_group)
            self._host_group = self.process_group if takes_cpu else dist.new_group(backend="gloo")
        return self._host_group

    @property
    def roll_call(self) -> RollCall | None:
        """Where the workers compare the calls that all must make; None in a single process or without a group."""
        if self._roll_call is None and self.world_size > 1 and self.has_group and not self.closed:
            self._roll_call = RollCall.start(self.global_rank, self.world_size, lambda: self.num_steps)
            self._uncaught = UncaughtErrors(self.models, self._roll_call, self.who)
        return self._roll_call

    @property
    def data_rank(self) -> int:
        """Which of :attr:`data_replicas` this worker belongs to; workers of one model copy have the same."""
        return self.axes.data_rank if self.collective else self.global_rank

    @property
    def data_replicas(self) -> int:
        """How many workers, or groups of workers that hold one model copy, train on different rows."""
        return self.axes.data_replicas if self.collective else self.world_size

    @property
    def whole_states(self) -> StateMesh:
        """The place of this worker on the mesh, as far as states go."""
        return StateMesh(self.axes, self.device)

    def meet(self, call: str) -> None:
        """Returns when every worker has made ``call``; raises when one does not, and says where it is."""
        if self.roll_call is not None:
            self.roll_call.meet(call)

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Turns a torch error inside the context into one that says what it means for the job."""
        try:
            yield
        except RuntimeError as error:
            self.explain(error)
            raise

    def explain(self, error: RuntimeError, model: FleetModel | None = None) -> None:
        """Raises an error that says what ``error`` means for the job; returns where ``error`` says so itself.

        Args:
            error: of torch.
            model: that ran, where one did.
        """
        if meaning := explained(error, self.models if model is None else [model], self.roll_call, self.who):
            raise meaning from error

    @property
    def who(self) -> str:
        """This worker, as messages begin."""
        place = self.axes.described() if self.collective else ""
        return f"[rank {self.global_rank} of {self.world_size}{f', {place}' if place else ''}]"

    def adopt(self, options: DistributedStrategy) -> None:
        """Replaces the options and the plan; models that are already wrapped are wrapped again where possible.

        Raises ConfigError when the new options cannot run, or when a model was already changed in place.
        """
        if self.server_job is not None and self.server_job.connected is not None:
            raise ConfigError(
                "distributed_optimizer(strategy=...) was called after fleet.init_worker(): the job trains already, and "
                "one with parameter servers has one optimizer. Put all parameters into its groups."
            )
        options = copy.deepcopy(options)
        if self.roll_call is not None:
            check_options(self.roll_call, "fleet.distributed_optimizer()", options)
        new_plan = plan(options, self.world_size, collective=self.collective)
        if self.models and options != self.options:
            stuck = [step.name for step in self.plan.steps if step.stage == Stage.MODULE or step.in_place]
            if stuck or self.optimizers:
                raise ConfigError(
                    "distributed_optimizer(strategy=...) sets options other than those the model was wrapped with "
                    f"({self.plan}). Give the strategy to fleet.init(), or call distributed_optimizer() first."
                )
        self.run_log.choose(options)
        self.options, self.plan = options, new_plan
        self._make_strategies()
        for model in self.models:
            model.rewrap(model.module)  # drops the old wrapper and its hooks
            module, chain = self._wrapped(model.module)
            model.replace_module(module)
            model.rewrap(chain)
            self.checks.watch_model(model)
            self.step_watch.watch_model(model)

    def _leave_roll_call(self) -> None:
        if self._roll_call is not None and self._uncaught is not None:
            self._roll_call.close()
            self._uncaught.close()
            self._roll_call = self._uncaught = None  # they hold the store, whose server is a thread

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
        made = plan(self.options, self.world_size, collective=False)
        known = {type(strategy): strategy for strategy in self.strategies}
        strategies = [known.get(step) or step(_config_of(step, self.options), self) for step in made.steps]
        fresh = [strategy for strategy in strategies if type(strategy) not in known]
        for optimizer in self.optimizers:
            self.checks.forget_optimizer(optimizer.user_optimizer)
        for strategy in fresh:
            for model in self.models:
                strategy.check_model(model.module)
            for optimizer in self.optimizers:
                strategy.check_optimizer(optimizer.user_optimizer)
        self.collective, self.plan, self.strategies = False, made, strategies
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
        check_placement(module, self.device)
        acting = [strategy.name for strategy in self.strategies if not isinstance(strategy, JobKind)]
        if acting and any(model.module is module for model in self.models):
            raise ConfigError(
                "distributed_model() was already called for this module, and "
                f"{', '.join(acting)} {_acts(acting)} in it. Use the model that it returned (parameters may "
                "be added to it), or call fleet.init() and wrap a new module."
            )
        mark_parts(module)
        share_experts(module, self.axes)
        for strategy in self.strategies:
            strategy.check_model(module)
        if self.collective and self.world_size > 1:
            check_renormalized(module)
        if self.roll_call is not None:
            check_model(self.roll_call, module, self.axes.ranks(*COPY_AXES, "mp"))
        module = self._cut(module, loss_fn)
        self._moved |= move_model(module, self.device, [optimizer.user_optimizer for optimizer in self.optimizers])
        module, chain = self._wrapped(module)
        model = _model_class(module)(module, chain, self)
        if self.whole_states.has_stages:
            model.note_names_elsewhere(self.whole_states.names(list(module.state_dict())))
        self.models.append(model)
        self.checks.watch_model(model)
        self.step_watch.watch_model(model)
        if self.health is not None:
            self.health.watch_model(module)
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
        is_read = pipeline is not None or isinstance(found, StagedLayers) or not self.collective
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
        self.checks.forget_optimizer(optimizer)
        if self.collective and self.axes.size(*MODEL_AXES) > 1:
            parameters = (p for group in optimizer.param_groups for p in group["params"])
            check_parts_of_model(optimizer, has_parts=any(layout_of(p) is not None for p in parameters))
        for strategy in self.strategies:
            strategy.check_optimizer(optimizer)
        move_state(optimizer, self._moved)
        if self.record.server_endpoints:
            for note in self.plan.notes:
                LOGGER.warning(note)
        wrapped = FleetOptimizer(self._stepped(optimizer), self, optimizer)
        self.optimizers.append(wrapped)
        self.checks.watch_optimizer(wrapped)
        return wrapped

    def before_step(self) -> None:
        """Warns once when the optimizer steps although no model exchanges gradients, or a loss may be a wrong mean."""
        if not self._checked and self.world_size > 1 and not self.models:
            warnings.warn(
                "fleet.distributed_optimizer() was called without fleet.distributed_model(): the workers do not "
                "exchange gradients. Call model = fleet.distributed_model(model) as well.",
                OptionWarning,
                stacklevel=4,
            )
        if not self._checked and not self.means_sequences and self.axes.size("sep", "cp") > 1:
            warnings.warn(
                "The workers along sep and cp hold parts of the same sequences, their gradients are added up, and "
                "fleet.meta_parallel.sequence_mean() was not called. A mean over a worker's own tokens gives gradients "
                f"that are {self.axes.size('sep', 'cp')} times too large. Write sequence_mean(sum of the losses, "
                "number of tokens). A loss that you divide by the tokens of the whole sequence is right as it is.",
                OptionWarning,
                stacklevel=4,
            )
        self._checked = True
        self.step_watch.before_step()

    def stepping(self, optimizer: FleetOptimizer, step: Step, closure: Closure) -> Any:
        """Does a ``step`` of ``optimizer`` and returns its result; raises ConfigError where its gradients are wrong."""
        return self.checks.stepping(optimizer, step, closure)

    def after_step(self) -> None:
        """Counts a step of an optimizer; ``num_steps`` is what checkpoints are named after."""
        self.num_steps += 1
        self.step_watch.after_step(self.num_steps)
        self.run_log.after_step()
        if self.health is not None:
            self.health.after_step(self.num_steps)
        for call in self.each_step:
            call()

    def beat(self, pause: bool = False) -> None:
        """Reports that this worker is alive, and with ``pause`` that it may be silent until the next step."""
        if self.health is not None:
            self.health.beat(pause)

    def after_clear(self, parameters: Sequence[torch.Tensor]) -> None:
        """Tells the strategies that the gradients of ``parameters`` were cleared through their model."""
        for strategy in self.strategies:
            strategy.note_clear(parameters)

    def before_forward(self, model: FleetModel) -> None:
        """Raises ConfigError when training starts with an option that acts in the optimizer, and there is none.

        A loop that does not say when it asks for its next batch begins it here.
        """
        records = torch.is_grad_enabled()
        if records and self.loops.checkpoints and self.models[0].training:
            self.loops.before_forward()
        self.checks.before_forward(model)
        self.step_watch.before_forward(self.num_steps)
        if records and model.training:
            self.sequences.check()
        if self.optimizers or not records:
            return
        waiting = [s.name for s in self.strategies if type(s).wrap_optimizer is not Strategy.wrap_optimizer]
        if waiting and any(model.training for model in self.models):
            raise ConfigError(
                f"{', '.join(waiting)} {_acts(waiting)} in the optimizer, and fleet.distributed_optimizer(optimizer) "
                "was not called. Call it before training."
            )

    def close(self) -> None:
        """Releases everything the strategies hold; the session is over."""
        self.closed = True
        self._leave_roll_call()
        self.run_log.close()
        self.step_watch.close()
        self.checks.close()
        for strategy in self.strategies:
            strategy.close()
        self.strategies = []
        norm.remove(self._norms)
        if self.health is not None:
            self.health.close()
        if self.server_job is not None:
            self.server_job.close()

    @property
    def has_group(self) -> bool:
        """Whether this session shares a process group with other workers."""
        return self.process_group is not None or self._host_group is not None

    def release_groups(self) -> None:
        """Releases every process group; nothing trains afterwards, though the script still holds its model.

        The parameters of a sharded model keep theirs. No thread of such a group runs Python.
        """
        for model in self.models:
            model.release_group()
        self.process_group = self._host_group = self.mesh = None
        self.axes.release()

    def before_join(self) -> None:
        """Raises ConfigError when an option needs every worker in every step, so that none may run out of batches."""
        if stuck := [strategy.name for strategy in self.strategies if strategy.steps_together]:
            raise ConfigError(
                f"model.join() and Join([model]) let workers have different numbers of batches, and {', '.join(stuck)} "
                "needs every worker in every step. Give all workers the same number of batches, or turn it off."
            )

    def before_save(self) -> None:
        """Warns when a state saved now is not what every worker has."""
        if self.server_job is not None and not self.closed:
            self.server_job.before_save()
        for optimizer in self.optimizers:
            if (note := optimizer.saving_note()) is not None:
                warnings.warn(note, OptionWarning, stacklevel=4)

    def _make_strategies(self) -> None:
        for strategy in self.strategies:
            strategy.close()
        self._make_mesh()
        self.strategies = [step(_config_of(step, self.options), self) for step in self.plan.steps]

    def _make_mesh(self) -> None:
        """Arranges the workers by axis; every worker does so at the same point, when it starts or adopts options."""
        if not self.collective:
            return
        degrees = plan_axes(self.options, self.world_size)
        experts = plan_expert_axes(self.options, self.world_size)
        if degrees != self.degrees or experts != self.axes.experts:
            timeout_s = Environment().float("PADDLE_PG_TIMEOUT") / 1000
            self.axes = make_axes(degrees, self.global_rank, self.process_group, timeout_s, experts)
            if self.process_group is not None:
                self.mesh = make_mesh(self.axes, self.process_group, self.device.type)
        self.degrees = degrees
        norm.remove(self._norms)
        if self.process_group is not None and self.axes.size(*MODEL_AXES, "sharding", "ep") > 1:
            self._norms = norm.MeshNorm(self)
            norm.install(self._norms)
        if self.roll_call is not None:
            self.roll_call.described = self.axes.described

    def _stepped(self, optimizer: Optimizer) -> Optimizer:
        """Returns ``optimizer`` as all strategies wrap it."""
        chain = optimizer
        # SHARD comes right after the update rules, see [Note: Stages] of the strategies.
        place = {Stage.SHARD: Stage.UPDATE + 0.5}
        for strategy in sorted(self.strategies, key=lambda s: place.get(s.stage, s.stage)):
            chain = _returned(strategy.wrap_optimizer(chain), strategy, "wrap_optimizer")
        for strategy in self.strategies:
            if isinstance(strategy, StepCounter):
                chain = strategy.wrap_steps(chain)
        return chain

    def _wrapped(self, module: nn.Module) -> tuple[nn.Module, nn.Module]:
        """Returns the user's module after MODULE-stage strategies, and the module as all strategies wrap it."""
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


def _returned(made: Wrapped | None, strategy: Strategy, hook: str) -> Wrapped:
    """Returns ``made``; raises ConfigError where a strategy of another package forgot the return."""
    if made is None:
        raise ConfigError(
            f"strategy {strategy.name!r}: {type(strategy).__name__}.{hook}() returned None; it must return what it was "
            "given, or a wrapper around it. Turn the option off, or tell its author."
        )
    return made


def _model_class(module: nn.Module) -> type[FleetModel]:
    """Returns the class of what :meth:`Session.wrap_model` makes of ``module``."""
    if not isinstance(module, StagedLayers):
        return FleetModel
    from fleet.training.pipeline_model import PipelineModel  # most jobs do not need the engine that it imports

    return PipelineModel


def _config_of(step: type[Strategy], options: DistributedStrategy) -> Any:
    return options[f"{step.name}_configs"] if step.Config is not None else None


def _acts(names: Sequence[str]) -> str:
    return "acts" if len(names) == 1 else "act"
