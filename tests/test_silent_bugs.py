"""The benchmark of silent bugs: the population is whole, the draw follows from it, and the score from the reports."""

from __future__ import annotations

import json
import random
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

from tests.helpers.sources import ROOT

FOLDER = ROOT / "benchmarks" / "silent_bugs"
SCRIPT = runpy.run_path(str(FOLDER / "draw.py"))
with mock.patch.object(sys, "path", list(sys.path)):
    SCORE = runpy.run_path(str(FOLDER / "score.py"))
POPULATION = yaml.safe_load((FOLDER / "population.yaml").read_text(encoding="utf-8"))
REPORTS = POPULATION["reports"]


def test_the_population_is_whole():
    named = {report["id"]: report for report in REPORTS}
    queries = {query["id"] for query in POPULATION["queries"]}
    assert len(named) == len(REPORTS) >= 120
    for report in REPORTS:
        assert {"id", "url", "project", "title", "wrong", "source"} <= report.keys(), report["id"]
        assert report["url"].startswith("https://"), report["id"]
        assert report["source"] in ("traincheck", "megatron", "study", "tracker"), report["id"]
        assert report["source"] != "tracker" or report["query"] in queries, report["id"]
        # A duplicate points at the report that counts, which is none itself.
        counts = named[report.get("duplicate_of", report["id"])]
        assert counts is report or "duplicate_of" not in counts, report["id"]


def test_drawn_yaml_is_current():
    assert yaml.safe_load((FOLDER / "drawn.yaml").read_text(encoding="utf-8")) == SCRIPT["draw"](REPORTS)


def test_the_draw_is_a_function_of_the_reports_and_the_seed():
    drawn = SCRIPT["draw"](REPORTS)
    assert SCRIPT["draw"](random.sample(REPORTS, len(REPORTS))) == drawn
    assert SCRIPT["draw"](REPORTS, seed=1)["cases"] != drawn["cases"]


def test_no_case_is_drawn_twice():
    drawn = SCRIPT["draw"](REPORTS)
    cases = [case["id"] for case in drawn["cases"]]
    replacements = [case["id"] for case in drawn["replacements"]]
    duplicates = {report["id"] for report in REPORTS if "duplicate_of" in report}
    assert (len(cases), len(drawn["aside"]), len(replacements)) == (40, 10, 10)
    assert len({*cases, *replacements} - duplicates) == 50
    assert set(drawn["aside"]) <= set(cases)


@pytest.mark.parametrize("gone", ["first", "last"])
def test_a_report_that_leaves_moves_no_other_case(gone: str):
    """The next in order takes its place; all others stay."""
    drawn = SCRIPT["draw"](REPORTS)
    left = drawn["cases"][0 if gone == "first" else -1]
    again = SCRIPT["draw"]([report for report in REPORTS if report["id"] != left["id"]])
    assert again["cases"] == [*(case for case in drawn["cases"] if case != left), drawn["replacements"][0]]


# ---- the score -------------------------------------------------------------------------------------------------------

LOOP = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for x, y in loader:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y, reduction="mean")
    loss.backward()
    optimizer.step()
