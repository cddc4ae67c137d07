"""What the training scripts show and write."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tests.examples.gpt.example import example_module
from tests.examples.scripts import history

report = example_module("report")


def options(path: Path) -> argparse.Namespace:
    return argparse.Namespace(batch_size=4, length=10, steps=4, log_every=2, history=str(path))


def test_lines_and_history(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = report.Report(options(tmp_path / "new" / "h"), 2)
    for loss, _ in enumerate(shown.steps([None] * 4), start=1):
        shown.add(float(loss))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "[Step 1/4] loss: 1.00000",
        "[Step 2/4] loss: 2.00000",
        "[Step 4/4] loss: 4.00000",
    ]
    assert "per worker" in lines[1]
    records = history(tmp_path / "new" / "h")
    assert [(r["step"], r["loss"], r["tokens"], r["workers"]) for r in records] == [
        (n, float(n), 40, 2) for n in range(1, 5)
    ]


def test_a_silent_one_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = report.Report(options(tmp_path / "h"), active=False)
    for _ in shown.steps([None] * 4):
        shown.add(1.0)
    shown.line("text")
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "h").exists()
