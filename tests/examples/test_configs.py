"""Every strategy file of the ResNet example plans, and names only modules and options that exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleet.options import DistributedStrategy, schema
from fleet.strategies import REGISTRY, plan
from fleet.strategies._declare.strategy_plan import foreign

CONFIGS = sorted((Path(__file__).parents[2] / "examples" / "resnet" / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_file_plans_on_the_workers_it_is_for(path: Path) -> None:
    """Issue 3: each file loads and plans on two workers (four for two levels); a comment says what it does."""
    assert path.read_text().startswith("# ")
    made = plan(DistributedStrategy.load(str(path)), 4 if "hierarchical" in path.stem else 2)
    assert made.steps
    assert made.notes == () or path.stem == "fast_gpu"


def test_every_strategy_has_a_file() -> None:
    """One file for each strategy that the example's network can use; layers and stages are the GPT's."""
    switched = {name for path in CONFIGS for name in DistributedStrategy.load(str(path)).to_dict()}
    options = schema()
    collective = {n: s for n, s in REGISTRY.items() if s.refused is None and foreign(s, collective=True) is None}
    offered = {n for n in collective if n in options and options[n].kind is bool}
    assert offered - switched <= {"asp", "check_nan_inf", "pipeline", "qat", "tensor_parallel"}
