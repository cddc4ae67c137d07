"""Penalties on divided weights: says where a loss takes a norm, a mean or a root of this worker's part alone.

[Note: What a graph shows]
A sum over elements has the right gradients on each part. What is not linear in that sum, such as ``p.norm()``, and what
divides by the number of elements, such as ``p.mean()``, has those of another function. Both stand in the graph of the
loss as nodes that depend on parameters alone. A sum over the workers behind them (``reduce_from``) is the user's own
care, and nothing is said then.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

from fleet.errors import OptionWarning
from fleet.strategies._shared.parameter_layout import layout_of

_KEEPS = {"Pow", "Mul", "Div", "Abs", "Neg", "Add", "Sub", "ToCopy", "Stack", "Cat", "View", "Sum", "Mean", "Relu"}
_CURVED = {"Sqrt", "Pow", "Exp", "Log", "Abs", "Relu"}  # of a sum over parts: no longer a sum
_REDUCES = {"LinalgVectorNorm", "ForeachNorm", "Mean", "Max", "Min", "Amax", "Amin", "Std", "Var", "Prod", "Logsumexp"}
_ELEMENTS, _SUM, _WRONG = range(3)


@dataclass(frozen=True)
class _Found:
    """What a node computes from parameters alone; ``part`` is a divided one among them."""

    part: Tensor | None
    state: int = _ELEMENTS
    has_shape: bool = True  # that of ``part``


def warn_of_penalties(loss: Tensor, model: nn.Module) -> bool:
    """Warns, and returns True, where ``loss`` depends on divided parameters in a way that is wrong for parts."""
    found: dict[Node, _Found] = {}
    wrong: dict[Tensor, str] = {}
    for node in _inputs_first(loss.grad_fn):
        variable = getattr(node, "variable", None)
        if variable is not None:
            found[node] = _Found(variable if layout_of(variable) is not None else None)
            continue
        given = [found.get(source) for source, _ in node.next_functions if source is not None]
        known = [one for one in given if one is not None]
        kind = node.name().rstrip("0123456789").removesuffix("Backward")
        if kind.startswith("_") and "Reduce" in kind and known and known[0].part is not None:
            wrong.pop(known[0].part, None)
        made = _made(node, kind, known) if known and len(known) == len(given) else None
        if made is not None:
            found[node] = made
            if made.state == _WRONG and made.part is not None and all(one.state != _WRONG for one in known):
                wrong[made.part] = kind
    if not wrong:
        return False
    listed = [f"{name} ({wrong[p]})" for name, p in model.named_parameters() if p in wrong]
    shown = ", ".join(listed[:3]) or "a parameter"
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    warnings.warn(
        f"the loss takes a norm, a mean or another function that is no sum over elements of divided weights: {shown}"
        f"{more}. Each worker of the mp axis has a part, and computes it of that part, so values and gradients are not "
        "those of the whole weight. Use the optimizer's weight_decay, or a sum over elements such as p.square().sum(), "
        "whose gradients are right.",
        OptionWarning,
        stacklevel=2,
    )
    return True


def _made(node: Any, kind: str, known: list[_Found]) -> _Found | None:
    part, state = next((one.part for one in known if one.part is not None), None), max(one.state for one in known)
    if kind not in _KEEPS | _CURVED | _REDUCES or (part is not None and layout_of(part) is None):
        return None
    if part is None or state == _WRONG:
        return _Found(part, state)
    if state == _SUM:
        curved = kind in _CURVED or (kind in _REDUCES and kind != "Mean") or (kind in ("Mul", "Div") and len(known) > 1)
        return _Found(part, _WRONG if curved else _SUM)
    has_shape = all(one.has_shape for one in known) and kind not in ("View", "Stack", "Cat")
    if kind not in _REDUCES | {"Sum"}:
        return _Found(part, state, has_shape)
    if _covers(node, part, has_shape):
        return _Found(part, _SUM if kind == "Sum" else _WRONG)
    return _Found(part, state, has_shape=False)


def _covers(node: Any, part: Tensor, has_shape: bool) -> bool:
    """Returns whether a reduction goes over the dimension in which ``part`` is divided."""
    dims, layout = getattr(node, "_saved_dim", None), layout_of(part)
    if dims is None or dims == ():
        return True
    listed = [dims] if isinstance(dims, int) else list(dims)
    signed = [dim - 2**64 if dim >= 2**63 else dim for dim in listed]  # the node has them without sign
    if not has_shape or layout is None:
        return False  # unknown, and not said
    return layout.dim % part.dim() in [dim % part.dim() for dim in signed]


def _inputs_first(root: Node | None) -> Iterator[Node]:
    """Yields the nodes below ``root``, each after those that it takes from."""
    seen: set[Node] = set()
    stack = [] if root is None else [(root, False)]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            yield node
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((source, False) for source, _ in node.next_functions if source is not None)