"""


def entry(outcome: str, *causes: str, note: str = "", where: str = "") -> dict[str, Any]:
    """Returns a line of the results with a report of these findings."""
    findings = [{"cause": cause, "sentence": f"a sentence on {cause}", "where": where} for cause in causes]
    return {"report": {"outcome": outcome, "findings": findings, "notes": [note] if note else []}, "failure": ""}


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (entry("differs", "no-distributed-sampler", "unknown"), "named"),
        (entry("differs", "unknown", "no-distributed-sampler"), "noticed, another cause"),
        (entry("differs", "unknown"), "noticed, another cause"),
        (entry("equal"), "missed"),
        (entry("not_comparable", note="a reason"), "not compared"),
        ({"report": None, "failure": "not over after 180 s"}, "not compared"),
        (None, "not run"),
    ],
)
def test_the_first_cause_of_a_case_counts(line: dict[str, Any] | None, kind: str):
    assert SCORE["judge"](line, ["no-distributed-sampler", "samples-seen-twice"]).kind == kind


def test_a_case_without_a_name_for_its_cause_is_never_named():
    assert SCORE["judge"](entry("differs", "unknown"), []).kind == "noticed, another cause"
    assert SCORE["judge"](entry("differs", "unknown"), ["unknown"]).kind == "noticed, another cause"


def test_a_correct_script_that_differs_is_a_false_alarm():
    assert str(SCORE["judge"](entry("equal"))) == "equal"
    assert str(SCORE["judge"](entry("differs", "unknown"))) == "false alarm: `unknown`: a sentence on unknown"
    assert str(SCORE["judge"](entry("not_comparable", note="a|reason\nwhy"))) == "not compared: a\\|reason why"


def test_a_warning_names_a_bug_and_accuses_no_correct_script():
    warning = {"cause": "dropout-seeded-alike", "where": "x.py:1"}
    entry = {"report": {"outcome": "equal", "findings": [], "warnings": [warning], "notes": []}}
    judged = [SCORE["judge"](entry, causes).kind for causes in (["dropout-seeded-alike"], ["samples-left-out"], None)]
    assert judged == ["named", "missed", "equal"]


def test_the_line_to_blame_is_found_by_its_text(tmp_path: Path):
    script = tmp_path / "wrong.py"
    script.write_text("first\nloss = total(x)\n", encoding="utf-8")
    assert SCORE["is_at_line"](f"{script}:2", script, "loss = total")
    assert not SCORE["is_at_line"](f"{script}:1", script, "loss = total")
    assert not SCORE["is_at_line"]("", script, "loss = total")


def test_the_next_replacement_takes_the_place_of_a_case_left_out(tmp_path: Path):
    for name, facts in (("a", {"left_out": "a card"}), ("c", {"left_out": "a link"}), ("d", {"engine": "ddp"})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "case.yaml").write_text(yaml.safe_dump(facts), encoding="utf-8")
    named = {name: {"id": name, "url": f"https://example.com/{name}"} for name in "abcd"}
    drawn = {"cases": [named["a"], named["b"]], "aside": ["a"], "replacements": [named["c"], named["d"]]}
    cases, left_out = SCORE["drawn_cases"](tmp_path, drawn)
    assert [(case.name, case.aside) for case in cases] == [("d", True), ("b", False)]
    assert [case.name for case in left_out] == ["a", "c"]


def test_a_finished_script_is_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    script = tmp_path / "train.py"
    script.write_text("pass", encoding="utf-8")
    job = SCORE["Job"]("train", script)
    verified = mock.Mock(return_value={"seconds": 1.0, **entry("equal")})
    results = tmp_path / "results.jsonl"
    for _ in range(2):
        found = SCORE["run"]([job], results, 60.0, verified)
        assert found["train"]["report"]["outcome"] == "equal"
    assert verified.call_count == 1
    assert capsys.readouterr().out == "1 of 1  train ... equal, 1 s\n"
    # Half a line is what a run leaves that is killed while it writes.
    results.write_text(results.read_text(encoding="utf-8")[:40], encoding="utf-8")
    SCORE["run"]([job], results, 60.0, verified)
    script.write_text("pass  # changed", encoding="utf-8")
    SCORE["run"]([job], results, 60.0, verified)
    assert verified.call_count == 3


def test_a_script_that_was_too_slow_is_run_again_with_more_time(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text("pass", encoding="utf-8")
    job = SCORE["Job"]("train", script)
    verified = mock.Mock(return_value={"seconds": 60.0, "report": None, "failure": "not over after 60 s"})
    for limit, calls in ((60.0, 1), (60.0, 1), (120.0, 2)):
        SCORE["run"]([job], tmp_path / "results.jsonl", limit, verified)
        assert verified.call_count == calls


@pytest.mark.slow
def test_a_case_and_a_correct_script_from_one_end_to_the_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    name = REPORTS and SCRIPT["draw"](REPORTS)["cases"][0]["id"]
    case, correct = tmp_path / "cases" / name, tmp_path / "correct"
    case.mkdir(parents=True)
    correct.mkdir()
    (case / "wrong.py").write_text(LOOP.replace("mean", "sum"), encoding="utf-8")
    (case / "right.py").write_text(LOOP, encoding="utf-8")
    (correct / "plain_ddp.py").write_text(LOOP, encoding="utf-8")
    facts = {"engine": "ddp", "workers": 2, "causes": ["loss-sum-instead-of-mean"], "line": "mse_loss("}
    (case / "case.yaml").write_text(yaml.safe_dump(facts), encoding="utf-8")
    results = tmp_path / "results.jsonl"
    given = ["--cases", str(case.parent), "--correct", str(correct), "--results", str(results)]
    assert SCORE["main"](given) == 0
    printed = capsys.readouterr().out
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    assert [(line["name"], line["report"]["outcome"]) for line in lines] == [
        (f"{name}/wrong", "differs"),
        (f"{name}/right", "equal"),
        ("plain_ddp", "equal"),
    ], lines
    assert "| ddp | named: `loss-sum-instead-of-mean` |" in printed
    assert "| plain_ddp | equal |" in printed
    assert "results.md is written only" in printed
