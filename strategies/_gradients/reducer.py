"""GradientReducer: gradients of a stage, exchanged in buckets among the workers that hold the same stage.

DistributedDataParallel decides in forward that the next backward exchanges, and a pipeline runs other backwards in
between; this exchange is told when a backward is the last of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fleet.errors import ConfigError
from fleet.strategies._gradients.flat import chunks, copy_back, flattened
from fleet.strategies._gradients.gradient_exchange import GradientExchange
from fleet.strategies._shared.waiting import wait_for

# Buckets of a chunk that is exchanged while its backward runs: more of them start earlier, and cost messages.
_OVERLAPPED_BUCKETS = 8


class GradientReducer:
    """Exchanges the gradients of a stage in flat buckets.

    Args:
        parameters: the parameters of this stage by chunk, in the order in which forward uses them.
        exchange: the exchange with the workers that hold the same parameters; ``None`` without others.
        bucket_bytes: the size at which a bucket is full.
        last_bucket_bytes: with ``overlaps``, the size of the bucket that is sent last.
        overlaps: exchange a bucket as soon as its gradients are complete, and not after the step.
        finds_unused: accept parameters without a gradient on some workers.
        late: parameters that stages share, exchanged after all others, in separate buckets.
    """

    def __init__(
        self,
        parameters: Sequence[Sequence[nn.Parameter]],
        exchange: GradientExchange | None,
        *,
        bucket_bytes: float = 32 * 2**20,
        last_bucket_bytes: float = 2**20,
        overlaps: bool = False,
        finds_unused: bool = False,
        late: Sequence[Sequence[nn.Parameter]] = (),
    ) -> None:
        self.exchange = exchange
        self._by_chunk = [list(chunk) for chunk in parameters]
        self._late = [list(bucket) for bucket in late]
        self._overlaps = overlaps
        self._finds_unused = finds_unused
        self._bucket_bytes = bucket_bytes
        self._last_bucket_bytes = last_bucket_bytes
        self._kept: dict[nn.Parameter, Tensor] = {}
        self._started: list[Bucket] = []
        self._buckets: list[Bucket] = []
        self._next = 0

    def __deepcopy__(self, memo: Any) -> GradientReducer:
        return self  # a copied model trains by itself

    @property
    def parameters(self) -> dict[nn.Parameter, None]:
        """Every parameter whose gradient is exchanged, in order."""
        everyone = [p for chunk in self._by_chunk for p in chunk] + [p for bucket in self._late for p in bucket]
        return dict.fromkeys(p for p in everyone if p.requires_grad)

    def begin(self) -> None:
        """Sets gradients of earlier steps aside, which were exchanged then."""
        self._kept = {p: p.grad for p in self.parameters if p.grad is not None}
        for parameter in self._kept:
            parameter.grad = None
        late = {p for bucket in self._late for p in bucket}
        # Backward makes the gradients of the last chunk complete first, and in it those of the last layers.
        self._buckets = [
            Bucket(tensors, chunk)
            for chunk in reversed(range(len(self._by_chunk)))
            for tensors in self._planned(
                [p for p in reversed(self._by_chunk[chunk]) if p.requires_grad and p not in late]
            )
        ]
        self._next = 0

    def _planned(self, parameters: list[Any]) -> list[list[Any]]:
        """Returns the buckets of a chunk, whose gradients become complete in the order of ``parameters``."""
        if not self._overlaps or not parameters:
            return list(chunks(parameters, self._bucket_bytes))
        return overlapped_buckets(parameters, self._bucket_bytes, self._last_bucket_bytes)

    @contextmanager
    def last_backward(self, chunk: int) -> Iterator[None]:
        """While the context is open, gradients of ``chunk`` become complete."""
        if self.exchange is None or not self._overlaps:
            yield
            return
        handles = [
            p.register_post_accumulate_grad_hook(self._arrived(bucket))
            for bucket in self._buckets
            if bucket.chunk == chunk
            for p in bucket.parameters
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def finish(self, sum_ties: Callable[[], None], names: Callable[[], dict[Any, str]]) -> None:
        """Exchanges the remaining buckets; then adds the gradients of earlier steps.

        ``sum_ties`` adds up the gradients of parameters that stages share; they are exchanged after it. ``names`` is
        for messages. Raises ConfigError when a parameter has no gradient and the options do not allow it.
        """
        if self.exchange is not None:
            # Before the rest is sent, so that a refused step leaves no exchange half done.
            self._check_used([p for bucket in self._buckets for p in bucket.parameters], names)
            while self._next < len(self._buckets):
                self._start_next()
        sum_ties()
        if self.exchange is not None:
            for tensors in self._late:
                trained = [p for p in tensors if p.requires_grad]
                self._check_used(trained, names)
                self._start(Bucket(trained))
            for bucket in self._started:
                bucket.finish()
        self._started = []
        self._buckets = []
        for parameter, gradient in self._kept.items():
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
        self._kept = {}

    def _arrived(self, bucket: Bucket) -> Callable[[Tensor], None]:
        def note(parameter: Tensor) -> None:
            bucket.waiting.discard(parameter)
            # A later bucket may be full first and waits: all workers start their exchanges in one order.
            while self._next < len(self._buckets) and not self._buckets[self._next].waiting:
                self._start_next()

        return note

    def _start_next(self) -> None:
        self._next += 1
        self._start(self._buckets[self._next - 1])

    def _start(self, bucket: Bucket) -> None:
        if bucket.parameters and self.exchange is not None:
            bucket.send(self.exchange, len(self._started), self._finds_unused)
            self._started.append(bucket)

    def _check_used(self, parameters: Sequence[Any], names: Callable[[], dict[Any, str]]) -> None:
        unused = [] if self._finds_unused else [p for p in parameters if p.grad is None]
        if unused:
            raise ConfigError(
                f"{names().get(unused[0], 'a parameter')!r} took no part in the loss of this step, and its gradient is "
                "exchanged with other workers. Set strategy.find_unused_parameters = True, or let every parameter take "
                "part, or set requires_grad to False on those that do not."
            )


def overlapped_buckets(tensors: Sequence[Tensor], full_bytes: float, last_bytes: float) -> list[list[Tensor]]:
    """Returns buckets that travel while the rest of ``tensors`` is computed, in their order.

    A bucket waits for all of its tensors, so one as large as a stage would travel after backward. Buckets have an
    eighth of the bytes, at least ``last_bytes`` and at most ``full_bytes``; the last, which nothing hides, has the
    tensors at the end that fit into ``last_bytes``, and one at least.

    Example:
        >>> [len(bucket) for bucket in overlapped_buckets([torch.zeros(64)] * 10, 2**25, 256)]
        [2, 2, 2, 2, 1, 1]
    """
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    kept = len(tensors) - 1
    tail = sizes[-1]
    while kept and tail + sizes[kept - 1] <= last_bytes:
        kept -= 1
        tail += sizes[kept]
    limit = min(full_bytes, max(last_bytes, sum(sizes) / _OVERLAPPED_BUCKETS))
    return [*chunks(tensors[:kept], limit), *chunks(tensors[kept:], full_bytes)]


class Bucket:
    """Parameters whose gradients travel together; those of ``chunk`` become complete in its last backward pass."""

    def __init__(self, parameters: Sequence[Any], chunk: int = 0) -> None:
        self.chunk = chunk
        self.parameters = list(parameters)
        self.waiting = set(self.parameters)

    @torch.no_grad()
    def send(self, exchange: GradientExchange, number: int, finds_unused: bool) -> None:
        """Starts the exchange; with ``finds_unused``, the header says for each parameter who has a gradient."""
        self._gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        first = self._gradients[0]
        # Made on the host: a worker whose parameters are all unused must not look at the device twice.
        flags = [p.grad is not None for p in self.parameters] if finds_unused else []
        header = [torch.tensor(flags, dtype=first.dtype).to(first.device)] if flags else []
        flat = flattened([*self._gradients, *header])
        with exchange.named(flat, number):
            self._sent = exchange.send(flat, header_size=len(flags))

    @torch.no_grad()
    def finish(self) -> None:
        """Waits, and puts the gradients into place."""
        wait_for(self._sent.future)
        flat = self._sent.received()
        size = sum(gradient.numel() for gradient in self._gradients)
        used = flat[size:].tolist() or [1] * len(self.parameters)
        copy_back(flat[:size], self._gradients)
        # A parameter that no worker has used keeps None, so that no update rule moves it.
        for parameter, gradient, count in zip(self.parameters, self._gradients, used, strict=True):
            if count and parameter.grad is None:
                parameter.grad = gradient
