"""docs/reference/strategies.md says of each strategy what it declares, conflicts of both sides included."""

from __future__ import annotations

import yaml

from fleet.options import DistributedStrategy
from fleet.options.guide_text import conflicts_of, strategies_markdown
from fleet.strategies import REGISTRY


def test_every_strategy_has_a_section_or_a_reason() -> None:
    """Issue 3: the guide is generated from the registry; what is refused stands there with its reason."""
    text = strategies_markdown()
    for name, strategy in REGISTRY.items():
        if strategy.refused is None:
            assert f"\n## {name}\n" in f"\n{text}", name
        else:
            assert f"- `{name}`: {strategy.refused}." in text, name


def test_conflicts_show_on_both_sides() -> None:
    """A conflict is written once, in one file, and shown in both sections."""
    for strategy in REGISTRY.values():
        for other, reason in strategy.conflicts.items():
            if other in REGISTRY:
                assert (strategy.name, reason) in conflicts_of(REGISTRY[other])
                assert (other, reason) in conflicts_of(strategy)


def test_examples_are_strategy_files() -> None:
    """Every example loads as it is printed."""
    blocks = strategies_markdown().split("```yaml\n")[1:]
    assert blocks
    for block in blocks:
        strategy = DistributedStrategy()
        strategy.update(yaml.safe_load(block.split("```")[0]))
        assert strategy.to_dict()
