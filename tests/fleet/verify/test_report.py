"""The report has an exit code for each outcome, and only causes that are listed."""

import json

import pytest

from fleet.verify.report import CAUSES, Finding, Report
from tests.helpers.sources import ROOT


def test_exit_codes_and_json() -> None:
    finding = Finding(cause="gradients-summed", sentence="twice", step=1)
    report = Report(outcome="differs", steps=1, workers=2, tolerance={}, findings=[finding])
    made = json.loads(json.dumps(report.to_json()))
    assert made["exit_code"] == 1
    assert made["findings"][0]["cause"] == "gradients-summed"
    assert Report(outcome="equal", steps=1, workers=2, tolerance={}).exit_code == 0
    assert Report(outcome="not_comparable", steps=0, workers=2, tolerance={}).exit_code == 2


def test_a_cause_that_is_not_listed_is_refused() -> None:
    with pytest.raises(ValueError, match="none of the causes"):
        Finding(cause="moon", sentence="")


@pytest.mark.parametrize("page", ["guides/verify.md", "guides/verify.zh-CN.md"])
def test_every_cause_is_documented(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    rows = [line.split("`")[1] for line in text.splitlines() if line.startswith("| `") and line.count("|") == 3]
    assert sorted(row for row in rows if row in CAUSES) == sorted(CAUSES)
