"""Planned layers: torch's linear layers and embeddings, divided in place as a plan says.

The module, its class and its ``nn.Parameter`` objects stay; the data of a parameter becomes this worker's part, and
the module instance gets a ``forward`` with the exchanges of the parts.
"""

from __future__ import annotations

from types import MethodType
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fleet.strategies._shared.parameter_layout import Layout, set_layout
from fleet.strategies._shared.random_streams import TRACKER
from fleet.strategies.tensor_parallel.layers import STREAM, check_ids
from fleet.strategies.tensor_parallel.place import LayerPlace
from fleet.strategies.tensor_parallel.plan_styles import PlanStyle
from fleet.strategies.tensor_parallel.regions import copy_to, gather_from, gathered, reduce_from, scatter_to

_ON_MODULE = "fleet_planned"


class PlannedLayer:
    """The settings of a divided layer; a copy of the module shares them.

    Attributes:
        style: the style of the layer in the plan.
        transposed: whether the weight is (inputs, outputs), as in Hugging Face's Conv1D.
        layouts: the layout of each divided parameter, by its name.
        whole: while True, the layer computes with whole weights, which it gathers, as on one worker.
    """

    def __init__(self, style: PlanStyle, place: LayerPlace, layouts: dict[str, Layout], transposed: bool) -> None:
        self.style = style
        self.place = place
        self.layouts = layouts
        self.transposed = transposed
        self.whole = False
        weight = layouts["weight"]
        self.order: Tensor | None = None
        self.back: Tensor | None = None
        if weight.sections:
            self.order, self.back = _orders(weight)

    def __deepcopy__(self, memo: Any) -> PlannedLayer:
        return self

    def parameter(self, module: nn.Module, name: str) -> Tensor | None:
        """Returns a parameter of ``module`` as the layer computes with it now: this worker's part, or whole."""
        value = module._parameters.get(name)
        layout = self.layouts.get(name)
        group = self.place.group
        if value is None or layout is None or group is None or not self.whole:
            return value
        parts = gathered(value.detach(), group, 0).chunk(layout.parts)
        return layout.joined(parts)

    def weight(self, module: nn.Module) -> Tensor:
        """Returns the weight in torch's order, (outputs, inputs)."""
        weight = cast(Tensor, self.parameter(module, "weight"))
        return weight.t() if self.transposed else weight


def planned(module: nn.Module) -> PlannedLayer | None:
    """Returns the settings of a divided layer; ``None`` for any other module."""
    found: PlannedLayer | None = module.__dict__.get(_ON_MODULE)
    return found


def divide_layer(
    module: nn.Module, style: PlanStyle, place: LayerPlace, layouts: dict[str, Layout], transposed: bool
) -> None:
    """Gives ``module`` the forward of a divided layer; its parameters have been cut by :func:`cut`."""
    module.__dict__[_ON_MODULE] = PlannedLayer(style, place, layouts, transposed)
    if style.kind == "vocab":
        forward: Any = _vocab_forward
    elif isinstance(module, nn.Embedding):
        forward = _embedding_forward
    else:
        forward = _column_forward if style.is_column else _row_forward
    module.__dict__["forward"] = MethodType(forward, module)


def cut(
    parameter: nn.Parameter, layout: Layout, holders: list[tuple[nn.Module, str]], place: LayerPlace, first: int
) -> None:
    """Replaces the data of ``parameter`` by this worker's part of worker ``first``'s data; the object stays.

    The node of the graph that adds to ``.grad`` keeps the shape it was made for as long as somebody, such as
    gradient_merge, holds it. Data of another type makes torch forget the node.
    """
    with torch.no_grad():
        if place.group is not None:
            dist.broadcast(parameter.data, first, group=place.group)
        if parameter.grad is not None:
            gradient = parameter.grad
            parameter.grad = None
            _replace(parameter, layout.part(parameter.data).contiguous())
            parameter.grad = layout.part(gradient).contiguous()
        else:
            _replace(parameter, layout.part(parameter.data).contiguous())
    for module, name in holders:
        set_layout(module, name, layout)


