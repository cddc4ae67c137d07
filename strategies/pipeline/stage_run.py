"""StageRun: the order of one stage, run: micro-batches in, losses and gradients out.

[Note: What is kept]
Between the forward and the backward of a micro-batch a stage keeps its input tensors, and of its outputs only the place
in the graph where their gradient enters: the outputs themselves are freed once they have left. After a step nothing is
kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map

from fleet.common.notes import add_note
from fleet.strategies.pipeline.order import MicroStep, StageStream, channel_in, channel_out, plan_in_flight, plan_order
from fleet.strategies.pipeline.wire import Incoming, Known, Outgoing, Spec, StageLink


class Work:
    """The computation of a step on this stage, as a subclass defines it."""

    def input(self, micro: int) -> Any:
        """Returns the data of a micro-batch; the first part of the model asks."""
        raise NotImplementedError

    def run(self, chunk: int, micro: int, value: Any) -> Any:
        """Returns the output of ``chunk`` for ``value``."""
        raise NotImplementedError

    def loss(self, micro: int, output: Any) -> Tensor | None:
        """Receives the output of the model; returns where backward begins, ``None`` without backward."""
        raise NotImplementedError

    def hook(self, location: str, action: MicroStep, **tensors: Any) -> None:
        """Called at the begin and the end of each forward and backward."""

    def last_backward(self, chunk: int) -> AbstractContextManager[Any]:
        """Returns the context of the last backward of ``chunk``, in which its gradients become complete."""
        return nullcontext()


@dataclass
class StagePlace:
    """Where a stage stands in its pipeline, and its links."""

    num_stages: int
    stage: int
    num_chunks: int = 1
    mode: str = "1F1B"
    links_in: dict[StageStream, StageLink] = field(default_factory=dict)
    links_out: dict[StageStream, StageLink] = field(default_factory=dict)
    known_in: dict[StageStream, Known] = field(default_factory=dict)
    known_out: dict[StageStream, Known] = field(default_factory=dict)

    def order(self, num_micro: int) -> tuple[MicroStep, ...]:
        """Returns the actions of this stage in a step."""
        return plan_order(self.num_stages, self.stage, num_micro, num_chunks=self.num_chunks, mode=self.mode)


@dataclass
class Pending:
    """A micro-batch in a chunk between its forward and its backward; see [Note: What is kept]."""

    inputs: list[Tensor]
    edges: list[GradientEdge]
    specs: list[Spec]
    loss: Tensor | None = None
    input: Any = None
    output: Any = None


class StageRun:
    """One step of one stage.

    Args:
        place: the stage.
        work: the computation.
        num_micro: the number of micro-batches.
        signature: the number under which headers are remembered; ``None`` sends them with each message.
        trains: whether backward runs too.
        keeps_values: keep inputs and outputs until backward, for hooks that look at them.
    """

    def __init__(
        self,
        place: StagePlace,
        work: Work,
        num_micro: int,
        *,
        signature: int | None,
        trains: bool,
        keeps_values: bool = False,
    ) -> None:
        self._place = place
        self._work = work
        self._num_micro = num_micro
        self._signature = signature
        self._keeps_values = keeps_values
        order = place.order(num_micro)
        self._order = order if trains else [action for action in order if action.what == "f"]
        self._trains = trains
        self._held: dict[tuple[int, int], Pending] = {}
        self._in: dict[StageStream, Incoming] = {}
        self._out: dict[StageStream, Outgoing] = {}
        self._expected: dict[StageStream, list[MicroStep]] = {}
        self._open()

    def run(self) -> None:
        """Runs the order; afterwards every message has left and nothing is held."""
        for action in self._order:
            self._post_ahead()
            try:
                if action.what == "f":
                    self._forward(action)
                else:
                    self._backward(action)
            # A note, not another error: its class says what went wrong, and the note adds where.
            except Exception as error:
                add_note(error, f"Stage {self._place.stage} {self._described(action)}.")
                raise
        for stream in self._out.values():
            stream.finish()
        self._remember()

    # ---- streams --------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        place = self._place
        in_flight = plan_in_flight(place.num_stages, self._num_micro, place.num_chunks)
        for action in self._order:
            source = channel_in(action, place.stage, place.num_stages, place.num_chunks)
            target = channel_out(action, place.stage, place.num_stages, place.num_chunks)
            if source is not None:
                self._expected.setdefault(source, []).append(action)
                if source not in self._in:
                    self._in[source] = Incoming(place.links_in[source], self._headers(place.known_in, source))
            if target is not None and target not in self._out:
                known = self._headers(place.known_out, target)
                self._out[target] = Outgoing(place.links_out[target], in_flight, known)

    def _headers(self, known: dict[StageStream, Known], channel: StageStream) -> Any:
        # A gradient has the shapes of its activation (``Pending.specs``) and travels without a header.
        if channel.what == "b" or self._signature is None:
            return None
        return known.setdefault(channel, Known()).of(self._signature)

    def _remember(self) -> None:
        # Only after a whole step: a step that failed would leave the two ends with different headers.
        if self._signature is None:
            return
        for channel, stream in self._in.items():
            if channel.what == "f" and stream.known is None:
                self._place.known_in[channel].keep(self._signature, stream.received)
        for channel, sender in self._out.items():
            if channel.what == "f" and sender.known is None:
                self._place.known_out[channel].keep(self._signature, sender.sent)

    def _post_ahead(self) -> None:
        """Asks each stream for its next message, where its shapes are known."""
        # Before the action, so that the sender need not wait until this stage has computed.
        for channel, stream in self._in.items():
            coming = self._expected[channel]
            if stream.has_posted or not coming:
                continue
            if channel.what == "f":
                stream.post_value()
            elif (held := self._held.get((coming[0].chunk, coming[0].micro))) is not None and held.specs:
                stream.post(held.specs)

    # ---- forward --------------------------------------------------------------------------------------------------

    def _forward(self, action: MicroStep) -> None:
        place = self._place
        work = self._work
        source = channel_in(action, place.stage, place.num_stages, place.num_chunks)
        target = channel_out(action, place.stage, place.num_stages, place.num_chunks)
        if source is None:
            value = work.input(action.micro)
        else:
            value = self._in[source].take_value(f"the activation of micro-batch {action.micro}")
            self._expected[source].pop(0)
        work.hook("forward_begin", action, input_tensor=value, output_tensor=None)
        output = work.run(action.chunk, action.micro, value if source is None else tree_map(_given, value))
        work.hook("forward_end", action, input_tensor=value, output_tensor=output)
        inputs = [] if source is None else [leaf for leaf in tree_leaves(value) if _takes_gradient(leaf)]
        held = Pending(inputs, [], [])
        if self._keeps_values:
            held.input = value
            held.output = output
        if target is None:
            held.loss = work.loss(action.micro, output)
        else:
            what = f"the activation of micro-batch {action.micro}"
            # An edge keeps the graph alone, so the output is freed once it has left; see [Note: What is kept].
            for tensor in self._out[target].send_value(output, what):
                if _takes_gradient(tensor):
                    held.edges.append(get_gradient_edge(tensor))
                    held.specs.append(Spec(tuple(tensor.shape), tensor.dtype, False))
        if self._trains:
            self._held[action.chunk, action.micro] = held

    # ---- backward -------------------------------------------------------------------------------------------------

    def _backward(self, action: MicroStep) -> None:
        place = self._place
        work = self._work
        source = channel_in(action, place.stage, place.num_stages, place.num_chunks)
        target = channel_out(action, place.stage, place.num_stages, place.num_chunks)
        held = self._held.pop((action.chunk, action.micro))
        gradients = None if source is None else self._gradients(action, source, held)
        work.hook(
            "backward_begin", action, input_tensor=held.input, output_tensor=held.output, output_tensor_grad=gradients
        )
        is_last = action.micro == self._num_micro - 1
        with work.last_backward(action.chunk) if is_last else nullcontext():
            if held.loss is not None:
                torch.autograd.backward([held.loss])
            elif held.edges:
                torch.autograd.backward(held.edges, gradients)
        came = [leaf.grad for leaf in held.inputs]
        work.hook(
            "backward_end",
            action,
            input_tensor=held.input,
            output_tensor=held.output,
            input_tensor_grad=came,
            output_tensor_grad=gradients,
        )
        # The sender expects a gradient for each tensor that asked for one; an unused one gets zeros.
        if target is not None and held.inputs:
            whole = [
                torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(held.inputs, came, strict=True)
            ]
            self._out[target].send(whole, f"the gradient of micro-batch {action.micro}")

    def _gradients(self, action: MicroStep, source: StageStream, held: Pending) -> list[Tensor]:
        stream = self._in[source]
        self._expected[source].pop(0)
        if not held.specs:
            return []
        if not stream.has_posted:
            stream.post(held.specs)
        return stream.take(f"the gradient of micro-batch {action.micro}")

    def _described(self, action: MicroStep) -> str:
        chunk = f" of chunk {action.chunk}" if self._place.num_chunks > 1 else ""
        return f"was in the {_NAMES[action.what]} of micro-batch {action.micro}{chunk}"


_NAMES = {"f": "forward", "b": "backward"}


class _Given(Function):
    """A tensor that came in as the first layer gets it: no leaf, so that a layer may work in place."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        """Returns the same memory, and no view: in-place changes of views of a leaf are refused, too."""
        return leaf.data

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Returns the gradient."""
        return gradient


def _given(leaf: Any) -> Any:
    return _Given.apply(leaf) if _takes_gradient(leaf) else leaf  # type: ignore[no-untyped-call]


def _takes_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad and (leaf.is_floating_point() or leaf.is_complex())


def make_links(
    place: StagePlace, ranks: Sequence[int], group_of: Callable[[StageStream], Any], device: torch.device
) -> None:
    """Gives ``place`` a link for each stream of its stage; ``ranks`` are the global ranks of the stages."""
    # One micro-batch passes through every chunk, so its actions name all streams of the stage.
    for action in place.order(1):
        for find, links, is_out in ((channel_in, place.links_in, False), (channel_out, place.links_out, True)):
            channel = find(action, place.stage, place.num_stages, place.num_chunks)
            if channel is None or channel in links:
                continue
            stage = channel.target if is_out else channel.source
            described = f"stage {stage} (worker {ranks[stage]})"
            links[channel] = StageLink(group_of(channel), ranks[stage], int(channel.what == "b"), device, described)
