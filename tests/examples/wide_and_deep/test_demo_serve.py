"""make demo-serve: three programs that only know folders and HTTP, and predictions that change."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.scripts import ROOT, train
from tests.examples.wide_and_deep.example import EXAMPLE, command, write_criteo


def test_make_runs_it() -> None:
    recipe = (ROOT / "Makefile").read_text().split("\ndemo-serve:")[1].split("\n\n")[0]
    assert "demo_serve.py output/demo-serve" in recipe
    parser = (EXAMPLE / "train_published.py").read_text()
    assert all(f'"{option}"' in parser for option in ("--publish", "--export"))


@pytest.mark.slow
def test_predictions_change_while_it_trains(tmp_path: Path) -> None:
    data = write_criteo(tmp_path / "part-0", 1000)
    options = ("--data", str(data), "--epochs", "20", "--max-batches", "1000")
    output = train(command("demo_serve.py", str(tmp_path / "demo"), *options), tmp_path, 180)
    lines = re.findall(r"^ +[0-9.]+ +(\d+)  (0\.\d+) / (0\.\d+)$", output, re.MULTILINE)
    assert len(lines) >= 2, output
    steps = [int(step) for step, _, _ in lines]
    assert steps == sorted(steps)
    assert steps[-1] > 0
    *_, (_, one, zero) = lines
    assert float(one) > float(zero), output  # it has learned something
