"""Where the backward signal is scaled and unscaled, so that neither the loss nor a gradient shows it.

[Note: One factor on every path]
A float16 backward pass needs its signal multiplied by the loss scale S, and the user's loop must not notice. The signal
is multiplied where it enters the output of a wrapped model, and divided where it leaves: at the model's parameters, by
a hook that runs before the gradient is accumulated, exchanged or merged, and at inputs that need a gradient. Everything
outside, the loss and ``.grad`` above all, has the true size; clipping, several backward passes for one step, merging,
and a model that feeds another one stay right.

This holds when each path from the loss to a parameter passes the output once. Two kinds of path do not: a term of the
loss that uses parameters directly (weight decay by hand), and a term that uses an activation which left the model in
another way than as its result (``self.aux_loss``, a hook that collects features). Before each backward pass the graph
outside the models, usually a few nodes, is walked; when a parameter is reached, the signal is multiplied on the edges
by which such paths come into the model. A hook on an activation inside a model sees the signal as it is: scaled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from fleet.strategies._shared.backward_calls import wrap_backward
from fleet.strategies._shared.parts import part_of
from fleet.strategies.amp.amp_optimizer import AmpOptimizer, LossScale

_MARK = "fleet_amp"
_INPUT = "input"
_OUTPUTS = ("output", "output, differentiable input")
Node = Any


def leave_model(output: Tensor, scale: LossScale, *, had_input: bool = False) -> Tensor:
    """Returns ``output`` in float32; the signal that comes back to it is multiplied by the scale.

    In float32: a float16 loss gradient would lose its small values before it is scaled. ``had_input`` says whether
    the model got an input that needs a gradient.
    """
    narrow = output.dtype in (torch.float16, torch.bfloat16)
    if not (scale.in_use and output.requires_grad and output.is_floating_point()):
        return output.float() if narrow else output
    scaled = output.float() if narrow else output.view_as(output)
    scaled.register_hook(lambda gradient: gradient * scale.factor)
    _mark(scaled, _OUTPUTS[had_input])
    # An alias, so that a user's retain_grad() and hooks see the signal before it is scaled.
    return scaled.view_as(scaled)


def enter_model(value: Tensor, scale: LossScale) -> Tensor:
    """Returns ``value``; the gradient that it gets is divided by the scale."""
    if not (scale.in_use and value.requires_grad and value.is_floating_point() and torch.is_grad_enabled()):
        return value
    inner = value.view_as(value)
    inner.register_hook(lambda gradient: unscaled(gradient, scale))
    _mark(inner, _INPUT)
    return inner


def _mark(tensor: Tensor, mark: str) -> None:
    node: Node = tensor.grad_fn
    node.metadata[_MARK] = mark


def unscaled(gradient: Tensor, scale: LossScale) -> Tensor:
    """Returns ``gradient`` divided by the scale, in its type; an inf or nan stays one."""
    if not scale.in_use:
        return gradient
    if gradient.dtype == torch.float16:
        return (gradient.float() / scale.factor).to(gradient.dtype)
    return gradient / scale.factor


class Signal:
    """Keeps one factor on every path while it is open; see [Note: One factor on every path].

    Args:
        scale: the loss scale.
        optimizers: told after each backward pass, when every gradient is in its place.
    """

    def __init__(self, scale: LossScale, optimizers: Sequence[AmpOptimizer]) -> None:
        self._scale = scale
        self._optimizers = optimizers
        self._parameters: dict[Tensor, Any] = {}
        self._waiting: list[Tensor] = []
        self._stops: list[Callable[[], None]] = []
        self._depth = 0

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Unscales the gradients of ``parameters``; of a frozen parameter, from the forward after it is unfrozen."""
        fresh = [p for p in parameters if p not in self._parameters]
        if fresh:
            self._waiting += fresh
            self.before_forward()
        if not self._stops:
            self._wrap("backward", self._optimizers)
            self._wrap("grad", ())

    def before_forward(self) -> None:
        """Adds parameters that were unfrozen since the last forward."""
        if not self._waiting:
            return
        for parameter in self._waiting:
            if parameter.requires_grad and parameter not in self._parameters:
                handle = parameter.register_hook(lambda gradient: unscaled(gradient, self._scale))
                hooks = cast(Any, parameter)._backward_hooks
                for earlier in list(hooks)[:-1]:  # the user's own come after it: they see the true size
                    hooks[earlier] = hooks.pop(earlier)
                self._parameters[parameter] = handle
        self._waiting = [p for p in self._waiting if not p.requires_grad]

    def close(self) -> None:
        """Removes every hook."""
        for handle in self._parameters.values():
            handle.remove()
        self._parameters.clear()
        for stop in self._stops:
            stop()
        self._stops.clear()

    def _wrap(self, name: str, told: Sequence[AmpOptimizer]) -> None:
        """Puts this object around ``torch.autograd.<name>``."""

        def scaled(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            # A backward pass inside another one (a reentrant checkpoint) continues a signal that is scaled already.
            if not self._scale.in_use or self._depth:
                return call(*args, **kwargs)
            first = next(iter(kwargs)) if not args else None  # both functions take the roots first
            given = args[0] if first is None else kwargs[first]
            self._depth += 1
            try:
                with self._other_paths_scaled((given,) if isinstance(given, Tensor) else tuple(given)) as roots:
                    result = call(roots, *args[1:], **kwargs) if first is None else call(**{**kwargs, first: roots})
            finally:
                self._depth -= 1
            for optimizer in told:
                optimizer.note_backward()
            return result

        self._stops.append(wrap_backward(scaled, name))

    @contextmanager
    def _other_paths_scaled(self, roots: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        """Yields the roots to start from; while it is open the signal comes into each model scaled."""
        if self._all_paths_pass_outputs([r.grad_fn for r in roots if isinstance(r, Tensor) and r.grad_fn is not None]):
            yield roots
            return
        with torch.enable_grad():  # an alias lies outside, also where the root lies inside a model
            roots = tuple(r.view_as(r) if isinstance(r, Tensor) and r.requires_grad else r for r in roots)
        edges = self._crossings([r.grad_fn for r in roots if isinstance(r, Tensor) and r.grad_fn is not None])
        handles = [node.register_hook(self._edge_hook(places)) for node, places in edges.items()]
        try:
            yield roots
        finally:
            for handle in handles:
                handle.remove()

    def _edge_hook(self, places: list[int]) -> Callable[[Any, Any], Any]:
        def scale_edges(to: tuple[Tensor | None, ...], came: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
            factor = self._scale.factor
            return tuple(g * factor if i in places and g is not None else g for i, g in enumerate(to))

        return scale_edges

    def _all_paths_pass_outputs(self, starts: list[Node]) -> bool:
        """Returns whether no parameter is reached from ``starts`` but through a model's output; the cheap case."""
        seen = set(starts)
        stack = list(starts)
        while stack:
            node = stack.pop()
            mark = node.metadata.get(_MARK)
            if mark == _OUTPUTS[False]:
                continue
            # What went in may have come out of another model: its paths need the whole walk.
            if mark == _OUTPUTS[True] or self._is_parameter(node):
                return False
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    stack.append(following)
        return True

    def _crossings(self, starts: list[Node]) -> dict[Node, list[int]]:
        """Returns, for nodes outside the models, the edges by which the signal would come into a model unscaled."""
        # A node may be reached both ways, from outside and through an output; the second decides that it is inside.
        outside: set[Node] = set(starts)
        inside: set[Node] = set()
        stack = [(node, False) for node in starts]
        while stack:
            node, is_inside = stack.pop()
            mark = node.metadata.get(_MARK)
            next_inside = mark in _OUTPUTS or (is_inside and mark != _INPUT)
            for following, _ in node.next_functions:
                seen = inside if next_inside else outside
                if following is not None and following not in seen:
                    seen.add(following)
                    stack.append((following, next_inside))
        edges: dict[Node, list[int]] = {}
        for node in outside - inside:
            if node.metadata.get(_MARK) in _OUTPUTS:
                continue
            places = [
                i
                for i, (following, _) in enumerate(node.next_functions)
                if following is not None and (following in inside or self._is_parameter(following))
            ]
            if places:
                edges[node] = places
        return edges

    def _is_parameter(self, node: Node) -> bool:
        # Where sharding divides a parameter, the graph holds the gathered one, which runs the hooks of its part.
        return type(node).__name__ == "AccumulateGrad" and part_of(node.variable) in self._parameters
