"""docs/guides/tracking.md and its Chinese twin: the script runs as it stands, and writes what the page says."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.sources import ROOT

BLOCK = re.compile(r"```(python|bash|toml)\n(.*?)```", re.DOTALL)
PAGES = ("guides/tracking.md", "guides/tracking.zh-CN.md")


def blocks(name: str) -> list[tuple[str, str]]:
    """Returns language and text of every block of code."""
    return BLOCK.findall((ROOT / "docs" / name).read_text(encoding="utf-8"))


def test_both_languages_have_the_same_code() -> None:
    assert blocks(PAGES[0]) == blocks(PAGES[1])


def test_settings_and_a_class_of_ones_own() -> None:
    import fleet

    strategy = fleet.DistributedStrategy()
    settings, console = (text for kind, text in blocks(PAGES[0])[2:] if kind == "python")
    exec(settings, {"strategy": strategy})
    assert strategy["tracker_configs"].every == 50
    names: dict[str, type] = {}
    exec(console, names)
    names["Console"]().log({"loss": 1.0}, 3)


@pytest.mark.slow
def test_the_page_runs(tmp_path: Path) -> None:
    (_, script), (_, command) = blocks(PAGES[0])[:2]
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    words = [sys.executable, *shlex.split(command)[1:]]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "runs" / "default.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 51))
    assert [line["step"] for line in lines if "time/step_ms" in line] == [10, 20, 30, 40, 50]
    assert all(path.name.startswith("events.") for path in (tmp_path / "runs" / "default").iterdir())
