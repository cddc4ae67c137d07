"""The options as text: the ``repr`` of a strategy, the table of the README, and the listing of docs/options.md.

Everything is written from the registry, so the documentation cannot differ from what the code does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fleet.options import Option, schema
from fleet.strategies import REGISTRY
from fleet.strategies._base import NOT_YET
from fleet.strategies._config import Config, Rule, plain, type_name, value_types

if TYPE_CHECKING:
    from fleet.options import DistributedStrategy

# What happens to an option, and the head of the table. Languages beside English come with their own words.
ENGLISH = {
    "option": "Option",
    "type": "Type",
    "default": "Default",
    "happens": "What happens",
    "no meaning": "Accepted with one warning: {reason}.",
    "refused": "Refused: {reason}.",
    "not yet": "Not yet: refused.",
}


def strategy_table(strategy: DistributedStrategy) -> str:
    """Returns a table of the options that were assigned or are on, with those of their keys that matter.

    Example:
        >>> strategy = DistributedStrategy(); strategy.amp = True
        >>> print(strategy_table(strategy).splitlines()[1])
          amp                        True
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


def option_table_markdown(words: Mapping[str, str] | None = None) -> str:
    """Returns the table of every top-level option: name, type, default and what happens when it is set.

    Args:
        words: text in another language: the keys of :data:`ENGLISH`, the names of options (their meaning) and
            English reasons (translated). What is absent stays English.
    """
    text = {**ENGLISH, **(words or {})}
    head = f"| {text['option']} | {text['type']} | {text['default']} | {text['happens']} |"
    rows = [_row(option.name, option.kind, option.default, option.rule, text) for option in schema().values()]
    return "\n".join([head, "| --- | --- | --- | --- |", *rows]) + "\n"


def option_listing_markdown(words: Mapping[str, str] | None = None) -> str:
    """Returns the table of the options, then a section with the keys of every option that has keys.

    ``words`` is as in :func:`option_table_markdown`.
    """
    text = {**ENGLISH, **(words or {})}
    head = f"| {text['option']} | {text['type']} | {text['default']} | {text['happens']} |"
    sections = [option_table_markdown(words)]
    for option in schema().values():
        if isinstance(option.kind, type) and issubclass(option.kind, Config):
            rows = [_row(*row, text) for row in _keys_of(option.kind)]
            table = "\n".join([head, "| --- | --- | --- | --- |", *rows])
            sections.append(f"## {option.name}\n\n{_meaning(option, text)}\n\n{table}\n")
    return "\n".join(sections)


def _meaning(option: Option, text: Mapping[str, str]) -> str:
    return text.get(option.name, option.rule.meaning)


def _keys_of(kind: type[Config], prefix: str = "") -> Iterator[tuple[str, Any, Any, Rule]]:
    default = kind()
    for key, inner in value_types(kind).items():
        value = getattr(default, key)
        if isinstance(value, Config):
            yield from _keys_of(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", inner, value, kind.rule(key)


def _row(name: str, kind: Any, default: Any, rule: Rule, text: Mapping[str, str]) -> str:
    shown = "" if isinstance(default, Config) else f"`{plain(default)!r}`"
    meaning = text.get(name, rule.meaning)
    cells = [f"`{name}`", type_name(kind), shown, f"{meaning} {_outcome(rule, text)}".strip()]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _outcome(rule: Rule, text: Mapping[str, str]) -> str:
    if rule.refused == NOT_YET:
        return text["not yet"]
    reason = rule.no_meaning or rule.refused
    return text[rule.outcome].format(reason=text.get(reason, reason)) if reason else ""
