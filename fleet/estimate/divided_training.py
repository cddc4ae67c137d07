"""Sharding stages 2 and 3 replayed on fake tensors: rows and buckets; parts, gathered units, reduced gradients.

[Note: What fully_shard holds]
A worker keeps a part of each parameter, padded along dim 0 to equal parts. Before a unit runs, its parts are gathered
into one buffer and copied from there into whole parameters, so both exist for a moment; in forward the buffer stays
until the next unit's buffer has arrived. The whole parameters are given up after forward and gathered again in
backward, where the next unit is requested while one unit runs. When the gradients of a unit are complete, the whole
parameters go, the gradients are copied into one buffer, reduced from there into this worker's part, and the buffer
stays until the next unit needs one. gloo, on the CPU, gathers and reduces in a copy of the buffer; the copy for a
reduction or for a unit requested ahead may last as long as the buffer, because another thread works on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from fleet.estimate.exchanged_training import Exchange, bytes_of
from fleet.estimate.storage_tracker import Block, StorageTracker
from fleet.strategies._gradients.flat import chunks
from fleet.strategies._gradients.reducer import overlapped_buckets
from fleet.strategies.sharding.bucket_sizes import GATHERED_BYTES, IN_FLIGHT, LAST_BYTES


@dataclass(eq=False)
class Unit:
    """Parameters that are gathered and reduced together, and the memory that they hold at the moment."""

    parameters: list[nn.Parameter]
    size_bytes: int
    whole: Block | None = None
    gathering: Block | None = None
    in_backward: bool = False
    waiting: set[Tensor] = field(default_factory=set)  # parameters whose gradients have not come yet


class Divided(Exchange):
    """A model divided among ``degree`` workers; see [Note: What fully_shard holds].

    Args:
        tracker: records the memory.
        model: the user's module on fakes; its parameters become whole copies that exist for a while.
        units: qualified names of the modules that are units, inner ones first.
        degree: number of workers that share one copy.
        reshard: give whole parameters up after forward.
        on_host: the workers exchange through gloo, on the CPU.
    """

    def __init__(
        self, tracker: StorageTracker, model: nn.Module, units: Sequence[str], degree: int, *, reshard: bool,
        on_host: bool,
    ) -> None:  # fmt: skip
        super().__init__(tracker, model)
        self._degree = degree
        self._reshard = reshard
        self._on_host = on_host
        self._is_last = True
        self._gathered: Block | None = None  # in forward: the buffer of the unit before
        self._reducing: Block | None = None
        self._buffers = [b for b in model.buffers() if b.numel()]
        self._order: list[Unit] = []  # in which units ran forward
        whole = list(model.parameters())
        self._parts: dict[Tensor, nn.Parameter] = {p: _part_of(p, degree) for p in whole}
        tracker.leave_out(whole)
        tracker.mark(self._parts.values(), "parameters")
        named = dict(model.named_modules(remove_duplicate=False))
        assigned: set[Tensor] = set()
        self._unit_of: dict[Tensor, Unit] = {}
        self._units: list[Unit] = []
        for module in [*(named[name] for name in units), model]:
            # Inner units come first, so the parameters of an outer one are those that no inner one has.
            own = [p for p in module.parameters() if p not in assigned]
            assigned.update(own)
            if own:
                self._units.append(self._watched(module, own))

    def take_over(self, optimizer: Optimizer) -> None:
        """Makes ``optimizer`` hold the parts; state that it had starts again, in parts."""
        for group in optimizer.param_groups:
            group["params"][:] = [self._parts.get(p, p) for p in group["params"]]
        optimizer.state.clear()

    def begin_batch(self, is_last: bool) -> None:
        """Receives rank 0's buffers, and waits for the gradients of every unit again."""
        self._is_last = is_last
        self._order.clear()
        self.tracker.pass_by(bytes_of(self._buffers), "communication")
        for unit in self._units:
            unit.waiting = {p for p in unit.parameters if p.requires_grad}

    def end_backward(self) -> None:
        """Reduces the remaining units, and releases all whole parameters."""
        for unit in self._units:
            self._finish(unit)
            self._give_up(unit)
        self._let_go(self._reducing, self._gathered)
        self._reducing = self._gathered = None

    def _watched(self, module: nn.Module, own: list[nn.Parameter]) -> Unit:
        unit = Unit(own, _padded_bytes(own, self._degree))
        module.register_forward_pre_hook(partial(self._before_forward, unit))
        module.register_forward_hook(partial(self._after_forward, unit))
        self._unit_of.update(dict.fromkeys(own, unit))
        return unit

    def _before_forward(self, unit: Unit, module: nn.Module, inputs: Any) -> None:
        self._gather(unit)

    def _after_forward(self, unit: Unit, module: nn.Module, inputs: Any, output: Any) -> None:
        if self.tracker.phase != "forward":
            # Recomputed as a part of a larger unit; in its own backward it needs its parameters next.
            if self._reshard and not unit.in_backward:
                self._give_up(unit)
            return
        if unit not in self._order:
            self._order.append(unit)
        if self._reshard:
            self._give_up(unit)
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(partial(self._before_backward, unit))

    def _before_backward(self, unit: Unit, gradient: Tensor) -> None:
        if unit.in_backward:
            return
        unit.in_backward = True
        self._gather(unit)
        # Backward visits the units in reverse order, so the unit before this one in forward comes next.
        place = self._order.index(unit)
        if place and self._reshard:
            before = self._order[place - 1]
            if before.whole is None and before.gathering is None:
                before.gathering = self._requested(before, ahead=True)

    def _requested(self, unit: Unit, ahead: bool = False) -> Block:
        if self._on_host and ahead:
            return self.tracker.hold(2 * unit.size_bytes, "communication")
        buffer = self.tracker.hold(unit.size_bytes, "communication")
        if self._on_host:
            self.tracker.pass_by(unit.size_bytes, "communication")
        return buffer

    def _gather(self, unit: Unit) -> None:
        if unit.whole is not None:
            return
        buffer = unit.gathering or self._requested(unit)
        self._let_go(self._gathered)
        self._gathered = None
        unit.gathering = None
        unit.whole = self.tracker.hold(unit.size_bytes, "parameters")
        if self.tracker.phase == "forward":
            self._gathered = buffer
        else:
            self.tracker.release(buffer)

    def _let_go(self, *blocks: Block | None) -> None:
        for block in blocks:
            if block is not None:
                self.tracker.release(block)

    def _give_up(self, unit: Unit) -> None:
        self._let_go(unit.whole, unit.gathering)
        unit.whole = unit.gathering = None

    def note_gradient(self, parameter: Tensor) -> None:
        """Reduces a unit when its last gradient has come."""
        super().note_gradient(parameter)
        unit = self._unit_of[parameter]
        unit.waiting.discard(parameter)
        if not unit.waiting:
            self._finish(unit)

    def _finish(self, unit: Unit) -> None:
        """Gives the whole parameters of ``unit`` up, and reduces its gradients where this batch exchanges."""
        self._give_up(unit)
        unit.in_backward = False
        ready = [p for p in unit.parameters if p.grad is not None]
        if not self._is_last or not ready:
            return
        self._let_go(self._reducing)
        size = _padded_bytes(ready, self._degree)
        self._reducing = self.tracker.hold(2 * size if self._on_host else size, "communication")
        for parameter in ready:
            parameter.grad = None
        for parameter in ready:
            part = self._parts[parameter]
            if part.grad is None:
                part.grad = torch.empty_like(part)
                self.tracker.mark([part.grad], "gradients")


