"""explain: what a strategy does, in which order, what changes nothing, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TextIO

from fleet.options import DistributedStrategy, without_effect
from fleet.options.explain_mesh import mesh_lines
from fleet.strategies._declare.strategy_plan import chosen_strategies, ordered, problems, remarks


def explain(
    strategy: DistributedStrategy,
    world_size: int = 2,
    file: TextIO | None = None,
    *,
    collective: bool = True,
    models: Sequence[Any] = (),
) -> str:
    """Prints and returns what ``strategy`` does on ``world_size`` workers, even when it is refused.

    Where workers hold different parts of the model, that is also the mesh: who holds what, what is sent along which
    axis, and how long the stages of a pipeline wait.

    Args:
        strategy: the options.
        world_size: the number of workers of the job.
        file: where to print; ``None`` is standard output.
        collective: False for a parameter-server job.
        models: models that train with it, whose divided parameters are named.

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
        from fleet.options.explain_divided import divided_lines

        lines = divided_lines(models)
        text += "\n\n" + "\n".join(lines) if lines else ""
    print(text, file=sys.stdout if file is None else file)
    return text


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
