"""Scripts of trainers, unchanged: what is right is found equal, and usual mistakes are named by their cause."""

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

FOLDER = ROOT / "tests/fleet/verify"
ENGINES = ("lightning", "fabric", "transformers")
PACKAGES = {"fabric": "lightning"}


def scripts(kind: str) -> list[str]:
    """Returns the scripts of one kind, as engine/kind/name."""
    paths = [path for engine in ENGINES for path in sorted((FOLDER / engine / kind).glob("*.py"))]
    return [f"{path.relative_to(FOLDER).with_suffix('')}" for path in paths]


def report(name: str, folder: Path, starter: Starter) -> dict[str, Any]:
    """Returns the report on a script; twelve updates begin a second epoch."""
    engine = name.partition("/")[0]
    pytest.importorskip(PACKAGES.get(engine, engine))
    request = VerifyRequest(script=FOLDER / f"{name}.py", steps=12, timeout_s=120)
    return _Judge(request, folder, starter).report().to_json()


@pytest.mark.parametrize("engine", ENGINES)
def test_there_are_enough_scripts(engine: str) -> None:
    for kind in ("clean", "planted"):
        assert sum(name.startswith(engine) for name in scripts(kind)) >= 5


@pytest.mark.parametrize("name", sampled(scripts("clean")))
def test_a_correct_script_is_equal(name: str, tmp_path: Path, starter: Starter) -> None:
    found = report(name, tmp_path, starter)
    assert (found["outcome"], found["findings"]) == ("equal", []), found["notes"]
    assert found["steps"] >= 6


@pytest.mark.parametrize("name", sampled(scripts("planted")))
def test_a_mistake_is_named(name: str, tmp_path: Path, starter: Starter) -> None:
    text = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8")))
    found = report(name, tmp_path, starter)
    cause = str(text).partition(":")[0]
    assert found["outcome"] == outcome_of(cause), found["notes"]
    assert causes(found)[0] == cause, found["findings"]
