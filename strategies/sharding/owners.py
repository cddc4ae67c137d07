"""Stage 1: whole parameters belong to workers; each updates its own and sends them to the others."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from fleet.strategies._gradients.exchange_names import named_exchange
from fleet.strategies._gradients.flat import chunks, copy_back, flattened
from fleet.strategies._shared.experts import is_expert
from fleet.strategies._shared.norm import of_mesh
from fleet.strategies._shared.optimizer_wrapper import OptimizerWrapper, loss_of, step_hooks_around
from fleet.strategies._shared.parts import PART, check_place
from fleet.strategies._shared.waiting import wait_for
from fleet.strategies.sharding.units import check_apart


def plan_owners(sizes: Sequence[int], degree: int, loads: Sequence[int] = ()) -> list[int]:
    """Returns the owner of each of ``sizes``: the largest first, each to the worker that has least so far.

    Args:
        sizes: numbers of elements.
        degree: number of workers.
        loads: elements that each worker owns already; empty means none.

    Example:
        >>> plan_owners([1, 8, 3, 3], 2)
        [1, 0, 1, 1]
    """
    # Every worker computes the same plan without a message: ties go to the lower rank, equal sizes keep their order.
    lightest = [(load, rank) for rank, load in enumerate(loads or [0] * degree)]
    heapq.heapify(lightest)
    owners = [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        load, owners[place] = lightest[0]
        heapq.heapreplace(lightest, (load + sizes[place], owners[place]))
    return owners


class PartitionedOptimizer(OptimizerWrapper):
    """Updates the parameters that this worker owns, with state for them alone, then receives the others.

    The optimizer inside sees no gradient of the others' parameters, which every torch optimizer takes as nothing to
    do. Gradients are complete on every worker (data parallel), so clipping and all rules are those of one process.

    Args:
        optimizer: the optimizer inside.
        group: the workers that share one copy of the state.
        buffer_bytes: bytes of parameters that are in flight at once.
        offload: keep the state in host memory between steps.
        expert_group: the workers that hold the same experts, which share the state of those; ``None`` gives this worker
            all of it.
    """

    def __init__(
        self, optimizer: Optimizer, group: Any, buffer_bytes: float, offload: bool = False, expert_group: Any = None
    ) -> None:
        super().__init__(optimizer)
        self.group = group
        self._buffer_bytes = buffer_bytes
        self._rank = dist.get_rank(group)
        self._degree = dist.get_world_size(group)
        self._expert_group = expert_group
        self._expert_rank = 0 if expert_group is None else expert_group.rank()
        self._offload = offload
        self._owners: dict[Tensor, int] = {}
        self._assign(self.parameters())

    def owner(self, parameter: Tensor) -> int:
        """Returns the rank, in the group that shares its state, of the worker that updates ``parameter``."""
        if parameter not in self._owners:  # put into a group of the optimizer inside since the last step
            self.note_groups()
        return self._owners[parameter]

    def owns(self, parameter: Tensor) -> bool:
        """Returns whether this worker updates ``parameter``."""
        return self.owner(parameter) == (self._expert_rank if is_expert(parameter) else self._rank)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Updates this worker's parameters and exchanges all of them; returns the closure's loss."""
        loss = loss_of(closure)
        with step_hooks_around(self.optimizer):  # they see every gradient; clipping is one of them
            self._update()
            self.exchange()
        return loss

    def _update(self) -> None:
        """Lets the optimizer inside update this worker's parameters."""
        # Every rule skips a parameter without a gradient; afterwards clipping and hooks see all gradients again.
        hidden = [(p, p.grad) for p in self.parameters() if p.grad is not None and not self.owns(p)]
        for parameter, _ in hidden:
            parameter.grad = None
        self._move_state(to_host=False)
        mesh = of_mesh()
        try:
            with nullcontext() if mesh is None else mesh.only_owned():  # an optimizer that clips inside its step()
                super().step()
        finally:
            self._move_state(to_host=True)
            for parameter, gradient in hidden:
                parameter.grad = gradient

    @torch.no_grad()
    def exchange(self) -> None:
        """Gives every worker of the group the parameters as their owners have them."""
        for group, experts in ((self.group, False), (self._expert_group, True)):
            if group is not None:
                self._exchange_over(group, [p for p in self._owners if is_expert(p) is experts])

    def _exchange_over(self, group: Any, parameters: Sequence[Tensor]) -> None:
        rank = group.rank()
        degree = group.size()
        owned: list[list[Tensor]] = [[] for _ in range(degree)]
        for parameter in parameters:
            # A frozen parameter was not updated, and is equal everywhere.
            if parameter.requires_grad:
                owned[self._owners[parameter]].append(parameter.detach())
        # In each turn every owner sends one bucket, so the buckets of a turn together fill the buffer.
        limit = self._buffer_bytes / degree
        waiting = [list(chunks(tensors, limit)) for tensors in owned]
        for turn in range(max(map(len, waiting), default=0)):
            sent = []
            # All workers begin the broadcasts of a turn in one order: a group matches collectives by their order.
            for owner, queue in enumerate(waiting):
                if turn < len(queue):
                    chunk = queue[turn]
                    flat = flattened(chunk) if owner == rank else _flat_like(chunk)
                    with named_exchange("sharding", flat, f"parameters of {owner}, bucket {turn}"):
                        work = dist.broadcast(flat, group=group, group_src=owner, async_op=True)
                    sent.append((work, owner, flat, chunk))
            for work, owner, flat, chunk in sent:
                wait_for(work)
                if owner != rank:
                    copy_back(flat, chunk)

    def note_groups(self) -> None:
        """Gives the parameters of new groups owners."""
        check_apart((f"parameter {place} of the optimizer", p) for place, p in enumerate(self.parameters()))
        self._assign([p for p in self.parameters() if p not in self._owners])

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of this worker's parameters, and whose part it is."""
        return {**super().state_dict(), PART: self.place}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the part that this worker saved, or its share of a whole state.

        Raises CheckpointError for the part of another worker.
        """
        if PART in state_dict:
            check_place(state_dict[PART], self.place)
        super().load_state_dict({name: value for name, value in state_dict.items() if name != PART})
        # A whole state has entries for every parameter; only this worker's are kept in memory.
        self._drop_others()
        self._move_state(to_host=True)

    @property
    def place(self) -> dict[str, int]:
        """Which part of how many parts of the state this worker holds."""
        return {"rank": self._rank, "degree": self._degree}

    def _device(self) -> torch.device:
        return next(iter(self._owners)).device

    def _assign(self, parameters: Sequence[Tensor]) -> None:
        """Gives ``parameters`` owners: first the trained ones, so that the work is even."""
        # Experts are shared by a smaller group, whose ranks and loads count separately.
        degrees = {False: self._degree, True: 1 if self._expert_group is None else self._expert_group.size()}
        for experts, degree in degrees.items():
            loads = [0] * degree
            for parameter, owner in self._owners.items():
                if is_expert(parameter) is experts:
                    loads[owner] += parameter.numel()
            for trains in (True, False):
                batch = [p for p in parameters if p.requires_grad is trains and is_expert(p) is experts]
                owners = plan_owners([p.numel() for p in batch], degree, loads)
                for parameter, owner in zip(batch, owners, strict=True):
                    self._owners[parameter] = owner
                    loads[owner] += parameter.numel()
        self._drop_others()

    def _drop_others(self) -> None:
        for parameter in [p for p in self.state if p in self._owners and not self.owns(p)]:
            del self.state[parameter]

    def _move_state(self, to_host: bool) -> None:
        """With offload, moves the state to pinned host memory or back, unless the parameters are there too."""
        if not self._offload:
            return
        for parameter, entry in self.state.items():
            if parameter.device.type == "cpu":
                continue
            for key, value in entry.items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    entry[key] = _on_host(value) if to_host else value.to(parameter.device, non_blocking=True)
        if to_host and self._device().type == "cuda":
            torch.cuda.current_stream().synchronize()  # the state may be read by the host from now on

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "group": None, "_expert_group": None, "_owners": {}}


def _flat_like(chunk: list[Tensor]) -> Tensor:
    return chunk[0].new_empty(sum(t.numel() for t in chunk))


def _on_host(value: Tensor) -> Tensor:
    if value.device.type == "cpu":
        return value
    return torch.empty_like(value, device="cpu", pin_memory=True).copy_(value, non_blocking=True)
