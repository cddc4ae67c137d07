"""docs/guides/recipes.md: every block runs on two workers as it stands there, and leaves equal weights behind."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler

import fleet
from tests.helpers.sources import ROOT
from tests.helpers.workers import run_workers

BLOCK = re.compile(r"<!-- example: ([^\n]+) -->\n```python\n(.*?)```", re.DOTALL)


def blocks(name: str) -> dict[str, str]:
    """Returns the code blocks of a page by their titles."""
    return dict(BLOCK.findall((ROOT / "docs" / name).read_text(encoding="utf-8")))


def whole(net: torch.nn.Module) -> list[torch.Tensor]:
    """Returns copies of the weights, gathered where workers hold parts."""
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for p in net.parameters()]


def run_block(start: str, body: str, label: str) -> dict[str, Any]:
    """Runs ``body`` after ``start``; returns the names that it leaves. A warning is an error."""
    names: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(compile(start + body, label, "exec"), names)
    return names


def run_blocks(rank: int, world_size: int, page: str, folder: str) -> dict[str, Any]:
    """Runs each block after the first one; returns the weights that each leaves."""
    os.chdir(folder)
    found = blocks(page)
    start = found.pop("start")
    left: dict[str, Any] = {}
    for title, body in found.items():
        names = run_block(start, body, f"{page}: {title}")
        left[title] = whole(names["net"])
        if "average" in names:
            left[f"{title} average"] = whole(names["average"])
        fleet.barrier_worker()
    return left


@pytest.mark.parametrize("page", ["guides/recipes.md", "guides/recipes.zh-CN.md"])
def test_every_recipe_runs_and_trains(page: str, tmp_path: Path) -> None:
    first, second = run_workers(run_blocks, 2, page, str(tmp_path), backend=None)
    assert len(first) >= 9
    for title, weights in first.items():
        torch.testing.assert_close(second[title], weights, atol=0, rtol=0, msg=title)
        assert title == "printing" or not torch.equal(weights[0], first["printing"][0]), f"{title} trained nothing"


def run_in_stages(rank: int, world_size: int, title: str) -> dict[int, list[list[torch.Tensor]]]:
    """Returns, by stage of sharding (0 is without), the weights that a block leaves, and their average."""
    found = blocks("guides/recipes.md")
    left: dict[int, list[list[torch.Tensor]]] = {}
    for stage in range(4):
        strategy = fleet.DistributedStrategy()
        if stage:
            strategy.sharding = True
            strategy.sharding_configs = {"stage": stage}
        start = found["start"].replace("is_collective=True", "is_collective=True, strategy=strategy")
        body = found[title].replace('{"stage": 3}', f'{{"stage": {stage or 1}}}')
        names: dict[str, Any] = {"strategy": strategy}
        exec(compile(start + body, title, "exec"), names)
        left[stage] = [whole(names[name]) for name in ("net", "average") if name in names]
    return left


def test_a_penalty_on_the_weights_trains_the_same_in_every_stage() -> None:
    """The last layer has one row and two workers share it; one process with all the data is right."""
    torch.manual_seed(0)
    x, y = torch.randn(64, 8), torch.randn(64, 1)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    samplers = [DistributedSampler(range(64), 2, rank) for rank in range(2)]  # type: ignore[arg-type]
    orders = [torch.tensor(list(sampler)).view(-1, 8) for sampler in samplers]
    for batch in torch.cat(orders, dim=1):
        loss = torch.nn.functional.mse_loss(net(x[batch]), y[batch])
        (loss + 0.01 * sum(p.square().sum() for p in net.parameters())).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in run_workers(run_in_stages, 2, "penalty", backend=None):
        for stage, (weights,) in found.items():
            torch.testing.assert_close(weights, whole(net), atol=1e-6, rtol=1e-5, msg=f"stage {stage}")


def test_an_average_of_parts_is_that_of_the_whole() -> None:
    for found in run_workers(run_in_stages, 2, "ema of parts", backend=None):
        for stage in (2, 3):
            torch.testing.assert_close(found[stage], found[1], atol=1e-6, rtol=1e-5)


def test_both_languages_have_the_same_code() -> None:
    english, chinese = (blocks(page) for page in ("guides/recipes.md", "guides/recipes.zh-CN.md"))

    def bare(code: str) -> str:
        return re.sub(r"  # .*", "", code)

    assert {title: bare(body) for title, body in english.items()} == {k: bare(v) for k, v in chinese.items()}