class DividedGradients(Exchange):
    """Stage 2: whole parameters; buckets of gradients become this worker's rows of them.

    Args:
        tracker: records the memory.
        model: the user's module on fakes.
        degree: number of workers that share one copy of the gradients.
        bucket_bytes: bytes of parameters or gradients that travel at once.
    """

    def __init__(self, tracker: StorageTracker, model: nn.Module, degree: int, bucket_bytes: float) -> None:
        super().__init__(tracker, model)
        self._degree = degree
        trained = [p for p in reversed(list(model.parameters())) if p.requires_grad]
        self._plan = overlapped_buckets(trained, bucket_bytes, LAST_BYTES) if trained else []
        self._rows: dict[Tensor, nn.Parameter] = {p: _part_of(p, degree) for p in trained}
        self._buffers = [b for b in model.buffers() if b.numel()]
        gathered = chunks(trained, min(bucket_bytes, GATHERED_BYTES))
        self._gathered_bytes = max((_padded_bytes(chunk, degree) for chunk in gathered), default=0)
        self._came: set[Tensor] = set()
        self._is_last = True
        self._next = 0
        self._sent: list[tuple[Block, list[Tensor]]] = []
        self._lingering: list[Block] = []
        tracker.leave_out(self._rows.values())  # in the memory of the parameters

    def take_over(self, optimizer: Optimizer) -> None:
        """Makes ``optimizer`` hold the rows; state that it had starts again."""
        for group in optimizer.param_groups:
            group["params"][:] = [self._rows.get(p, p) for p in group["params"]]
        optimizer.state.clear()

    def begin_batch(self, is_last: bool) -> None:
        """Receives rank 0's buffers, and waits for every gradient."""
        self._is_last = is_last
        self._came.clear()
        self._next = 0
        self.tracker.pass_by(bytes_of(self._buffers), "communication")

    def note_gradient(self, parameter: Tensor) -> None:
        """Sends a bucket when all of its gradients have come, in the last batch of an update."""
        super().note_gradient(parameter)
        self._came.add(parameter)
        while self._is_last and self._next < len(self._plan) and self._came.issuperset(self._plan[self._next]):
            self._send()

    def end_backward(self) -> None:
        """Sends and receives the remaining buckets."""
        while self._is_last and self._next < len(self._plan):
            self._send()
        while self._sent:
            self._receive()
        self._let_go()

    def end_step(self) -> None:
        """Gathers the updated parameters."""
        self.tracker.pass_by(IN_FLIGHT * self._gathered_bytes, "communication")

    def _send(self) -> None:
        bucket = self._plan[self._next]
        self._next += 1
        if len(self._sent) == IN_FLIGHT:
            self._receive()
        self._sent.append((self.tracker.hold(_padded_bytes(bucket, self._degree), "communication"), bucket))
        for parameter in bucket:
            parameter.grad = None

    def _receive(self) -> None:
        block, bucket = self._sent.pop(0)
        for parameter in bucket:
            rows = self._rows[parameter]
            rows.grad = torch.empty_like(rows)
            self.tracker.mark([rows.grad], "gradients")
        self._let_go()
        self._lingering.append(block)

    def _let_go(self) -> None:
        # gloo's thread frees a buffer some time after the wait for it has ended; counted here until the next wait.
        while self._lingering:
            self.tracker.release(self._lingering.pop())


def _padded(parameter: Tensor, degree: int) -> int:
    return -(-parameter.shape[0] // degree) * degree


def _padded_bytes(parameters: Sequence[Tensor], degree: int) -> int:
    return sum(_padded(p, degree) * p.shape[1:].numel() * p.element_size() for p in parameters)


def _part_of(parameter: nn.Parameter, degree: int) -> nn.Parameter:
    shape = [_padded(parameter, degree) // degree, *parameter.shape[1:]]
    part = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
    return nn.Parameter(part, requires_grad=parameter.requires_grad)
