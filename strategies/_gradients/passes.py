"""Backward passes of a wrapped model: when one begins, whether it exchanges gradients, and which loss had one.

[Note: Decided when backward begins]
DistributedDataParallel decides in forward whether the next backward pass exchanges, and that decision serves one pass.
After two forwards the second backward pass would silently stay local, and a forward whose backward never comes (a
batch that is skipped, validation with gradients recorded) would use a decision up. Here a pass is prepared when it
begins: at the model's output or, for a graph that bypasses the output, at the first parameter that is watched.

``torch.autograd.grad`` passes through the output too and fills no gradient. The nodes that accumulate gradients tell it
apart: the engine does not run them then.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import TensorWeakRef

from fleet.errors import ConfigError
from fleet.strategies._gradients.arrivals import Arrivals, accumulator_of
from fleet.strategies._gradients.gradient_exchange import exchanging_in
from fleet.strategies._gradients.viewed import hook_viewed
from fleet.strategies._shared.casts import nested_tensors
from fleet.strategies._shared.parts import is_part

_MARK = "fleet_forward"


class Forward:
    """One forward of a wrapped model.

    Attributes:
        exchanges: whether its backward pass is to exchange gradients, as far as ``no_sync()`` says; see also
            :meth:`will_exchange`.
        begun: whether a backward pass of it has begun.
        differentiated: who ran a backward pass through its output: ``"user"``, ``"minimize"`` or nobody, ``""``.
    """

    def __init__(self, passes: Passes, exchanges: bool, begun: bool = False) -> None:
        self._passes = weakref.ref(passes)  # a graph that holds the passes would hold itself
        self.exchanges = exchanges
        self.begun = begun
        self.differentiated = ""

    def will_exchange(self) -> bool:
        """Returns whether the backward pass under way exchanges gradients; without one, whether a new pass would."""
        passes = self._passes()
        if passes is None:
            return False
        return passes.runs_exchange() if passes.running else self.exchanges and passes.is_due()

    def fills(self) -> bool:
        """Returns whether the backward pass under way adds to ``.grad`` of a parameter of the model."""
        passes = self._passes()
        return passes is not None and passes.fill()


class Passes:
    """The backward passes through the outputs of one wrapped model; see [Note: Decided when backward begins].

    Attributes:
        starts: called when a pass begins, before the first gradient arrives.
        gates: a pass exchanges when one of them returns True, or when there is none.
        ends: called when a pass has ended.
        checks: called before a pass that exchanges; they may raise.
        reducer: the data-parallel module, if there is one.
        arrivals: the gradients that arrive at its parameters, if there is one.
        begun: the number of passes that have begun; ``exchanged`` counts those that exchanged gradients.
        latest: the latest forward, which may be under way.
        takes_unseen: returns whether every pass that bypasses the outputs belongs to the latest forward.
        everyone: returns the parameters of all models that may share a graph with this one.
        hearing: returns the calls for a hook of the job's listeners.
    """

    def __init__(self, exchanging: nn.Module | None, parameters: Iterable[nn.Parameter]) -> None:
        self.starts: list[Callable[[], None]] = []
        self.gates: list[Callable[[], bool]] = []
        self.ends: list[Callable[[], None]] = []
        self.checks: list[Callable[[], None]] = []
        self.parameters = dict.fromkeys(parameters)
        self.takes_unseen: Callable[[], bool] = lambda: False
        self.everyone: Callable[[], Iterable[Tensor]] = lambda: self.parameters
        self.hearing: Callable[[str], Sequence[Callable[[], None]]] = lambda hook: ()
        self.running = False
        self.begun = self.exchanged = 0
        self._exchanging: Any = exchanging  # in data parallel or stages 2 and 3 of sharding
        self.reducer = exchanging if isinstance(exchanging, DistributedDataParallel) else None
        self._prepared = False  # torch's reducer waits for a pass, or for the gradients of the one under way
        self._latest = Forward(self, exchanges=True, begun=True)  # that has ended
        self.latest = self._latest
        self._places: dict[Tensor, tuple[TensorWeakRef, int]] = {}  # gradients after an exchange, and where
        self._accumulator: Any = None  # of the parameter that the last pass was recognised by
        self.arrivals: Arrivals | None = None
        if self.reducer is not None:
            self.arrivals = Arrivals(self.reducer, lambda: self.running, self._begin_unseen)

    def forward(self, chain: nn.Module, args: Any, kwargs: Any) -> Any:
        """Returns the output of ``chain``; backward passes through it are noticed."""
        if not torch.is_grad_enabled():
            return chain(*args, **kwargs)
        if torch.compiler.is_compiling():
            self._latest = Forward(self, exchanges=self.reducer is not None and self.reducer.require_backward_grad_sync)
            self.latest = self._latest
            return chain(*args, **kwargs)
        if self.running and torch._C._current_graph_task_id() == -1:
            self.running = False  # a pass that failed has no end
        exchanging = self._exchanging
        reducer = self.reducer
        made = Forward(self, exchanges=exchanging is not None and exchanging.require_backward_grad_sync)
        self.latest = made
        if reducer is None:
            return self._watched(chain(*args, **kwargs), made)
        # Workers that have joined wait for a word from forward whether backward will exchange.
        self._prepared = made.exchanges and reducer._join_config.enable and not self.gates
        # This is False as a rule: torch's forward would prepare the reducer for one pass, and begin() does so for each.
        reducer.require_backward_grad_sync = self._prepared
        try:
            output = chain(*args, **kwargs)
        finally:
            reducer.require_backward_grad_sync = made.exchanges
        reducer.require_forward_param_sync = made.exchanges and not self.gates
        return self._watched(output, made)

    def follow(self, parameters: Iterable[nn.Parameter]) -> None:
        """Follows the ``parameters`` that the module has now; other ones than before may train."""
        self.parameters = dict.fromkeys(parameters)
        if self.arrivals is not None:
            self.arrivals.follow()

    def fill(self) -> bool:
        """Returns whether the backward pass under way adds to ``.grad`` of one of the parameters."""
        try:
            if self._accumulator is not None and torch._C._will_engine_execute_node(self._accumulator):
                return True
        except RuntimeError:
            return False  # torch.autograd.grad(..., parameter)
        found = _first_filled(self.parameters)
        if found is not None and not is_part(found):
            # Most likely the node of the next pass, too; a search takes ten times as long.
            self._accumulator = accumulator_of(found)
        return found is not None

    def runs_exchange(self) -> bool:
        """Returns whether the pass under way exchanges gradients."""
        return self._prepared or bool(getattr(self._exchanging, "exchanges", False))

    def is_due(self) -> bool:
        """Returns whether a pass exchanges as far as the gates say."""
        return not self.gates or any(gate() for gate in self.gates)

    @property
    def in_forward(self) -> bool:
        """Whether a forward is under way."""
        return self.latest is not self._latest

    @property
    def exchanges(self) -> bool:
        """Whether there are passes that exchange."""
        return self._exchanging is not None

    @property
    def has_local(self) -> bool:
        """Whether a divided model holds gradients that no pass has exchanged yet."""
        has: Any = getattr(self._exchanging, "has_local", None)
        return has is not None and bool(has())

    @property
    def local_gradients(self) -> Arrivals | None:
        """The watch over gradients that wait in ``.grad`` for an exchange, if the model exchanges them there."""
        return self.arrivals or (self._exchanging if hasattr(self._exchanging, "has_exchanged") else None)

    def watch_loss(self, loss: Tensor, exchanges: bool) -> Tensor:
        """Returns ``loss``, from which backward is called while a forward is under way; that pass is noticed."""
        return cast(Tensor, self._watched(loss, Forward(self, exchanges and self._exchanging is not None)))

    def _begin_unseen(self) -> None:
        """Begins the pass of the latest forward, whose outputs the graph bypasses; other passes stay on this worker."""
        if self.takes_unseen() or (not self._latest.begun and self._exchanging.require_backward_grad_sync):
            self.begin()

    def begin(self, made: Forward | None = None) -> None:
        """Begins a pass that fills gradients, unless one is under way; of the latest forward when none is named.

        Raises ConfigError when it must exchange gradients and cannot.
        """
        if self.running:
            return
        if self._exchanging is None and not self.starts and not self.hearing("gradients_arrived"):
            self.begun += 1
            return  # nothing waits for the first gradient of the pass, and nothing for its end
        unseen = made is None
        made = made or self._latest
        reducer = self.reducer
        made.begun = True
        is_held = unseen and not getattr(self._exchanging, "require_backward_grad_sync", True)
        if reducer is not None and reducer._delay_all_reduce_all_params:
            reducer = None  # a wholly frozen model's reducer would wait for gradients that do not come
        elif made.exchanges and not is_held and self.is_due():
            self._exchange()
        else:
            self.tell(exchanges=False)
        self.running = True
        self.begun += 1
        self._places = {}
        # The engine calls it when the pass has ended and every gradient has arrived.
        torch.autograd.Variable._execution_engine.queue_callback(self._end)
        for start in self.starts:
            start()

    def _exchange(self) -> None:
        """Makes the pass that begins exchange gradients."""
        # They may raise, so they run before anything changes.
        for check in self.checks:
            check()
        self.tell(exchanges=True)
        if self.reducer is not None and self.arrivals is not None:
            self.arrivals.begin()
            if not self._prepared:
                self._prepare(self.reducer, self.arrivals)
            self._prepared = True

    def tell(self, *, exchanges: bool) -> None:
        """Tells a divided model whether this pass exchanges, where more than ``no_sync()`` decides."""
        if self.gates and self.reducer is None:
            self._exchanging.set_exchanges(exchanges)

    def _end(self) -> None:
        exchanged = self._prepared
        exchanges = self.runs_exchange()
        try:
            if exchanged and self.arrivals is not None:
                self.arrivals.end()
        finally:
            self.running = False
            self._prepared = False
        self.exchanged += exchanges
        for end in self.ends:
            end()
        for tell in self.hearing("gradients_arrived"):
            tell()
        if exchanges and self.hearing("exchange_ended"):
            torch.autograd.Variable._execution_engine.queue_callback(self._tell_exchanged)
        if exchanged and self.reducer is not None and self.reducer.gradient_as_bucket_view:
            # torch's own callback, which ends the exchange, is queued later than this one.
            torch.autograd.Variable._execution_engine.queue_callback(self._note_places)

    def _tell_exchanged(self) -> None:
        for tell in self.hearing("exchange_ended"):
            tell()

    def _note_places(self) -> None:
        with_gradients = ((p, p.grad) for p in self.parameters if p.grad is not None and not p.grad.is_sparse)
        self._places = {p: (TensorWeakRef(gradient), gradient.data_ptr()) for p, gradient in with_gradients}

    def check_places(self) -> None:
        """Raises ConfigError when a gradient, which is a view of a bucket that is exchanged, was given other memory."""
        for p, (gradient, place) in self._places.items():
            if p.grad is not None and gradient() is p.grad and p.grad.data_ptr() != place:
                raise ConfigError(
                    f"The .data of a gradient of shape {list(p.shape)} was assigned between backward() and step(): the "
                    "next exchange would not see it. Write p.grad.mul_(...), p.grad.copy_(...) or p.grad = ... instead."
                )

    def _prepare(self, reducer: DistributedDataParallel, arrivals: Arrivals) -> None:
        """Makes torch's reducer wait for the gradients of this pass."""
        if reducer.reducer._rebuild_buckets():  # as forward does, for a pass that no forward has prepared
            reducer._has_rebuilt_buckets = True
        reducer.reducer.prepare_for_backward(arrivals.find_used() if reducer.find_unused_parameters else [])
        reducer.require_forward_param_sync = True  # the next forward takes rank 0's buffers, as after every exchange

    def _watched(self, output: Any, made: Forward) -> Any:
        found = [output] if type(output) is Tensor else nested_tensors(output)
        tensors = [tensor for tensor in found if tensor.requires_grad]
        # Weakly: a graph that holds the passes would hold itself.
        arrive = partial(_arrive, weakref.ref(self), made)
        for tensor in tensors:
            node: Any = tensor.grad_fn
            for one in (node, hook_viewed(tensor, arrive)):
                if one is not None:
                    one.metadata[_MARK] = made
            if node is None or type(tensor) is not Tensor or tensor._backward_hooks is not None:
                tensor.register_hook(arrive)
            else:  # the same without a handle that removes it, in a third of the time
                tensor._backward_hooks = OrderedDict([(_MARK, arrive)])
                node._register_hook_dict(tensor)
        self._latest = made
        return output


