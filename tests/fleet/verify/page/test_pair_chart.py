"""Two bars for each tensor, from zero, around the one that is set off."""

from __future__ import annotations

import re

from fleet.verify.page.pair_chart import TwoNorms, pair_chart

NAMES = ("one process", "workers")


def test_bars_are_as_long_as_their_values() -> None:
    text = pair_chart(
        [TwoNorms("a", 4.0, 2.0), TwoNorms("b", None, float("nan"))], names=NAMES, label="Norms", marked="of a"
    )
    widths = [float(width) for width in re.findall(r'<rect[^>]* width="([0-9.]+)"', text)]
    assert widths[:2] == [400.0, 200.0]
    assert widths[2:] == [0.0, 0.0]
    assert text.count('class="marked"') == 1


def test_of_many_tensors_those_around_the_marked_one_are_drawn() -> None:
    pairs = [TwoNorms(f"layer.{i}.<weight>", 1.0, 1.0) for i in range(100)]
    text = pair_chart(pairs, names=NAMES, label="Norms", marked="gradient of layer.70.<weight>")
    assert text.count("<rect") == 48
    assert "76 more tensors are not shown" in text
    assert "layer.70.&lt;weight&gt;" in text
    assert "layer.10." not in text


def test_nothing_is_drawn_of_nothing() -> None:
    assert pair_chart([], names=NAMES, label="") == ""
    assert pair_chart([TwoNorms("a", 0.0, 0.0)], names=NAMES, label="") == ""
