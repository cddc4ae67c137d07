"""Changes to a package that a script may import: made once it does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

_Change = Callable[[ModuleType], None]


def when_imported(name: str, change: _Change) -> None:
    """Calls ``change`` with the module ``name`` as soon as this process has imported it, at once where it has."""
    module = sys.modules.get(name)
    if module is not None:
        change(module)
    else:
        # In front of the others, which would load the module unchanged.
        sys.meta_path.insert(0, _Finder(name, change))


class _Finder(MetaPathFinder):
    """Finds one module, whose loader then makes the change."""

    def __init__(self, name: str, change: _Change) -> None:
        self._name = name
        self._change = change

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        # Out of the way first: find_spec() below asks every finder again.
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _WatchedLoader(spec.loader, self._change)
        return spec


class _WatchedLoader(Loader):
    """Loads a module as ``inner`` does, and changes it."""

    def __init__(self, inner: Loader, change: _Change) -> None:
        self._inner = inner
        self._change = change

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)  # hands on

    def exec_module(self, module: ModuleType) -> None:
        # importlib.resources and pkgutil ask the loader for files, which only the real one can give.
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        module.__loader__ = self._inner
        self._inner.exec_module(module)  # hands on
        self._change(module)
