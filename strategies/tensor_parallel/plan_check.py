"""The check of a plan: the first forward is also computed with whole weights, and both results are compared.

A plan can be wrong without an error: a model that counts on its whole number of heads may still find a shape for its
part, and a fused weight that is cut in the wrong pieces gives numbers, too. So before the first forward, each divided
layer gathers its weight once, computes as on one worker, and the results of the model must be equal.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from fleet.errors import ConfigError
from fleet.strategies._shared.parts import is_part
from fleet.strategies._shared.random_streams import TRACKER
from fleet.strategies._shared.stages import on_any
from fleet.strategies.tensor_parallel.place import ComparedLosses, CurrentJob
from fleet.strategies.tensor_parallel.plan import ResolvedPlan, generic_name
from fleet.strategies.tensor_parallel.planned_layers import planned

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_OF_16_BITS = 0.1


class FirstForward:
    """A forward pre-hook that runs once and raises where the divided model computes something else than the whole.

    It compares the result of one module: the model, or on a stage of a pipeline each layer of the stage.

    Args:
        group: the workers that share the model.
        resolved: the plan that divided it.
    """

    def __init__(self, group: dist.ProcessGroup, resolved: ResolvedPlan) -> None:
        self._group = group
        self._resolved = resolved
        self.handle: RemovableHandle | None = None

    def __deepcopy__(self, memo: Any) -> FirstForward:
        return self

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compares, and removes the hook.

        Raises:
            ConfigError: the divided model fails, or returns something else.
        """
        if self.handle is None:
            return
        self.handle.remove()
        self.handle = None
        # Sharding has divided the weights once more, and layers could not gather them.
        if any(is_part(parameter) for parameter in module.parameters()):
            return
        found = None
        failure: Exception | None = None
        with _undisturbed(module):
            try:
                with _results(module) as found_inside:
                    found = _on_copies(module, args, kwargs)
            # Kept until the whole forward has run: its exchanges need every worker, and the plan may fail on some only.
            except (RuntimeError, ValueError, IndexError) as error:
                failure = error
            with self._whole(module), _results(module) as expected_inside:
                expected = _on_copies(module, args, kwargs)
        if failure is not None:
            raise ConfigError(_failed(module, failure)) from failure
        if any(on_any([_differ(expected, found)], self._group)):
            raise ConfigError(_another(module, expected_inside, found_inside))

    def watch(self, module: nn.Module) -> None:
        """Compares the next forward of ``module``."""
        self.handle = module.register_forward_pre_hook(self, with_kwargs=True)

    @contextmanager
    def _whole(self, module: nn.Module) -> Iterator[None]:
        """Makes every divided layer compute with whole weights inside the context."""
        layers = [layer for submodule in module.modules() if (layer := planned(submodule)) is not None]
        for layer in layers:
            layer.whole = True
        for owner, attribute, part in self._resolved.numbers:
            setattr(owner, attribute, part * self._group.size())
        assert CurrentJob.compared is not None
        CurrentJob.compared.whole = True
        try:
            yield
        finally:
            for layer in layers:
                layer.whole = False
            for owner, attribute, part in self._resolved.numbers:
                setattr(owner, attribute, part)


