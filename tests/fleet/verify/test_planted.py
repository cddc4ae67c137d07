"""Each planted bug is found, and named by its cause first."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.helpers.sources import ROOT
from tests.helpers.verifying import causes, outcome_of, verify

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
    assert report["outcome"] == outcome_of(cause_of(script)), report["notes"]
    assert causes(report)[:1] == [cause_of(script)], report["findings"]
    assert (*report["findings"], *report["warnings"])[0]["sentence"]


@pytest.mark.slow
def test_a_stream_that_each_worker_permutes_in_its_own_order_gives_rows_to_several(tmp_path: Path) -> None:
    right = (ROOT / FOLDER.parent / "clean/permuted_stream.py").read_text(encoding="utf-8")
    assert right.count("    seed = 7\n") == 1
    script = tmp_path / "train.py"
    script.write_text(right.replace("    seed = 7\n", "    seed = 7 + rank\n"), encoding="utf-8")
    report = verify(script, tmp_path)
    assert causes(report) == ["samples-seen-twice"], report
    sentence = report["findings"][0]["sentence"]
    assert "train.py:19 `order = torch.randperm" in sentence, sentence
