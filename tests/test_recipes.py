"""docs/recipes.md: every block runs on two workers as it stands there, and leaves equal weights behind."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import fleet
from tests.helpers.sources import ROOT
from tests.helpers.workers import run_workers

BLOCK = re.compile(r"<!-- example: ([^\n]+) -->\n```python\n(.*?)```", re.DOTALL)


def blocks(name: str) -> dict[str, str]:
    """Returns the code blocks of a page by their titles."""
    return dict(BLOCK.findall((ROOT / "docs" / name).read_text(encoding="utf-8")))


def run_blocks(rank: int, world_size: int, page: str, folder: str) -> dict[str, Any]:
    """Runs each block after the first one; returns the weights that each leaves."""
    os.chdir(folder)
    found = blocks(page)
    start = found.pop("start")
    left: dict[str, Any] = {}
    for title, body in found.items():
        names: dict[str, Any] = {}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            exec(compile(start + body, f"{page}: {title}", "exec"), names)
        left[title] = [p.detach().clone() for p in names["net"].parameters()]
        if "average" in names:
            left["average"] = [p.detach().clone() for p in names["average"].parameters()]
        fleet.barrier_worker()
    return left


@pytest.mark.parametrize("page", ["recipes.md", "recipes.zh-CN.md"])
def test_every_recipe_runs_and_trains(page: str, tmp_path: Path) -> None:
    first, second = run_workers(run_blocks, 2, page, str(tmp_path), backend=None)
    assert len(first) >= 9
    for title, weights in first.items():
        torch.testing.assert_close(second[title], weights, atol=0, rtol=0, msg=title)
        assert title == "printing" or not torch.equal(weights[0], first["printing"][0]), f"{title} trained nothing"


def test_both_languages_have_the_same_code() -> None:
    english, chinese = (blocks(page) for page in ("recipes.md", "recipes.zh-CN.md"))

    def bare(code: str) -> str:
        return re.sub(r"  # .*", "", code)

    assert {title: bare(body) for title, body in english.items()} == {k: bare(v) for k, v in chinese.items()}
