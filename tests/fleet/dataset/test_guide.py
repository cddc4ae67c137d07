"""docs/guides/data.md: its programs run as they stand, its table has every option, and the Chinese page is its twin."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

import fleet
from fleet.dataset.dataset_settings import MEMORY_OPTIONS
from tests.test_readme import example, read, run


@pytest.mark.slow
def test_the_programs_of_the_guide_run(tmp_path: Path) -> None:
    source = random.Random(0)
    for index in range(2):
        lines = [f"{word == 'good':d} {word} x{source.randrange(9)}" for word in source.choices(["good", "bad"], k=20)]
        (tmp_path / f"raw-{index}").write_text("\n".join(lines))
    (tmp_path / "clicks.py").write_text(example("docs/guides/data.md", "clicks.py"))
    done = run(example("docs/guides/data.md", "train.py"), tmp_path)
    assert done.returncode == 0, done.stderr
    samples, auc = done.stdout.split()[-2:]
    assert samples == "40"
    assert float(auc) > 0.6
    assert len(re.findall(r"batch \d+: loss=[\d.]+", done.stdout + done.stderr)) == 10


def test_the_metrics_of_the_guide_print_what_it_says(tmp_path: Path) -> None:
    done = run(example("docs/guides/data.md", "metrics.py"), tmp_path)
    assert round(float(done.stdout.split()[-1]), 4) == 0.6667, done.stderr
    assert "prints 0.6667" in read("docs/guides/data.md")


def test_the_guide_names_every_metric() -> None:
    named = set(re.findall(r"^\| `(Stat\w+)\(", read("docs/guides/data.md"), re.MULTILINE))
    assert named == {name for name in fleet.metrics.__all__ if name.startswith("Stat")}


@pytest.mark.parametrize("page", ["docs/guides/data.md", "docs/guides/data.zh-CN.md"])
def test_the_guide_names_every_option(page: str) -> None:
    rows = re.findall(r"^\| (`[^|]*) \|", read(page), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert set(MEMORY_OPTIONS) - named == set()


def test_both_languages_have_the_same_programs_and_outline() -> None:
    texts = [read(page) for page in ("docs/guides/data.md", "docs/guides/data.zh-CN.md")]
    english, chinese = (re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL) for text in texts)
    assert english == chinese
    english, chinese = (
        re.findall(r"^(#+ |- |\| )", re.sub(r"(?s)```.*?```", "", text), re.MULTILINE) for text in texts
    )
    assert english == chinese
