"""The memory of the exchange between workers, replayed on fake tensors: buckets, wire copies, averages.

No process group takes part. Each class stands for one way to exchange and repeats the strategy's allocations, each at
its moment; the figures were checked against runs with real workers.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fleet.estimate.storage_tracker import Block, StorageTracker
from fleet.job.logical_workers import hosted_blocks
from fleet.strategies._gradients.flat import chunks
from fleet.strategies._shared.experts import is_expert
from fleet.strategies.dgc import SMALLEST
from fleet.strategies.reproducible.tree import kept_sums, whole_nodes
from fleet.strategies.sharding.owners import plan_owners


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of the elements of ``tensors``."""
    return sum(t.numel() * t.element_size() for t in tensors)


class Exchange:
    """The exchange beside the user's loop; this base class, for a single worker, exchanges nothing.

    Args:
        tracker: records the memory.
        model: the user's module on fakes.
    """

    def __init__(self, tracker: StorageTracker, model: nn.Module) -> None:
        self.tracker = tracker
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.note_gradient)

    def note_gradient(self, parameter: Tensor) -> None:
        """Marks the gradient of ``parameter``, which was accumulated a moment ago."""
        self.tracker.mark([parameter.grad], "gradients")

    def take_over(self, optimizer: Optimizer) -> None:
        """Makes ``optimizer`` hold the parameters that this worker updates."""

    def begin_batch(self, is_last: bool) -> None:
        """Notes whether the backward pass of this batch exchanges gradients."""

    def end_backward(self) -> None:
        """Ends the exchange of a batch."""

    def begin_step(self) -> None:
        """Begins a call of ``step()``."""

    def end_step(self) -> None:
        """Ends a call of ``step()``."""


