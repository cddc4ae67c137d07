"""Compiled kernels are kept, for the sources that they were compiled from alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.helpers.sources import ROOT

KERNEL = """
import numba
from constants import ADDED
from fleet.ps.table.kernels.numba_cache import keep_compiled

def add(x):
    return x + ADDED

compiled = keep_compiled(numba.njit(add), add)
print(compiled(1), sum(compiled.stats.cache_hits.values()))
"""


def run(folder: Path) -> str:
    """Returns what a new process prints: 1 plus the constant, and how many compiled functions it found."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}"}
    command = [sys.executable, f"{folder / 'kernel.py'}"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout


def test_a_constant_of_another_module_changes_the_code(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(KERNEL)
    (tmp_path / "constants.py").write_text("ADDED = 1\n")
    assert run(tmp_path) == "2 0\n"
    assert run(tmp_path) == "2 1\n"
    (tmp_path / "constants.py").write_text("ADDED = 20\n")
    assert run(tmp_path) == "21 0\n"
    assert run(tmp_path) == "21 1\n"


def test_code_of_an_older_state_is_not_read_under_a_newer_index(tmp_path: Path) -> None:
    """A process that has written its index, and not yet its code, leaves what another one must not take."""
    (tmp_path / "constants.py").write_text("ADDED = 1\n")
    (tmp_path / "kernel.py").write_text(KERNEL)
    run(tmp_path)
    old = {path: path.read_bytes() for path in (tmp_path / "__pycache__").glob("*.nbc")}
    (tmp_path / "constants.py").write_text("ADDED = 20\n")
    (tmp_path / "kernel.py").write_text(KERNEL + "# a newer state\n")
    run(tmp_path)
    for path, code in old.items():
        path.write_bytes(code)
    assert run(tmp_path) == "21 1\n"
