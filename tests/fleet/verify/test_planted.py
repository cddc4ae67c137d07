"""Each planted bug is found, and named by its cause first."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.helpers.sources import ROOT
from tests.helpers.verifying import causes, verify

FOLDER = Path("tests/fleet/verify/planted")
PLANTED = sorted(path.relative_to(ROOT) for path in (ROOT / FOLDER).glob("*.py"))


def cause_of(script: Path) -> str:
    """Returns the cause that the first line of a script names."""
    text = ast.get_docstring(ast.parse((ROOT / script).read_text(encoding="utf-8")))
    assert text is not None, script
    return text.partition(":")[0]


def test_a_script_is_named_after_its_cause() -> None:
    assert len(PLANTED) >= 20
    for script in PLANTED:
        assert cause_of(script) == script.stem.replace("_", "-")


@pytest.mark.slow
@pytest.mark.parametrize("script", PLANTED, ids=lambda path: path.stem)
def test_a_planted_bug_is_named(script: Path, tmp_path: Path) -> None:
    report = verify(script, tmp_path)
    assert report["outcome"] == "differs", report["notes"]
    assert causes(report)[:1] == [cause_of(script)], report["findings"]
    assert report["findings"][0]["sentence"]
