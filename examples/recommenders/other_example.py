"""The modules of the wide & deep example that this one uses too."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

_FOLDER = str(Path(__file__).parent.with_name("wide_and_deep"))


def module_of_wide_and_deep(name: str) -> ModuleType:
    """Returns a module of the other example; its modules import each other by their short names."""
    sys.path.append(_FOLDER)
    try:
        return import_module(name)
    finally:
        sys.path.remove(_FOLDER)
