"""The options as text: the ``repr`` of a strategy, the table of the README, and the listing of docs/options.md.

Everything is written from the registry, so the documentation cannot differ from what the code does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from fleet.options import schema
from fleet.strategies import REGISTRY
from fleet.strategies._base import NOT_YET
from fleet.strategies._config import Config, Rule, plain, type_name, value_types

if TYPE_CHECKING:
    from fleet.options import DistributedStrategy

# What happens to an option, and the head of the table. Words of another language stand in docs/options.LANGUAGE.yaml.
ENGLISH: Mapping[str, Any] = {
    "option": "Option",
    "type": "Type",
    "default": "Default",
    "happens": "What happens",
    "no meaning": "Accepted with one warning: {reason}.",
    "refused": "Refused: {reason}.",
    "not yet": "Not yet: refused.",
    "settings of": "Settings of '{name}'.",
    "meanings": {},
    "reasons": {},
}


def words_of(language: str, folder: Path = Path(__file__).parents[1] / "docs") -> Mapping[str, Any]:
    """Returns the words of ``language``; ``folder`` holds ``options.LANGUAGE.yaml``, English needs no file."""
    if language == "en":
        return ENGLISH
    text = (folder / f"options.{language}.yaml").read_text(encoding="utf-8")
    return {**ENGLISH, **yaml.safe_load(text)}


def strategy_table(strategy: DistributedStrategy) -> str:
    """Returns a table of the options that were assigned or are on, with those of their keys that matter.

    Example:
        >>> from fleet.options import DistributedStrategy
        >>> strategy = DistributedStrategy()
        >>> strategy.fuse_grad_size_in_MB = 16
        >>> print(strategy_table(strategy))
        DistributedStrategy (every other option holds its default)
          fuse_grad_size_in_MB  16
    """
    rows = list(_changed_rows(strategy))
    if not rows:
        return "DistributedStrategy: every option holds its default."
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:{width}}  {value}" for name, value in rows]
    return "\n".join(["DistributedStrategy (every other option holds its default)", *lines])


def _changed_rows(strategy: DistributedStrategy) -> Iterator[tuple[str, str]]:
    for name, option in schema().items():
        value = strategy[name]
        switch = name.removesuffix("_configs")
        is_on = name.endswith("_configs") and switch in REGISTRY and strategy[switch] and strategy.is_set(switch)
        if value == option.default and not strategy.is_set(name) and not is_on:
            continue
        if not isinstance(value, Config):
            yield f"  {name}", repr(plain(value))
            continue
        keys = value.as_dict() if is_on else value.changes()
        yield f"  {name}", "" if keys else "(defaults)"
        for key, item in _flat(keys):
            yield f"    {key}", repr(item)


def _flat(keys: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in keys.items():
        if isinstance(item, dict) and item:
            yield from _flat(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item


def option_table_markdown(language: str = "en") -> str:
    """Returns the table of every top-level option: name, type, default and what happens when it is set."""
    words = words_of(language)
    rows = [_row(option.name, option.kind, option.default, option.rule, words) for option in schema().values()]
    return "\n".join([*_head(words), *rows]) + "\n"


def option_listing_markdown(language: str = "en") -> str:
    """Returns the table of the options, then for every option that has keys a section with the table of its keys.

    The keys are described in English in every language.
    """
    words = words_of(language)
    sections = [option_table_markdown(language)]
    for option in schema().values():
        if isinstance(option.kind, type) and issubclass(option.kind, Config):
            keys = {**words, "meanings": {}}  # a key may have the name of an option
            rows = [_row(name, kind, default, rule, keys) for name, kind, default, rule in _keys_of(option.kind)]
            table = "\n".join([*_head(words), *rows])
            sections.append(f"## {option.name}\n\n{_meaning(option.name, option.rule, words)}\n\n{table}\n")
    return "\n".join(sections)


def _head(words: Mapping[str, Any]) -> list[str]:
    names = " | ".join(words[name] for name in ("option", "type", "default", "happens"))
    return [f"| {names} |", "| --- | --- | --- | --- |"]


def _meaning(name: str, rule: Rule, words: Mapping[str, Any]) -> str:
    switch = name.removesuffix("_configs")
    own = words["settings of"].format(name=switch) if switch != name and switch in REGISTRY else rule.meaning
    return str(words["meanings"].get(name, own))


def _keys_of(kind: type[Config], prefix: str = "") -> Iterator[tuple[str, Any, Any, Rule]]:
    default = kind()
    for key, inner in value_types(kind).items():
        value = getattr(default, key)
        if isinstance(value, Config):
            yield from _keys_of(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", inner, value, kind.rule(key)


def _row(name: str, kind: Any, default: Any, rule: Rule, words: Mapping[str, Any]) -> str:
    shown = "" if isinstance(default, Config) else f"`{plain(default)!r}`"
    happens = f"{_meaning(name, rule, words)} {_outcome(rule, words)}".strip()
    cells = [f"`{name}`", type_name(kind), shown, happens]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _outcome(rule: Rule, words: Mapping[str, Any]) -> str:
    if rule.refused == NOT_YET:
        return str(words["not yet"])
    reason = rule.no_meaning or rule.refused
    if reason is None:
        return ""
    return str(words[rule.outcome].format(reason=words["reasons"].get(reason, reason)))
