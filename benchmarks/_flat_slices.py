"""Stage 2 of sharding with whole parameters: a prototype, to be measured beside the one that Fleet has.

Parameters lie in flat buckets, whole on every worker. Worker r of N owns the r-th of N slices of each bucket: of its
gradient while it waits for ``step()``, and of the optimizer's state. A bucket's gradients are exchanged as soon as the
last of them has arrived, then all but the slice is released. ``.grad`` holds a :class:`Placeholder` meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fleet.strategies._gradients.flat import broadcast_from_rank_0
from fleet.strategies._gradients.reducer import overlapped_buckets

# Buckets on the wire at once: a wire slower than backward would fill the memory with them.
IN_FLIGHT = 2


class Placeholder(Tensor):
    """A gradient without storage: this worker owns no more than a slice of it, which no ``.grad`` can hold."""

    @staticmethod
    def __new__(cls, parameter: Tensor, owner: Slices) -> Placeholder:
        """Returns one with the shape, the type and the device of ``parameter``."""
        made: Placeholder = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, parameter.shape, dtype=parameter.dtype, device=parameter.device, requires_grad=False
        )
        made.owner, made.parameter = owner, parameter
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Placeholder(shape={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Passes on what a further backward pass adds; raises RuntimeError for every other use."""
        is_backward = torch._C._current_graph_task_id() != -1  # type: ignore[attr-defined]
        if func is torch.ops.aten.add_.Tensor and is_backward and isinstance(args[0], Placeholder):
            args[0].owner.collect(args[0].parameter, args[1])
            return args[0]
        raise RuntimeError(
            f"sharding stage 2: {func} reads a gradient of which this worker holds a slice only. Clip with "
            "fleet.clip_grad_norm_, or set sharding_configs['stage'] to 1, where every worker has whole gradients."
        )


