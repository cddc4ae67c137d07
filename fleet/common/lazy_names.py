"""Packages whose names are resolved at first use, so that importing them loads nothing else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

from fleet.errors import did_you_mean


def lazy_names(
    package: str, homes: Mapping[str, str], modules: Iterable[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the ``__getattr__`` and the ``__dir__`` of a package.

    Args:
        package: its ``__name__``.
        homes: the module of each name, absolute, or relative to the package with a leading dot.
        modules: modules of the package that are offered by their names.

    Example:
        >>> find, _ = lazy_names("fleet.moe", {"SwitchGate": ".gates"})
        >>> find("SwitchGate").__module__
        'fleet.moe.gates'
    """
    offered = sorted({*homes, *modules})

    def find(name: str) -> Any:
        if name in homes:
            value = getattr(import_module(homes[name], package), name)
            # The next access finds the value without calling this function.
            setattr(sys.modules[package], name, value)
            return value
        if name in modules:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}.{did_you_mean(name, offered)}")

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *offered})

    return find, names
