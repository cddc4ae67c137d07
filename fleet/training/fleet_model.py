"""FleetModel: the result of ``fleet.distributed_model``. It looks like the user's module and runs the wrapped one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from fleet.checkpoint.save_load import known_entries
from fleet.checkpoint.state_dicts import ModelStates, warn_of_stage_or_part
from fleet.checkpoint.to_group import StateMesh
from fleet.common.outside_graphs import outside_graphs
from fleet.errors import ConfigError
from fleet.job.job import Job
from fleet.job.wrapped_model import WrappedModel
from fleet.strategies._gradients.gradient_exchange import copied_chain, data_parallel_in, exchanging_in, inner_of
from fleet.strategies._gradients.passes import passes_of
from fleet.strategies._shared.parts import PART, has_parts, part_of, warn_of_parts
from fleet.strategies.amp.amp_model import AmpModel
from fleet.training.forward_guard import ForwardGuard


def _set_state_dict(self: Any, state_dict: Mapping[str, Any]) -> Any:
    """Loads a state as Fleet does: entries that are not part of the object ('epoch') are left alone."""
    return self.load_state_dict(known_entries(state_dict, self.state_dict()))


def name_loads() -> None:
    """Gives all torch modules and optimizers ``set_state_dict`` and its older names; a class's own stay.

    Fleet's scripts load before ``distributed_model()``, and their ``except`` takes an absent method for a bad file.
    """
    for base, names in (
        (nn.Module, ("set_state_dict", "set_dict", "load_dict")),
        (Optimizer, ("set_state_dict", "set_dict")),
    ):
        for name in names:
            if not hasattr(base, name):
                setattr(base, name, _set_state_dict)


# Stands in the place of the user's module: `model = fleet.distributed_model(model)` is right, whatever class it has.
UsersClass: Any = cast("Any", object)

# Kept out of the module's own attributes: they belong to the wrapper.
_OWN = frozenset({"_chain", "_passes", "_job", "_guard", "_trains", "_exchanges", "_elsewhere", "_compiled_call_impl"})
# A method of the user's with one of these names takes precedence, as over everything that comes from nn.Module alone.
_GIVES_WAY = (
    "clear_gradients",
    "scale_loss",
    "apply_collective_grads",
    "set_state_dict",
    "set_dict",
    "load_dict",
    "join",
)

name_loads()  # a script may load before it wraps


class FleetModel(WrappedModel, UsersClass):  # type: ignore[misc]
    """Calls run the wrapped module; names, attributes, methods and ``state_dict`` are those of the user's module.

    ``module`` is the user's module. Assigning an attribute assigns it there. A method that the user's class defines
    takes precedence over one that all modules have (``compile``, ``eval``, ``to``). A method of the user's module that
    runs submodules itself would bypass the gradient exchange; calling one while gradients are recorded raises, until
    :meth:`mark_forward_method` names it.

    A deep copy shares only the job with the model. If data parallel alone acts on the gradients, the copy exchanges
    them as a copy of DistributedDataParallel does. Otherwise, and after ``torch.load``, the copy computes and can be
    saved, and a backward pass to its parameters raises.

    Args:
        module: the user's module, after strategies have rewritten parts of it.
        chain: the wrapped module that calls run; equal to ``module`` when nothing wraps it.
        job: hears of forwards and clears; by default a job of this model alone, as for a copy that torch has loaded.
    """

    _job: Job
    _guard: ForwardGuard

    def __init__(self, module: nn.Module, chain: nn.Module, job: Job | None = None) -> None:
        super().__init__()
        # Plain assignment would set the attribute on the user's module.
        object.__setattr__(self, "_guard", ForwardGuard(self))
        object.__setattr__(self, "_job", Job.alone([self]) if job is None else job)
        object.__setattr__(self, "_trains", True)
        object.__setattr__(self, "_exchanges", True)
        object.__setattr__(self, "_elsewhere", frozenset())
        self._modules["module"] = module
        for name in _methods_of_the_users(type(module)):
            self.__dict__[name] = self._users_method(name)
        self.register_load_state_dict_pre_hook(_enter_module)  # type: ignore[no-untyped-call]
        self.rewrap(chain)

    def rewrap(self, chain: nn.Module) -> None:
        """Makes calls run ``chain`` from now on."""
        object.__setattr__(self, "_chain", chain)
        object.__setattr__(self, "_passes", passes_of(chain))
        self._passes.everyone = self._job.parameters
        self._passes.hearing = self._hearing
        self._follow_mode()

    def _hearing(self, hook: str) -> list[Callable[[], None]]:
        """Returns calls that tell the listeners of the job about a backward pass of this model."""
        return [partial(getattr(listener, hook), self) for listener in self._job.listeners.hearing[hook]]

    def _follow_mode(self) -> None:
        """Gives the wrappers the mode of the user's module; submodules, perhaps frozen in evaluation, keep theirs."""
        wrapper: nn.Module | None = self._chain
        while wrapper is not None and wrapper is not self.module:
            wrapper.training = self.module.training
            wrapper = inner_of(wrapper)
        self.training = self.module.training

    def replace_module(self, module: nn.Module) -> None:
        """Makes ``module`` the user's module; names and parameters must be those of the old one."""
        self._modules["module"] = module

    @property
    def module(self) -> nn.Module:
        """The user's module."""
        return cast(nn.Module, self._modules["module"])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the wrapped module."""
        self._begin_forward(args, kwargs)
        try:
            return self._run(*args, **kwargs)
        except RuntimeError as error:
            self._job.explain(error, self)
            raise
        finally:
            for listener in self._job.listeners.hearing["forward_ends"]:
                listener.forward_ends()

    # A script may compile a module around this model: the work of listeners is no part of its graph.
    @outside_graphs
    def _begin_forward(self, args: Any, kwargs: Any) -> None:
        is_recorded = torch.jit.is_tracing() or torch.compiler.is_exporting()
        if is_recorded and self._job.collective and self._job.world_size > 1:
            raise _not_recorded("torch.jit.trace(model, x)" if torch.jit.is_tracing() else "torch.export.export(model)")
        # Scripts add groups to the optimizer inside; strategies must know the parameters before their gradients come.
        for optimizer in self._job.optimizers:
            optimizer.follow_groups()
        for listener in self._job.listeners.hearing["before_forward"]:
            listener.before_forward(self)
        for listener in self._job.listeners.hearing["forward_begins"]:
            listener.forward_begins(self, (args, kwargs))

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        result = self._passes.forward(self._chain, args, kwargs)
        if not self._trains and torch.is_grad_enabled() and any(p.requires_grad for p in self.module.parameters()):
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(_refuse_training)
        return result

    def __prepare_scriptable__(self) -> nn.Module:
        """Raises ConfigError: torch.jit.script would keep the module and lose the wrappers around it."""
        raise _not_recorded("torch.jit.script(model)")

    def exchanged_parameters(self) -> list[nn.Parameter]:
        """Returns the parameters whose gradients data parallel makes equal on all workers."""
        reducer = self._passes.reducer
        if reducer is None:
            return []
        return [p for name, p in reducer.module.named_parameters() if name not in reducer.parameters_to_ignore]

    def release_group(self) -> None:
        """Releases the process group; the model exchanges no gradients afterwards."""
        reducer = data_parallel_in(self._chain)
        if reducer is not None:
            if self._passes.arrivals is not None:
                self._passes.arrivals.release()
            for name in ("reducer", "logger", "process_group", "fleet_keywords"):
                reducer.__dict__.pop(name, None)

    def clear_gradients(self) -> None:
        """Clears every gradient, as ``zero_grad`` does; Fleet's name."""
        self.zero_grad()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears every gradient."""
        super().zero_grad(set_to_none=set_to_none)
        # A zero_grad() of the user's class may clear more than gradients.
        if type(self.module).zero_grad is not nn.Module.zero_grad:
            self.module.zero_grad(set_to_none=set_to_none)
        parameters = list(self.parameters())
        self._job.listeners.tell("gradients_cleared", parameters)

    def no_sync(self) -> AbstractContextManager[None]:
        """Returns a context in which backward keeps gradients local; a later backward exchanges them."""
        no_sync = getattr(self._chain, "no_sync", None)
        return cast("AbstractContextManager[None]", no_sync()) if no_sync is not None else nullcontext()

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next backward passes exchange gradients; assigning False is an open-ended ``no_sync()``."""
        holder = exchanging_in(self._chain)
        return self._exchanges if holder is None else bool(holder.require_backward_grad_sync)

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        object.__setattr__(self, "_exchanges", bool(value))
        holder = cast(Any, exchanging_in(self._chain))
        if holder is not None:
            holder.require_backward_grad_sync = bool(value)

    def join(self, *args: Any, **kwargs: Any) -> AbstractContextManager[Any]:
        """Returns DistributedDataParallel's context in which workers may have different numbers of batches.

        Raises ConfigError where an option needs every worker in every step.
        """
        reducer = self._joining()
        return nullcontext() if reducer is None else cast("AbstractContextManager[Any]", reducer.join(*args, **kwargs))

    def join_hook(self, **kwargs: Any) -> Any:
        """Returns the hook of ``torch.distributed.algorithms.join.Join([model])`` for a worker without batches."""
        reducer = self._joining()
        if reducer is None:
            raise ConfigError(
                "Join([model]): no gradients are exchanged here. Use model.join(), which is then a no-op."
            )
        return reducer.join_hook(**kwargs)

    def _joining(self) -> DistributedDataParallel | None:
        self._job.listeners.tell("before_join")
        return data_parallel_in(self._chain)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Returns ``loss`` unchanged: gradients are averaged in the exchange (Fleet's older loops call this)."""
        return loss

    def apply_collective_grads(self) -> None:
        """A no-op: gradients were exchanged during backward (Fleet's older loops call this)."""

    def watch_loss(self, loss: Tensor, exchanges: bool = True) -> Tensor:
        """Returns ``loss``, for a backward pass that begins before the forward that computed it has ended.

        The pass exchanges gradients as a pass from an output of the model does, unless ``exchanges`` is False.
        """
        if isinstance(self._chain, AmpModel):
            loss = self._chain.leave(loss)
        return self._passes.watch_loss(loss, exchanges)

    def mark_forward_method(self, name: str) -> None:
        """Makes ``model.<name>(...)`` run through the wrapped module, like ``model(...)``.

        Raises ConfigError when the user's module has no such method.
        """
        if not callable(getattr(self.module, name, None)):
            raise ConfigError(f"mark_forward_method({name!r}): {type(self.module).__name__} has no such method.")
        self._guard.marked.add(name)

    def train(self, mode: bool = True) -> FleetModel:
        """Sets training mode on the user's module and everything around it."""
        super().train(mode)
        self._chain.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Returns the state of the user's module, under the user's names.

        Where sharding shards the parameters, the state holds DTensors, of which this worker has a shard; with tensor
        parallelism or a pipeline it holds this worker's parts of divided layers, and its stage. A warning says so. Save
        the result of :meth:`full_state_dict` or :meth:`local_state_dict`.
        """
        self._job.before_save()
        state: dict[str, Any] = self.module.state_dict(*args, **kwargs)
        states = self._states
        if states.is_part:
            warn_of_stage_or_part("model")
            return states.marked(state)
        if has_parts(state):
            warn_of_parts("model")
        return state

    def full_state_dict(self, keep: bool = True) -> dict[str, Any]:
        """Returns the whole state on the host, which a plain module loads; every worker must call it.

        Names and shapes are as in one process, whatever the mesh; a tied parameter is there once.

        Args:
            keep: False takes part in the gather and returns ``{}``, which saves memory on workers that do not write.

        Raises:
            CheckpointError: the workers of one stage hold different entries, or an entry cannot travel.

        Example:
            >>> state = model.full_state_dict(keep=fleet.is_first_worker())
        """
        states = self._states
        self._job.before_save()
        if states.is_collective():
            self._job.meet("model.full_state_dict()")
        return states.whole(keep)

    def local_state_dict(self) -> dict[str, Any]:
        """Returns this worker's part as plain tensors on the host; each worker saves its own, and none waits.

        :meth:`load_state_dict` loads it on the worker of the same place on the same mesh.
        """
        self._job.before_save()
        return self._states.local()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads a state of the user's module: its own, a whole one on every worker, or this worker's part.

        Raises CheckpointError for the part of another worker, and ConfigError for ``assign`` with divided parameters.
        """
        states = self._states
        if states.is_part or PART in state_dict or has_parts(self.module.state_dict()):
            if assign:
                raise ConfigError("load_state_dict(assign=True) would replace the parameters that were divided.")
            state_dict = states.fitted(state_dict)
        result = self.module.load_state_dict(state_dict, strict=strict, assign=assign)
        self._job.listeners.tell("state_loaded", self)
        return result

    def load_full_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads worker 0's ``state_dict``, a whole state, on all workers; every worker must call it.

        The argument of the other workers is ignored and may be ``{}``.
        """
        self._job.meet("model.load_full_state_dict()")
        self._states.load_from_rank_0(state_dict)
        self._job.listeners.tell("state_loaded", self)

    @property
    def _states(self) -> ModelStates:
        return ModelStates(self.module, StateMesh(self._job.axes, self._job.device), self._elsewhere)

    def note_names_elsewhere(self, names: Iterable[str]) -> None:
        """Notes the ``names`` that a state of the whole model may hold and this worker's stage does not."""
        object.__setattr__(self, "_elsewhere", frozenset(names) - set(self.module.state_dict()))

    def set_state_dict(self, state_dict: Mapping[str, Any]) -> Any:
        """Loads a state as Fleet does: entries that are not part of the module ('epoch') are left alone.

        Raises RuntimeError when an entry of the module is missing or has a different shape, and CheckpointError for a
        tensor that the module does not have.
        """
        known = [*self.module.state_dict(), *self._elsewhere, PART]
        return self.load_state_dict(known_entries(state_dict, known))

    set_dict = set_state_dict
    load_dict = set_state_dict

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterates over the parameters under the user's names; with sharding, over the shards being updated."""
        return ((name, part_of(p)) for name, p in self.module.named_parameters(*args, **kwargs))

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Iterates over the buffers under the user's names."""
        return self.module.named_buffers(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Iterates over the user's modules under the user's names."""
        named: Iterator[tuple[str, nn.Module]] = self.module.named_modules(*args, **kwargs)
        return named

    def __getattr__(self, name: str) -> Any:
        modules = self.__dict__.get("_modules", {})
        if "module" not in modules:
            raise AttributeError(name)
        try:
            value = getattr(modules["module"], name)
        except AttributeError:
            chain = self.__dict__["_chain"]
            if chain is not modules["module"] and hasattr(chain, name):
                return getattr(chain, name)
            if name == "_layers":  # Fleet's name of the user's module
                return modules["module"]
            raise AttributeError(f"{type(modules['module']).__name__!r} has no attribute {name!r}") from None
        return self._guard.guarded(name, value) if self._is_own_method(value) else value

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN or name == "training" or name in FleetModel.__dict__:
            object.__setattr__(self, name, value)
        elif name == "_join_config":  # of torch's Join
            setattr(data_parallel_in(self._chain), name, value)
        else:
            setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.module, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> FleetModel:
        self._check_whole("copy.deepcopy(model) (AveragedModel does it too)")
        # torch cannot copy a process group.
        for part in self.module.modules():  # a copy has the same workers to exchange with
            memo.update({id(group): group for group in vars(part).values() if isinstance(group, dist.ProcessGroup)})
        module = copy.deepcopy(self.module, memo)
        chain, trains = copied_chain(self._chain, self.module, module, memo)
        twin = FleetModel.__new__(type(self))
        FleetModel.__init__(twin, module, chain, self._job)
        object.__setattr__(twin, "_elsewhere", self._elsewhere)
        twin.__dict__.update(
            {n: copy.copy(hooks) for n, hooks in self.__dict__.items() if n.startswith("_forward_") and "hook" in n}
        )
        twin._guard.marked.update(self._guard.marked)
        object.__setattr__(twin, "_trains", trains and self._trains)
        memo[id(self)] = twin
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        self._check_whole("torch.save(model)")
        return _loaded, (self.module,)

    def _check_whole(self, call: str) -> None:
        if has_parts(dict(self.named_parameters())):
            raise ConfigError(
                f"{call}: sharding stage 3 sharded the model, and a worker holds a shard of it. Save "
                "model.full_state_dict(), which a plain module loads; keep an average of the shards in "
                "model.parameters(), which torch._foreach_lerp_ updates; or set sharding_configs['stage'] to 1 or 2."
            )

    def __bool__(self) -> bool:
        return True  # also a model without a length

    def __len__(self) -> int:
        return len(cast(Any, self.module))

    def __getitem__(self, index: Any) -> Any:
        return cast(Any, self.module)[index]

    def _users_method(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = self.__getattr__(name)(*args, **kwargs)
            self._follow_mode()  # it may have been an eval()
            return self if result is self.module else result

        return call

    def _is_own_method(self, value: Any) -> bool:
        return getattr(value, "__self__", None) is self.module and self._chain is not self.module


def _methods_of_the_users(kind: type[nn.Module]) -> list[str]:
    """Returns the called methods that the user's class has in common with every module or FleetModel."""
    own = [name for base in kind.__mro__[: kind.__mro__.index(nn.Module)] for name in vars(base)]
    return [
        name
        for name in own
        if not name.startswith("_")
        and (name in _GIVES_WAY or (name not in FleetModel.__dict__ and callable(getattr(nn.Module, name, None))))
    ]


def _loaded(module: nn.Module) -> FleetModel:
    """Returns the model that ``torch.load`` makes from a whole pickled model."""
    model = FleetModel(module, module)
    object.__setattr__(model, "_trains", False)
    return model


def _refuse_training(gradient: Tensor) -> None:
    raise ConfigError(
        "backward() reached a copy of a model that fleet.distributed_model() returned (copy.deepcopy, AveragedModel, "
        "torch.load), whose gradients nothing exchanges or unscales. To train it, pass its module: "
        "fleet.distributed_model(twin.module). For gradients of inputs alone: twin.requires_grad_(False)."
    )


def _enter_module(model: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Passes a state that a module around ``model`` loads, under the user's names, to the user's module."""
    # The state comes without "module.", for state_dict() has saved it so; torch loads by the names of submodules.
    for name in [name for name in state_dict if name.startswith(prefix)]:
        state_dict[f"{prefix}module.{name[len(prefix) :]}"] = state_dict.pop(name)


def _not_recorded(call: str) -> ConfigError:
    return ConfigError(
        f"{call}: the model is wrapped by fleet.distributed_model(), and the exchange of its gradients cannot be a "
        "part of what is recorded. Record the module inside, on worker 0: model.module, in evaluation mode; where "
        "workers hold parts of it (sharding 2 and 3, mp, pp), load model.full_state_dict() into a plain module first. "
        "To train a compiled model use torch.compile or strategy.to_static."
    )
