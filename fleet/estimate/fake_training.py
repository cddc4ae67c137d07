"""Fake tensors for an estimate: a copy of the user's model, optimizer and batch that has shapes and no memory.

One stage of a pipeline trains on them in the order of its forwards and backwards, with the state between them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fleet.errors import ConfigError, did_you_mean
from fleet.estimate.modelled_strategies import Application
from fleet.estimate.storage_tracker import StorageTracker
from fleet.strategies.pipeline.descriptions import StagedLayers
from fleet.strategies.pipeline.order import plan_order
from fleet.training.fleet_model import FleetModel
from fleet.training.fleet_optimizer import FleetOptimizer

_OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.001),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.001),
}


class Fakes:
    """Makes fakes of tensors on one device, the same fake for the same tensor; used under a FakeTensorMode.

    Attributes:
        buffers: fakes of the tensors of modules that are not parameters.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memo: dict[int, Any] = {}
        self._originals: list[Any] = []  # an id is unique only while its object lives
        self.buffers: list[Tensor] = []

    def tensor(self, original: Tensor) -> Tensor:
        """Returns the fake of ``original``: same shape, strides, dtype, and gradient flag, on the device."""
        if id(original) not in self._memo:
            # With its strides: operations decide by them whether they copy.
            fake: Tensor = torch.empty_strided(
                original.shape, original.stride(), dtype=original.dtype, device=self._device
            )
            if isinstance(original, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=original.requires_grad)
            else:
                fake.requires_grad_(original.requires_grad and original.is_leaf)
            self._memo[id(original)] = fake
            self._originals.append(original)
        found: Tensor = self._memo[id(original)]
        return found

    def model(self, model: nn.Module | Callable[[], nn.Module]) -> nn.Module:
        """Returns a copy of ``model`` on fakes; a factory is called here, where nothing is allocated."""
        module = model if isinstance(model, nn.Module) else _made(model)
        if isinstance(module, FleetModel):
            raise ConfigError(
                "estimate_memory() was given a model that distributed_model() returned; pass your own module, and the "
                "strategy as the third argument."
            )
        self._originals.append(module)
        for part in module.modules():
            for name, tensor in _tensors_of(part):
                if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
                    raise ConfigError(
                        f"estimate_memory(): {name!r} of {type(part).__name__} has no shape yet. Run one batch through "
                        "the lazy module first."
                    )
                fake = self.tensor(tensor)
                if not isinstance(fake, nn.Parameter):
                    self.buffers.append(fake)
        try:
            return copy.deepcopy(module, self._memo)
        except Exception as error:
            raise ConfigError(
                f"estimate_memory() works on a copy of the model, and {type(module).__name__} cannot be copied "
                f"({type(error).__name__}: {error}). Pass a function without arguments that makes the model."
            ) from error

    def optimizer(self, optimizer: Any, model: nn.Module) -> Optimizer:
        """Returns the user's optimizer on fakes, or a new one over the parameters of ``model`` that need gradients."""
        if isinstance(optimizer, FleetOptimizer):
            raise ConfigError(
                "estimate_memory() was given an optimizer that distributed_optimizer() returned; pass your own."
            )
        if isinstance(optimizer, Optimizer):
            return _checked(self._copied(optimizer))
        if isinstance(optimizer, str):
            if optimizer not in _OPTIMIZERS:
                near = did_you_mean(optimizer, _OPTIMIZERS)
                raise ConfigError(
                    f"estimate_memory(optimizer={optimizer!r}): the names are {', '.join(_OPTIMIZERS)}; "
                    f"any other optimizer is given as its class or as an object.{near}"
                )
            optimizer = _OPTIMIZERS[optimizer]
        if not callable(optimizer):
            raise ConfigError(
                f"estimate_memory(optimizer={optimizer!r}): it is a name, a class, an optimizer, or a function that "
                "takes parameters and returns an optimizer."
            )
        parameters = [p for p in model.parameters() if p.requires_grad]
        if not parameters:
            raise ConfigError("estimate_memory(): no parameter of the model needs a gradient, so nothing is trained.")
        made = optimizer(parameters)
        if not isinstance(made, Optimizer):
            raise ConfigError(f"estimate_memory(optimizer=...) made {made!r}, which is no torch.optim.Optimizer.")
        return _checked(made)

    def batch(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments and named arguments that ``batch`` describes, as fakes."""
        if isinstance(batch, Mapping):
            return (), {name: self._argument(value) for name, value in batch.items()}
        if isinstance(batch, Tensor) or _is_shape(batch) or _is_typed_shape(batch):
            return (self._argument(batch),), {}
        if isinstance(batch, Sequence) and not isinstance(batch, str):
            return tuple(self._argument(value) for value in batch), {}
        raise ConfigError(f"estimate_memory(): batch is {batch!r}; {_BATCH_FORMS}")

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.empty(value.shape, dtype=value.dtype, device=self._device, requires_grad=value.requires_grad)
        if _is_shape(value):
            return torch.empty(tuple(value), device=self._device)
        if _is_typed_shape(value):
            return torch.empty(tuple(value[0]), dtype=value[1], device=self._device)
        if value is None or isinstance(value, bool | float | str):
            return value
        raise ConfigError(f"estimate_memory(): the batch holds {value!r}; {_BATCH_FORMS}")

    def _copied(self, optimizer: Optimizer) -> Optimizer:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if id(parameter) not in self._memo:
                raise ConfigError(
                    f"estimate_memory(optimizer=...): the optimizer holds a parameter of shape "
                    f"{tuple(parameter.shape)} that is not one of the model's. Give an optimizer of this model, or its "
                    "class."
                )
        for tensor in tree_leaves(list(optimizer.state.values())):
            if isinstance(tensor, Tensor):
                self.tensor(tensor)
        return copy.deepcopy(optimizer, self._memo)


_BATCH_FORMS = (
    "it is a shape such as (32, 3, 224, 224), a pair of shape and dtype, a tensor, a list of these for several "
    "arguments, or a dict of them for named ones."
)


def _checked(optimizer: Optimizer) -> Optimizer:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            "estimate_memory() runs step() without a closure, and torch.optim.LBFGS needs one. Estimate with another "
            "optimizer; LBFGS keeps history_size (100 by default) pairs of vectors as long as the parameters."
        )
    return optimizer


def _made(factory: Any) -> nn.Module:
    if not callable(factory):
        raise ConfigError(
            f"estimate_memory(): model is {factory!r}; it is a torch.nn.Module, or a function or class without "
            "arguments that makes one."
        )
    made = factory()
    if not isinstance(made, nn.Module):
        raise ConfigError(f"estimate_memory(): {factory!r} returned {made!r}, which is no torch.nn.Module.")
    return made


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters and buffers of one module, and the tensors among its other attributes."""
    found: Iterable[tuple[str, Any]] = [*module._parameters.items(), *module._buffers.items()]
    others = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    found = [*found, *((name, leaf) for name, value in others.items() for leaf in tree_leaves(value))]
    yield from ((name, tensor) for name, tensor in found if isinstance(tensor, Tensor))


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple | list) and bool(value) and all(type(size) is int and size >= 0 for size in value)


