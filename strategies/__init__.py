"""Every option of ``DistributedStrategy``: one public module of this folder = one option, or one group of settings.

Importing this package fills the registry: first the modules of this folder, then the entry points of the group
``fleet.strategies`` that other distributions declare.
"""

from __future__ import annotations

import importlib
import pkgutil
from importlib.metadata import entry_points

from fleet.errors import ConfigError
from fleet.strategies._declare.fields import Config, setting
from fleet.strategies._declare.strategy import GROUPS, REGISTRY, Stage, Strategy
from fleet.strategies._declare.strategy_plan import Plan, plan

__all__ = ["GROUPS", "REGISTRY", "Config", "Plan", "Stage", "Strategy", "plan", "setting"]

for _module in sorted(module.name for module in pkgutil.iter_modules(__path__)):
    if not _module.startswith("_"):
        importlib.import_module(f"{__name__}.{_module}")
for _entry in entry_points(group="fleet.strategies"):
    try:
        _entry.load()
    except Exception as _error:  # whatever the code of another package raises
        _home = f"{_entry.dist.name} {_entry.dist.version}" if _entry.dist is not None else "a package"
        raise ConfigError(
            f"{_home} adds an option of DistributedStrategy, and its entry point '{_entry.name} = {_entry.value}' "
            f"cannot be loaded ({type(_error).__name__}: {_error}). Repair that package, or uninstall it."
        ) from _error
