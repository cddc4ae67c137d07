"""A small GPT in three forms with the same arithmetic: Fleet's layers, the same by hand, and plain for torch to cut.

By hand means three autograd Functions and plain local parameters, as a project that owns its model writes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Size:
    """Widths of the model and its batch."""

    vocab: int
    hidden: int
    heads: int
    layers: int
    tokens: int
    rows: int = 16


SIZES = {"small": Size(128, 64, 4, 4, 32), "big": Size(512, 256, 8, 4, 64)}


class Copied(torch.autograd.Function):
    """Identity, whose gradient is summed over the group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Returns ``x``."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Sums the gradient."""
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


class Summed(torch.autograd.Function):
    """Sum over the group, whose gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Sums in place."""
        dist.all_reduce(x)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Passes the gradient."""
        return gradient


class HandColumn(nn.Module):
    """Rows of the weight on each worker."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outside // dist.get_world_size(), inside).normal_(std=0.02))
        self.bias = nn.Parameter(torch.zeros(outside // dist.get_world_size()))

    def forward(self, x: Tensor) -> Tensor:
        """Returns this worker's columns."""
        copied: Tensor = Copied.apply(x)  # type: ignore[no-untyped-call]
        return F.linear(copied, self.weight, self.bias)


class HandRow(nn.Module):
    """Columns of the weight on each worker."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outside, inside // dist.get_world_size()).normal_(std=0.02))
        self.bias = nn.Parameter(torch.zeros(outside))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the sum over the workers."""
        summed: Tensor = Summed.apply(F.linear(x, self.weight))  # type: ignore[no-untyped-call]
        return summed + self.bias


def column(form: str, inside: int, outside: int) -> nn.Module:
    """Returns a layer divided by its output."""
    if form == "hand":
        return HandColumn(inside, outside)
    if form == "torch":
        return nn.Linear(inside, outside)
    from fleet import meta_parallel as mpu

    made: nn.Module = mpu.ColumnParallelLinear(inside, outside, has_bias=True, gather_output=False)
    return made


def row(form: str, inside: int, outside: int) -> nn.Module:
    """Returns a layer divided by its input."""
    if form == "hand":
        return HandRow(inside, outside)
    if form == "torch":
        return nn.Linear(inside, outside)
    from fleet import meta_parallel as mpu

    made: nn.Module = mpu.RowParallelLinear(inside, outside, input_is_parallel=True)
    return made


class BenchBlock(nn.Module):
    """Attention and an MLP."""

    def __init__(self, form: str, size: Size) -> None:
        super().__init__()
        hidden = size.hidden
        self.width = hidden // size.heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.q, self.k, self.v = (column(form, hidden, hidden) for _ in range(3))
        self.o = row(form, hidden, hidden)
        self.up, self.down = column(form, hidden, 4 * hidden), row(form, 4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Takes and returns [rows, tokens, hidden]."""
        h = self.norm1(x)
        q, k, v = (layer(h).unflatten(-1, (-1, self.width)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


def layers_of(form: str, size: Size) -> list[nn.Module]:
    """Returns embedding, blocks, norm and head; the ends are whole on every worker."""
    ends = [nn.Embedding(size.vocab, size.hidden), nn.Linear(size.hidden, size.vocab, bias=False)]
    return [ends[0], *(BenchBlock(form, size) for _ in range(size.layers)), nn.LayerNorm(size.hidden), ends[1]]


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def cut_by_torch(model: nn.Sequential) -> nn.Module:
    """Divides the plain model with ``parallelize_module``, as torch's tutorial does."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        if isinstance(block, BenchBlock):
            styles = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel()) | dict.fromkeys(
                ("o", "down"), RowwiseParallel()
            )
            parallelize_module(block, mesh, styles)
    return model


def batch(size: Size) -> tuple[Tensor, Tensor]:
    """Returns inputs and labels, the same on every worker."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(size.vocab, (2, size.rows, size.tokens), generator=generator)
    return x[0], x[1]