class FlatBucket:
    """Parameters in one flat memory, and this worker's slice of it.

    Attributes:
        pieces: what of each parameter lies in the slice, as the optimizer inside gets it; views of the flat memory.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: Any) -> None:
        self.parameters = list(parameters)
        self._group, self._degree = group, dist.get_world_size(group)
        size = sum(p.numel() for p in self.parameters)
        self._length = -(-size // self._degree)
        self._start = dist.get_rank(group) * self._length
        self._flat = parameters[0].new_zeros(self._length * self._degree)
        self._begins: dict[Tensor, int] = {}
        begin = 0
        for p in self.parameters:
            self._begins[p] = begin
            self._flat[begin : begin + p.numel()].copy_(p.detach().reshape(-1))
            p.data = self._flat[begin : begin + p.numel()].view_as(p)
            begin += p.numel()
        self.slice = self._flat[self._start : self._start + self._length]
        self.pieces: list[tuple[nn.Parameter, slice]] = []
        for p in self.parameters:
            first = max(self._begins[p], self._start) - self._start
            last = min(self._begins[p] + p.numel(), self._start + self._length) - self._start
            if first < last:
                self.pieces.append((nn.Parameter(self.slice[first:last]), slice(first, last)))
        self._gradients: Tensor | None = None
        self._missing: set[Tensor] = set()
        self._work: Any = None
        self.kept: Tensor | None = None

    def arrived(self, parameter: Tensor, gradient: Tensor) -> bool:
        """Takes a gradient; returns whether all are there."""
        if self._gradients is None:
            self._gradients = torch.empty_like(self._flat)
            self._missing = set(self.parameters)
        begin = self._begins[parameter]
        self._gradients[begin : begin + parameter.numel()].copy_(gradient.reshape(-1))
        self._missing.discard(parameter)
        return not self._missing

    def send(self) -> None:
        """Starts the exchange.

        gloo reduces to owners by a sum of a copy of the whole bucket, through a third one: the sum itself is the same
        traffic without either. Where the backend has a reduce-scatter of its own, that is half of the traffic.
        """
        assert self._gradients is not None
        if dist.get_backend(self._group) == "gloo":
            self._work = dist.all_reduce(self._gradients, group=self._group, async_op=True)
            return
        own = self._gradients.narrow(0, self._start, self._length)
        self._work = dist.reduce_scatter_tensor(own, self._gradients, group=self._group, async_op=True)

    def finish(self) -> None:
        """Waits, keeps the mean of the slice and releases the rest."""
        assert self._gradients is not None
        self._work.wait()
        mine = self._gradients.narrow(0, self._start, self._length) / self._degree
        self.kept = mine if self.kept is None else self.kept.add_(mine)
        self._gradients = None

    def hand_over(self) -> None:
        """Gives the pieces their gradients, of which the optimizer inside makes the update."""
        for piece, place in self.pieces:
            piece.grad = None if self.kept is None else self.kept[place]

    def clear(self) -> None:
        """Drops the gradients."""
        self.kept = None
        for piece, _ in self.pieces:
            piece.grad = None

    def gather(self) -> Any:
        """Starts the exchange of the updated slices, into the flat memory itself."""
        return dist.all_gather_into_tensor(self._flat, self.slice.detach(), group=self._group, async_op=True)


class Slices:
    """Divides the gradients and the optimizer state of ``module``, whose parameters stay whole.

    Args:
        module: is changed in place: its parameters become views of flat memory, with rank 0's values.
        group: the workers.
        bucket_bytes: the most that a bucket holds, but for one larger parameter.
    """

    def __init__(self, module: nn.Module, group: Any, bucket_bytes: float = 32 * 2**20) -> None:
        broadcast_from_rank_0([*module.parameters(), *module.buffers()], group)
        trained: list[Any] = [p for p in reversed(list(module.parameters())) if p.requires_grad]
        self._buckets = [FlatBucket(bucket, group) for bucket in overlapped_buckets(trained, bucket_bytes, 2**20)]
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        self._full: set[FlatBucket] = set()
        self._next = 0
        self._in_flight: list[FlatBucket] = []
        self._in_pass = False
        for p in trained:
            p.register_post_accumulate_grad_hook(self._arrived)

    def pieces(self) -> list[nn.Parameter]:
        """Returns what the optimizer inside is to update."""
        return [piece for bucket in self._buckets for piece, _ in bucket.pieces]

    def _arrived(self, parameter: Tensor) -> None:
        if not isinstance(parameter.grad, Placeholder):
            gradient = parameter.grad
            assert gradient is not None
            self.collect(parameter, gradient)
            parameter.grad = Placeholder(parameter, self)

    def collect(self, parameter: Tensor, gradient: Tensor) -> None:
        """Takes a gradient in a backward pass, and starts the buckets whose turn it is."""
        if not self._in_pass:
            self._in_pass = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        if self._bucket_of[parameter].arrived(parameter, gradient):
            self._full.add(self._bucket_of[parameter])
        while self._next < len(self._buckets) and self._buckets[self._next] in self._full:
            if len(self._in_flight) == IN_FLIGHT:
                self._in_flight.pop(0).finish()
            self._buckets[self._next].send()
            self._in_flight.append(self._buckets[self._next])
            self._next += 1

    def _end(self) -> None:
        assert self._next == len(self._buckets), "a parameter took no part"
        for bucket in self._in_flight:
            bucket.finish()
        self._in_flight, self._full = [], set()
        self._next, self._in_pass = 0, False

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Updates this worker's slices and receives the others."""
        for bucket in self._buckets:
            bucket.hand_over()
        optimizer.step()
        sent: list[Any] = []
        for bucket in self._buckets:
            bucket.clear()
            if len(sent) == IN_FLIGHT:
                sent.pop(0).wait()
            sent.append(bucket.gather())
        for work in sent:
            work.wait()
        for parameter in self._bucket_of:
            parameter.grad = None