def _replace(parameter: nn.Parameter, part: Tensor) -> None:
    """Makes ``part`` the data of ``parameter``, and of the node that will add to its gradient.

    torch replaces a node that somebody keeps alive where the type of the data changes, and not where the shape does.
    """
    other = torch.float32 if part.dtype == torch.float64 else torch.float64
    parameter.data = part.new_empty(0, dtype=other)
    parameter.data = part


def draw_from_own_stream(module: nn.Module) -> None:
    """Makes ``module`` draw its random numbers from the stream that differs between the workers of a layer."""
    inside = module.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if STREAM not in TRACKER.names:
            return inside(*args, **kwargs)
        with TRACKER.rng_state(STREAM):
            return inside(*args, **kwargs)

    module.__dict__["forward"] = MethodType(forward, module)


def _orders(layout: Layout) -> tuple[Tensor, Tensor]:
    """Returns, for each place of the whole, its place in the parts one after the other; and the reverse."""
    whole = torch.arange(layout.whole[layout.dim])
    flat = Layout(layout.axis, 0, layout.parts, 0, (len(whole),), layout.sections)
    back = torch.cat([flat.part(whole, index) for index in range(layout.parts)])
    return back.argsort(), back


def _column_forward(self: nn.Module, x: Tensor) -> Tensor:
    layer = cast(PlannedLayer, planned(self))
    if layer.whole:
        return F.linear(x, layer.weight(self), layer.parameter(self, "bias"))
    group = layer.place.group
    y = F.linear(copy_to(x, group), layer.weight(self), layer.parameter(self, "bias"))
    if layer.style.kind == "column":
        return y
    y = gather_from(y, group)
    return y if layer.order is None else y.index_select(-1, layer.order.to(y.device))


def _row_forward(self: nn.Module, x: Tensor) -> Tensor:
    layer = cast(PlannedLayer, planned(self))
    bias = self._parameters.get("bias")
    if layer.whole:
        return F.linear(x, layer.weight(self), bias)
    group = layer.place.group
    if layer.style.kind == "row_split":
        x = scatter_to(x if layer.back is None else x.index_select(-1, layer.back.to(x.device)), group)
    y = reduce_from(F.linear(x, layer.weight(self)), group, in_place=True)
    return y if bias is None else y + bias.to(y.dtype)


def _embedding_forward(self: nn.Module, ids: Tensor) -> Tensor:
    layer = cast(PlannedLayer, planned(self))
    y = F.embedding(ids, layer.weight(self), cast(nn.Embedding, self).padding_idx)
    return gather_from(y, layer.place.group) if layer.style.kind == "column_gather" and not layer.whole else y


def _vocab_forward(self: nn.Module, ids: Tensor) -> Tensor:
    layer = cast(PlannedLayer, planned(self))
    padding = cast(nn.Embedding, self).padding_idx
    weight = layer.weight(self)
    if layer.whole:
        return F.embedding(ids, weight, padding)
    rows = layer.layouts["weight"].whole[0]
    name = type(self).__name__
    check_ids(ids, (ids >= 0) & (ids < rows), rows, name, "id")
    local = ids - weight.shape[0] * layer.place.rank
    elsewhere = (local < 0) | (local >= weight.shape[0])
    # F.embedding's padding_idx would name a row of this worker's part; the padding row must get no gradient.
    if padding is not None:
        own = ids == padding
        found = F.embedding(local.masked_fill(elsewhere, 0), weight)
        found = torch.where(own.unsqueeze(-1), found.detach(), found)
    else:
        found = F.embedding(local.masked_fill(elsewhere, 0), weight)
    return reduce_from(found.masked_fill(elsewhere.unsqueeze(-1), 0.0), layer.place.group, in_place=True)
