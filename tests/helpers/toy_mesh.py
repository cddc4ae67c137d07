"""A small model whose wide layers are divided over ``mp`` by hand, and the same model undivided in one process."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from fleet.job.axes import Axes
from fleet.strategies._shared.parameter_layout import Layout, layouts_in, set_layout

ROWS, WIDTH, WIDE, CLASSES = 8, 8, 16, 4
DIVIDED = {"up.weight": 0, "up.bias": 0, "down.weight": 1}  # the dim that is cut


class _Enter(torch.autograd.Function):
    """Into a divided region: as it is forward, summed over mp backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Leave(torch.autograd.Function):
    """Out of a divided region: summed over mp forward, as it is backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Toy(nn.Module):
    """LayerNorm, a layer divided by its outputs, one divided by its inputs, and an undivided head.

    Args:
        axes: the mesh; ``None`` builds the whole model.
        norm: what comes first.
    """

    def __init__(self, axes: Axes | None = None, norm: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.norm = nn.LayerNorm(WIDTH) if norm is None else norm
        self.up, self.down = nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, CLASSES)
        with torch.no_grad():
            self.norm.weight.mul_(torch.linspace(0.5, 1.5, WIDTH))
        self.parts = 1 if axes is None else axes.size("mp")
        self.__dict__["group"] = None if axes is None else axes.group("mp")
        if axes is not None and self.parts > 1:
            for name, dim in DIVIDED.items():
                cut(self, name, dim, axes)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the scores of ``x``."""
        group = self.__dict__["group"]
        x = self.norm(x)
        inner = x if group is None else cast(Tensor, _Enter.apply(x, group))
        inner = self.down(functional.gelu(self.up(inner)))
        if group is not None:
            inner = cast(Tensor, _Leave.apply(inner, group))
        return cast(Tensor, self.head(x + inner))


def cut(model: nn.Module, name: str, dim: int, axes: Axes) -> None:
    """Replaces the parameter ``name`` of ``model`` by this worker's part."""
    module, leaf = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
    whole = module.get_parameter(leaf)
    layout = Layout("mp", dim, axes.size("mp"), axes.rank("mp"), tuple(whole.shape))
    setattr(module, leaf, nn.Parameter(layout.part(whole.detach())))
    set_layout(module, leaf, layout)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Returns the rows of all workers at ``step``, and their classes."""
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    return x, torch.randint(CLASSES, (ROWS,), generator=generator)


def own_rows(tensor: Tensor, axes: Axes) -> Tensor:
    """Returns the rows of ``tensor`` that this worker trains on."""
    return tensor.chunk(axes.data_replicas)[axes.data_rank]


def whole(tensor: Tensor, layout: Layout | None, axes: Axes) -> Tensor:
    """Returns the whole of a parameter, gradient or state; every worker calls it."""
    held = tensor.detach()
    full = getattr(held, "full_tensor", None)
    held = (held if full is None else full()).contiguous()
    if layout is None:
        return held.clone()
    parts = [torch.empty_like(held) for _ in range(layout.parts)]
    dist.all_gather(parts, held, group=axes.group(layout.axis))
    return layout.joined(parts)


def whole_parameters(model: nn.Module, axes: Axes) -> dict[str, Tensor]:
    """Returns the whole parameters of ``model`` by name; every worker calls it."""
    layouts = layouts_in(model)
    return {name: whole(p, layouts.get(name), axes) for name, p in model.named_parameters()}


def whole_gradients(model: nn.Module, axes: Axes) -> dict[str, Tensor]:
    """Returns the whole gradients of ``model`` by name; every worker calls it."""
    layouts = layouts_in(model)
    return {name: whole(p.grad, layouts.get(name), axes) for name, p in model.named_parameters() if p.grad is not None}
