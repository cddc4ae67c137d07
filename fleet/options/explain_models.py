"""The models that train, in words: their divided parameters and bytes, or their tables on parameter servers."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

from torch import Tensor, nn

from fleet.strategies._shared.parameter_layout import Layout, layouts_in
from fleet.strategies.tensor_parallel.plan import generic_name

_SHOWN = 20


def divided_lines(models: Iterable[nn.Module]) -> list[str]:
    """Returns lines about the divided parameters of ``models``; no line where all are whole.

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


def row_lines(models: Iterable[nn.Module], tables: dict[str, Any]) -> list[str]:
    """Returns lines about the tables of ``models``, equal tables in one, and their dense parameters.

    ``tables`` is the option ``sparse_table_configs``.
    """
    # Here, because a collective job loads nothing of the parameter server.
    from fleet.ps.embeddings.embedding import SparseEmbedding
    from fleet.ps.embeddings.served_embedding import ServedEmbedding
    from fleet.ps.table.rules import Rule
    from fleet.ps.worker.table_configs import configure_table

    found: dict[str, list[str]] = {}
    dense = 0
    for model in models:
        for name, module in model.named_modules():
            own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
            if isinstance(module, ServedEmbedding):
                text = f"{own // module.embedding_dim} rows of {module.embedding_dim}, from the module's own weights"
            elif isinstance(module, SparseEmbedding):
                config = module.table_config(Rule("sgd"), name)
                start = configure_table(config, tables.get(config.name)).initializer
                text = f"rows of {module.dim} for any 64-bit id, each from {start.kind} ({start.a:g}, {start.b:g})"
            else:
                dense += own
                continue
            found.setdefault(text, []).append(name or "embedding")
    if not found:
        return []
    lines = [f"  {', '.join(names)}: {text}" for text, names in found.items()]
    return ["Rows on the servers:", *lines, f"Dense parameters: {dense:,} elements"]


def _MB(size_bytes: float) -> str:
    return f"{size_bytes / 1e6:,.3f} MB"
