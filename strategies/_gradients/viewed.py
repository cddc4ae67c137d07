"""Hooks on a tensor that hold when it is a view and is changed in place.

[Note: Views]
``out += 1`` on a view gives it a new history, through the tensor that it views, and torch calls the hooks of the
old one no more. The history of the viewed tensor stays in the graph, so a hook that only hears of backward stands
there, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def hook_viewed(tensor: Tensor, hook: Callable[[Any], Any]) -> Any:
    """Calls ``hook`` in backward before the node of the tensor that ``tensor`` is a view of; see [Note: Views].

    Returns:
        The node; ``None`` for a tensor that is no view, and for a view of one without a history.
    """
    node: Any = None if tensor._base is None else tensor._base.grad_fn
    if node is not None:
        node.register_prehook(hook)
    return node
