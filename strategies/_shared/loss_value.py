"""The loss, seen where backward starts, so that the user's loop needs no extra call."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor


def watch_losses(seen: Callable[[Tensor, Tensor | None], None]) -> Callable[[], None]:
    """Calls ``seen`` with every scalar, with its graph, on which backward is called, until the returned function is.

    With it comes the gradient that backward begins from, ``None`` for 1. ``Tensor.backward`` and user code both go
    through ``torch.autograd.backward``, looked up at each call.
    """
    original = torch.autograd.backward

    @wraps(original)
    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        roots, gradients = ([one] if isinstance(one, Tensor) else one for one in (tensors, grad_tensors))
        for tensor, gradient in zip_longest(roots, gradients or ()):
            if isinstance(tensor, Tensor) and tensor.numel() == 1:
                seen(tensor, gradient)
        original(tensors, grad_tensors, *args, **kwargs)

    torch.autograd.backward = backward

    def stop() -> None:
        if torch.autograd.backward is backward:
            torch.autograd.backward = original

    return stop
