"""The picture of a history."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.examples.scripts import command, example_module, train

plot = example_module("plot")


def record(epoch: int, loss: float) -> str:
    """Returns one line of a history."""
    return json.dumps({"epoch": epoch, "loss": loss, "acc1": 0.5, "acc5": 1.0, "test_acc1": 0.25, "lr": 0.1})


def test_an_epoch_that_was_trained_twice_counts_once(tmp_path: Path) -> None:
    """A run that was killed may write an epoch again after it resumed."""
    path = tmp_path / "history"
    path.write_text("\n".join([record(0, 3.0), record(1, 2.0), record(1, 1.5), record(2, 1.0)]) + "\n")
    records = plot.read_history(path)
    assert [(r["epoch"], r["loss"]) for r in records] == [(0, 3.0), (1, 1.5), (2, 1.0)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no epoch. Train with --history"),
        (record(0, 1.0) + "\nnot json", "line 2: not a record"),
        ('{"epoch": 0}', "line 1: not a record"),
        ("3", "line 1: not a record"),
    ],
)
def test_a_file_that_is_no_history_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "history").write_text(text)
    with pytest.raises(ValueError, match=message):
        plot.read_history(tmp_path / "history")


def panels(records: list[str], folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Returns the two halves of the picture that the script draws."""
    (folder / "history").write_text("\n".join(records))
    assert "Wrote" in train(command("plot.py", "history", "pictures/p.png"), folder)
    picture = np.array(Image.open(folder / "pictures" / "p.png").convert("RGB")).astype(int)
    middle = picture.shape[1] // 2
    return picture[:, :middle], picture[:, middle:]


def coloured(panel: np.ndarray, colour: str) -> int:
    """Returns how many pixels have a colour, written as ``#rrggbb``."""
    wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])
    return int((np.abs(panel - wanted).sum(axis=2) < 12).sum())


def test_the_picture_has_a_panel_for_the_loss_and_one_for_the_accuracies(tmp_path: Path) -> None:
    left, right = panels([record(epoch, 2.0 - epoch / 2) for epoch in range(3)], tmp_path)
    assert left.shape[0] > 400
    assert left.shape[1] > 600
    assert coloured(left, plot.BLUE) > 500
    assert coloured(left, plot.ORANGE) == 0
    assert coloured(right, plot.BLUE) > 500
    assert coloured(right, plot.ORANGE) > 500


def test_one_epoch_gives_a_picture_too(tmp_path: Path) -> None:
    left, right = panels([record(0, 2.0)], tmp_path)
    assert coloured(left, plot.BLUE) > 20
    assert coloured(right, plot.ORANGE) > 20
