"""docs/reference/strategies.md: one section for each strategy, from its ``guide`` and its declarations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from fleet.strategies import REGISTRY
from fleet.strategies._declare.strategy import Strategy

# Words of the sections. Other languages are in docs/reference/strategies.LANGUAGE.yaml, with the meanings and reasons
# of options.LANGUAGE.yaml; "guides" holds the sentences of each strategy.
ENGLISH: Mapping[str, Any] = {
    "when": "When",
    "cost": "Cost",
    "formula": "Formula",
    "source": "Source",
    "model": "On the model",
    "optimizer": "On the optimizer",
    "not with": "Not with `{other}`",
    "not supported": "Not supported",
    "colon": ": ",
    "stop": ".",
    "meanings": {},
    "guides": {},
    "reasons": {},
}


def strategies_markdown(words: Mapping[str, Any] = ENGLISH) -> str:
    """Returns a section for every supported strategy, by name, and the list of the unsupported ones."""
    offered = [s for s in REGISTRY.values() if s.refused is None]
    sections = "\n".join(_section(strategy, words) for strategy in sorted(offered, key=lambda s: s.name))
    refused = [f"- `{s.name}`: {s.refused}." for s in sorted(REGISTRY.values(), key=lambda s: s.name) if s.refused]
    return sections + (f"\n## {words['not supported']}\n\n" + "\n".join(refused) + "\n" if refused else "")


def _section(strategy: type[Strategy], words: Mapping[str, Any]) -> str:
    meaning = words["meanings"].get(strategy.name, strategy.meaning)
    return "\n".join([f"## {strategy.name}", "", meaning, "", *_facts(strategy, words), *_example(strategy)])


def _facts(strategy: type[Strategy], words: Mapping[str, Any]) -> Iterator[str]:
    said = words["guides"].get(strategy.name, {})
    colon, stop = words["colon"], words["stop"]
    guide = strategy.guide
    if guide is not None:
        yield f"- **{words['when']}**{colon}{said.get('when', guide.when)}"
        yield f"- **{words['cost']}**{colon}{said.get('cost', guide.cost)}"
        if guide.formula:
            yield f"- **{words['formula']}**{colon}`{said.get('formula', guide.formula)}`"
        if guide.source:
            yield f"- **{words['source']}**{colon}{guide.source}"
    for kind, effect in (("model", strategy.model_effect), ("optimizer", strategy.optimizer_effect)):
        if effect:
            yield f"- **{words[kind]}**{colon}{said.get(kind, effect)}{stop}"
    for other, reason in conflicts_of(strategy):
        yield f"- **{words['not with'].format(other=other)}**{colon}{words['reasons'].get(reason, reason)}{stop}"
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
