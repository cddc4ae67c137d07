"""Modules that an option names: qualified names as in ``model.named_modules()``, or patterns of them."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import nn

from fleet.errors import ConfigError, did_you_mean
from fleet.strategies._shared.stages import on_some_stage

if TYPE_CHECKING:
    from fleet.job.job import Job

__all__ = ["check_patterns", "find_modules"]


def find_modules(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """Returns the modules that ``patterns`` name, each once, in the order of ``model.named_modules()``.

    Example:
        >>> list(find_modules(nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)}), ["[ac]"]))
        ['a']
    """
    modules = {name: module for name, module in model.named_modules() if name}
    return {name: m for name, m in modules.items() if any(fnmatchcase(name, pattern) for pattern in patterns)}


def check_patterns(model: nn.Module, patterns: Sequence[str], option: str, job: Job | None) -> None:
    """Raises ConfigError for one of ``option``'s patterns that fits no module of any stage, with the nearest names."""
    modules = [name for name, _ in model.named_modules() if name]
    # Patterns are written for the whole model: a pattern may fit a module of another stage.
    known = [any(fnmatchcase(name, pattern) for name in modules) for pattern in patterns]
    fits = on_some_stage(known, None if job is None else job.axes)
    for pattern, fitting in zip(patterns, fits, strict=True):
        if not fitting:
            near = did_you_mean(pattern, modules) or f" Modules: {', '.join(modules[:12])}."
            raise ConfigError(f"{option} has {pattern!r}, which names no module.{near}")