def _is_typed_shape(value: Any) -> bool:
    return (
        isinstance(value, tuple | list)
        and len(value) == 2
        and isinstance(value[1], torch.dtype)
        and (_is_shape(value[0]) or value[0] == ())
    )


def mean_of_outputs(output: Any) -> Tensor:
    """Returns the sum of the means of every floating tensor in ``output`` that needs a gradient.

    Raises ConfigError for an output without such a tensor.
    """
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    means = [t.mean() for t in tensors if t.is_floating_point() and t.requires_grad]
    if not means:
        raise ConfigError(
            "estimate_memory(): no floating tensor in what the model returns needs a gradient. Give loss=..., a "
            "function of the model's output, or unfreeze a parameter."
        )
    return sum(means[1:], start=means[0])


class _RealSeeds(TorchFunctionMode):
    """Lets layers draw the numbers of their seeds, for which fakes have no value."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.randint:
            return func(*args, **(kwargs or {}))
        with unset_fake_temporarily():
            return int(func(*args, **(kwargs or {})))  # layers make a number of it in any case


def layers_of(model: Any) -> list[Any] | None:
    """Returns the layers of a PipelineLayer, a list or an nn.Sequential; ``None`` for other models."""
    if isinstance(model, StagedLayers):
        return list(model._layers_desc)
    if isinstance(model, nn.Sequential):
        return list(model.children())
    return list(model) if isinstance(model, list | tuple) else None


def make_stage(model: Any, stages: int, stage: int) -> StagedLayers:
    """Returns the layers of ``stage``; to be called where tensors are fakes."""
    if not isinstance(model, nn.Module | list | tuple) and callable(model):
        with _RealSeeds():
            model = model()
    layers = layers_of(model)
    if layers is None:
        raise ConfigError(
            f"estimate_memory() with {stages} stages takes a PipelineLayer, the list that it is made of, or a function "
            f"that makes one; got {type(model).__name__}."
        )
    losses = model.loss_functions if isinstance(model, StagedLayers) else []
    with _RealSeeds():
        return StagedLayers(
            layers, stages, stage, loss_fn=losses or None, seg_method=getattr(model, "seg_method", "uniform")
        )


class StageOnFakes:
    """Trains one stage as the engine of pipelines does.

    Args:
        stages: number of stages.
        stage: index of this stage.
        num_micro: micro-batches of a step.
        mode: the schedule.
        before: the stages before this one, which give the shape of its input.
        loss: the loss of the last stage's output.
    """

    def __init__(
        self, stages: int, stage: int, num_micro: int, mode: str, before: Sequence[nn.Module],
        loss: Callable[..., Tensor],
    ) -> None:  # fmt: skip
        self._order = plan_order(stages, stage, num_micro, mode=mode)
        self._is_first = stage == 0
        self._is_last = stage == stages - 1
        self.is_end = self._is_first or self._is_last  # they are given the batch
        self._num_micro = num_micro
        self._before = before
        self._loss = loss

    def received(self, batch: Any) -> Any:
        """Returns this stage's input for one micro-batch of ``batch``, the argument of the first stage."""
        value = tree_map_only(Tensor, self._cut, batch)
        with torch.no_grad():
            for stage in self._before:
                value = stage(value)
        return value

    def _cut(self, rows: Tensor) -> Tensor:
        if rows.shape[0] % self._num_micro:
            raise ConfigError(
                f"estimate_memory(): the batch has {rows.shape[0]} rows, and pipeline_configs['accumulate_steps'] "
                f"cuts it into {self._num_micro} micro-batches. Choose a multiple."
            )
        return rows[: rows.shape[0] // self._num_micro]

    def run(self, applied: Application, batch: Any, like: Any, tracker: StorageTracker) -> None:
        """Runs the micro-batches of one step; ``like`` is the result of :meth:`received`."""
        kept: dict[int, tuple[list[Any], list[Any]]] = {}
        applied.exchange.begin_batch(True)
        for action in self._order:
            if action.what == "f":
                tracker.phase = "forward"
                value = tree_map_only(Tensor, self._cut, batch) if self._is_first else _arrived(like)
                output = applied.model(value)
                if self._is_last:
                    output = self._loss(output) / self._num_micro
                leaves = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
                # The engine sends the output away: only its place in autograd's graph stays until backward.
                kept[action.micro] = (
                    [get_gradient_edge(t) for t in leaves],
                    [(t.shape, t.dtype, t.device) for t in leaves],
                )
                del value, output, leaves
                continue
            tracker.phase = "backward"
            edges, shapes = kept.pop(action.micro)
            gradients = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in shapes]
            torch.autograd.backward(edges, gradients)
            del edges, gradients
        applied.exchange.end_backward()


def _arrived(like: Any) -> Any:
    def arrive(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, requires_grad=tensor.is_floating_point())

    return tree_map_only(Tensor, arrive, like)


def one_argument(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    """Returns the first layer's argument: the only one, or all in a tuple; raises ConfigError for named ones."""
    args, named = arguments
    if named:
        raise ConfigError("estimate_memory(): the first layer of a pipeline takes one argument; give no named ones.")
    return args[0] if len(args) == 1 else args
