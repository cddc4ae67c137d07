"""Fake tensors for an estimate: a copy of the user's model, optimizer and batch that has shapes and no memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from fleet.errors import ConfigError, did_you_mean
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
