"""The modules of an example, for its tests; those of several examples have the same names, and all stay whole."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType


class ExampleModules:
    """Imports the modules of one example by the short names by which they import each other.

    Args:
        folder: of the example.
        others: folders whose modules it imports by short names, too.
    """

    def __init__(self, folder: Path, *others: Path) -> None:
        self._folder = folder
        self._names = {path.stem for each in (folder, *others) for path in each.iterdir()}
        self._loaded: dict[str, ModuleType] = {}

    def module(self, name: str) -> ModuleType:
        """Returns a module of this example."""
        with self.alone():
            return importlib.import_module(name)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lets ``import data`` find this example's module, and nobody else's, until the block ends."""
        others = self._taken()
        sys.modules.update(self._loaded)
        sys.path.insert(0, str(self._folder))
        try:
            yield
        finally:
            sys.path.remove(str(self._folder))
            self._loaded.update(self._taken())
            sys.modules.update(others)

    def _taken(self) -> dict[str, ModuleType]:
        """Removes the modules with this example's names from Python's; returns them."""
        names = [name for name in sys.modules if name.split(".")[0] in self._names]
        return {name: sys.modules.pop(name) for name in names}
