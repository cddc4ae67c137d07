"""The plan of tensor_parallel: patterns of module names that say how a plain model is divided over the mp axis.

A pattern is matched name by name between the dots, so ``blocks.*.attn.[qkv]`` is the q, k and v of every block, and no
star crosses a dot. Parameters that modules share are divided once; a module that shares one and is not in the plan is
divided in the way that fits: a head that is the embedding's weight computes its columns and gathers the logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import is_parametrized

from fleet.errors import ConfigError, did_you_mean
from fleet.job.axes import Axes
from fleet.strategies._shared.parameter_layout import Layout, layout_of
from fleet.strategies._shared.stages import on_some_stage
from fleet.strategies.tensor_parallel.place import place_in
from fleet.strategies.tensor_parallel.plan_styles import PlanStyle, read_style
from fleet.strategies.tensor_parallel.planned_layers import cut, divide_layer, draw_from_own_stream
from fleet.strategies.tensor_parallel.sequence import mark_as_sequence_parallel_parameter

AUTO = "auto"
_PLAN = "tensor_parallel_configs['plan']"


@dataclass(frozen=True)
class PlanEntry:
    """One module of a model and its style in the plan; ``pattern`` is the user's pattern."""

    name: str
    module: nn.Module
    style: PlanStyle
    pattern: str

    def __str__(self) -> str:
        return f"{_PLAN}[{self.pattern!r}] matches {self.name!r} ({type(self.module).__name__})"


@dataclass
class ResolvedPlan:
    """The effect of a plan on a model.

    Attributes:
        entries: the modules that are changed, in the order of the model.
        layouts: the layout of each divided parameter of an entry's module, by module name and parameter name.
        numbers: whole numbers to divide: (module, attribute, value for the part).
    """

    entries: list[PlanEntry] = field(default_factory=list)
    layouts: dict[str, dict[str, Layout]] = field(default_factory=dict)
    numbers: list[tuple[nn.Module, str, int]] = field(default_factory=list)


def read_plan(value: Any) -> dict[str, Any]:
    """Returns ``value`` as the option stores it: ``"auto"`` is ``{"*": "auto"}``.

    Raises:
        ConfigError: it is other text.
    """
    if isinstance(value, str):
        if value != AUTO:
            raise ConfigError(f"{_PLAN} is {value!r}; it takes a dictionary, or 'auto' for a Hugging Face model's own.")
        return {"*": AUTO}
    return value  # type: ignore[no-any-return]  # the Config checks the rest


def resolve_plan(model: nn.Module, plan: Mapping[str, Any], axes: Axes) -> ResolvedPlan:
    """Returns the effect of ``plan`` on ``model`` on this worker; changes nothing.

    Raises:
        ConfigError: a pattern matches nothing, or an indivisible module; patterns disagree; a size does not divide.
    """
    degree = axes.size("mp")
    index = axes.rank("mp")
    written = {pattern: style for pattern, style in plan.items() if style != AUTO}
    if wrong := [pattern for pattern in plan if plan[pattern] == AUTO and pattern != "*"]:
        raise ConfigError(f"{_PLAN}[{wrong[0]!r}] = 'auto': only '*' takes it, and means the plan of the model itself.")
    found = _matched(model, written, own=False)
    _check_matched(model, list(written), {entry.pattern for entry in found}, axes)
    if len(written) < len(plan):
        mine = {(id(entry.module), entry.style.divides) for entry in found}
        found += [entry for entry in own_entries(model) if (id(entry.module), entry.style.divides) not in mine]
    _check_overlap(found)
    resolved = ResolvedPlan([entry for entry in found if entry.style.kind != "whole"])
    for entry in resolved.entries:
        if entry.style.divides:
            resolved.layouts[entry.name] = _layouts(entry, degree, index)
        elif entry.style.kind == "divide":
            resolved.numbers += _numbers(entry, degree)
    _add_tied(model, resolved, degree, index)
    if not on_some_stage([bool(resolved.layouts)], axes)[0]:
        raise ConfigError(f"{_PLAN} divides no parameter of {type(model).__name__}. Name linear layers or embeddings.")
    return resolved


def apply_plan(model: nn.Module, resolved: ResolvedPlan, axes: Axes) -> None:
    """Divides ``model`` in place; every worker of the mp axis calls it, for a part of the first one's weights."""
    place = place_in(None, "plan")
    first = axes.ranks("mp")[0]
    # A tied parameter is cut once, and every module that holds it gets its layout.
    holders: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append((module, name))
    for entry in resolved.entries:
        layouts = resolved.layouts.get(entry.name, {})
        for name, layout in layouts.items():
            parameter = entry.module.get_parameter(name)
            if layout_of(parameter) is None:
                cut(parameter, layout, holders[id(parameter)], place, first)
        if entry.style.divides:
            divide_layer(entry.module, entry.style, place, layouts, _is_conv1d(entry.module))
        elif entry.style.kind == "sum":
            for parameter in entry.module.parameters(recurse=False):
                mark_as_sequence_parallel_parameter(parameter)  # their gradients are added up over the axis
        elif entry.style.kind == "own_random":
            draw_from_own_stream(entry.module)
    for module, attribute, part in resolved.numbers:
        setattr(module, attribute, part)


