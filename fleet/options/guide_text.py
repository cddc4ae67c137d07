"""docs/reference/strategies.md: one section for each strategy, from its ``guide`` and its declarations."""

from __future__ import annotations

from collections.abc import Iterator

import yaml

from fleet.strategies import REGISTRY
from fleet.strategies._declare.strategy import Strategy


def strategies_markdown() -> str:
    """Returns a section for every supported strategy, by name, and the list of the unsupported ones."""
    offered = [s for s in REGISTRY.values() if s.refused is None]
    sections = "\n".join(_section(strategy) for strategy in sorted(offered, key=lambda s: s.name))
    refused = [f"- `{s.name}`: {s.refused}." for s in sorted(REGISTRY.values(), key=lambda s: s.name) if s.refused]
    return sections + ("\n## Not supported\n\n" + "\n".join(refused) + "\n" if refused else "")


def _section(strategy: type[Strategy]) -> str:
    return "\n".join([f"## {strategy.name}", "", strategy.meaning, "", *_facts(strategy), *_example(strategy)])


def _facts(strategy: type[Strategy]) -> Iterator[str]:
    guide = strategy.guide
    if guide is not None:
        yield f"- **When**: {guide.when}"
        yield f"- **Cost**: {guide.cost}"
        if guide.formula:
            yield f"- **Formula**: `{guide.formula}`"
        if guide.source:
            yield f"- **Source**: {guide.source}"
    if strategy.model_effect:
        yield f"- **On the model**: {strategy.model_effect}."
    if strategy.optimizer_effect:
        yield f"- **On the optimizer**: {strategy.optimizer_effect}."
    for other, reason in conflicts_of(strategy):
        yield f"- **Not with `{other}`**: {reason}."
    yield ""


def conflicts_of(strategy: type[Strategy]) -> list[tuple[str, str]]:
    """Returns the options that exclude ``strategy``, with the reasons; either of the two files may declare it."""
    own = list(strategy.conflicts.items())
    said_elsewhere = [(s.name, s.conflicts[strategy.name]) for s in REGISTRY.values() if strategy.name in s.conflicts]
    return sorted(own + said_elsewhere)


def _example(strategy: type[Strategy]) -> Iterator[str]:
    if strategy.guide is None or not strategy.guide.example:
        return
    yield "```yaml"
    yield yaml.safe_dump(dict(strategy.guide.example), sort_keys=False).rstrip()
    yield "```"
    yield ""
