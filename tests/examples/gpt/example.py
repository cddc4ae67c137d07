"""The GPT example for its tests: its modules, and its scripts as child processes with and without the launcher."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from tests.examples.scripts import ROOT

EXAMPLE = ROOT / "examples" / "gpt"
CONFIGS = sorted((EXAMPLE / "configs").glob("*.yaml"))
# The smallest model that two workers can share.
TINY = ("--hidden", "16", "--layers", "2", "--heads", "4", "--length", "16", "--log-every", "1")
NAMES = [path.stem for path in EXAMPLE.glob("*.py")]
_LOADED: dict[str, ModuleType] = {}


def example_module(name: str) -> ModuleType:
    """Returns a module of this example; another example has modules with the same names, and both stay whole."""
    with only_this_example():
        return importlib.import_module(name)


@contextmanager
def only_this_example() -> Iterator[None]:
    """Lets ``import data`` find this example's module, and nobody else's, until the block ends."""
    others = {name: sys.modules.pop(name) for name in NAMES if name in sys.modules}
    sys.modules.update(_LOADED)
    sys.path.insert(0, str(EXAMPLE))
    try:
        yield
    finally:
        sys.path.remove(str(EXAMPLE))
        _LOADED.update({name: sys.modules.pop(name) for name in NAMES if name in sys.modules})
        sys.modules.update(others)


def command(script: str, *arguments: str) -> list[str]:
    """Returns the command that runs a script of the example in one process."""
    return [sys.executable, str(EXAMPLE / script), *arguments]


def launched(script: str, num_workers: int, mesh: str, *arguments: str) -> list[str]:
    """Returns the command that runs a script of the example on the workers of a mesh."""
    gpus = ",".join(map(str, range(num_workers)))
    launcher = [sys.executable, "-m", "fleet.launch", f"--gpus={gpus}", "--log_dir", "log"]
    return [*launcher, str(EXAMPLE / script), "--strategy", str(EXAMPLE / "configs" / f"{mesh}.yaml"), *arguments]