def own_entries(model: nn.Module) -> list[PlanEntry]:
    """Returns the entries of the plans that Hugging Face models in ``model`` bring along.

    Raises:
        ConfigError: there is no such model with a plan.
    """
    entries: list[PlanEntry] = []
    covered: list[str] = []
    for name, module in model.named_modules():
        own = _own_plan(module)
        if own and not any(name.startswith(prefix) for prefix in covered):
            prefix = f"{name}." if name else ""
            covered.append(prefix)
            entries += _matched(model, {prefix + pattern: style for pattern, style in own.items()}, own=True)
    if not any(entry.style.divides for entry in entries):
        raise ConfigError(
            f"{_PLAN} is 'auto', and {type(model).__name__} has no plan of its own: no Hugging Face model in it has a "
            "base_model_tp_plan (GPT-2 and BERT have none). Write the patterns: {'blocks.*.attn.q': 'column', ...}."
        )
    return entries


def _own_plan(module: nn.Module) -> dict[str, str]:
    own = module.__dict__.get("_tp_plan")
    if isinstance(own, Mapping) and own:
        return dict(own)
    base = getattr(getattr(module, "config", None), "base_model_tp_plan", None)
    return dict(base) if isinstance(base, Mapping) else {}


def _matched(model: nn.Module, plan: Mapping[str, Any], *, own: bool) -> list[PlanEntry]:
    """Returns an entry for each module that a pattern matches; ``own`` says that the model brought the patterns."""
    entries: list[PlanEntry] = []
    for pattern, value in plan.items():
        matches = [(name, module) for name, module in model.named_modules() if name and _matches(pattern, name)]
        style = read_style(pattern, value)
        if own and not matches and any(_matches(pattern, name) for name, _ in model.named_parameters()):
            raise ConfigError(
                f"{_PLAN} is 'auto', and the model's own plan divides {pattern!r} ({value}), a parameter of no known "
                "layer. Write a plan of your own that leaves it out."
            )
        entries += [PlanEntry(name, module, _for_module(style, module), pattern) for name, module in matches]
    return entries


