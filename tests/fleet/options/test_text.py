"""The generated documentation of the options: complete, and true to the registry."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from fleet.launch.cli.unused_flags import REFUSED_FLAGS, WITHOUT_EFFECT
from fleet.options import (
    DistributedStrategy,
    option_listing_markdown,
    option_table_markdown,
    schema,
    strategy_table,
    words_of,
)
from fleet.strategies import REGISTRY
from fleet.strategies._declare.fields import Config, FieldRule, value_types


def cells(table: str) -> dict[str, list[str]]:
    rows = [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in table.splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): row for row in rows}


@pytest.mark.parametrize("language", ["en", "zh"])
def test_table_has_every_option(language: str) -> None:
    """Each option once, with type, default, meaning and outcome; four cells in each row."""
    rows = cells(option_table_markdown(language))
    assert list(rows) == list(schema())
    assert {len(row) for row in rows.values()} == {4}
    for name, option in schema().items():
        assert rows[name][1]
        assert rows[name][3].strip()
        if isinstance(option.default, bool | int | float):
            assert rows[name][2] == f"`{option.default!r}`"


def test_outcomes_are_written_out() -> None:
    """What warns and what is refused can be told apart, with the reason."""
    rows = cells(option_table_markdown())
    for name, option in schema().items():
        happens = rows[name][3]
        if option.rule.no_meaning:
            assert f"Accepted with one warning: {option.rule.no_meaning}." in happens
        elif option.rule.refused:
            assert f"Refused: {option.rule.refused}." in happens
        else:
            assert "Accepted with" not in happens


def test_chinese_words_are_complete() -> None:
    """Decision 12: every option has a meaning in Chinese, and every reason of the table too."""
    words = words_of("zh")
    table = option_table_markdown("zh")
    for name, row in cells(table).items():
        assert re.search(r"[\u4e00-\u9fff]", row[3]), name
        assert not re.search(r"[a-z]{3,} [a-z]{2,} [a-z]{2,} [a-z]{2,}", row[3]), f"{name} is in English"
    assert set(words["meanings"]) <= set(schema())
    assert set(words["reasons"]) <= reasons_in_use()


def test_chinese_words_of_keys_are_complete() -> None:
    """Every key has a meaning in Chinese, every outcome a reason, and no words are left for keys that are gone."""
    words = words_of("zh")
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", option_listing_markdown("zh"), re.DOTALL | re.MULTILINE))
    for option, text in sections.items():
        for key, row in cells(text).items():
            assert re.search(r"[\u4e00-\u9fff]", row[3]) or row[3] in ("rank",), f"{option}.{key}"
            assert not re.search(r"[a-z]{3,} [a-z]{2,} [a-z]{2,} [a-z]{2,}", row[3]), f"{option}.{key} is in English"
        last_parts = {key.rpartition(".")[2] for key in cells(text)} | set(cells(text))
        assert set(words["keys"].get(option, {})) <= last_parts
    assert set(words["keys"]) == set(sections)


def reasons_in_use() -> set[str]:
    """Returns every reason why an option, a key, a pair of options or a flag of the launcher does not act."""
    configs = [option.kind for option in schema().values() if isinstance(option.default, Config)]
    rules = [option.rule for option in schema().values()] + [rule for kind in configs for rule in rules_of(kind)]
    own = {reason for rule in rules for reason in (rule.no_meaning, rule.refused) if reason}
    pairs = {reason for strategy in REGISTRY.values() for reason in strategy.conflicts.values()}
    return own | pairs | {flag.reason for flag in (*REFUSED_FLAGS, *WITHOUT_EFFECT)}


def rules_of(kind: type[Config]) -> Iterator[FieldRule]:
    """Yields the rules of the keys of a config, those of its groups too."""
    for key in value_types(kind):
        value = getattr(kind(), key)
        if isinstance(value, Config):
            yield from rules_of(type(value))
        else:
            yield kind.rule(key)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_listing_has_every_key(language: str) -> None:
    """docs/reference/options.md: a section for each option with keys, nested keys with dots."""
    text = option_listing_markdown(language)
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE))
    assert set(sections) == {name for name, option in schema().items() if isinstance(option.default, Config)}
    assert list(cells(sections["gradient_merge_configs"])) == ["k_steps", "avg"]
    assert "mp_configs.sync_mode" in cells(sections["hybrid_configs"])
    assert "dp_configs.nccl_config" in cells(sections["hybrid_configs"])
    # A group that stands in several places has one table.
    assert sections["hybrid_configs"].count("| `nchannels` |") == 1
    assert "### nccl_config\n" in sections["hybrid_configs"]
    assert not re.search(r"[\u4e00-\u9fff\uff09]\. |\u3002 (?!\|)", text)


def test_strategy_table_shows_nested_changes() -> None:
    """A0.12: keys of what is on in full, of the rest what was changed."""
    strategy = DistributedStrategy()
    strategy.hybrid_configs = {"mp_configs": {"sync_mode": "average"}}
    strategy.amp_configs = {}
    lines = [line.split() for line in strategy_table(strategy).splitlines()[1:]]
    assert ["mp_configs.sync_mode", "'average'"] in lines
    assert ["amp_configs", "(defaults)"] in lines
    assert len(lines) == 3
