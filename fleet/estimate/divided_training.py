"""Sharding stages 2 and 3 replayed on fake tensors: parts, gathered units, reduced gradients.

[Note: What fully_shard holds]
A worker keeps a part of each parameter, padded along dim 0 to equal parts. Before a unit runs, its parts are gathered
into one buffer and copied from there into whole parameters, so both exist for a moment; in forward the buffer stays
until that of the next unit has arrived. Stage 3 gives the whole parameters up after forward and gathers them again in
backward, where the next unit is requested while one unit runs. When the gradients of a unit are complete, the whole
parameters go, the gradients are copied into one buffer, reduced from there into this worker's part, and the buffer
stays until the next unit needs one. gloo, on the CPU, gathers and reduces in a copy of the buffer; that of a reduction
or of a unit that was requested ahead may last as long as the buffer, because a thread of its own works on it.
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


@dataclass(eq=False)
class Unit:
    """Parameters that are gathered and reduced together, and what is held of them at the moment."""

    parameters: list[nn.Parameter]
    size_bytes: int
    whole: Block | None = None
    gathering: Block | None = None
    in_backward: bool = False
    waiting: set[Tensor] = field(default_factory=set)  # parameters whose gradients have not come yet


class Divided(Exchange):
    """A model divided among ``degree`` workers; see [Note: What fully_shard holds].

    Args:
        tracker: records what is held.
        model: the user's module on fakes; its parameters become whole copies that exist for a while.
        units: qualified names of the modules that are units, inner ones first.
        degree: number of workers that share one copy.
        reshard: give whole parameters up after forward (stage 3).
        on_host: the workers exchange through gloo, on the CPU.
    """

    def __init__(
        self,
        tracker: StorageTracker,
        model: nn.Module,
        units: Sequence[str],
        degree: int,
        *,
        reshard: bool,
        on_host: bool,
    ) -> None:
        super().__init__(tracker, model)
        self._degree, self._reshard, self._on_host = degree, reshard, on_host
        self._is_last = True
        self._gathered: Block | None = None  # in forward: the buffer of the unit before
        self._reducing: Block | None = None
        self._buffers = [b for b in model.buffers() if b.numel()]
        self._order: list[Unit] = []  # in which units ran forward
        whole = list(model.parameters())
        self._parts: dict[Tensor, nn.Parameter] = {p: self._part_of(p) for p in whole}
        tracker.leave_out(whole)
        tracker.mark(self._parts.values(), "parameters")
        named = dict(model.named_modules(remove_duplicate=False))
        taken: set[Tensor] = set()
        self._unit_of: dict[Tensor, Unit] = {}
        self._units: list[Unit] = []
        for module in [*(named[name] for name in units), model]:
            own = [p for p in module.parameters() if p not in taken]
            taken.update(own)
            if own:
                self._units.append(self._watched(module, own))

    def take_over(self, optimizer: Optimizer) -> None:
        """Makes ``optimizer`` hold the parts; state that it had starts again, in parts."""
        for group in optimizer.param_groups:
            group["params"][:] = [self._parts.get(p, p) for p in group["params"]]
        optimizer.state.clear()

    def begin_batch(self, is_last: bool) -> None:
        """Takes rank 0's buffers, and waits for the gradients of every unit again."""
        self._is_last = is_last
        self._order.clear()
        self.tracker.pass_by(bytes_of(self._buffers), "communication")
        for unit in self._units:
            unit.waiting = {p for p in unit.parameters if p.requires_grad}

    def end_backward(self) -> None:
        """Reduces what is left, and lets go of everything that is whole."""
        for unit in self._units:
            self._finish(unit)
            self._give_up(unit)
        self._let_go(self._reducing, self._gathered)
        self._reducing = self._gathered = None

    def _part_of(self, parameter: nn.Parameter) -> nn.Parameter:
        shape = [self._padded(parameter) // self._degree, *parameter.shape[1:]]
        part = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
        return nn.Parameter(part, requires_grad=parameter.requires_grad)

    def _padded(self, parameter: Tensor) -> int:
        return -(-parameter.shape[0] // self._degree) * self._degree

    def _padded_bytes(self, parameters: Sequence[Tensor]) -> int:
        return sum(self._padded(p) * p.shape[1:].numel() * p.element_size() for p in parameters)

    def _watched(self, module: nn.Module, own: list[nn.Parameter]) -> Unit:
        unit = Unit(own, self._padded_bytes(own))
        module.register_forward_pre_hook(partial(self._before_forward, unit))
        module.register_forward_hook(partial(self._after_forward, unit))
        self._unit_of.update(dict.fromkeys(own, unit))
        return unit

    def _before_forward(self, unit: Unit, module: nn.Module, inputs: Any) -> None:
        self._gather(unit)

    def _after_forward(self, unit: Unit, module: nn.Module, inputs: Any, output: Any) -> None:
        if self.tracker.phase != "forward":
            if self._reshard and not unit.in_backward:
                self._give_up(unit)  # computed again as a part of a larger unit
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
        self._gathered, unit.gathering = None, None
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
        size = self._padded_bytes(ready)
        self._reducing = self.tracker.hold(2 * size if self._on_host else size, "communication")
        for parameter in ready:
            parameter.grad = None
        for parameter in ready:
            part = self._parts[parameter]
            if part.grad is None:
                part.grad = torch.empty_like(part)
                self.tracker.mark([part.grad], "gradients")
