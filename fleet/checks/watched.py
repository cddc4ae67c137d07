"""Watched: the models and optimizers that the checks of one job watch, and how its workers compare."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as torch_modules
from torch.optim import Optimizer

from fleet.checks.comparison import checksums, digest
from fleet.errors import ConfigError, RendezvousError
from fleet.job.axes import COPY_AXES
from fleet.job.job import Job
from fleet.job.listener import Listener
from fleet.job.whereabouts import user_line
from fleet.job.wrapped_model import WrappedModel
from fleet.strategies._gradients.arrivals import Arrivals
from fleet.strategies._shared.experts import is_expert
from fleet.strategies._shared.optimizer_wrapper import OptimizerWrapper, wrapper_in
from fleet.strategies._shared.parameter_layout import layouts_of
from fleet.strategies._shared.parts import is_part, local, rows_of
from fleet.strategies.sharding.owners import PartitionedOptimizer

_TRAINS = attrgetter("requires_grad")
_KIND = attrgetter("dtype", "device")
_LEFT = "fleet_left"  # the version of a gradient that a step has left behind


class LoadNote:
    """A hook that records where a state is loaded, and a digest of the state before; copies and pickles do nothing."""

    def __init__(self, watch: ModelWatch | OptimizerWatch) -> None:
        self._watch = watch

    def __call__(self, *_: Any) -> None:
        """Runs before the state is loaded."""
        watch = self._watch
        # The first of several loads counts: only the state before it was compared.
        if not watch.loaded_at:
            watch.loaded_at = user_line()
            watch.before = digest(watch.sums())

    def __reduce__(self) -> Any:
        # torch pickles a module with its hooks. A copy elsewhere needs a callable that exists without Fleet.
        return functools.partial, (sys.audit, "fleet.load")


class ModelWatch:
    """One wrapped model: which parameters train, how often it ran, and whether a state was loaded.

    Attributes:
        forwards: forwards with gradients recorded.
        loaded_at: the line that loaded a state since the last comparison; ``before``: a digest of the state before it.
        exchanged: the parameters that trained when the workers last agreed on them.
    """

    def __init__(self, model: WrappedModel, registered: int) -> None:
        self.model = model
        self.forwards = 0
        self.is_compared = False
        self.loaded_at = self.before = ""
        self.note_parameters(registered)
        self.exchanged = self.trained_names
        self.versions = {name: p._version for name, p in self.named.items()}
        self.kinds = {name: _KIND(p) for name, p in self.named.items()}
        self.handle = model.module.register_load_state_dict_pre_hook(LoadNote(self))

    @property
    def used(self) -> int:
        """The number of forwards of the wrapped model and of backward passes through it."""
        return self.forwards + self.model._passes.begun

    @property
    def is_divided(self) -> bool:
        """Whether each worker has shards of the parameters."""
        return any(is_part(p) for p in self.named.values())

    @property
    def is_apart(self) -> bool:
        """Whether peers hold different parameters: shards, or experts."""
        return self.is_divided or any(is_expert(p) for p in self.named.values())

    def note_parameters(self, registered: int) -> None:
        """Records the current parameters; ``registered`` counts what modules have registered so far."""
        self.registered = registered
        self.named = dict(self.model.named_parameters())
        self.trained_names = {name for name, p in self.named.items() if p.requires_grad}
        self.trained = [self.named[name] for name in self.trained_names]
        self.frozen = [p for p in self.named.values() if not p.requires_grad]

    def has_changed(self, registered: int) -> bool:
        """Returns whether parameters may have been added, removed, frozen or unfrozen."""
        return registered != self.registered or any(map(_TRAINS, self.frozen)) or not all(map(_TRAINS, self.trained))

    def check_kinds(self) -> None:
        """Raises ConfigError when a parameter has another type or device than when the model was wrapped."""
        for name, p in self.named.items():
            kind = _KIND(p)
            if kind != self.kinds.setdefault(name, kind):
                was, now = (" on ".join(map(str, one)) for one in (self.kinds[name], kind))
                raise ConfigError(
                    f"{name!r} is {now} and was {was} when distributed_model() wrapped the model, whose gradients are "
                    "exchanged as they were then. Convert and move the model before distributed_model()."
                )

    def unseen(self, registered: int, models: Iterable[ModelWatch]) -> str:
        """Returns a parameter with a gradient that did not train when the wrapped model last ran, or an empty text."""
        if not self.has_changed(registered):
            return ""
        seen = {id(p) for model in models for p in model.trained}
        for name, p in self.model.named_parameters():
            if id(p) in seen or not p.requires_grad or p.grad is None or not bool(p.grad.any()):
                continue
            if not any(one.has_exchanged(p) for one in arrivals_of(models)):
                return name
        return ""

    def sums(self) -> dict[str, int]:
        """Returns a checksum of each parameter; sharded parameters only if all workers have shards of one size."""
        held = {name: p for name, p in self.named.items() if not is_expert(p)}
        return checksums({name: p for name, p in held.items() if not is_part(p) or _is_even(p)})

    def undivided(self, sums: Mapping[str, int]) -> dict[str, int]:
        """Returns those of ``sums`` whose parameters are whole on every worker along mp."""
        layouts = layouts_of(self.model.module)
        return {name: value for name, value in sums.items() if name not in layouts}

    def digests(self, sums: Mapping[str, int]) -> dict[str, str]:
        """Returns digests of the undivided parameters along mp, and of the parts, empty where these are constant."""
        layouts = layouts_of(self.model.module)
        parts = {name: value for name, value in sums.items() if name in layouts}
        flat = (local(self.named[name].detach()).flatten() for name in parts)
        varies = any(t.numel() > 1 and bool((t != t[0]).any()) for t in flat)
        return {"whole": digest(self.undivided(sums)), "parts": digest(parts) if varies else ""}

    def varying(self) -> list[str]:
        """Returns the parameters whose shards have one size on all workers and are not constant on this one."""
        held = {name: local(p.detach()) for name, p in self.named.items() if is_part(p) and _is_even(p)}
        return [name for name, t in held.items() if t.numel() > 1 and bool((t != t.flatten()[0]).any())]

    def was_written(self) -> bool:
        """Returns whether something other than a step has changed a parameter before the first comparison."""
        # A write that no load hook hears of, such as copy_(), still counts up the tensor's version.
        return bool(self.loaded_at) or any(p._version != self.versions.get(name) for name, p in self.named.items())


class OptimizerWatch:
    """One wrapped optimizer: which of its parameters are not exchanged, and whether a state was loaded.

    Attributes:
        strangers: parameters that belong to no wrapped model, under a name for messages.
        models: the wrapped models that it trains, with the number of uses until its last step.
        exchanged: the number of exchanges of their gradients until its last update.
        agreed: the states before a step that the workers have compared: the numbers of exchanges between two updates,
            and the parameters to whose gradients something was added after the last exchange.
    """

    def __init__(self, optimizer: OptimizerWrapper, user_optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.user_optimizer = user_optimizer
        self.is_compared = False
        self.loaded_at = self.before = ""
        self.strangers: dict[str, Tensor] = {}
        self.models: dict[ModelWatch, int] = {}
        self.exchanged: dict[ModelWatch, int] = {}
        self.agreed: set[tuple[int | str, ...]] = set()
        self.seen: tuple[int, ...] = ()
        self.handles: list[Any] = []
        if hasattr(user_optimizer, "_optimizer_load_state_dict_pre_hooks"):
            self.handles.append(user_optimizer.register_load_state_dict_pre_hook(LoadNote(self)))

    def look(self, watches: Sequence[ModelWatch], registered: int) -> None:
        """Notes the models and strangers that the optimizer trains, if anything may have changed."""
        groups = self.optimizer.param_groups
        seen = (len(watches), registered, *(len(group["params"]) for group in groups))
        # This runs at every step: the walk over all parameters is left out while the counts stay the same.
        if seen == self.seen:
            return
        self.seen = seen
        owners: dict[int, list[ModelWatch]] = {}
        for watch in watches:
            for parameter in watch.model.parameters():
                owners.setdefault(id(parameter), []).append(watch)
        held = [(number, p) for number, group in enumerate(groups) for p in group["params"]]
        self.strangers = {f"{tuple(p.shape)} (group {number})": p for number, p in held if id(p) not in owners}
        found = dict.fromkeys(watch for _, p in held for watch in owners.get(id(p), ()))
        self.models = {watch: self.models.get(watch, 0) for watch in found}

    def has_only_old_gradients(self) -> bool:
        """Returns whether no gradient arrived since the last step."""
        first = self._first_gradient()
        return first is not None and vars(first).get(_LEFT) == first._version

    def note_step(self) -> None:
        """Marks a gradient that a step leaves behind."""
        # A mark on the gradient: a reference would hold a bucket, or keep torch from converting a layer.
        if (first := self._first_gradient()) is not None:
            vars(first)[_LEFT] = first._version

    def _first_gradient(self) -> Tensor | None:
        gradients = (p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None)
        return next(gradients, None)

    @property
    def is_divided(self) -> bool:
        """Whether each worker has a shard of the state."""
        return wrapper_in(self.optimizer, PartitionedOptimizer) is not None or any(
            is_part(rows_of(p)) for p in self.optimizer.parameters()
        )

    def settings(self) -> dict[str, str]:
        """Returns the class and the settings of the groups."""
        found = {"the class": type(self.user_optimizer).__name__}
        for number, group in enumerate(self.optimizer.param_groups):
            found |= {f"{key} of group {number}": repr(value) for key, value in group.items() if key != "params"}
        return found

    def state(self, kinds: Any, only: str = "") -> dict[str, Any]:
        """Returns the entries of the state that are of ``kinds``; with ``only``, those of this key."""
        return {
            f"{key} of parameter {place}": value
            for place, parameter in enumerate(self.optimizer.parameters())
            if parameter in self.optimizer.state
            for key, value in self.optimizer.state[parameter].items()
            if isinstance(value, kinds) and only in ("", key)
        }

    def sums(self) -> dict[str, Any]:
        """Returns a checksum of each tensor of the state, the numbers in it, and the settings of the groups."""
        return {**self.settings(), **self.state(bool | int | float | str), **checksums(self.state(Tensor))}


def _is_even(part: Any) -> bool:
    return bool(part.shape[0] % part.device_mesh.size(-1) == 0)


class Watched(Listener):
    """The models and optimizers of ``job`` that the checks watch.

    Attributes:
        registered: the number of parameters and submodules that modules have registered so far.
        compares: whether the workers compare with each other.
        said: the latest entries of all workers; empty when one was absent.
        absence: the error about a worker that was absent last.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.models: dict[WrappedModel, ModelWatch] = {}
        self.optimizers: dict[Optimizer, OptimizerWatch] = {}
        self.registered = 0
        self.compares = job.collective and job.process_group is not None and job.world_size > 1
        self.said: list[Any] = []
        self.absence: RendezvousError | None = None
        self._handles: list[Any] = []

    def model_wrapped(self, model: WrappedModel) -> None:
        """Watches ``model`` from now on, where an option or another worker makes it differ from its module."""
        if not self.job.collective or not self.job.strategies:
            return
        self._count_registrations()
        if model in self.models:
            self.models[model].handle.remove()
        self.models[model] = ModelWatch(model, self.registered)

    def optimizer_wrapped(self, optimizer: Optimizer, user_optimizer: Optimizer) -> None:
        """Watches ``optimizer`` from now on."""
        assert isinstance(optimizer, OptimizerWrapper)
        self.optimizers[optimizer] = OptimizerWatch(optimizer, user_optimizer)
        if self.job.collective:
            self._count_registrations()

    def optimizer_unwrapped(self, optimizer: Optimizer) -> None:
        """Removes the hooks from the user's ``optimizer``."""
        for watch in self.optimizers.values():
            if watch.user_optimizer is optimizer:
                # Emptied, because close() comes here again for optimizers that are unwrapped already.
                while watch.handles:
                    watch.handles.pop().remove()

    def before_forward(self, model: WrappedModel) -> None:
        """Counts the forwards that record gradients."""
        if (watch := self.recording(model)) is not None:
            watch.forwards += 1

    def close(self) -> None:
        """Removes every hook."""
        for watch in self.models.values():
            watch.handle.remove()
        for watched in self.optimizers.values():
            self.optimizer_unwrapped(watched.user_optimizer)
        for handle in self._handles:
            handle.remove()
        self.models = {}
        self.optimizers = {}
        self._handles = []
        self.compares = False

    def recording(self, model: WrappedModel) -> ModelWatch | None:
        """Returns the watch of ``model`` in a forward that records gradients, ``None`` in others."""
        return self.models.get(model) if torch.is_grad_enabled() and self.job.collective else None

    def stepped(self, optimizer: Optimizer) -> OptimizerWatch | None:
        """Returns the watch of ``optimizer``; ``None`` where no model is watched, now or later."""
        return self.optimizers.get(optimizer) if self.models or self.job.collective else None

    @property
    def peers(self) -> tuple[int, ...]:
        """The workers that hold the same part of the model as this one, itself included."""
        return self.job.axes.ranks(*COPY_AXES)

    @property
    def trains_locally(self) -> bool:
        """Whether parameters differ between workers, because gradients stay on their worker."""
        return any(optimizer.trains_locally for optimizer in self.job.optimizers)

    def gather(self, subject: str, said: Any, perhaps_alone: bool = False) -> list[Any]:
        """Returns each worker's entry about ``subject``; ``None`` for a worker that does not post one.

        The entry of a worker that is no peer is replaced by this worker's. Raises RendezvousError for an absent worker
        unless ``perhaps_alone``.
        """
        job = self.job
        roll_call = job.roll_call
        assert roll_call is not None
        job.beat(pause=True)  # the others may arrive late
        try:
            self.said = [json.loads(text) for text in roll_call.meet(subject, json.dumps(said))]
            mine = self.said[job.global_rank]
            peers = self.peers
            return [other if rank in peers else mine for rank, other in enumerate(self.said)]
        except RendezvousError as error:
            if not perhaps_alone:
                raise
            self.absence = error
            self.said = []
            return [said if rank == job.global_rank else None for rank in range(job.world_size)]
        finally:
            job.beat()

    def post(self, subject: str, said: Any) -> list[Any]:
        """Returns each worker's entry about ``subject``, of peers and others."""
        self.gather(subject, said)
        return self.said

    def number(self, watch: ModelWatch) -> int:
        """Returns the number of a watched model, as messages name it."""
        return list(self.models.values()).index(watch)

    def _count_registrations(self) -> None:
        # torch's global hooks: they hear of every module, so an unchanged count means unchanged models.
        if not self._handles:
            self._handles = [
                torch_modules.register_module_parameter_registration_hook(self._count),
                torch_modules.register_module_module_registration_hook(self._count),
            ]

    def _count(self, *_: Any) -> None:
        self.registered += 1


def arrivals_of(models: Iterable[ModelWatch]) -> list[Arrivals]:
    """Returns the objects that watch the gradients of data-parallel ``models``."""
    return [found for model in models if (found := model.model._passes.local_gradients) is not None]


def missed(job: Job) -> str:
    """Names the strategies that a step or a forward misses when it bypasses the wrapped objects of ``job``."""
    return ", ".join(strategy.name for strategy in job.strategies) or "what the job does at a step"
