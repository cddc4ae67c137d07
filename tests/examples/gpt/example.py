"""The GPT example for its tests: its modules, and its scripts as child processes with and without the launcher."""

from __future__ import annotations

import sys

from tests.examples.modules import ExampleModules
from tests.examples.scripts import ROOT

EXAMPLE = ROOT / "examples" / "gpt"
CONFIGS = sorted((EXAMPLE / "configs").glob("*.yaml"))
# The smallest model that two workers can share.
TINY = ("--hidden", "16", "--layers", "2", "--heads", "4", "--length", "16", "--log-every", "1")
_MODULES = ExampleModules(EXAMPLE)
example_module = _MODULES.module
only_this_example = _MODULES.alone


def command(script: str, *arguments: str) -> list[str]:
    """Returns the command that runs a script of the example in one process."""
    return [sys.executable, str(EXAMPLE / script), *arguments]


def launched(script: str, num_workers: int, mesh: str, *arguments: str) -> list[str]:
    """Returns the command that runs a script of the example on the workers of a mesh."""
    gpus = ",".join(map(str, range(num_workers)))
    launcher = [sys.executable, "-m", "fleet.launch", f"--gpus={gpus}", "--log_dir", "log"]
    return [*launcher, str(EXAMPLE / script), "--strategy", str(EXAMPLE / "configs" / f"{mesh}.yaml"), *arguments]
