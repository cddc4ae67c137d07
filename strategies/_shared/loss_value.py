"""The loss, seen where backward starts, so that the user's loop needs no extra call."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def watch_losses(seen: Callable[[Tensor], None]) -> Callable[[], None]:
    """Calls ``seen`` with every scalar, with its graph, on which backward is called, until the returned function is.

    ``Tensor.backward`` and user code both go through ``torch.autograd.backward``, looked up at each call.
    """
    original = torch.autograd.backward

    @wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        for tensor in (tensors,) if isinstance(tensors, Tensor) else tensors:
            if isinstance(tensor, Tensor) and tensor.numel() == 1:
                seen(tensor)
        original(tensors, *args, **kwargs)

    torch.autograd.backward = backward

    def stop() -> None:
        if torch.autograd.backward is backward:
            torch.autograd.backward = original

    return stop
