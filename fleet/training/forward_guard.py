"""ForwardGuard: methods of the user's module that would run submodules past the wrapped forward."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from fleet.errors import ConfigError
from fleet.job.wrapped_model import WrappedModel
from fleet.strategies._shared.backward_calls import wrap_backward


class ForwardGuard:
    """Guards the methods of the user's module in ``model``.

    A method that runs a trainable submodule raises, unless gradients are off or the method is marked: a marked method
    runs inside the forward of the wrapped module.

    Attributes:
        marked: the names of the methods that run inside the wrapped forward.
    """

    def __init__(self, model: WrappedModel) -> None:
        self._model = model
        self._model.__dict__["_redirected"] = ""
        self.marked: set[str] = set()

    def guarded(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Returns ``method``, which the script calls on the wrapped model as ``name``, with its guard."""
        if name in self.marked and not self._model._redirected:
            return self._redirect(method)

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled() or self._model._redirected:
                return method(*args, **kwargs)
            with _no_submodule_forward(self._model.module, name):
                return method(*args, **kwargs)

        return call

    def _redirect(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Runs ``method`` inside the forward of the wrapped module and returns its result."""
        module = self._model.module

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            # The wrappers call the module's forward(), so the method takes its place while they run.
            own = {name: value for name, value in module.__dict__.items() if name == "forward"}

            def run(*inner_args: Any, **inner_kwargs: Any) -> Any:
                # The method may call self(...): that is the user's own forward again.
                del module.__dict__["forward"]
                module.__dict__.update(own)
                return method(*inner_args, **inner_kwargs)

            module.__dict__["forward"] = run
            self._model.__dict__["_redirected"] = method.__name__
            try:
                with _no_backward(module, method.__name__):
                    return self._model(*args, **kwargs)
            finally:
                self._model.__dict__["_redirected"] = ""
                module.__dict__.pop("forward", None)
                module.__dict__.update(own)

        return call


def check_outside(models: Iterable[WrappedModel], what: str) -> None:
    """Raises ConfigError where a marked method of one of ``models`` runs ``what``."""
    for model in models:
        if model._redirected:
            raise ConfigError(_runs_inside(model.module, model._redirected, what))


@contextmanager
def _no_submodule_forward(module: nn.Module, method: str) -> Iterator[None]:
    """Raises ConfigError when a trainable submodule of ``module`` runs inside the context with gradients recorded."""
    names = {id(sub): name or type(module).__name__ for name, sub in module.named_modules()}

    def check(running: nn.Module, inputs: Any) -> None:
        if id(running) in names and torch.is_grad_enabled() and any(p.requires_grad for p in running.parameters()):
            raise ConfigError(
                f"model.{method}() runs {names[id(running)]!r} outside the wrapped forward, so its gradients would not "
                f"be exchanged between workers. If {method}() computes an output or a loss, call "
                f"model.mark_forward_method({method!r}) once after distributed_model(). If it runs backward() or a "
                f"step itself, {_instead_of_self(module, method)} For evaluation run it under torch.no_grad()."
            )

    handle = register_module_forward_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _no_backward(module: nn.Module, method: str) -> Iterator[None]:
    """Raises ConfigError when this thread calls ``backward()`` inside the context, where gradients stay local."""
    # The patch is global, and other threads may train other models.
    thread = threading.get_ident()

    def refuse(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            raise ConfigError(_runs_inside(module, method, "backward()"))
        return call(*args, **kwargs)

    stop = wrap_backward(refuse)
    try:
        yield
    finally:
        stop()


def _runs_inside(module: nn.Module, method: str, what: str) -> str:
    """Returns the message for a ``method`` that was marked although it runs ``what``."""
    return (
        f"model.{method}() was marked with mark_forward_method(), so it runs inside the wrapped forward, and it calls "
        f"{what} there, before gradients can be exchanged. Do not mark it; {_instead_of_self(module, method)}"
    )


def _instead_of_self(module: nn.Module, method: str) -> str:
    return (
        f"pass the wrapped model in place of self: {type(module).__name__}.{method}(model, ...); self(...) in it then "
        "runs the wrapped model."
    )
