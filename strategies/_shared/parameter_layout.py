"""Layout: the part of a whole parameter that a worker holds, as a plain tensor, where a layer is divided over workers.

A divided parameter is a plain ``nn.Parameter`` of the part's shape. Its layout stands beside it twice: on the
parameter, for code that looks at parameters (norms), and on the module that owns it, for code that goes by names
(states) and after a deep copy, which drops attributes of parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_ON_PARAMETER = "fleet_layout"
_ON_MODULE = "fleet_layouts"


@dataclass(frozen=True)
class Layout:
    """The part of a whole tensor that one worker holds.

    Attributes:
        axis: the axis of the mesh whose workers hold the other parts: ``'mp'`` or ``'ep'``.
        dim: the dimension that is divided.
        parts: how many parts there are.
        index: which of them this worker holds.
        whole: the shape of the whole tensor.
        sections: sizes along ``dim`` that are each divided by themselves, as query, key and value in one weight;
            ``()`` when the dimension is divided in one piece.
    """

    axis: str
    dim: int
    parts: int
    index: int
    whole: tuple[int, ...]
    sections: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a part."""
        return (*self.whole[: self.dim], self.whole[self.dim] // self.parts, *self.whole[self.dim + 1 :])

    def part(self, whole: Tensor, index: int | None = None) -> Tensor:
        """Returns a copy of part ``index`` of ``whole``, by default this worker's."""
        return torch.cat(self.places(whole, self.index if index is None else index), self.dim)

    def places(self, whole: Tensor, index: int) -> list[Tensor]:
        """Returns the views of ``whole`` that part ``index`` consists of, in the order of the part."""
        sections = whole.split(self.sections or (whole.shape[self.dim],), self.dim)
        return [section.chunk(self.parts, self.dim)[index] for section in sections]

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Returns the whole tensor made of all ``parts``, in the order of their index."""
        sizes = [size // self.parts for size in self.sections or (self.whole[self.dim],)]
        pieces = [part.split(sizes, self.dim) for part in parts]
        return torch.cat([piece for section in zip(*pieces, strict=True) for piece in section], self.dim)


def set_layout(module: nn.Module, name: str, layout: Layout) -> None:
    """Records that the parameter ``name`` of ``module`` itself is a part; Fleet's attributes say so too."""
    _mark(module.get_parameter(name), layout)
    module.__dict__.setdefault(_ON_MODULE, {})[name] = layout


def mark_parts(module: nn.Module) -> None:
    """Puts the layouts that ``module`` has by name on its parameters again, which a deep copy leaves bare."""
    for name, layout in layouts_in(module).items():
        _mark(module.get_parameter(name), layout)


def _mark(parameter: Tensor, layout: Layout) -> None:
    parameter.__dict__[_ON_PARAMETER] = layout
    parameter.__dict__.update(is_distributed=True, split_axis=layout.dim)


def layout_of(parameter: Tensor) -> Layout | None:
    """Returns the layout of a parameter that is a part, ``None`` for a whole one."""
    found: Layout | None = parameter.__dict__.get(_ON_PARAMETER)
    return found


def layouts_in(module: nn.Module) -> dict[str, Layout]:
    """Returns the layout of every divided parameter of ``module`` and its submodules, by qualified name.

    A parameter that two modules share stands under each of its names.
    """
    return {
        f"{prefix}.{name}" if prefix else name: layout
        for prefix, submodule in module.named_modules(remove_duplicate=False)
        for name, layout in submodule.__dict__.get(_ON_MODULE, {}).items()
    }


def layouts_of(module: nn.Module) -> dict[str, Layout]:
    """Returns the layouts of parameters in ``module`` that are divided among more than one worker, by name."""
    return {name: layout for name, layout in layouts_in(module).items() if layout.parts > 1}


def cut(whole: Tensor, layout: Layout | None) -> Tensor:
    """Returns this worker's part of a ``whole`` tensor, a copy; without layout the tensor itself.

    Example:
        >>> cut(torch.arange(4), Layout("mp", 0, 2, 1, (4,)))
        tensor([2, 3])
    """
    if layout is None or layout.parts == 1 or tuple(whole.shape) != layout.whole:
        return whole
    return layout.part(whole)


def is_stage(model: nn.Module) -> bool:
    """Returns whether ``model`` is a stage of a pipeline: names that it lacks may belong to other stages."""
    return int(getattr(model, "num_stages", 1)) > 1
