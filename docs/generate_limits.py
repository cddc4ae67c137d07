"""The parts of docs/help/limits.md that are data: statements with their tests, refused options, pairs and flags.

The statements stand in docs/help/limits.yaml, in both languages; options, pairs and flags come from the code.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from generate_errors import words_of_help

from fleet.launch.cli.unused_flags import REFUSED_FLAGS, WITHOUT_EFFECT
from fleet.options import schema, words_of
from fleet.options.guide_text import conflicts_of
from fleet.strategies import REGISTRY
from fleet.strategies._declare.fields import Config, value_types

ROOT = Path(__file__).parents[1]
STATEMENTS = ROOT / "docs" / "help" / "limits.yaml"
# Words of the tables; those of another language are in docs/help/words.LANGUAGE.yaml.
ENGLISH = {
    "not tested": "Reason: {reason}.",
    "pair": "| options | reason |",
    "option": "| option | reason |",
    "flag": "| flag | reason |",
    "refused flags": "Refused:",
    "flags without effect": "Accepted with one warning:",
}


def statements() -> list[dict[str, Any]]:
    """Returns the topics of docs/help/limits.yaml with their statements."""
    found: list[dict[str, Any]] = yaml.safe_load(STATEMENTS.read_text(encoding="utf-8"))
    return found


def statements_markdown(language: str = "en") -> str:
    """Returns a list of statements for each topic, with the reason where no test holds one; tests stay in the data."""
    lines: list[str] = []
    for topic in statements():
        title = topic["topic"] if language == "en" else topic["zh"]
        lines += [f"## {title}", "", *[f"- {_said(row, language)}" for row in topic["rows"]], ""]
    return "\n".join(lines)


def _said(row: dict[str, str], language: str) -> str:
    said = row["says"] if language == "en" else row["zh"]
    if "test" in row:
        return said
    reason = row["untested" if language == "en" else "untested_zh"]
    note = words_of_help("limits", language, ENGLISH)["not tested"].format(reason=reason)
    return f"{said} {note}" if language == "en" else f"{said}{note}"


def refused_options_markdown(language: str = "en") -> str:
    """Returns a table of the options that are refused, with the reasons."""
    refused = [(option.name, option.rule.refused) for option in schema().values() if option.rule.refused]
    for option in schema().values():
        if isinstance(option.default, Config):
            refused += [(f"{option.name}.{name}", reason) for name, reason in _refused_keys(option.default)]
    return _table("option", [(f"`{name}`", _reason(reason, language)) for name, reason in refused], language)


def _refused_keys(config: Config) -> Iterator[tuple[str, str]]:
    """Yields the keys of ``config`` that are refused, those of its groups with dots, and the reasons."""
    for key in value_types(type(config)):
        value = getattr(config, key)
        reason = type(config).rule(key).refused
        if isinstance(value, Config):
            yield from ((f"{key}.{inner}", why) for inner, why in _refused_keys(value))
        elif reason:
            yield key, reason


def idle_options_markdown(language: str = "en") -> str:
    """Returns a table of the options that are accepted with one warning, with the reasons."""
    idle = [(option.name, option.rule.no_meaning) for option in schema().values() if option.rule.no_meaning]
    return _table("option", [(f"`{name}`", _reason(reason, language)) for name, reason in idle], language)


def pairs_markdown(language: str = "en") -> str:
    """Returns a table of the pairs of options that exclude each other, with the reasons."""
    found = {tuple(sorted((strategy.name, other))): why for strategy, other, why in _conflicts()}
    rows = [(f"`{first}`, `{second}`", _reason(why, language)) for (first, second), why in sorted(found.items())]
    return _table("pair", rows, language)


def _conflicts() -> Iterator[tuple[Any, str, str]]:
    for strategy in REGISTRY.values():
        for other, reason in conflicts_of(strategy):
            yield strategy, other, reason


def flags_markdown(language: str = "en") -> str:
    """Returns the flags of the launcher that are refused, and those without effect, with the reasons."""
    words = words_of_help("limits", language, ENGLISH)
    parts = []
    for title, flags in (("refused flags", REFUSED_FLAGS), ("flags without effect", WITHOUT_EFFECT)):
        rows = [(f"`--{flag.name}`", _reason(flag.reason, language)) for flag in flags]
        parts += [words[title], "", _table("flag", rows, language)]
    return "\n".join(parts)


def _table(kind: str, rows: list[tuple[str, str]], language: str) -> str:
    return (
        "\n".join(
            [
                words_of_help("limits", language, ENGLISH)[kind],
                "| --- | --- |",
                *[f"| {name} | {why} |" for name, why in rows],
            ]
        )
        + "\n"
    )


def _reason(reason: str, language: str) -> str:
    return str(words_of(language)["reasons"].get(reason, reason)).replace("|", "\\|")
