"""make demo-resizes: an elastic job whose nodes come and are killed has the bits of one undisturbed process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from PIL import Image

from tests.examples.scripts import ROOT, TINY, command, history, train


def test_make_runs_it() -> None:
    recipe = (ROOT / "Makefile").read_text().split("\ndemo-resizes:")[1].split("\n\n")[0]
    assert "examples/resnet/demo_resizes.py output/demo-resizes" in recipe


@pytest.mark.slow
def test_a_resized_job_has_the_bits_of_an_undisturbed_one(tmp_path: Path) -> None:
    """Issue 44, acceptance 3."""
    options = (*TINY, "--batch-size", "8", "--epochs", "9", "--save-every", "5")
    output = train(command("demo_resizes.py", "demo", "--sizes", "2", "1", "3", "--", *options), tmp_path, 300)
    assert re.search(r"^losses that differ from the undisturbed run: 0 of 198$", output, re.MULTILINE), output
    assert "weights and optimizer state: the same bits" in output
    workers = {record["workers"] for record in history(tmp_path / "demo" / "resized.jsonl")}
    assert workers >= {1, 2, 3}, output
    with Image.open(tmp_path / "demo" / "resizes.png") as picture:
        assert picture.width > 1000
