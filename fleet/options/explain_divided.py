"""The divided parameters of models that train, in words: which, along which dimension, and how many bytes."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from torch import Tensor, nn

from fleet.strategies._shared.parameter_layout import Layout, layouts_in
from fleet.strategies.tensor_parallel.plan import generic_name

_SHOWN = 20


def divided_lines(models: Iterable[nn.Module]) -> list[str]:
    """Returns lines about the divided parameters of ``models``; none where all are whole.

    Parameters whose names differ in numbers share a line; a parameter with two names is counted under the first.
    """
    divided: dict[Tensor, tuple[str, Layout]] = {}
    everything: dict[Tensor, None] = {}
    for model in models:
        layouts = layouts_in(model)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            everything[parameter] = None
            if name in layouts:
                divided.setdefault(parameter, (name, layouts[name]))
    if not divided:
        return []
    groups: dict[tuple[str, str, int, int, bool], list[int]] = {}
    for held_part, (name, layout) in divided.items():
        key = (generic_name(name), layout.axis, layout.dim, layout.parts, bool(layout.sections))
        groups.setdefault(key, []).append(prod(layout.whole) * held_part.element_size())
    whole = [p.numel() * p.element_size() for p in everything if p not in divided]
    total = sum(size for sizes in groups.values() for size in sizes)
    held = sum(sum(sizes) / key[3] for key, sizes in groups.items())
    lines = [
        f"Divided: {len(divided)} of {len(everything)} parameters on this worker, {_MB(held)} of {_MB(total)}; whole: "
        f"{len(whole)}, {_MB(sum(whole))}"
    ]
    for (name, axis, dim, parts, sections), sizes in list(groups.items())[:_SHOWN]:
        pieces = ", in pieces" if sections else ""
        lines.append(
            f"  {name}: {len(sizes)} along dim {dim} over {axis} {parts}{pieces}, {_MB(sum(sizes) / parts)} of "
            f"{_MB(sum(sizes))}"
        )
    left = len(groups) - _SHOWN
    return [*lines, f"  and {left} more"] if left > 0 else lines


def _MB(size_bytes: float) -> str:
    return f"{size_bytes / 1e6:,.3f} MB"
