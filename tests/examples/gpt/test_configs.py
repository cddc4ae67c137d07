"""Every strategy file of the GPT example plans on the workers that its name says."""

from __future__ import annotations

import re
from math import prod
from pathlib import Path

import pytest

from fleet.options import DistributedStrategy
from fleet.strategies import plan
from fleet.strategies._shared.mesh import plan_axes
from tests.examples.gpt.example import CONFIGS


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_file_plans_on_its_mesh(path: Path) -> None:
    """Issue 12, 3: a strategy file per mesh; a comment says what it does."""
    assert path.read_text().startswith("# ")
    named = {axis: int(degree) for axis, degree in re.findall(r"([a-z]+)(\d)", path.stem)}
    strategy = DistributedStrategy.load(str(path))
    num_workers = prod(named.values())
    degrees = plan_axes(strategy, num_workers)
    assert {axis: degree for axis, degree in degrees.items() if degree > 1} == named
    made = plan(strategy, num_workers)
    assert made.notes == ()
    settings = strategy.pipeline_configs
    if not path.stem.startswith("plan"):
        rows = settings["accumulate_steps"] * settings["micro_batch_size"]
        assert rows * named.get("dp", 1) * named.get("sharding", 1) == 16