def _arrive(passes_ref: weakref.ref[Passes], made: Forward, gradient: Tensor) -> None:
    """Records that the signal of a backward pass has reached an output."""
    passes = passes_ref()
    if passes is None or (passes.running and made.differentiated):
        return
    fills = passes.fill()
    if fills:
        passes.begin(made)
    else:
        # The gradients of earlier batches may wait in a frozen model, and stay there.
        passes.tell(exchanges=False)
    if not made.differentiated and (fills or fills_gradients(passes.everyone(), alone=True)):
        made.differentiated = "user"


def passes_of(chain: nn.Module) -> Passes:
    """Returns the passes of ``chain``: one object for each module that exchanges gradients."""
    exchanging = exchanging_in(chain)
    if exchanging is None:
        return Passes(None, chain.parameters())
    found = exchanging.__dict__.get("fleet_passes")
    if found is None:
        found = exchanging.__dict__["fleet_passes"] = Passes(exchanging, exchanging.parameters())
    return cast(Passes, found)


def fills_gradients(parameters: Iterable[Tensor], alone: bool = False) -> bool:
    """Returns whether the backward pass under way adds to ``.grad`` of one of ``parameters``; ``alone`` without any."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return _first_filled(trained) is not None if trained else alone


def _first_filled(parameters: Iterable[Tensor]) -> Tensor | None:
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        if is_part(parameter):
            return parameter  # the gathered parameter has the node, and only running units have one
        try:
            if torch._C._will_engine_execute_node(accumulator_of(parameter)):
                return parameter
        except RuntimeError:
            return None  # torch.autograd.grad(..., parameter)
    return None


def forwards_behind(loss: Tensor) -> list[Forward]:
    """Returns the forwards of wrapped models that ``loss`` was computed from."""
    nodes = nodes_behind(loss, ends=lambda node: _MARK in node.metadata)
    return [node.metadata[_MARK] for node in nodes if _MARK in node.metadata]


def nodes_behind(loss: Tensor, ends: Callable[[Any], bool] = lambda node: False) -> Iterator[Any]:
    """Yields the nodes of the graph of ``loss`` (a leaf has none), up to nodes at which the search ``ends``."""
    stack: list[Any] = [] if loss.grad_fn is None else [loss.grad_fn]
    seen = set(stack)
    while stack:
        node = stack.pop()
        yield node
        if ends(node):
            continue
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
