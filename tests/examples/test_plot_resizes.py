"""The picture of a run that was resized, on the undisturbed one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.examples.scripts import command, example_module, train

plot = example_module("plot_resizes")


def write(path: Path, *records: tuple[int, float, int]) -> Path:
    """Writes a history of updates: the number of each, its loss and the workers."""
    lines = [json.dumps({"update": u, "loss": loss, "workers": workers}) for u, loss, workers in records]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_an_update_that_was_made_again_counts_once(tmp_path: Path) -> None:
    path = write(tmp_path / "h", (1, 3.0, 2), (2, 2.5, 2), (3, 2.0, 2), (2, 2.5, 1), (3, 2.0, 1), (4, 1.5, 1))
    run, again = plot.read_updates(path)
    assert run == {1: (3.0, 2), 2: (2.5, 1), 3: (2.0, 1), 4: (1.5, 1)}
    assert again == 2
    assert plot.stages(run) == [(1, 1, 2), (2, 4, 1)]


def test_an_update_that_was_made_again_with_another_loss_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "h", (1, 3.0, 2), (1, 3.0000000000000004, 1))
    with pytest.raises(ValueError, match="line 2: update 1 was made again, and its loss is 3.0000000000000004"):
        plot.read_updates(path)


@pytest.mark.parametrize(("text", "message"), [("", "holds no update"), ("3", "line 1: not a record")])
def test_a_file_that_is_no_history_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "h").write_text(text)
    with pytest.raises(ValueError, match=message):
        plot.read_updates(tmp_path / "h")


def test_runs_of_another_length_are_not_compared() -> None:
    with pytest.raises(ValueError, match="2 and 1 updates"):
        plot.differences({1: (1.0, 1), 2: (1.0, 1)}, {1: (1.0, 2)})
    assert plot.differences({1: (1.0, 1)}, {1: (1.5, 2)}) == [0.5]


def test_the_picture_shows_both_runs_and_their_difference(tmp_path: Path) -> None:
    write(tmp_path / "one", *((u, 2.0 / u, 1) for u in range(1, 9)))
    write(tmp_path / "resized", *((u, 2.0 / u, 2 if u < 4 else 3) for u in range(1, 9)))
    assert "Wrote" in train(command("plot_resizes.py", "one", "resized", "pictures/p.png"), tmp_path)
    picture = np.array(Image.open(tmp_path / "pictures" / "p.png").convert("RGB")).astype(int)
    wanted = np.array([int(plot.ORANGE[i : i + 2], 16) for i in (1, 3, 5)])
    orange = np.abs(picture - wanted).sum(axis=2) < 12
    middle = picture.shape[0] * 2 // 3
    assert orange[:middle].sum() > 200
    assert orange[middle:].sum() > 200
