"""Functions that the compiler of ``to_static`` and ``torch.compile`` calls without tracing them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch

_FunctionType = TypeVar("_FunctionType", bound=Callable[..., Any])


def outside_graphs(function: _FunctionType) -> _FunctionType:
    """Returns ``function`` so that the compiler does not trace it: it exchanges with other processes, or uses numpy.

    Each worker compiles at its own time, and exchanges while compiling would wait for workers that do not compile.
    """
    left_out: Callable[..., Any] = function

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal left_out
        # Importing the compiler takes a second, so jobs that never compile do not pay for it.
        if left_out is function and "torch._dynamo" in sys.modules:
            left_out = torch.compiler.disable(function)
        return left_out(*args, **kwargs)

    run._torchdynamo_disable = True  # type: ignore[attr-defined]
    return cast(_FunctionType, run)
