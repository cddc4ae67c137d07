"""Rows of whole parameters: which worker updates which, and how they travel.

[Note: Rows]
Worker r of N owns the r-th of N chunks of dimension 0, as in stage 3. So exchanged gradients and the optimizer's state
are the same DTensors as there, and norms, clipping, states and checkpoints know one form. The owner of a row does not
depend on the parameters that travel in one bucket.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fleet.strategies._gradients.exchange_names import named_exchange
from fleet.strategies._gradients.flat import chunks, gather_into, sum_scatter_into
from fleet.strategies._shared.parts import mark_gathered, mark_rows, rows_of
from fleet.strategies._shared.waiting import wait_for
from fleet.strategies.sharding.bucket_sizes import GATHERED_BYTES, IN_FLIGHT


class RowBucket:
    """Parameters side by side in a buffer with a line for each worker, which holds the rows that it owns.

    Args:
        parameters: of one type, on one device.
        degree: number of workers.
        header_size: numbers at the end of each line that are no rows.
    """

    def __init__(self, parameters: Sequence[Any], degree: int, header_size: int = 0) -> None:
        self.parameters = list(parameters)
        self.size = 0  # of the rows in a line
        self._degree = degree
        self._columns: list[tuple[int, int]] = []
        for p in self.parameters:
            # Shard(0) rounds up: the first owners have full chunks, the last ones fewer rows or none.
            width = -(-p.shape[0] // degree) * (p.numel() // p.shape[0]) if p.numel() else 0
            self._columns.append((self.size, width))
            self.size += width
        self._length = self.size + header_size

    def new_buffer(self) -> Tensor:
        """Returns a buffer of zeros."""
        made: Tensor = self.parameters[0].detach().new_zeros(self._degree, self._length)
        return made

    def put(self, buffer: Tensor, place: int, whole: Tensor) -> None:
        """Copies ``whole``, of the shape of parameter ``place``, into ``buffer``."""
        for lines, values in self._pieces(buffer, place, whole.reshape(-1)):
            lines.copy_(values)

    def take(self, buffer: Tensor, place: int, whole: Tensor) -> None:
        """Copies parameter ``place`` from ``buffer`` into ``whole``."""
        flat = whole.reshape(-1)
        for lines, values in self._pieces(buffer, place, flat):
            values.copy_(lines)
        # reshape() may have copied, so the values still have to reach the parameter.
        if not whole.is_contiguous():
            whole.copy_(flat.view(whole.shape))

    def rows(self, line: Tensor, place: int, own: Tensor) -> Tensor:
        """Returns the view of ``line`` for the rows of parameter ``place``, in the shape of ``own``."""
        begin = self._columns[place][0]
        return line[begin : begin + own.numel()].view(own.shape)

    def _pieces(self, buffer: Tensor, place: int, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields views of ``buffer`` and of the flat ``values`` of a parameter for the same rows."""
        # The rows fill the lines of the first owners; the next line is filled in part, and later ones stay zero.
        begin, width = self._columns[place]
        if not width:
            return
        full = values.numel() // width
        yield buffer[:full, begin : begin + width], values[: full * width].view(full, width)
        rest = values[full * width :]
        if rest.numel():
            yield buffer[full, begin : begin + rest.numel()], rest


class RowOwners:
    """The rows that each worker of ``mesh`` owns; with two dims, the first holds copies of the second.

    Attributes:
        group: the workers that share one copy; ``degree`` is their number, ``rank`` this one's place.
        copies: the workers that own the same rows, or ``None``.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group = mesh.get_group(mesh.ndim - 1)
        self.copies = mesh.get_group(0) if mesh.ndim > 1 else None
        self.rank = self.group.rank()
        self.degree = self.group.size()
        self._mesh = mesh

    def own(self, whole: Tensor) -> Tensor:
        """Returns this worker's rows of ``whole``, in its memory."""
        chunk = -(-whole.shape[0] // self.degree)
        begin = min(self.rank * chunk, whole.shape[0])
        return whole.detach()[begin : begin + chunk]

    def of(self, parameter: nn.Parameter) -> Any:
        """Returns this worker's rows of ``parameter`` as a DTensor, in the memory that the parameter has now."""
        known = rows_of(parameter)
        own = self.own(parameter)
        # A conversion such as model.half() moves the parameter, and its rows with it.
        if known is parameter or known.to_local().data_ptr() != own.data_ptr():
            known = nn.Parameter(self.shard(own, parameter), parameter.requires_grad)
            known.__dict__.update({name: v for name, v in vars(parameter).items() if name != "fleet_rows"})
            mark_gathered(known, parameter)  # part_of(known) is the parameter
            mark_rows(parameter, known)
        return known

    def shard(self, own: Tensor, whole: Tensor) -> DTensor:
        """Returns a DTensor of the shape of ``whole`` whose rows on this worker are ``own``."""
        placements = [*[Replicate()] * (self._mesh.ndim - 1), Shard(0)]
        like = torch.empty(whole.shape, device="meta") if own.is_contiguous() else whole
        return DTensor.from_local(own, self._mesh, placements, run_check=False, shape=whole.shape, stride=like.stride())

    def reduce(self, buffer: Tensor, number: int) -> tuple[Any, Tensor | None]:
        """Starts to sum ``buffer`` over the workers; returns the work, and this worker's line unless it is there."""
        with named_exchange("sharding", buffer, f"gradients, bucket {number}"):
            # gloo's reduce-scatter copies the buffer and sums the copy, so the sum in place is cheaper.
            if _is_gloo(self.group, buffer):
                return dist.all_reduce(buffer, group=self.group, async_op=True), None
            line = torch.empty_like(buffer[0])
            return sum_scatter_into(line, buffer.view(-1), group=self.group, async_op=True), line

    def _gather(self, buffer: Tensor) -> list[Any]:
        """Starts to fill every line of ``buffer`` from its worker; returns the works."""
        if not _is_gloo(self.group, buffer):
            return [gather_into(buffer.view(-1), buffer[self.rank], group=self.group, async_op=True)]
        # gloo gathers through two copies, which it keeps until its next exchange.
        ranks = dist.get_process_group_ranks(self.group)
        lines = zip(buffer, ranks, strict=True)
        return [dist.broadcast(line, rank, group=self.group, async_op=True) for line, rank in lines]

    @torch.no_grad()
    def gather(self, parameters: Sequence[nn.Parameter], bucket_bytes: float) -> None:
        """Gives every worker all rows of ``parameters`` as their owners have them."""
        sent: list[tuple[RowBucket, Tensor, list[Any]]] = []

        def finish() -> None:
            bucket, buffer, works = sent.pop(0)
            for work in works:
                wait_for(work)
            for place, p in enumerate(bucket.parameters):
                bucket.take(buffer, place, p.detach())

        for number, chunk in enumerate(chunks(parameters, min(bucket_bytes, GATHERED_BYTES))):
            # Each bucket in flight has a buffer, so their number bounds the memory.
            if len(sent) == IN_FLIGHT:
                finish()
            bucket = RowBucket(chunk, self.degree)
            buffer = bucket.new_buffer()
            for place, p in enumerate(chunk):
                own = self.own(p)
                bucket.rows(buffer[self.rank], place, own).copy_(own)
            with named_exchange("sharding", buffer, f"parameters, bucket {number}"):
                sent.append((bucket, buffer, self._gather(buffer)))
        while sent:
            finish()


def _is_gloo(group: Any, tensor: Tensor) -> bool:
    return bool(group._get_backend(tensor.device).name() == "gloo")
