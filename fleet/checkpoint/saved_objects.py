"""Objects: what a script gives to save() and load(), and what takes or loads the state of each."""

from __future__ import annotations

import json
import warnings
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from fleet.checkpoint.boxes import HeldBox
from fleet.checkpoint.items import Item, StateSource, Wanted, raw_bytes
from fleet.checkpoint.model_tensors import ModelTensors
from fleet.checkpoint.optimizer_tensors import OptimizerTensors
from fleet.checkpoint.state_taker import Description, StateTaker
from fleet.checkpoint.values import decode, encode
from fleet.errors import ConfigError, OptionWarning
from fleet.job.axes import Axes
from fleet.job.job import Job
from fleet.strategies._shared.optimizer_wrapper import OptimizerWrapper
from fleet.training.fleet_model import FleetModel


class ObjectState(StateTaker):
    """Takes and loads what has ``state_dict`` and ``load_state_dict``, or is a value.

    Where all workers have the same, worker 0 writes it; where they differ, each writes its own.

    Args:
        key: its name in the checkpoint.
        found: the object.
        axes: the place of this worker.
        rank: of this worker in the job.
        world_size: number of workers in the job.
    """

    def __init__(self, key: str, found: Any, axes: Axes, rank: int, world_size: int) -> None:
        self.key, self._found, self._rank, self._world_size = key, found, rank, world_size
        self.differs = False  # set once the workers have compared their digests
        self.kind = "state" if hasattr(found, "state_dict") and hasattr(found, "load_state_dict") else "value"
        self.class_name = type(found).__name__
        self._holders = axes.ranks(*axes.degrees)

    def take(self) -> Description:
        """Returns the state or the value."""
        name = f"@{self._rank}/{self.key}" if self.differs else self.key
        tensors: dict[str, Tensor] = {}
        values = {name: encode(self._state(), name, tensors)}
        holders = (self._rank,) if self.differs else self._holders
        items = [
            Item(inner, tuple(tensor.shape), [HeldBox((0,) * tensor.dim(), tensor)], holders, alone=True)
            for inner, tensor in tensors.items()
        ]
        return Description(items, values=values)

    def _state(self) -> Any:
        return self._found.state_dict() if self.kind == "state" else self._found

    def digest(self) -> int:
        """Returns a number that is the same on workers whose states are the same."""
        tensors: dict[str, Tensor] = {}
        found = zlib.crc32(json.dumps(encode(self._state(), self.key, tensors)).encode())
        for data in raw_bytes(tensors.values()):
            found = zlib.crc32(data, found)
        return found

    def _saved_as(self, source: StateSource) -> str:
        """Returns the name of the value that this worker loads."""
        return self.key if self.key in source.index.values else f"@{self._rank}/{self.key}"

    def check(self, source: StateSource) -> list[str]:
        """Returns why this worker has no saved state; what an object's own loading refuses, it says itself."""
        saved = source.index.job.get("world_size", 1)
        now = self._world_size
        if self._saved_as(source) in source.index.values and (self.key in source.index.values or saved == now):
            return []
        return [
            f"{self.key!r} was different on each of {saved} workers, and there are {now} now; omit it, and begin anew"
        ]

    def wanted(self, source: StateSource) -> Wanted:
        """Returns the tensors inside the saved value."""
        found = Wanted()
        found.add_inside(source, source.index.values.get(self._saved_as(source)))
        return found

    def put(self, source: StateSource, wanted: Wanted) -> Any:
        """Loads the state into the object; returns a value."""
        value = decode(source.index.values[self._saved_as(source)], wanted.tensor)
        if self.kind == "value":
            return value
        self._found.load_state_dict(value)
        return self._found


