"""The picture of a history."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from tests.examples.wide_and_deep.example import example_module

plot = example_module("plot")


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "holds no pass. Train with --history"), ("3\n", "line 1: not a record"), ('{"pass": 0}', "line 1: not a")],
)
def test_a_file_that_is_no_history_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "h").write_text(text)
    with pytest.raises(ValueError, match=message):
        plot.read_history(tmp_path / "h")


def test_the_picture_shows_both_curves(tmp_path: Path) -> None:
    lines = [json.dumps({"pass": n, "loss": 0.5 - 0.01 * n, "auc": 0.7, "samples": 8}) for n in range(3)]
    (tmp_path / "h").write_text("\n".join(lines))
    plot.draw(plot.read_history(tmp_path / "h"), tmp_path / "a" / "p.png", "title")
    with Image.open(tmp_path / "a" / "p.png") as picture:
        colours = {colour for _, colour in picture.convert("RGB").getcolors(1 << 20)}
    assert {(0x1F, 0x5F, 0xA8), (0xD1, 0x62, 0x1C)} <= colours
