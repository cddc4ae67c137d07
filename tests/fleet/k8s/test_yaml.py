"""YAML as kubectl reads it (000-25: a translation says what the job says)."""

from __future__ import annotations

from itertools import pairwise

import pytest
import yaml

from fleet.errors import ConfigError
from fleet.k8s.yaml import read_documents, write_documents

# Texts that kubectl, or a reader of another version of YAML, takes for something else when they stand without quotes.
TEXTS = (
    "1e-3", "12e4", "-1E5", "1.e3", "089", "017", "0o17", "0b1", "0x1F", "1_000", ".5", "+.inf", ".NaN", "12:30:00",
    "2001-12-14", "2001-12-14t21:59:43Z", "y", "N", "Yes", "off", "true", "null", "~", "=", "<<", "",
)  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_stays_a_text_for_every_reader(text: str) -> None:
    written = write_documents([{"value": text}])
    assert written == f"---\nvalue: '{text}'\n"
    assert read_documents(written, "it") == [{"value": text}]


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("12:30:00", "12:30:00"),
        ("36000:10", "36000:10"),
        ("2001-12-14", "2001-12-14"),
        ("=", "="),
        ("1e-3", 0.001),
        ("1_000", 1000),
        ("0o644", 420),
        ("0644", 420),
        ("0x1F", 31),
        ("10.0.0.7:36000", "10.0.0.7:36000"),
        ("1.2.3", "1.2.3"),
        ("-7", -7),
        ("0", 0),
    ],
)
def test_words_without_quotes_mean_what_kubectl_takes_them_for(word: str, value: object) -> None:
    (document,) = read_documents(f"it: {word}", "it")
    assert document == {"it": value}
    assert type(document["it"]) is type(value)


def test_a_plain_text_is_written_plainly_and_an_alias_written_out() -> None:
    shared = ["torch-fleet"]
    assert write_documents([{"a": shared, "b": shared}]) == "---\na:\n- torch-fleet\nb:\n- torch-fleet\n"
    assert yaml.safe_load(write_documents([{"n": 3}])) == {"n": 3}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb: {c: 1, c: 2}", "the name 'c' appears twice"),
        ("a: &x [*x]", "job.yaml is not YAML: a value contains itself through an alias"),
        (
            "a: &a [1, 1]\n" + "".join(f"{y}: &{y} [*{x}, *{x}, *{x}, *{x}]\n" for x, y in pairwise("abcdefghijk")),
            "aliases",
        ),
        ("a: " + "[" * 5000, "nested more than 64 deep"),
        ("a: " + "7" * 5000, "does not fit 64 bits"),
        ("a: 1" + "".join(f", &{y} {{<<: [*{x}, *{x}]}}" for x, y in pairwise("abc")), "job.yaml is not YAML"),
        ("a: !!int seven", "invalid literal"),
        (" " * (1 << 22) + "a: 1", "at most 4194304 are read"),
        ("a: [", "job.yaml is not YAML"),
    ],
)
def test_a_text_that_holds_no_document(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_documents(text, "job.yaml")


def test_a_merge_may_be_overridden() -> None:
    assert read_documents("a: &x {b: 1, c: 2}\nd: {<<: *x, b: 3}", "it")[0]["d"] == {"b": 3, "c": 2}
