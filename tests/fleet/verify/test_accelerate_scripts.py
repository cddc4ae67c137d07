"""Scripts of Accelerate, unchanged: what is right is found equal, and usual mistakes are named by their cause."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from fleet.verify.paired_runs import Starter, VerifyRequest
from fleet.verify.run_comparison import _Judge
from tests.helpers.sampled import sampled
from tests.helpers.sources import ROOT
from tests.helpers.verifying import causes, outcome_of

FOLDER = ROOT / "tests/fleet/verify/accelerate"
CLEAN = sorted(path.stem for path in (FOLDER / "clean").glob("*.py"))
PLANTED = sorted(path.stem for path in (FOLDER / "planted").glob("*.py"))


def report(kind: str, name: str, folder: Path, starter: Starter) -> dict[str, Any]:
    """Returns the report on a script; twelve updates begin a second epoch."""
    pytest.importorskip("accelerate")
    request = VerifyRequest(script=FOLDER / kind / f"{name}.py", steps=12, timeout_s=120)
    return _Judge(request, folder, starter).report().to_json()


def test_there_are_enough_scripts() -> None:
    assert len(CLEAN) >= 8
    assert len(PLANTED) >= 8


@pytest.mark.parametrize("name", sampled(CLEAN))
def test_a_correct_script_is_equal(name: str, tmp_path: Path, starter: Starter) -> None:
    found = report("clean", name, tmp_path, starter)
    assert (found["outcome"], found["findings"]) == ("equal", []), found["notes"]
    assert found["steps"] >= 6


@pytest.mark.parametrize("name", sampled(PLANTED))
def test_a_mistake_is_named(name: str, tmp_path: Path, starter: Starter) -> None:
    text = ast.get_docstring(ast.parse((FOLDER / "planted" / f"{name}.py").read_text(encoding="utf-8")))
    found = report("planted", name, tmp_path, starter)
    cause = str(text).partition(":")[0]
    assert found["outcome"] == outcome_of(cause), found["notes"]
    assert causes(found)[0] == cause, found["findings"]
    place = (*found["findings"], *found["warnings"])[0]["where"]
    assert f"/{name}.py:" in place, found["findings"]
