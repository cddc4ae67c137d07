"""The recommenders for their tests: their modules, and a small shop."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from tests.examples.scripts import ROOT

EXAMPLE = ROOT / "examples" / "recommenders"
# The readers of the other example are imported by their short names.
NAMES = {path.stem for path in EXAMPLE.iterdir()} | {path.stem for path in EXAMPLE.with_name("wide_and_deep").iterdir()}
_LOADED: dict[str, ModuleType] = {}


def example_module(name: str) -> ModuleType:
    """Returns a module of this example; other examples have modules with the same names, and all stay whole."""
    with only_this_example():
        return importlib.import_module(name)


@contextmanager
def only_this_example() -> Iterator[None]:
    """Lets ``import evaluation`` find this example's module, and nobody else's, until the block ends."""
    others = _taken()
    sys.modules.update(_LOADED)
    sys.path.insert(0, str(EXAMPLE))
    try:
        yield
    finally:
        sys.path.remove(str(EXAMPLE))
        _LOADED.update(_taken())
        sys.modules.update(others)


def _taken() -> dict[str, ModuleType]:
    """Removes the modules with this example's names from Python's; returns them."""
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] in NAMES}