class Buckets(Exchange):
    """Data parallel: gradients live in buckets that stay from step to step.

    Args:
        tracker: records the memory.
        model: the user's module.
        wire_dtype: floating type in which float32 gradients cross the wire.
        sparse: dgc sends the largest entries of large gradients and holds the others back.
        dense_start: dgc begins with steps of plain momentum, whose state stays.
    """

    def __init__(
        self, tracker: StorageTracker, model: nn.Module, *, wire_dtype: torch.dtype | None = None,
        sparse: bool = False, dense_start: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(tracker, model)
        # Gradients of experts are exchanged by their layer, and are in no bucket.
        parameters: list[Tensor] = [p for p in model.parameters() if p.requires_grad and not is_expert(p)]
        self._buckets = {p: torch.empty_like(p, requires_grad=False) for p in parameters}
        self._buffers = list(model.buffers())
        self._wire_dtype = wire_dtype
        self._sparse = sparse
        self._dense_start = dense_start
        self._in_flight: list[Block] = []
        self._is_last = True
        self._held_back = False
        tracker.mark(self._buckets.values(), "gradients")

    def begin_batch(self, is_last: bool) -> None:
        """Receives rank 0's buffers, through one flat copy."""
        self._is_last = is_last
        self.tracker.pass_by(bytes_of(self._buffers), "communication")

    def end_backward(self) -> None:
        """Releases the copies that were on the wire."""
        for block in self._in_flight:
            self.tracker.release(block)
        self._in_flight.clear()

    def note_gradient(self, parameter: Tensor) -> None:
        """Moves the gradient into its bucket when this batch exchanges."""
        if not self._is_last or parameter not in self._buckets:
            super().note_gradient(parameter)
            return
        parameter.grad = self._buckets[parameter]
        if self._sparse and _is_large(parameter):
            # The magnitudes from which the largest are chosen; the chosen entries are small beside them.
            self.tracker.pass_by(bytes_of([parameter]), "communication")
        elif self._sparse:
            self._in_flight.append(self.tracker.hold(bytes_of([parameter]), "communication"))
        elif self._wire_dtype is not None and parameter.dtype == torch.float32:
            size = parameter.numel() * self._wire_dtype.itemsize
            self._in_flight.append(self.tracker.hold(size, "communication"))

    def begin_step(self) -> None:
        """Holds dgc's momentum and unsent gradients; the optimizer does not see those parameters."""
        if not self._sparse:
            return
        large = [p for p in self._buckets if _is_large(p)]
        if not self._held_back:
            self._held_back = True
            self.tracker.hold(2 * bytes_of(large), "optimizer_state")
        if not self._dense_start:
            for parameter in large:
                parameter.grad = None


class SharedUpdate(Buckets):
    """Sharding stage 1: data parallel, and each worker updates the parameters that it owns.

    Args:
        tracker: records the memory.
        model: the user's module.
        degree: number of workers that share one copy of the optimizer state.
        buffer_bytes: bytes of parameters that are in flight at once after an update.
        expert_degree: number of workers that share the state of the same experts.
    """

    def __init__(
        self, tracker: StorageTracker, model: nn.Module, degree: int, buffer_bytes: float, expert_degree: int = 1
    ) -> None:
        super().__init__(tracker, model)
        self._degree = degree
        self._expert_degree = expert_degree
        self._buffer_bytes = buffer_bytes
        self._in_flight_bytes = 0

    def take_over(self, optimizer: Optimizer) -> None:
        """Leaves ``optimizer`` the parameters of the worker that owns most."""
        parameters: list[Any] = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        mine: set[Any] = set()
        self._in_flight_bytes = 0
        for experts, degree in ((False, self._degree), (True, self._expert_degree)):
            mine.update(self._owned([p for p in parameters if is_expert(p) is experts], degree))
        for group in optimizer.param_groups:
            group["params"][:] = [p for p in group["params"] if p in mine]
        for parameter in [p for p in optimizer.state if p not in mine]:
            del optimizer.state[parameter]

    def _owned(self, parameters: list[Any], degree: int) -> list[Any]:
        """Returns the parameters of the worker that owns most of them; keeps the memory of their exchange."""
        owners = plan_owners([p.numel() for p in parameters], degree)
        owned = [[p for p, owner in zip(parameters, owners, strict=True) if owner == r] for r in range(degree)]
        if degree > 1:
            waiting = [list(map(bytes_of, chunks(part, self._buffer_bytes / degree))) for part in owned]
            in_flight = max(map(sum, zip_longest(*waiting, fillvalue=0)), default=0)
            self._in_flight_bytes = max(self._in_flight_bytes, in_flight)
        return max(owned, key=bytes_of)

    def end_step(self) -> None:
        """Exchanges the updated parameters through flat copies."""
        self.tracker.pass_by(self._in_flight_bytes, "communication")


class LogicalSums(Exchange):
    """reproducible: the gradients of a turn are set aside, and added to the sums that wait for their neighbours.

    In the last turn each gradient is copied, sent with the sums and received, in slices; the update's gradients are
    another copy. See [Note: The exchange] in ``strategies.reproducible.tree_bucket``.

    Args:
        tracker: records the memory.
        model: the user's module.
        num: the number of logical workers.
        hosts: the number of processes.
    """

    def __init__(self, tracker: StorageTracker, model: nn.Module, num: int, hosts: int) -> None:
        super().__init__(tracker, model)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._buffers = list(model.buffers())
        blocks = hosted_blocks(num, hosts)
        nodes = [len(list(whole_nodes(num, block))) for block in blocks]
        self._kept = max(kept_sums(num, block) for block in blocks)
        self._received = sum(nodes) / hosts if hosts > 1 else 0.0
        # The last turn's gradient in the tree, and where several sums travel a copy of all.
        self._sent = 1 + (max(nodes) if max(nodes) > 1 and hosts > 1 else 0)
        self._is_last = True
        self._sums: list[Block] = []  # until the update
        self._in_flight: list[Block] = []
        if len(blocks[0]) > 1:  # those that a round begins with, and those of logical worker 0
            tracker.hold(2 * bytes_of(self._buffers), "buffers")

    def begin_batch(self, is_last: bool) -> None:
        """Notes whether this is the last turn of an update."""
        self._is_last = is_last

    def note_gradient(self, parameter: Tensor) -> None:
        """Holds the copies of a gradient that are sent and received, in the last turn."""
        super().note_gradient(parameter)
        if self._is_last:
            copies = self._sent + self._received
            self._in_flight.append(self.tracker.hold(round(copies * bytes_of([parameter])), "communication"))

    def end_backward(self) -> None:
        """Adds the gradients to the sums; in the last turn receives those of the update."""
        size = bytes_of(self._parameters)
        if not self._is_last:
            if not self._sums:
                self._sums = [self.tracker.hold(size, "gradients") for _ in range(self._kept)]
            for parameter in self._parameters:
                parameter.grad = None
            return
        for block in self._in_flight:
            self.tracker.release(block)
        self._in_flight.clear()
        self._sums.append(self.tracker.hold(size, "gradients"))
        if self._received:  # gloo gathers into a copy
            self.tracker.pass_by(round((1 + self._received) * size), "communication")

    def end_step(self) -> None:
        """Drops the sums after an update."""
        for block in self._sums:
            self.tracker.release(block)
        self._sums.clear()


class Averages(Exchange):
    """localsgd: no gradient is exchanged; parameters are averaged through flat copies after an update."""

    def __init__(self, tracker: StorageTracker, model: nn.Module) -> None:
        super().__init__(tracker, model)
        self._parameters = [p for p in model.parameters() if p.requires_grad]

    def end_step(self) -> None:
        """Averages the parameters."""
        largest = max((bytes_of(chunk) for chunk in chunks(self._parameters)), default=0)
        self.tracker.pass_by(largest, "communication")


def _is_large(parameter: Tensor) -> bool:
    """Returns whether dgc sends the gradient of ``parameter`` sparsely."""
    return parameter.numel() >= SMALLEST and parameter.dtype == torch.float32
