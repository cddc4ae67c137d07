"""Stage 1: whole parameters belong to workers; each updates its own and sends them to the others."""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from math import prod
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from fleet.errors import CheckpointError
from fleet.strategies._gradients.exchange_names import named_exchange
from fleet.strategies._gradients.flat import chunks, copy_back, flattened
from fleet.strategies._shared.exchanged_texts import gather_texts
from fleet.strategies._shared.experts import is_expert
from fleet.strategies._shared.norm import of_mesh
from fleet.strategies._shared.optimizer_wrapper import OptimizerWrapper, step_hooks_around
from fleet.strategies._shared.parts import PART, check_place
from fleet.strategies.sharding.units import check_apart

_Entries: TypeAlias = dict[int, dict[str, Any]]  # the state of each parameter by its place in the groups


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
        self._group, self._buffer_bytes = group, buffer_bytes
        self._rank, self._degree = dist.get_rank(group), dist.get_world_size(group)
        self._expert_group, self._expert_rank = expert_group, 0 if expert_group is None else expert_group.rank()
        self._offload = offload
        self._owners: dict[Tensor, int] = {}
        self._assign(self.parameters())

    def owner(self, parameter: Tensor) -> int:
        """Returns the rank, in the group that shares its state, of the worker that updates ``parameter``."""
        return self._owners[parameter]

    def owns(self, parameter: Tensor) -> bool:
        """Returns whether this worker updates ``parameter``."""
        return self._owners[parameter] == (self._expert_rank if is_expert(parameter) else self._rank)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Updates this worker's parameters and exchanges all of them; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with step_hooks_around(self.optimizer):  # they see every gradient; clipping is one of them
            self._update()
            self.exchange()
        return loss

    def _update(self) -> None:
        """Lets the optimizer inside update what this worker owns."""
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
        for group, experts in ((self._group, False), (self._expert_group, True)):
            if group is not None:
                self._exchange_over(group, [p for p in self._owners if is_expert(p) is experts])

    def _exchange_over(self, group: Any, parameters: Sequence[Tensor]) -> None:
        rank, degree = group.rank(), group.size()
        owned: list[list[Tensor]] = [[] for _ in range(degree)]
        for parameter in parameters:
            if parameter.requires_grad:
                owned[self._owners[parameter]].append(parameter.detach())
        limit = self._buffer_bytes / degree
        waiting = [list(chunks(tensors, limit)) for tensors in owned]
        for turn in range(max(map(len, waiting), default=0)):
            sent = []
            for owner, queue in enumerate(waiting):
                if turn < len(queue):
                    chunk = queue[turn]
                    flat = flattened(chunk) if owner == rank else _flat_like(chunk)
                    with named_exchange("sharding", flat, f"parameters of {owner}, bucket {turn}"):
                        work = dist.broadcast(flat, group=group, group_src=owner, async_op=True)
                    sent.append((work, owner, flat, chunk))
            for work, owner, flat, chunk in sent:
                work.wait()
                if owner != rank:
                    copy_back(flat, chunk)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group, whose parameters get owners too."""
        super().add_param_group(param_group)
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
        self._drop_others()
        self._move_state(to_host=True)

    def entry_rows(self) -> list[list[Any]]:
        """Returns [owner, place, key, type, shape] of the state of every parameter; a collective call.

        The type of what is no tensor is "value", with the value instead of a shape.
        """
        places = {p: place for place, p in enumerate(self.parameters())}
        own = {places[p]: dict(entry) for p, entry in self.state.items() if p in places and entry}
        experts = {place for p, place in places.items() if is_expert(p)}
        rows = []
        for group, some in ((self._group, own.keys() - experts), (self._expert_group, own.keys() & experts)):
            text = _described({place: own[place] for place in some})
            texts = [text] if group is None else gather_texts(text, group, self._device())
            rows += [[owner, *row] for owner, text in enumerate(texts) for row in json.loads(text)]
        return sorted(rows, key=lambda row: int(row[1]))

    def entry_tensors(self, rows: Sequence[Sequence[Any]]) -> Iterator[Tensor]:
        """Yields the tensors of ``rows``, each whole on every worker of the group, in that order; a collective call.

        As many travel at once as the buffer holds.
        """
        batch: list[Sequence[Any]] = []
        size, parameters = 0, self.parameters()
        for row in rows:
            # Not in one batch: workers that share the others have different experts.
            if batch and is_expert(parameters[row[1]]) != is_expert(parameters[batch[-1][1]]):
                yield from self._received(batch)
                batch, size = [], 0
            batch.append(row)
            size += prod(row[4]) * getattr(torch, row[3]).itemsize
            if size >= self._buffer_bytes:
                yield from self._received(batch)
                batch, size = [], 0
        yield from self._received(batch)

    def _received(self, rows: Sequence[Sequence[Any]]) -> list[Tensor]:
        device, parameters = self._device(), self.parameters()
        experts = bool(rows) and is_expert(parameters[rows[0][1]])
        group, rank = (self._expert_group, self._expert_rank) if experts else (self._group, self._rank)
        by_owner: list[list[Tensor]] = [[] for _ in range(1 if group is None else group.size())]
        found = []
        for owner, place, key, kind, shape in rows:
            if owner == rank:
                found.append(self.state[parameters[place]][key].detach().to(device))
            else:
                found.append(torch.empty(shape, dtype=getattr(torch, kind), device=device))
            by_owner[owner].append(found[-1])
        for owner, tensors in enumerate(by_owner) if group is not None else ():
            for chunk in chunks(tensors, self._buffer_bytes):
                flat = flattened(chunk)
                dist.broadcast(flat, group=group, group_src=owner)
                if owner != rank:
                    copy_back(flat, chunk)
        return found

    @property
    def place(self) -> dict[str, int]:
        """Which part of how many parts of the state this worker holds."""
        return {"rank": self._rank, "degree": self._degree}

    def _device(self) -> torch.device:
        return next(iter(self._owners)).device

    def _assign(self, parameters: Sequence[Tensor]) -> None:
        """Gives ``parameters`` owners: those that train first, so that their work is even."""
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
        """With offload, moves the state to pinned host memory or back; nothing to do where parameters are there."""
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
        return {**super().__getstate__(), "_group": None, "_expert_group": None, "_owners": {}}


def _flat_like(chunk: list[Tensor]) -> Tensor:
    return chunk[0].new_empty(sum(t.numel() for t in chunk))


def _on_host(value: Tensor) -> Tensor:
    if value.device.type == "cpu":
        return value
    return torch.empty_like(value, device="cpu", pin_memory=True).copy_(value, non_blocking=True)


def _described(entries: _Entries) -> str:
    """Returns place, key, type and shape (or value) of everything in ``entries``, in one order, as JSON."""
    rows: list[list[Any]] = []
    for place, entry in sorted(entries.items()):
        for key, value in entry.items():
            if isinstance(value, Tensor):
                rows.append([place, key, str(value.dtype).removeprefix("torch."), list(value.shape)])
            elif value is None or isinstance(value, bool | int | float | str):
                rows.append([place, key, "value", value])
            else:
                raise CheckpointError(
                    f"full_state_dict(): the optimizer's state {key!r} is a {type(value).__name__}; tensors, numbers "
                    "and texts can be gathered. Save one state_dict() for each worker."
                )
    return json.dumps(rows)
