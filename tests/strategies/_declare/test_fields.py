"""Settings as data: conversion, bounds, merging, copies."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import pytest

from fleet.errors import ConfigError, UnknownOptionError
from fleet.strategies._declare.fields import Config, FieldRule, plain, setting, type_name, value_types


@dataclass(frozen=True, kw_only=True)
class Inner(Config, option="outer_configs['inner']"):
    size: int = setting(2, "a size", at_least=1, at_most=4)
    name: str = setting("a", "a name", choices=("a", "b"))


@dataclass(frozen=True, kw_only=True)
class Outer(Config, option="outer_configs"):
    rate: float = setting(0.5, "a rate", above=0, below=1)
    flags: tuple[str, ...] = setting(["x"], "some flags", choices=("x", "y"))
    table: dict[str, Any] = setting({}, "a free table")
    kind: int = setting(1, "a kind", enum={"ONE": 1, "TWO": 2})
    inner: Inner = setting(Inner, "nested")


class Number(IntEnum):
    ONE = 1
    TWO = 2


def test_merge_keeps_other_keys() -> None:
    """A0.5: a partial dictionary changes the named keys only, in nested settings too."""
    config = Outer().updated({"rate": 0.25, "inner": {"size": 3}})
    assert config.updated({"inner": {"name": "b"}}) == Outer(rate=0.25, inner=Inner(size=3, name="b"))
    assert Outer() == Outer(rate=0.5)


def test_lists_replace() -> None:
    """A0.7: a list that is assigned twice holds the second one, not both."""
    config = Outer().updated({"flags": ["y"]}).updated({"flags": ["x", "x"]})
    assert config.flags == ("x", "x")


def test_tables_merge_and_are_copied() -> None:
    """A0.5, A0.10: a free dictionary merges by its first level and shares nothing with the caller's."""
    given: dict[str, Any] = {"a": {"k": [1]}}
    config = Outer().updated({"table": given})
    given["a"]["k"].append(2)
    given["b"] = {}
    assert config.table == {"a": {"k": [1]}}
    assert config.updated({"table": {"c": {}}}).table == {"a": {"k": [1]}, "c": {}}
    shown = config.as_dict()
    shown["table"]["a"]["k"].append(3)
    assert config.table == {"a": {"k": [1]}}


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("rate", 0, "greater than 0"),
        ("rate", 1.0, "less than 1"),
        ("rate", float("nan"), "finite"),
        ("rate", float("inf"), "finite"),
        ("rate", "0.5", "takes a number"),
        ("rate", True, "takes a number"),
        ("flags", "x", "takes a list"),
        ("flags", ["z"], "'z'; it takes one of 'x', 'y'"),
        ("flags", [1], r"\['flags'\]\[0\] takes a string"),
        ("kind", 3, "one of 1, 2"),
        ("kind", 1.0, "takes an integer"),
        ("table", [1], "takes a dictionary"),
        ("table", {1: 2}, "its keys are strings"),
        ("table", {"a": {"b": object()}}, r"\['table'\]\['a'\]\['b'\]"),
        ("table", {"a": [float("inf")]}, r"\['a'\]\[0\]"),
        ("table", {"a": None}, "None"),
        ("inner", 3, "takes a dictionary"),
        ("inner", {"size": 5}, r"outer_configs\['inner'\]\['size'\] is 5; it must be at most 4"),
        ("inner", {"size": 0}, "at least 1"),
        ("inner", {"name": "c"}, "'c'; it takes one of 'a', 'b'"),
    ],
)
def test_wrong_values_name_the_key_and_the_rule(key: str, value: object, rule: str) -> None:
    """A0.4: a wrong value raises with what the user wrote and the rule; it is a ValueError and a TypeError."""
    with pytest.raises(ConfigError, match=rule):
        Outer().updated({key: value})
    with pytest.raises(TypeError):
        Outer().updated({key: value})


def test_unknown_key_names_the_nearest() -> None:
    """A0.5: the message holds the nearest key and the list."""
    with pytest.raises(UnknownOptionError, match=r"no key 'rat'. Did you mean 'rate'\? Keys: rate, flags"):
        Outer().updated({"rat": 1})
    with pytest.raises(UnknownOptionError, match=r"outer_configs\['inner'\] has no key 'sise'"):
        Outer().updated({"inner": {"sise": 1}})


def test_enum_members_become_numbers() -> None:
    """An IntEnum is taken for its number, so that files and copies hold plain data."""
    assert type(Outer(kind=Number.TWO).kind) is int
    assert Outer(rate=0.5).changes() == {}
    assert Outer(kind=2, inner=Inner(size=3)).changes() == {"kind": 2, "inner": {"size": 3}}


def test_frozen() -> None:
    """A configuration cannot be changed in place."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        Outer().rate = 0.1  # type: ignore[misc]


def test_words_for_the_documentation() -> None:
    """Types are named as a reader expects."""
    names = {key: type_name(kind) for key, kind in value_types(Outer).items()}
    assert names == {"rate": "float", "flags": "list of str", "table": "dict", "kind": "int", "inner": "dict"}
    assert plain(Outer().inner) == {"size": 2, "name": "a"}
    assert FieldRule(no_meaning="x").outcome == "no meaning"
    assert FieldRule(refused="x").outcome == "refused"
    assert FieldRule().outcome == "implemented"
