"""Runs ``python -m fleet verify`` on a script and reads its report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.helpers.sources import ROOT

TIME_LIMIT_S = 240


def verify(script: Path, folder: Path, *flags: str, arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the report on ``script``, run with ``arguments`` in ``folder``; the exit code agrees with it."""
    report = folder / "report.json"
    program = [sys.executable, "-m", "fleet", "verify", "--json", str(report), *flags]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / ".editable")])}
    command = [*program, str(ROOT / script), "--", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIME_LIMIT_S, env=env)
    printed = done.stdout + done.stderr
    assert report.exists(), printed
    found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    assert found["exit_code"] == done.returncode, printed
    return found


def causes(report: dict[str, Any]) -> list[str]:
    """Returns the causes that a report names, the first difference first."""
    return [finding["cause"] for finding in report["findings"]]