def generic_name(name: str) -> str:
    """Returns the pattern that matches ``name`` and its like: ``"blocks.3.up"`` gives ``"blocks.*.up"``."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _for_module(style: PlanStyle, module: nn.Module) -> PlanStyle:
    """Returns the style; the rows of an embedding are its inputs."""
    return PlanStyle("vocab") if isinstance(module, nn.Embedding) and style == PlanStyle("row") else style


def _matches(pattern: str, name: str) -> bool:
    patterns = pattern.split(".")
    names = name.split(".")
    return len(patterns) == len(names) and all(map(fnmatchcase, names, patterns))


def _check_matched(model: nn.Module, patterns: list[str], matched: set[str], axes: Axes) -> None:
    """Raises ConfigError for a pattern that matches nothing on any stage."""
    for pattern, known in zip(patterns, on_some_stage([p in matched for p in patterns], axes), strict=True):
        if not known:
            _refuse_unmatched(model, pattern)


def _refuse_unmatched(model: nn.Module, pattern: str) -> None:
    names = [name for name, _ in model.named_modules() if name]
    parameters = [name for name, _ in model.named_parameters() if _matches(pattern, name)]
    if parameters:
        raise ConfigError(
            f"{_PLAN}[{pattern!r}] matches the parameter {parameters[0]!r}; a pattern names modules: "
            f"{pattern.rpartition('.')[0]!r}."
        )
    generic = list(dict.fromkeys(map(generic_name, names)))
    near = did_you_mean(pattern, generic)
    raise ConfigError(
        f"{_PLAN}[{pattern!r}] matches no module of {type(model).__name__}.{near} A star stands for what is between "
        f"two dots. Names: {', '.join(generic[:12])}{', ...' if len(generic) > 12 else ''}."
    )


def _check_overlap(entries: list[PlanEntry]) -> None:
    seen: dict[tuple[int, str], PlanEntry] = {}
    for entry in entries:
        key = (id(entry.module), "divided or whole" if entry.style.divides else entry.style.kind)
        other = seen.setdefault(key, entry)
        if other is not entry:
            raise ConfigError(
                f"{_PLAN}: both {other.pattern!r} and {entry.pattern!r} match {entry.name!r} "
                f"({other.style.kind!r} and {entry.style.kind!r}). Let one pattern match it."
            )


def _layouts(entry: PlanEntry, degree: int, index: int) -> dict[str, Layout]:
    """Returns the layouts of the parameters of a layer; raises where it cannot be divided."""
    module = entry.module
    style = entry.style
    _check_kind(entry)
    whole = tuple(module.get_parameter("weight").shape)
    # torch's linear weight is (outputs, inputs), Conv1D's and an embedding's the reverse.
    outputs = 1 if _is_conv1d(module) or isinstance(module, nn.Embedding) and style.is_column else 0
    dim = outputs if style.is_column or style.kind == "vocab" else 1 - outputs
    _check_size(entry, whole[dim], degree)
    sections = style.sections_of(whole[dim])
    layouts = {"weight": Layout("mp", dim, degree, index, whole, sections)}
    if style.is_column and module._parameters.get("bias") is not None:
        layouts["bias"] = Layout("mp", 0, degree, index, (whole[dim],), sections)
    return layouts


def _check_kind(entry: PlanEntry) -> None:
    module = entry.module
    style = entry.style
    is_embedding = isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward
    if not is_embedding and type(module).forward is not nn.Linear.forward and not _is_conv1d(module):
        reason = "a plan divides nn.Linear, nn.Embedding and Hugging Face's Conv1D, whose forward it knows"
    elif isinstance(module, NonDynamicallyQuantizableLinear):
        reason = "nn.MultiheadAttention reads its weight and never calls it; leave the attention whole"
    elif is_parametrized(module) or "forward" in module.__dict__ or module._parameters.get("weight") is None:
        reason = "its weight or its forward was changed by something else"
    elif is_embedding != (style.kind == "vocab") and not (is_embedding and style.is_column and style.pieces == 1):
        reason = "an embedding takes 'vocab', 'column' and 'column_gather', a linear layer the other styles"
    elif is_embedding and any(getattr(module, name) for name in ("max_norm", "scale_grad_by_freq", "sparse")):
        reason = "max_norm, scale_grad_by_freq and sparse need all rows on one worker"
    else:
        return
    raise ConfigError(f"{entry}, which cannot be divided as {style.kind!r}: {reason}. Change the pattern or the style.")


def _check_size(entry: PlanEntry, size: int, degree: int) -> None:
    style = entry.style
    if style.sections and sum(style.sections) != size:
        raise ConfigError(f"{entry}: the sections {style.sections} add up to {sum(style.sections)}, not to {size}.")
    if size % style.pieces:
        raise ConfigError(f"{entry}: its size {size} does not fall into {style.pieces} equal pieces.")
    for piece in style.sections_of(size) or (size,):
        if piece % degree:
            what = f"size {size}" if piece == size else f"piece of size {piece} of {size}"
            raise ConfigError(
                f"{entry}: its {what} does not divide by mp_degree {degree}. Leave the module out of the plan, "
                f"choose a size that is a multiple of {degree}, or another mp_degree."
            )


def _numbers(entry: PlanEntry, degree: int) -> Iterator[tuple[nn.Module, str, int]]:
    for attribute in entry.style.attributes:
        value = getattr(entry.module, attribute, None)
        if isinstance(value, bool) or not isinstance(value, int) or value % degree:
            raise ConfigError(
                f"{entry}, whose attribute {attribute!r} is {value!r}; 'divide' takes whole numbers that divide by "
                f"mp_degree {degree}."
            )
        yield entry.module, attribute, value // degree


def _add_tied(model: nn.Module, resolved: ResolvedPlan, degree: int, index: int) -> None:
    """Adds the modules that share a divided parameter; raises where they need it in another way."""
    cuts = {
        id(entry.module.get_parameter(name)): (entry, layout)
        for entry in resolved.entries
        for name, layout in resolved.layouts.get(entry.name, {}).items()
    }
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) not in cuts:
                continue
            entry, layout = cuts[id(parameter)]
            known = resolved.layouts.get(path)
            if known is None and not entry.name.startswith(f"{path}."):  # a holder above the layer only keeps the name
                kind = "vocab" if isinstance(module, nn.Embedding) else "column_gather"
                added = PlanEntry(path, module, PlanStyle(kind), entry.pattern)
                resolved.entries.append(added)
                known = resolved.layouts[path] = _layouts(added, degree, index)
                for other, other_layout in known.items():
                    cuts.setdefault(id(module.get_parameter(other)), (added, other_layout))
            if known is not None and known.get(name) != layout:
                raise ConfigError(
                    f"{entry}, whose parameter is also {path + '.' + name!r}, which is divided in another way. Give "
                    "both the styles 'vocab' (embedding) and 'column' or 'column_gather' (head), or untie them."
                )


def _is_conv1d(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D" and isinstance(getattr(module, "nf", None), int)
