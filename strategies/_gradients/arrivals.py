"""Arrivals: the parameters that get gradients in a backward pass of a data-parallel module, and those that lack one.

[Note: What an exchange carries]
torch's reducer waits in a pass that exchanges for one gradient of each parameter, and sends all of ``.grad``, including
the gradients of earlier passes on this worker alone, under ``no_sync()`` or through the plain module. A parameter that
only they have reached (a head whose loss is computed in chunks) is given to the reducer when the pass ends.

With ``find_unused_parameters`` the reducer asks, when a pass begins, which parameters it may expect. It searches the
graph of one forward; the engine knows the graph of the whole pass, so the reducer is handed a graph with that answer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fleet.errors import ConfigError

_WATCHERS = "fleet_arrivals"


class Arrivals:
    """Watches the parameters whose gradients ``reducer`` exchanges; see [Note: What an exchange carries].

    Args:
        reducer: the data-parallel module.
        is_running: whether a pass is under way.
        begin_unseen: begins a pass that has reached no output.

    Attributes:
        local: the parameters to whose gradients something was added after the last exchange.
        outside: called with a parameter before a gradient is added to it that no pass of the module brings.
    """

    def __init__(
        self, reducer: DistributedDataParallel, is_running: Callable[[], bool], begin_unseen: Callable[[], None]
    ) -> None:
        self.local: set[Tensor] = set()
        self.outside: list[Callable[[Tensor], None]] = []
        self._reducer = reducer
        self._is_running = is_running
        self._begin_unseen = begin_unseen
        # The nodes that accumulate gradients, kept alive: torch drops a node, and its hooks, when nobody holds it.
        self._nodes: dict[nn.Parameter, Any] = {}
        # Frozen after they were exchanged, perhaps with gradients.
        self._frozen: dict[nn.Parameter, Any] = {}
        self._handles: list[Any] = []
        # In a pass that exchanges: the parameters with a gradient so far, and those that the reducer expects; None is
        # all.
        self._came: set[Tensor] | None = None
        self._expected: set[Tensor] | None = None
        self.follow()

    def __deepcopy__(self, memo: Any) -> None:
        """Returns None: a copied model makes its own passes."""

    def follow(self) -> None:
        """Watches the parameters that the reducer exchanges now."""
        present = set(self._reducer.module.parameters())
        known = self._frozen | self._nodes
        local = self.local.copy()
        self.release()
        self._frozen = {p: node for p, node in known.items() if p in present and not p.requires_grad}
        self._nodes = {p: accumulator_of(p) for p in self._reducer._module_parameters if p.requires_grad}
        watched = self._nodes | self._frozen
        self.local = local.intersection(watched)
        for parameter, node in watched.items():
            node.metadata.setdefault(_WATCHERS, weakref.WeakSet()).add(self)
            self._handles.append(node.register_prehook(partial(_arrive, weakref.ref(self), parameter)))

    def release(self) -> None:
        """Stops watching."""
        while self._handles:
            self._handles.pop().remove()
        self.local.clear()
        self._nodes = {}
        self._frozen = {}

    def has_exchanged(self, parameter: Tensor) -> bool:
        """Returns whether the reducer has exchanged ``parameter`` and nothing was added to its gradient since."""
        return (parameter in self._nodes or parameter in self._frozen) and parameter not in self.local

    def begin(self) -> None:
        """Begins a pass that exchanges."""
        self._came = set()
        self._expected = None

    def find_used(self) -> list[Tensor]:
        """Returns an output, for the reducer's search, of a graph with the parameters that this pass reaches."""
        # A local gradient goes along, though this pass does not reach its parameter; see _complete().
        expected = [p for p, node in self._nodes.items() if _is_executed(node) or self._waits(p)]
        self._expected = set(expected)
        # Parameters that were frozen after their forward; the reducer's search finds only trained ones.
        frozen = [p for p in expected if not p.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(True)
        with torch.enable_grad():
            found = [_Reached.apply(*expected)] if expected else []  # type: ignore[no-untyped-call]
        for parameter in frozen:
            parameter.requires_grad_(False)
        return found

    def arrive(self, parameter: nn.Parameter) -> None:
        """Notes a gradient that is about to be added to ``.grad`` of ``parameter``.

        Raises ConfigError where the exchange under way could not take it in.
        """
        if not self._is_running() and not any(one._is_running() for one in self._sharing(parameter)):
            self._begin_unseen()
            for note in () if self._is_running() else self.outside:
                note(parameter)
        came = self._came
        if came is None or parameter in self._frozen:
            self.local.add(parameter)
            return
        if parameter in came:
            raise ConfigError(
                f"{self._named([parameter])} got a second gradient in one backward pass, and the first is being "
                "exchanged. A part of the model that runs more than once in a forward cannot be recomputed with "
                "use_reentrant=True: pass use_reentrant=False to checkpoint()."
            )
        if self._expected is not None and parameter not in self._expected:
            raise ConfigError(
                f"strategy.find_unused_parameters found no use of {self._named([parameter])} in this backward pass, "
                "and a gradient came: torch.utils.checkpoint with use_reentrant=True hides what it computes. Pass "
                "use_reentrant=False to checkpoint(), or turn find_unused_parameters off."
            )
        came.add(parameter)

    def end(self) -> None:
        """Ends a pass that exchanges, with the parameters that only earlier passes have reached.

        Raises ConfigError where parameters took no part, or their gradients cannot arrive.
        """
        came = self._came or set()
        missing = [p for p in self._nodes if p not in came] if len(came) < len(self._nodes) else []
        try:
            if missing:
                self._complete(missing)
        finally:
            self._came = None
        self.local.difference_update(self._nodes)

    def _complete(self, missing: Sequence[nn.Parameter]) -> None:
        finds_unused = self._reducer.find_unused_parameters
        owed = [p for p in missing if self._waits(p)] if self._expected is not None or not finds_unused else []
        given = set(owed)
        silent = [p for p in missing if p not in given and not (finds_unused and p.grad is None)]
        present = {id(p) for p in self._reducer.module.parameters()}
        changed = [p for p in missing if id(p) not in present or _has_another_node(p, self._nodes[p])]
        if changed:
            raise ConfigError(
                f"Gradients of {self._named(changed)} came past the exchange: after distributed_model() had wrapped "
                "the model it was converted, moved or replaced (model.double(), layer.float(), p.data = ...). Convert "
                "and move the model before distributed_model()."
            )
        if silent and not finds_unused:
            raise ConfigError(
                f"{self._named(silent)} took no part in the loss of this backward pass, which was to exchange the "
                "gradients of all. Set strategy.find_unused_parameters = True, or let every parameter take part in the "
                "loss on every worker, or set requires_grad to False on those that do not. Of several backward passes "
                "before one step(), run all but the last under model.no_sync()."
            )
        if owed:
            _deliver(owed)

    def _waits(self, parameter: Tensor) -> bool:
        return parameter in self.local and parameter.grad is not None and parameter.requires_grad

    def _sharing(self, parameter: nn.Parameter) -> Iterable[Arrivals]:
        found: Iterable[Arrivals] = (self._nodes.get(parameter) or self._frozen[parameter]).metadata[_WATCHERS]
        return found

    def _named(self, parameters: Iterable[Tensor]) -> str:
        names = {id(p): name for name, p in self._reducer.module.named_parameters()}
        found = [repr(names.get(id(p), f"of shape {list(p.shape)}")) for p in parameters]
        return f"parameter{'s' if len(found) > 1 else ''} {', '.join(found)}"


class _Reached(torch.autograd.Function):
    """A node whose backward reaches parameters without a gradient for any."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        """Returns an empty tensor."""
        ctx.count = len(parameters)
        return parameters[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Returns no gradients."""
        return (None,) * ctx.count


def _deliver(parameters: Sequence[Tensor]) -> None:
    """Lets the reducer take ``.grad`` of ``parameters`` into its exchange, as if a gradient had arrived at each."""
    with _without_hooks(parameters), torch.enable_grad():
        reached = _Reached.apply(*parameters)  # type: ignore[no-untyped-call]
        reached.backward(torch.empty_like(reached))


@contextmanager
def _without_hooks(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Keeps hooks of the script, which expect a gradient, from being called."""
    kept = [p._backward_hooks for p in parameters]
    for parameter in parameters:
        parameter._backward_hooks = None
    try:
        yield
    finally:
        for parameter, hooks in zip(parameters, kept, strict=True):
            parameter._backward_hooks = hooks


def _arrive(arrivals: weakref.ref[Arrivals], parameter: nn.Parameter, gradients: Any) -> None:
    found = arrivals()
    if found is not None:
        found.arrive(parameter)


def accumulator_of(parameter: Tensor) -> Any:
    """Returns the node of the graph that adds to ``parameter.grad``; torch keeps it only while somebody holds it."""
    with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():  # a class of parameters may watch its uses
        view: Any = parameter.view_as(parameter).grad_fn
    return view.next_functions[0][0]


def _has_another_node(parameter: Tensor, node: Any) -> bool:
    return parameter.requires_grad and accumulator_of(parameter) is not node


def _is_executed(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return False  # torch.autograd.grad(..., parameter)