def takers_of(
    objects: Mapping[str, Any], job: Job | None, axes: Axes, call: str, own: bool | None = None
) -> list[StateTaker]:
    """Returns what takes or loads the state of each of ``objects``, modules first.

    Args:
        objects: by key, as the script gave them.
        job: the job; ``None`` before ``fleet.init``.
        axes: the place of this worker.
        call: the function that errors name.
        own: whether each worker has a state of its own; ``None`` asks the optimizers.

    Raises:
        ConfigError: ``objects`` is no dictionary by texts, or is empty.
    """
    if not isinstance(objects, Mapping) or not objects:
        raise ConfigError(
            f'{call}: the second argument is a dictionary {{"model": model, "optimizer": optimizer, "epoch": 3}}, got '
            f"{type(objects).__name__ if not isinstance(objects, Mapping) else 'an empty one'}."
        )
    for key in objects:
        if not isinstance(key, str) or not key or set(key) & set("/@#+"):
            raise ConfigError(f"{call}: the key {key!r}: a key is a text without '/', '@', '#' and '+'.")
    modules = {key: _model(found, job) for key, found in objects.items() if isinstance(found, nn.Module)}
    chains = {key: _chain(found, job) for key, found in objects.items() if isinstance(found, Optimizer)}
    has_own = own_state_of(chains.values(), job) if own is None else own
    rank, world = (0, 1) if job is None else (job.global_rank, job.world_size)
    mine = rank if has_own and world > 1 else None
    wrapped = [] if job is None else [model.module for model in job.models]
    found: list[Any] = []
    names: dict[Tensor, str] = {}
    homes: dict[Tensor, tuple[str, str]] = {}
    for key, model in modules.items():
        inner = model.module if isinstance(model, FleetModel) else model
        elsewhere = model._elsewhere if isinstance(model, FleetModel) else ()
        taker = ModelTensors(key, inner, axes, any(inner is one for one in wrapped), mine, elsewhere)
        found.append(taker)
        _add_names(names, taker.parameter_names(), key)
        homes = {p: (key, name) for p, name in taker.parameter_names().items()} | homes
    for number, model in enumerate([] if job is None else job.models):
        _add_names(names, {p: name for name, p in model.named_parameters()}, f"{number}")
        homes = {p: ("", name) for name, p in model.named_parameters()} | homes
    found += [OptimizerTensors(key, chain, names, axes, mine, homes) for key, chain in chains.items()]
    found += [
        ObjectState(key, one, axes, rank, world)
        for key, one in objects.items()
        if key not in modules and key not in chains
    ]
    return found


def _add_names(names: dict[Tensor, str], added: Mapping[Tensor, str], prefix: str) -> None:
    """Gives the parameters of one more module names; those that another module's has taken begin with ``prefix``."""
    taken = set(names.values())
    for parameter, name in added.items():
        if parameter not in names:
            names[parameter] = f"{prefix}:{name}" if name in taken else name


def own_state_of(optimizers: Iterable[Optimizer], job: Job | None) -> bool:
    """Returns whether a strategy keeps a state on this worker that other workers do not have.

    With one worker that is an open window of gradient_merge, which more workers cannot share.
    """
    if job is not None and job.world_size > 1:
        return any(bool(getattr(optimizer, "has_own_state", False)) for optimizer in optimizers)
    states = [OptimizerWrapper.state_dict(o) for o in optimizers if isinstance(o, OptimizerWrapper)]
    return any(isinstance(value, Mapping) and value.get("batch") for state in states for value in state.values())


def warn_of_waiting(optimizers: Iterable[Optimizer]) -> None:
    """Warns of batches that wait for their update and that the checkpoint lacks."""
    for optimizer in optimizers:
        note = optimizer.saving_note() if isinstance(optimizer, OptimizerWrapper) else None
        if note is not None and not cast(OptimizerWrapper, optimizer).has_own_state:
            warnings.warn(note, OptionWarning, stacklevel=5)


def _model(found: nn.Module, job: Job | None) -> nn.Module:
    for model in [] if job is None else job.models:
        if model.module is found:
            wrapped: nn.Module = model
            return wrapped
    return found


def _chain(found: Optimizer, job: Job | None) -> Optimizer:
    """Returns the distributed optimizer around ``found``, if there is one."""
    for wrapped in [] if job is None else job.optimizers:
        if wrapped.user_optimizer is found:
            chain: Optimizer = wrapped
            return chain
    return found
