"""The picture of some histories."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.examples.gpt.example import command, example_module
from tests.examples.scripts import train

plot = example_module("plot")


def record(step: int, loss: float, workers: int = 1) -> str:
    """Returns one line of a history."""
    return json.dumps({"step": step, "loss": loss, "seconds": 0.5, "tokens": 100, "workers": workers})


def test_the_first_step_does_not_count_for_the_speed(tmp_path: Path) -> None:
    path = tmp_path / "h"
    path.write_text(record(1, 3.0).replace("0.5", "9.5") + "\n" + record(2, 2.0) + "\n" + record(3, 1.0) + "\n")
    assert plot.speed(plot.read_history(path)) == pytest.approx(200)


@pytest.mark.parametrize("text", ["", "not json", '{"step": 1}'])
def test_a_file_that_is_no_history_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "history").write_text(text)
    with pytest.raises(ValueError, match=r"line 1: not a record|holds no step. Train with --history"):
        plot.read_history(tmp_path / "history")


def test_the_picture_shows_a_curve_and_a_bar_for_each_run(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("\n".join(record(step, 6.0 - step) for step in range(1, 5)))
    (tmp_path / "two").write_text("\n".join(record(step, 6.5 - step, 4) for step in range(1, 5)))
    assert "Wrote" in train(command("plot.py", "pictures/p.png", "plain=one", "two"), tmp_path)
    picture = np.array(Image.open(tmp_path / "pictures" / "p.png").convert("RGB")).astype(int)
    middle = int(picture.shape[1] * 0.6)
    for panel in (picture[:, :middle], picture[:, middle:]):
        for colour in plot.COLOURS[1:2]:
            wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])
            assert (np.abs(panel - wanted).sum(axis=2) < 12).sum() > 300
