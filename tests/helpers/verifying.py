"""Runs the command ``python -m fleet verify`` on a script, in processes of its own, and reads the report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fleet.verify.verify_command import run
from tests.helpers.sources import ROOT


def verify(script: Path, folder: Path, *flags: str, arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the report on ``script``, run with ``arguments``; the exit code agrees with it."""
    report = folder / "report.json"
    code = run(["--json", str(report), "--timeout", "120", *flags, str(ROOT / script), "--", *arguments])
    found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    assert found["exit_code"] == code
    return found


def causes(report: dict[str, Any]) -> list[str]:
    """Returns the causes that a report names, the first difference first, and then those of warnings."""
    return [finding["cause"] for finding in (*report["findings"], *report["warnings"])]


def outcome_of(cause: str) -> str:
    """Returns the outcome of a script whose one mistake has this cause."""
    return "equal" if cause == "dropout-seeded-alike" else "differs"