def _on_copies(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the result of ``module``; an object that it would change, such as a cache of keys, is copied first."""

    def fresh(leaf: Any) -> Any:
        if leaf is None or isinstance(leaf, Tensor | bool | int | float | str):
            return leaf
        try:
            return copy.deepcopy(leaf)
        except (RuntimeError, TypeError):  # tensors of a graph, generators, locks
            return leaf

    args, kwargs = tree_map(fresh, (args, kwargs))
    return module.forward(*args, **kwargs)


@contextmanager
def _undisturbed(module: nn.Module) -> Iterator[None]:
    """Runs without gradients and without dropout, and leaves modes and random numbers as they were."""
    modes = {submodule: submodule.training for submodule in module.modules()}
    CurrentJob.compared = ComparedLosses()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    streams = TRACKER.get_states_tracker()
    module.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices):
            yield
    finally:
        CurrentJob.compared = None
        TRACKER.set_states_tracker(streams)
        for submodule, training in modes.items():
            submodule.training = training


@contextmanager
def _results(model: nn.Module) -> Iterator[list[tuple[str, tuple[int, ...], Tensor]]]:
    """Collects, for each module that returns a tensor, its name, the shape and a small summary."""
    found: list[tuple[str, tuple[int, ...], Tensor]] = []
    handles = []
    for name, module in model.named_modules():
        if planned(module) is not None:
            continue  # a plan goes wrong in the code around a divided layer

        def note(_: nn.Module, __: Any, output: Any, name: str = name) -> None:
            tensor = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)), None)
            if tensor is not None and tensor.is_floating_point() and tensor.numel():
                values = tensor.detach().double()
                found.append((name, tuple(tensor.shape), torch.stack([values.mean(), values.abs().mean()])))

        handles.append(module.register_forward_hook(note))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _differ(expected: Any, found: Any) -> bool:
    """Returns whether two results hold tensors of the same shapes with other values; a part is not compared."""
    pairs = zip(_tensors(expected), _tensors(found), strict=False)
    return any(a.shape == b.shape and _apart(a, b) for a, b in pairs)


def _tensors(result: Any) -> list[Tensor]:
    leaves = tree_leaves(dict(result) if isinstance(result, dict) else result)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel()]


def _apart(expected: Tensor, found: Tensor) -> bool:
    if expected.is_floating_point() and torch.is_autocast_enabled(expected.device.type):
        tolerance = _OF_16_BITS
    else:
        tolerance = _TOLERANCE.get(expected.dtype, _OF_16_BITS)
    a = expected.double()
    b = found.double()
    a = a.masked_fill(~a.isfinite(), 0.0)
    b = b.masked_fill(~b.isfinite(), 0.0)
    return bool((a - b).abs().max() > tolerance * a.abs().max())


def _failed(model: nn.Module, error: Exception) -> str:
    name, module = _raised_in(model, error.__traceback__)
    counted = ", ".join(f"{key}={value}" for key, value in _whole_numbers(module).items()) or "none"
    place = f"{name!r} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
    advice = f"add {{{generic_name(name)!r}: 'divide:ATTRIBUTE'}} to the plan, or " if name else ""
    return (
        f"With its layers divided as tensor_parallel_configs['plan'] says, the forward of {place} fails, which works "
        f"with whole layers: {error} Its code may use a count of heads or columns that must be divided, too (whole "
        f"numbers it holds: {counted}): {advice}make a later layer 'row', or this one 'column_gather'."
    )


def _another(model: nn.Module, expected: list[Any], found: list[Any]) -> str:
    place = "the model"
    for (name, shape, a), (other, other_shape, b) in zip(expected, found, strict=False):
        if name != other:
            break
        if shape == other_shape and not torch.allclose(a, b, rtol=1e-3, atol=1e-6):
            module = model.get_submodule(name)
            place = f"{name!r} ({type(module).__name__})" if name else place
            counted = ", ".join(f"{key}={value}" for key, value in _whole_numbers(module).items())
            place += f", which holds the whole numbers {counted}" if counted else ""
            break
    return (
        "Divided as tensor_parallel_configs['plan'] says, the model returns something else than with whole layers. "
        f"The first whole result that differs is that of {place}. Usual reasons: a count of heads that must be divided "
        "('divide:ATTRIBUTE'), a fused weight that falls into pieces ('column:3'), or an operation over all columns, "
        "as a norm or a softmax, between a 'column' and its 'row' (write 'column_gather')."
    )


def _raised_in(model: nn.Module, traceback: TracebackType | None) -> tuple[str, nn.Module]:
    """Returns the innermost module of ``model`` whose own code runs in ``traceback``."""
    names = {id(module): name for name, module in model.named_modules()}
    found: tuple[str, nn.Module] = ("", model)
    while traceback is not None:
        code = traceback.tb_frame.f_code
        owner = traceback.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in names and code.co_name == "forward" and planned(owner) is None:
            found = names[id(owner)], owner
        traceback = traceback.tb_next
    return found


def _whole_numbers(module: nn.Module) -> dict[str, int]:
    return {
        name: value
        for name, value in vars(module).items()
        if type(value) is int and value > 1 and not name.startswith("_")
    }
