"""Names under which profilers show the exchanges of the strategies."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def named_exchange(strategy: str, tensor: Tensor, what: str = "") -> AbstractContextManager[Any]:
    """Returns the context in which ``strategy`` exchanges ``tensor``; while no profiler is on, it does nothing.

    Example:
        >>> with named_exchange("localsgd", torch.zeros(1 << 18), "average"):
        ...     pass  # an exchange that profilers show as "fleet: localsgd average, 1 MiB"
    """
    if torch.compiler.is_compiling() or not torch.autograd._profiler_enabled():
        return nullcontext()
    size = tensor.numel() * tensor.element_size() / 2**20
    return torch.profiler.record_function(f"fleet: {' '.join(filter(None, (strategy, what)))}, {size:.3g} MiB")
