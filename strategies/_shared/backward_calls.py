"""Functions put around ``torch.autograd.backward`` and ``torch.autograd.grad``, so that a loop needs no extra call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

Layer = Callable[..., Any]  # called with the function below it, then with the arguments of the call


def wrap_backward(layer: Layer, name: str = "backward") -> Callable[[], None]:
    """Calls ``layer`` in place of ``torch.autograd.<name>`` until the returned function is called.

    ``Tensor.backward`` and user code both look the function up at each call. Layers are taken off in any order: they
    share one patch, and the last one to go restores torch's function, unless somebody else has patched it since; then
    the patch stays below theirs and only passes calls on.

    Args:
        layer: called with the function below, then with the arguments of the call; it returns the result.
        name: ``backward`` or ``grad``.

    Example:
        >>> stop = wrap_backward(lambda call, *args, **kwargs: call(*args, **kwargs))
        >>> stop()
    """
    patch = getattr(torch.autograd, name)
    # By identity: what somebody else has put around our patch may have its attributes, which functools.wraps copies.
    if getattr(patch, "_fleet_patch", None) is not patch:
        patch = _patched(patch)
        setattr(torch.autograd, name, patch)
    layers: list[Layer] = patch._fleet_layers
    entry = partial(layer)  # a new object each time: the same layer may be put on twice
    layers.append(entry)

    def stop() -> None:
        if entry in layers:
            layers.remove(entry)
        if not layers and getattr(torch.autograd, name) is patch:
            setattr(torch.autograd, name, patch.__wrapped__)

    return stop


def _patched(original: Callable[..., Any]) -> Any:
    layers: list[Layer] = []

    @wraps(original)
    def patch(*args: Any, **kwargs: Any) -> Any:
        call = original
        for layer in tuple(layers):
            call = partial(layer, call)
        return call(*args, **kwargs)

    patch._fleet_layers = layers  # type: ignore[attr-defined]
    patch._fleet_patch = patch  # type: ignore[attr-defined]
    return patch


def watch_losses(seen: Callable[[Tensor, Tensor | None], None]) -> Callable[[], None]:
    """Calls ``seen`` with every scalar, with its graph, on which backward is called, until the returned function is.

    With it comes the gradient that backward begins from, ``None`` for 1.
    """

    def layer(call: Callable[..., None], tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        roots, gradients = ([one] if isinstance(one, Tensor) else one for one in (tensors, grad_tensors))
        for tensor, gradient in zip_longest(roots, gradients or ()):
            if isinstance(tensor, Tensor) and tensor.numel() == 1:
                seen(tensor, gradient)
        call(tensors, grad_tensors, *args, **kwargs)

    return wrap_backward(layer)
