"""Objects: the entries that a script gives to save() and load(), and the adapter of each."""

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
from fleet.checkpoint.state_adapter import Description, StateAdapter
from fleet.checkpoint.values import decode, encode
from fleet.errors import ConfigError, OptionWarning
from fleet.job.axes import Axes
from fleet.job.job import Job
from fleet.strategies._shared.optimizer_wrapper import OptimizerWrapper
from fleet.training.fleet_model import FleetModel


class ObjectState(StateAdapter):
    """Describes and loads an object with ``state_dict`` and ``load_state_dict``, or a plain value.

    Worker 0 writes a state that is the same on all workers; otherwise each writes its own.

    Args:
        key: its name in the checkpoint.
        object_: the object or the value.
        axes: the place of this worker.
        rank: rank of this worker in the job.
        world_size: number of workers in the job.
    """

    def __init__(self, key: str, object_: Any, axes: Axes, rank: int, world_size: int) -> None:
        self.key = key
        self._object = object_
        self._rank = rank
        self._world_size = world_size
        self.differs = False  # set once the workers have compared their digests
        self.kind = "state" if hasattr(object_, "state_dict") and hasattr(object_, "load_state_dict") else "value"
        self.class_name = type(object_).__name__
        self._holders = axes.ranks(*axes.degrees)

    def describe(self) -> Description:
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
        return self._object.state_dict() if self.kind == "state" else self._object

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
        """Returns why this worker has no saved state; the object's own ``load_state_dict`` refuses the rest."""
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
        """Loads the state into the object and returns the object; returns a plain value."""
        value = decode(source.index.values[self._saved_as(source)], wanted.tensor)
        if self.kind == "value":
            return value
        self._object.load_state_dict(value)
        return self._object


def adapters_of(
    objects: Mapping[str, Any], job: Job | None, axes: Axes, call: str, own: bool | None = None
) -> list[StateAdapter]:
    """Returns the adapters of ``objects``, modules first.

    Args:
        objects: by key, as the script gave them.
        job: the job; ``None`` before ``fleet.init``.
        axes: the place of this worker.
        call: the function that errors name.
        own: whether every worker saves its state separately; ``None`` asks the optimizers.

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
    models = [] if job is None else job.models
    modules = {key: _model(given, models) for key, given in objects.items() if isinstance(given, nn.Module)}
    chains = {key: _chain(given, job) for key, given in objects.items() if isinstance(given, Optimizer)}
    has_own = own_state_of(chains.values(), job) if own is None else own
    rank, world = (0, 1) if job is None else (job.global_rank, job.world_size)
    mine = rank if has_own and world > 1 else None
    adapters: list[StateAdapter] = []
    names: dict[Tensor, str] = {}
    homes: dict[Tensor, tuple[str, str]] = {}
    for key, model in modules.items():
        inner = model.module if isinstance(model, FleetModel) else model
        elsewhere = model._elsewhere if isinstance(model, FleetModel) else ()
        adapter = ModelTensors(key, inner, axes, any(inner is one.module for one in models), mine, elsewhere)
        adapters.append(adapter)
        _add_names(names, homes, adapter.parameter_names(), key, key)
    # An optimizer may be saved without its module: then the models of the job name its parameters.
    for number, model in enumerate(models):
        _add_names(names, homes, {p: name for name, p in model.named_parameters()}, f"{number}", "")
    adapters += [OptimizerTensors(key, chain, names, axes, mine, homes) for key, chain in chains.items()]
    others = {key: one for key, one in objects.items() if key not in modules and key not in chains}
    return adapters + [ObjectState(key, one, axes, rank, world) for key, one in others.items()]


def _add_names(
    names: dict[Tensor, str], homes: dict[Tensor, tuple[str, str]], added: Mapping[Tensor, str], prefix: str, home: str
) -> None:
    """Adds names and homes of one more module's parameters; a name already in use gets ``prefix`` before it."""
    used = set(names.values())
    for parameter, name in added.items():
        homes.setdefault(parameter, (home, name))
        if parameter not in names:
            names[parameter] = f"{prefix}:{name}" if name in used else name


def own_state_of(optimizers: Iterable[Optimizer], job: Job | None) -> bool:
    """Returns whether a strategy keeps a state on this worker that other workers do not have.

    A single worker has such a state in an open window of gradient_merge, which more workers cannot share.
    """
    if job is not None and job.world_size > 1:
        return any(bool(getattr(optimizer, "has_own_state", False)) for optimizer in optimizers)
    states = [OptimizerWrapper.state_dict(o) for o in optimizers if isinstance(o, OptimizerWrapper)]
    return any(isinstance(value, Mapping) and value.get("batch") for state in states for value in state.values())


def warn_of_waiting(optimizers: Iterable[Optimizer]) -> None:
    """Warns of batches that wait for their update, which the checkpoint lacks."""
    for optimizer in optimizers:
        note = optimizer.saving_note() if isinstance(optimizer, OptimizerWrapper) else None
        if note is not None and not cast(OptimizerWrapper, optimizer).has_own_state:
            warnings.warn(note, OptionWarning, stacklevel=5)


def _model(given: nn.Module, models: Iterable[Any]) -> nn.Module:
    """Returns the distributed model around ``given``, or ``given``."""
    return next((model for model in models if model.module is given), given)


def _chain(given: Optimizer, job: Job | None) -> Optimizer:
    """Returns the distributed optimizer around ``given``, or ``given``."""
    return next((one for one in ([] if job is None else job.optimizers) if one.user_optimizer is given), given)
