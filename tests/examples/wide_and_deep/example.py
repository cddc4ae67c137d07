"""The wide & deep example for its tests: its modules, and its scripts with and without servers."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.examples.modules import ExampleModules
from tests.examples.scripts import ROOT

EXAMPLE = ROOT / "examples" / "wide_and_deep"
_MODULES = ExampleModules(EXAMPLE)
example_module = _MODULES.module
only_this_example = _MODULES.alone


def command(script: str, *arguments: str) -> list[str]:
    """Returns the command that runs a script of the example in one process."""
    return [sys.executable, "-W", "ignore::UserWarning", str(EXAMPLE / script), *arguments]


def served(*arguments: str) -> list[str]:
    """Returns the command that trains with one server and two workers."""
    launcher = [sys.executable, "-m", "fleet.launch", "--server_num=1", "--worker_num=2", "--log_dir", "log"]
    return [*launcher, str(EXAMPLE / "train_fleet_ps.py"), *arguments]


def losses(output: str) -> list[float]:
    """Returns the losses that were printed, pass by pass."""
    return [float(loss) for loss in re.findall(r"^TRAIN ---> pass: \d+ loss: (\S+)$", output, re.MULTILINE)]


def aucs(output: str) -> list[float]:
    """Returns the areas that were printed, pass by pass."""
    return [float(auc) for auc in re.findall(r"^TEST ---> pass: \d+ AUC: (\S+)$", output, re.MULTILINE)]


def criteo_line(label: int, integers: list[str], categories: list[str]) -> str:
    """Returns a line in Criteo's format; missing fields at the end are empty."""
    fields = [str(label), *integers, *[""] * (13 - len(integers)), *categories, *[""] * (26 - len(categories))]
    return "\t".join(fields) + "\n"


def write_criteo(path: Path, lines: int) -> Path:
    """Writes samples whose first category decides the label in four cases of five; returns the path."""
    text = ""
    for number in range(lines):
        kind = number * 7 % 3
        label = int(kind == 0) if number % 5 else number % 2
        text += criteo_line(label, [str(number % 11), "-2", ""], [f"{kind:08x}", "", f"{number % 17:08x}"])
    path.write_text(text)
    return path
