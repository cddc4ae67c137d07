"""TreeBucket: gradients that travel together, summed over all logical workers in the order of the tree.

[Note: The exchange]
A process holds the sums of the largest nodes of the tree over its logical ranks, each in one flat buffer that is
divided into as many slices as there are processes. It sends slice ``n`` of each of them to process ``n``, which adds
them in the order of the tree, and sends the sum to all others. Where one node covers a block (powers of two), as
many bytes travel as in a ring: 2 (N - 1) / N of the gradients. Elsewhere the first half is larger: the nodes of a block
travel apart.

Behind the gradients stand flags, which are summed with them: for each parameter how many logical workers have a
gradient of it, and a number on which all must agree. A parameter that nobody used keeps no gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fleet.job.logical_workers import LogicalWorkers, hosted_blocks
from fleet.strategies._gradients.exchange_names import named_exchange
from fleet.strategies._gradients.flat import gather_into
from fleet.strategies._shared.waiting import wait_for
from fleet.strategies.reproducible.tree import TreeStack, whole_nodes


class TreeBucket:
    """The gradients of ``parameters``, all of one type and device; see [Note: The exchange].

    Args:
        parameters: the parameters, in the order in which backward completes them.
        logical: the logical workers.
        group: the processes; ``None`` with one.
    """

    def __init__(self, parameters: Sequence[Tensor], logical: LogicalWorkers, group: Any) -> None:
        self.parameters = list(parameters)
        self.waiting: set[Tensor] = set()
        self._logical = logical
        self._group = group
        self._nodes = [list(whole_nodes(logical.num, block)) for block in hosted_blocks(logical.num, logical.num_hosts)]
        self._layouts: list[tuple[Sequence[int], Sequence[int], int]] = []  # shapes, strides, offsets in a flat buffer
        self._size = 0
        for parameter in self.parameters:
            self._layouts.append((parameter.shape, _dense_stride(parameter), self._size))
            self._size += parameter.numel()
        # The flags: one for each parameter, and the number on which all agree.
        length = self._size + len(self.parameters) + 1
        self._slice = -(-length // logical.num_hosts)
        first = self.parameters[0]
        self._like: dict[str, Any] = {"dtype": first.dtype, "device": first.device}
        self._stack = self._new_stack()
        self._merged: Tensor | None = None  # this process's slice of earlier rounds
        self._sent: tuple[Any, Tensor] | None = None
        self._gathered: tuple[Any, Tensor] | None = None
        self._kept: Tensor | None = None  # what an exchange reads, while it runs
        self._round: Tensor | None = None  # this process's slice of the round that was reduced

    def _new_stack(self) -> TreeStack[Tensor]:
        return TreeStack(self._logical.num, lambda left, right: left.add_(right))

    # ---- one logical worker's gradients ---------------------------------------------------------------------------

    def add(self, rank: int, gradients: Mapping[Tensor, Tensor], agreed: int) -> None:
        """Adds the gradients of logical worker ``rank``."""
        node = rank, rank + 1
        if not self._stack.completes(node):
            self._stack.push(node, self._leaf(gradients, agreed))
            return
        # The sum of a leaf and its left neighbour needs no buffer for the leaf.
        (begin, _), left = self._stack.sums.pop()
        own = [gradients.get(p) for p in self.parameters]
        views = self.views(left)
        torch._foreach_add_(views, [torch.zeros_like(v) if g is None else g for v, g in zip(views, own, strict=True)])
        self._flags(left).add_(self._new_flags(own, agreed))
        self._stack.push((begin, node[1]), left)

    def _leaf(self, gradients: Mapping[Tensor, Tensor], agreed: int) -> Tensor:
        own = [gradients.get(p) for p in self.parameters]
        flat = torch.empty(self._slice * self._logical.num_hosts, **self._like)
        flat[self._size :] = 0
        views = self.views(flat)
        torch._foreach_copy_(views, [torch.zeros_like(v) if g is None else g for v, g in zip(views, own, strict=True)])
        self._flags(flat).copy_(self._new_flags(own, agreed))
        return flat

    def _new_flags(self, own: Sequence[Tensor | None], agreed: int) -> Tensor:
        return torch.tensor([*(float(gradient is not None) for gradient in own), float(agreed)], **self._like)

    def _flags(self, flat: Tensor) -> Tensor:
        return flat[self._size : self._size + len(self.parameters) + 1]

    def views(self, flat: Tensor) -> list[Tensor]:
        """Returns the gradients in ``flat``, each in the layout of its parameter."""
        return [flat.as_strided(shape, stride, begin) for shape, stride, begin in self._layouts]

    def clear(self) -> None:
        """Drops the sums of a round that has ended."""
        self._stack = self._new_stack()

    def drop_merged(self) -> None:
        """Drops the sums of earlier rounds, after an update."""
        self._merged = None

    # ---- the exchange, in the last turn ---------------------------------------------------------------------------

    def send(self, rank: int, gradients: Mapping[Tensor, Tensor], agreed: int, number: int) -> None:
        """Starts the exchange with the gradients of the last logical worker, ``rank``.

        The sums of the earlier ones stay as they are: another backward pass of the same batch exchanges again.
        """
        # Adds into the right term, which is the leaf's own buffer.
        stack = TreeStack[Tensor](self._logical.num, lambda left, right: right.add_(left))
        stack.sums = list(self._stack.sums)
        stack.push((rank, rank + 1), self._leaf(gradients, agreed))
        nodes = [flat for _, flat in stack.sums]
        if self._group is None:
            self._sent = None, nodes[0]
            return
        hosts = self._logical.num_hosts
        given = nodes[0] if len(nodes) == 1 else torch.stack([n.view(hosts, -1) for n in nodes], 1).reshape(-1)
        counts = [len(found) * self._slice for found in self._nodes]
        received = torch.empty(sum(counts), **self._like)
        with named_exchange("reproducible", given, f"bucket {number}"):
            work = dist.all_to_all_single(
                received, given, counts, [len(nodes) * self._slice] * hosts, group=self._group, async_op=True
            )
        self._kept = given
        self._sent = work, received

    def reduce(self) -> None:
        """Waits for the slices of all processes, and adds them in the order of the tree."""
        assert self._sent is not None
        work, received = self._sent
        self._sent = None
        if work is not None:
            wait_for(work)
            self._kept = None
            stack = self._new_stack()
            places = [node for found in self._nodes for node in found]
            for node, part in zip(places, received.view(len(places), self._slice), strict=True):
                stack.push(node, part)
            received = stack.sums[0][1].clone()  # the other slices are released
        self._round = received

    def keep(self) -> None:
        """Keeps the round that was reduced, for the update that a later round makes."""
        self._merged = self._take_total()

    def _take_total(self) -> Tensor:
        assert self._round is not None
        found = self._round if self._merged is None else self._merged.add(self._round)
        self._round = None
        return found

    def gather(self, divisor: float) -> None:
        """Starts to send this process's slice, divided by ``divisor``, to all others."""
        total = self._take_total()
        if divisor != 1:
            total.div_(divisor)  # the flags with the rest
        if self._group is None:
            self._gathered = None, total
            return
        whole = torch.empty(self._slice * self._logical.num_hosts, **self._like)
        self._kept = total
        self._gathered = gather_into(whole, total, group=self._group, async_op=True), whole

    def finish(self) -> tuple[dict[Tensor, Tensor], float]:
        """Returns the gradients of the update, and the sum of the numbers on which all agree, both divided."""
        assert self._gathered is not None
        work, whole = self._gathered
        self._gathered = None
        if work is not None:
            wait_for(work)
        self._kept = None
        flags = self._flags(whole)
        *used, agreed = (flags.real if flags.is_complex() else flags).tolist()
        views = self.views(whole)
        return {p: view for p, view, count in zip(self.parameters, views, used, strict=True) if count > 0}, agreed


def _dense_stride(parameter: Tensor) -> Sequence[int]:
    """Returns the strides of a gradient of ``parameter`` without gaps: its own where it has none."""
    if torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return parameter.stride()
    return torch.empty(parameter.shape, device="meta").stride()
