"""followed: the calls of a model's forward, which torch.fx writes down.

[Note: What can be followed]
``torch.fx`` runs forward with stand-ins for tensors and records every call. Lists of blocks are looked into; each
block, and each module outside the lists, is a layer. At a cut everything that a later layer needs goes along: the
activation, and a mask or a size that was computed before. Forward must take the same path for all data; the inputs are
its parameters without a default. It is followed in training and in evaluation, which may differ in arguments only.
What forward does beside calling would be done once, while it is followed, and never again: a random number that Python
code looks at, a counter, a buffer that is changed in place. Such models are refused.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, fx, nn

from fleet.errors import ConfigError

_FACTORIES = ("arange", "zeros", "ones", "full", "empty", "tensor")
_CONSTANT = "_tensor_constant"  # the name under which torch.fx keeps a tensor in the model


class Followed:
    """The calls of ``model.forward`` in one mode.

    Args:
        model: the model, which is left as it was.
        training: the mode.

    Attributes:
        nodes: the calls.
        constants: the tensors that forward makes of nothing.

    Raises:
        ConfigError: forward cannot be followed.
    """

    def __init__(self, model: nn.Module, training: bool) -> None:
        before = _State(model)
        try:
            self.nodes = list(_followed(model, training).nodes)
            changed = before.difference(model)
        finally:
            self.constants: dict[str, Tensor] = {
                name: model.__dict__.pop(name) for name in list(model.__dict__) if name.startswith(_CONSTANT)
            }
            before.restore()
        if changed:
            raise ConfigError(refusal(model, f"{changed}, which would be done once and not in each step"))

    @property
    def calls(self) -> list[tuple[str, str]]:
        """What is called, in order."""
        return [(n.op, "" if n.target in self.constants else str(n.target)) for n in self.nodes]


class _State:
    """What forward may change beside computing its output."""

    def __init__(self, model: nn.Module) -> None:
        self._attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
        self._buffers = {
            (module, name): (buffer, buffer.detach().clone(), buffer._version)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        }
        self._drawn = (torch.get_rng_state(), random.getstate())

    def difference(self, model: nn.Module) -> str:
        """Returns what has changed in ``model``, in words."""
        if not torch.equal(torch.get_rng_state(), self._drawn[0]) or random.getstate() != self._drawn[1]:
            return "it draws random numbers outside layers and functions of its input"
        for (module, name), (buffer, _, version) in self._buffers.items():
            if module._buffers.get(name) is not buffer or buffer._version != version:
                return f"it changes the buffer {name!r}"
        for place, module in model.named_modules():
            before, after = self._attributes[place], vars(module)
            for name in before.keys() | after.keys():
                if name.startswith(_CONSTANT) or before.get(name) is after.get(name):
                    continue
                return f"it changes the attribute {name!r} of {type(module).__name__}"
        return ""

    @torch.no_grad()
    def restore(self) -> None:
        """Gives buffers and random streams their values back."""
        for (module, name), (buffer, value, version) in self._buffers.items():
            if buffer._version != version:
                buffer.copy_(value)
            module._buffers[name] = buffer
        torch.set_rng_state(self._drawn[0])
        random.setstate(self._drawn[1])


class _Follower(fx.Tracer):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        lists = (nn.ModuleList, nn.Sequential)
        elements = {
            e for m in model.modules() if isinstance(m, lists) and m is not model for e in m.modules() if e is not m
        }
        self._looked_into = {
            m for m in model.modules() if m not in elements and any(isinstance(inner, lists) for inner in m.modules())
        }

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m not in self._looked_into


def _followed(model: nn.Module, training: bool) -> fx.Graph:
    """Returns the calls of ``model.forward``; raises ConfigError where it cannot be followed."""
    modes = {module: module.training for module in model.modules()}
    parameters = inspect.signature(model.forward).parameters.values()
    fixed = {p.name: p.default for p in parameters if p.default is not p.empty}
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        raise ConfigError(refusal(model, "it takes *args or **kwargs"))
    model.train(training)
    try:
        with _factories_followed():
            graph: fx.Graph = _Follower(model).trace(model, concrete_args=fixed or None)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(refusal(model, f"{type(error).__name__}: {error}")) from error
    finally:
        for module, mode in modes.items():
            module.training = mode
    if not any(node.op == "call_module" for node in graph.nodes):
        raise ConfigError(refusal(model, "it calls no layer"))
    return graph


def refusal(model: nn.Module, reason: str) -> str:
    """Returns why ``model`` cannot be followed, the rule, and what to write."""
    first = reason.strip().splitlines()[0][:200]
    return (
        f"pipeline_configs['split'] cannot follow {type(model).__name__}.forward: {first}. It must call its layers one "
        "after the other, on the same path for all data (no assert, if or loop on values of tensors). Write the model "
        "as a fleet.meta_parallel.PipelineLayer."
    )


@contextmanager
def _factories_followed() -> Iterator[None]:
    """Records calls such as ``torch.arange(n)`` whose arguments are stand-ins; torch would ask them for numbers."""
    originals = {name: getattr(torch, name) for name in _FACTORIES}

    def follow(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            stand_in = next((a for a in (*args, *kwargs.values()) if isinstance(a, fx.Proxy)), None)
            if stand_in is None:
                return original(*args, **kwargs)
            return stand_in.tracer.create_proxy("call_function", original, args, kwargs)

        return call

    try:
        for name, original in originals.items():
            setattr(torch, name, follow(original))
        yield
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)
