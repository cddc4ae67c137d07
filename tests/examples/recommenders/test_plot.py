"""The picture of all models, and the lines of the history it is drawn from."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from tests.examples.recommenders.example import example_module

plot = example_module("plot")
report = example_module("report")


def args(path: Path | None, **changes: object) -> argparse.Namespace:
    given = {"model": "esmm", "mode": "geo", "torch": False, "seed": 0, "history": path and str(path), **changes}
    return argparse.Namespace(**given)


def test_results_are_appended_and_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "h.jsonl"
    values = {"auc_click": {"model": 0.7, "best": 0.8}, "auc_purchase": {"model": 0.6}}
    for changes in ({"mode": "sync"}, {}, {"torch": True}, {"torch": True, "mode": "sync"}):
        made = report.Report(args(path, **changes))
        made.add(0.5)
        made.add(0.25)
        made.end_pass(0)
        made.end(values)
    shown = capsys.readouterr().out
    assert "TRAIN ---> pass: 0 loss: 0.375000\nTEST ---> auc_click: model 0.700000, best 0.800000\n" in shown
    found = plot.read_history(path)
    assert list(found) == ["esmm auc_click", "esmm auc_purchase"]
    assert set(found["esmm auc_click"]) == {"sync", "geo", "torch", "torch, geo's settings"}
    record = json.loads(path.read_text().splitlines()[0])
    assert record["steps"] == 2
    plot.draw(found, tmp_path / "all.png")
    assert (tmp_path / "all.png").stat().st_size > 10_000


def test_the_loss_of_a_pass_is_the_mean_over_all_workers(capsys: pytest.CaptureFixture[str]) -> None:
    made = report.Report(args(None), total=lambda own: [own[0] + 2.5, own[1] + 1])
    made.add(0.5)
    made.end_pass(0)
    assert capsys.readouterr().out == "TRAIN ---> pass: 0 loss: 1.500000\n"


def test_other_workers_are_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = report.Report(args(tmp_path / "h.jsonl"), active=False)
    with pytest.raises(ValueError, match="no batch"):
        made.end_pass(0)
    made.end({"auc_click": {"model": 0.7}})
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"model": "din", "mode": "other", "auc_click": {}}', '{"mode": "sync", "auc_click": {}}']
)
def test_other_lines_are_refused_with_their_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "h.jsonl"
    good = json.dumps({"model": "din", "mode": "sync", "auc_click": {"model": 0.7}})
    path.write_text(f"{good}\n{line}\n")
    with pytest.raises(ValueError, match="line 2"):
        plot.read_history(path)


def test_an_empty_history_names_the_option(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    path.write_text("")
    with pytest.raises(ValueError, match="--history"):
        plot.read_history(path)
