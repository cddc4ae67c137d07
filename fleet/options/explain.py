"""explain: the effects of a strategy in their order, its mesh, its options without effect, and its refusals."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TextIO

from fleet.errors import ConfigError
from fleet.job.axes import Axes
from fleet.options import DistributedStrategy, without_effect
from fleet.strategies._declare.strategy_plan import chosen_strategies, ordered, problems, remarks
from fleet.strategies._shared.mesh import plan_axes, plan_expert_axes
from fleet.strategies.tensor_parallel.plan_styles import STYLES, read_style

_HOLDS = {
    "dp": "different rows, and a copy of the same parameters",
    "sharding": "different rows, and parts of the optimizer state, gradients or parameters of one copy",
    "pp": "different layers: stages, through which micro-batches of the same rows pass",
    "mp": "parts of each divided layer, and the same rows",
    "sep": "different tokens of the same rows, and a copy of the same parameters",
    "cp": "different tokens of the same rows, and a copy of the same parameters",
    "ep": "different experts, and the same workers as sharding and mp: a second grid over them",
    "moe_sharding": "the same experts, whose gradients they exchange",
}
# Bytes that one worker sends in a step; a ring all-reduce of B bytes among k workers sends 2 (k-1)/k B.
_SENDS = {
    "dp": "once, the gradients of what this worker holds: {ring} x P x 4 bytes / {parts}",
    "sharding": "once, the gradients of what this worker holds, as dp, and the updated parts",
    "pp": "for each micro-batch, one activation to the next stage and its gradient to the one before",
    "mp": "for each block (attention and MLP), {ring} x the bytes of 4 activations of rows x tokens x width",
    "sep": "for each attention, the activations from tokens to heads and back; once, the gradients",
    "cp": "for each attention, keys and values around the ring; once, the gradients",
    "ep": "for each layer of experts, the tokens to their experts and back, forward and in backward",
    "moe_sharding": "once, the gradients of its experts",
}
_SHOWN = 4


def explain(
    strategy: DistributedStrategy,
    world_size: int = 2,
    file: TextIO | None = None,
    *,
    collective: bool = True,
    models: Sequence[Any] = (),
) -> str:
    """Prints and returns the effects of ``strategy`` on ``world_size`` workers, even of a refused one.

    Where workers hold different parts of the model, the text describes the mesh as well: the parts of each worker, the
    traffic along each axis, and the waiting time of the stages of a pipeline.

    Args:
        strategy: the options.
        world_size: the number of workers of the job.
        file: where to print; ``None`` is standard output.
        collective: False for a parameter-server job.
        models: models that train with it; the text names their divided parameters, or their rows on servers.

    Example:
        >>> strategy = DistributedStrategy()
        >>> text = explain(strategy, world_size=2)
        2 workers: data_parallel
        <BLANKLINE>
        1. data_parallel
           model: averages the gradients of all workers in buckets while backward runs; parameters start as rank 0's
    """
    text = explanation(strategy, world_size, collective=collective)
    if models:
        lines = _model_lines(strategy, models, collective=collective)
        text += "\n\n" + "\n".join(lines) if lines else ""
    print(text, file=sys.stdout if file is None else file)
    return text


def _model_lines(strategy: DistributedStrategy, models: Sequence[Any], *, collective: bool) -> list[str]:
    # Here, because a strategy file is explained without any model.
    from fleet.options.explain_models import divided_lines, row_lines

    return divided_lines(models) if collective else row_lines(models, strategy.sparse_table_configs)


def explanation(strategy: DistributedStrategy, world_size: int, *, collective: bool = True) -> str:
    """Returns the text that :func:`explain` prints."""
    found = problems(strategy, world_size, collective=collective)
    steps = ordered(chosen_strategies(strategy, world_size, collective=collective))
    notes = [*remarks(strategy, steps, world_size, collective=collective), *without_effect(strategy)]
    title = " -> ".join(step.name for step in steps) or "nothing to apply"
    verdict = " (refused; see below)" if found else ""
    lines = [f"{world_size} worker{'' if world_size == 1 else 's'}: {title}{verdict}"]
    if steps:
        lines.append("")
    for place, step in enumerate(steps, 1):
        lines.append(f"{place}. {step.name}")
        model, optimizer = step.effects(strategy, world_size)
        lines += [f"   model: {model}"] if model else []
        lines += [f"   optimizer: {optimizer}"] if optimizer else []
    mesh = mesh_lines(strategy, world_size) if collective else []
    lines += ["", *mesh] if mesh else []
    for head, items in (("Accepted, changes nothing:", notes), ("Refused:", [str(error) for error in found])):
        if items:
            lines += ["", head, *(f"- {item}" for item in items)]
    return "\n".join(lines)


def mesh_lines(options: Any, world_size: int) -> list[str]:
    """Returns lines about the mesh of ``options``; no line where workers differ in their rows alone."""
    try:
        degrees = plan_axes(options, world_size)
    except ConfigError:  # explanation() lists it among the problems
        return []
    real = {axis: size for axis, size in degrees.items() if size > 1}
    experts = plan_expert_axes(options, world_size)
    if set(real) <= {"dp", "sharding"} and not experts:
        return []
    axes = Axes(degrees, 0, experts=experts)
    replicas = axes.data_replicas
    lines = ["Mesh: " + " x ".join(f"{axis} {size}" for axis, size in real.items())]
    lines[0] += f"; {replicas} group{'' if replicas == 1 else 's'} of {world_size // replicas} workers train on "
    lines[0] += "different rows (fleet.data_rank() of fleet.data_replicas())"
    parts = axes.size("pp", "mp")
    for axis, size in (real | {axis: size for axis, size in experts.items() if size > 1}).items():
        groups = axes.all_ranks(axis)
        shown = " | ".join(",".join(map(str, group)) for group in groups[:_SHOWN]) + (
            " | ..." if len(groups) > _SHOWN else ""
        )
        lines.append(f"  {axis} {size} (ranks {shown}): hold {_HOLDS.get(axis, 'their part')}")
        if axis in _SENDS:
            ring = f"{2 * (size - 1) / size:.3g}"
            lines.append(f"    a worker sends {_SENDS[axis].format(ring=ring, parts=parts)}")
        lines += _plan_lines(options) if axis == "mp" else []
    if "dp" in real and parts > 1:
        lines.append(f"  P are the parameters of the whole model; a worker holds about P / {parts}")
    return lines + _bubble(options, axes.size("pp"))


def _plan_lines(options: Any) -> list[str]:
    """Returns a line for each pattern of the plan; counting its modules would need the model."""
    lines = []
    for pattern, value in options["tensor_parallel_configs"].plan.items():
        if value == "auto":
            meaning = "as the Hugging Face model's own plan says"
        else:
            try:
                meaning = STYLES[read_style(pattern, value).kind]
            except ConfigError:  # distributed_model() refuses it
                continue
        lines.append(f"    {pattern}: {value}: {meaning}")
    if lines:
        lines.append("    fleet.explain() after distributed_model() counts the parameters")
    return lines


def _bubble(options: Any, stages: int) -> list[str]:
    """Returns the waiting time of stages, for stages of equal length and no time on the wire."""
    if stages == 1:
        return []
    config = options["pipeline_configs"]
    micro = config.accumulate_steps
    share = (stages - 1) / (micro + stages - 1)
    text = f"  bubble: stages wait (p-1)/(v n + p-1) = {share:.1%} of a step with p = {stages} stages, n = {micro} "
    text += f"micro-batch{'' if micro == 1 else 'es'} and v = 1 chunk"
    if config.schedule_mode == "1F1B":
        text += f"; stage s keeps the activations of min(p - s, n) micro-batches, at most {min(stages, micro)}"
    else:
        text += f"; a stage keeps the activations of all {micro}"
    return [text]
