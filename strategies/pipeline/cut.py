"""Where a list of layers is cut into the parts of a pipeline; pure arithmetic on names and numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fleet.errors import ConfigError

Method = str | Sequence[int]


def plan_cut(names: Sequence[str], parts: int, method: Method = "uniform") -> list[int]:
    """Returns the boundaries of ``parts`` consecutive parts: part ``i`` is ``[cut[i], cut[i + 1])``.

    Args:
        names: the class or function name of each layer.
        parts: how many parts; stages times chunks.
        method: ``'uniform'`` gives each part as many layers, the last parts one more; ``'layer:REGEX'`` gives each part
            as many layers whose name matches; a list holds the first layer of each part, and may end with the number
            of layers.

    Raises ConfigError where a part would be empty, or the matching layers do not divide by the parts.

    Example:
        >>> plan_cut(["Block"] * 11, 4)
        [0, 2, 5, 8, 11]
    """
    if len(names) < parts:
        raise ConfigError(
            f"PipelineLayer has {len(names)} layers for {parts} parts; each part needs at least one. Lower pp_degree "
            "or num_virtual_pipeline_stages, or split a layer."
        )
    if not isinstance(method, str):
        return _listed(method, len(names), parts)
    if method == "uniform":
        size, rest = divmod(len(names), parts)
        sizes = [size + (part >= parts - rest) for part in range(parts)]
        return [sum(sizes[:part]) for part in range(parts + 1)]
    if method.startswith("layer:"):
        return _by_name(names, parts, method)
    raise ConfigError(
        f"PipelineLayer(seg_method={method!r}): it is 'uniform', 'layer:' and a regular expression for class names, "
        "or a list with the index of each part's first layer."
    )


def plan_cut_by_size(sizes: Sequence[int], parts: int) -> list[int]:
    """Returns boundaries such that the largest part is as small as can be; ``sizes`` are parameters by layer.

    Example:
        >>> plan_cut_by_size([8, 1, 1, 8], 2)
        [0, 2, 4]
    """
    if len(sizes) < parts:
        raise ConfigError(f"The model has {len(sizes)} layers in a row for {parts} stages; each needs one.")
    # A binary search for the smallest limit with which ``parts`` parts suffice; then parts are filled up to it.
    low = max(sizes)
    high = sum(sizes)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _parts_needed(sizes, middle) <= parts else (middle + 1, high)
    cut = [0]
    filled = 0
    for at, size in enumerate(sizes):
        must_end = len(sizes) - at == parts - len(cut)  # each part that is still to come needs a layer
        if at > cut[-1] and (filled + size > low or must_end) and len(cut) < parts:
            cut.append(at)
            filled = 0
        filled += size
    return [*cut, len(sizes)]


def _parts_needed(sizes: Sequence[int], limit: int) -> int:
    parts, filled = 1, 0
    for size in sizes:
        if filled + size > limit:
            parts += 1
            filled = 0
        filled += size
    return parts


def _listed(method: Sequence[int], count: int, parts: int) -> list[int]:
    cut = [*method] if len(method) == parts + 1 else [*method, count]
    whole = all(isinstance(place, int) and not isinstance(place, bool) for place in cut)
    if not whole or len(cut) != parts + 1 or cut[0] != 0 or cut[-1] != count or sorted(set(cut)) != cut:
        raise ConfigError(
            f"PipelineLayer(seg_method={list(method)!r}) for {count} layers in {parts} parts: it holds the index of "
            f"the first layer of each part, rising from 0; the end, {count}, may be left out."
        )
    return cut


def _by_name(names: Sequence[str], parts: int, method: str) -> list[int]:
    pattern = method.removeprefix("layer:")
    try:
        expression = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise ConfigError(
            f"PipelineLayer(seg_method={method!r}): {pattern!r} is no regular expression: {error}."
        ) from error
    matching = [at for at, name in enumerate(names) if expression.search(name)]
    if not matching or len(matching) % parts:
        raise ConfigError(
            f"PipelineLayer(seg_method={method!r}) fits {len(matching)} of the layers "
            f"{', '.join(dict.fromkeys(names))}; it must fit a multiple of {parts}, the number of parts. Change the "
            "expression, or give the boundaries as a list."
        )
    each = len(matching) // parts
    return [0, *(matching[part * each - 1] + 1 for part in range(1, parts)), len(names)]
