"""Files and variables that stand for far more than they are: each is refused with one sentence, at once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from fleet.common.addresses import split_endpoint
from fleet.common.limited_yaml import LimitedLoader
from fleet.env import Environment
from fleet.errors import ConfigError
from fleet.k8s.yaml import read_documents
from fleet.options import schema
from fleet.options.files import read_prototxt, read_yaml
from fleet.options.prototxt import parse
from fleet.role_maker.fleet_contract import read_list
from fleet.role_maker.starters import expand_hosts, task_counts

LAUGHS = "a: &a [1, 1]\n" + "".join(f"{y}: &{y} [{', '.join([f'*{x}'] * 9)}]\n" for x, y in pairwise("abcdefghij"))
MERGES = "a: &a {k: 1}\n" + "".join(
    f"{y}: &{y} {{<<: [{', '.join([f'*{x}'] * 9)}]}}\n" for x, y in pairwise("abcdefgh")
)
TOWER = "n0: &n0 [1]\n" + "".join(f"n{i + 1}: &n{i + 1} [*n{i}]\n" for i in range(3000))
BOMBS = {
    "laughs": (LAUGHS, "with its aliases it has more than 100000 values"),
    "merges": (MERGES, "with its aliases it has more than 100000 values"),
    "tower": (TOWER, "nested more than 64 deep"),
    "itself": ("amp: &x [*x]", "contains itself"),
    "deep": ("amp: " + "[" * 100_000, "nested more than 64 deep"),
    "digits": ("amp: " + "7" * 100_000, "does not fit 64 bits"),
    "sixties": ("amp: 1" + ":59" * 50_000, "does not fit 64 bits"),
    "hex": ("amp: 0x" + "f" * 100_000, "does not fit 64 bits"),
    "large": ("amp: 18446744073709551616", "does not fit 64 bits"),
    "long": ("# " + "x" * (1 << 22), "4194304"),
    "tagged": ("amp: !!int seven", "invalid literal"),
}


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    """A refusal takes no time that grows with what a text stands for."""
    began = time.process_time()
    yield
    assert time.process_time() - began < 10


@pytest.mark.parametrize("name", BOMBS)
def test_a_strategy(name: str, tmp_path: Path) -> None:
    text, said = BOMBS[name]
    path = tmp_path / "strategy.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        read_yaml(path)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", sorted(BOMBS.keys() - {"sixties"}))  # a text, as for kubectl
def test_a_paddle_job(name: str) -> None:
    text, said = BOMBS[name]
    with pytest.raises(ConfigError, match=said):
        read_documents(text, "job.yaml")


def test_runs_of_digits_are_read_once(tmp_path: Path) -> None:
    """Patterns that try each way to part digits took the square of their number."""
    digits = "1" * 200_000
    path = tmp_path / "strategy.yaml"
    path.write_text(f"amp: {digits}x")
    assert read_yaml(path)[0][1] == f"{digits}x"
    assert read_documents(f"amp: {digits}x", "job.yaml") == [{"amp": f"{digits}x"}]
    with pytest.raises(ConfigError, match="no text format"):
        parse(f"amp: {digits}x", "it")


def test_what_is_meant_is_read() -> None:
    shared = "base: &b {x: 1, y: [2, 3]}\none: *b\ntwo: {<<: *b, z: 18446744073709551615}\nlow: -9223372036854775808"
    assert yaml.load(shared, LimitedLoader) == yaml.safe_load(shared)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("amp: " + "7" * 5000, "line 1: the number 7{40} does not fit 64 bits"),
        ("amp: 0x1" + "0" * 16, "does not fit 64 bits"),
        ("amp: -9223372036854775809", "does not fit 64 bits"),
        ('amp: "\\Uffffffff"', "is not UTF-8"),
        ('amp: "\\ud800"', "is not UTF-8"),
        ("amp: " + "[" * 100_000, "nested more than 50 deep"),
        ("amp { " * 100_000, "nested more than 50 deep"),
    ],
)
def test_text_format(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(text, "it")


def test_escapes_are_joined_once() -> None:
    assert parse('amp: "' + "\\n" * 500_000 + '"', "it")[0].value == "\n" * 500_000


def test_a_file_that_does_not_end() -> None:
    with pytest.raises(ConfigError, match="not a regular file"):
        read_prototxt("/dev/zero", schema())


TEXTS: dict[str, tuple[Callable[[], object], str]] = {
    "a number": (lambda: Environment({"PADDLE_TRAINERS_NUM": "7" * 5000}).int("PADDLE_TRAINERS_NUM"), "an integer"),
    "bits": (lambda: Environment({"PADDLE_TRAINERS_NUM": "7" * 50}).int("PADDLE_TRAINERS_NUM"), "64-bit"),
    "a switch": (lambda: Environment({"PADDLE_WITH_GLOO": "y" * 5000}).bool("PADDLE_WITH_GLOO"), "1 or 0"),
    "a port": (lambda: split_endpoint("host:" + "7" * 5000, "PADDLE_MASTER"), "a port from 1 to 65535"),
    "a raised port": (lambda: split_endpoint("host:\u00b2", "PADDLE_MASTER"), "a port from 1 to 65535"),
    "hosts": (lambda: expand_hosts("gpu[0-99999999999]"), "more than 100000 hosts"),
    "products": (lambda: expand_hosts("gpu" + "[0-999]" * 6), "more than 100000 hosts"),
    "lists": (lambda: expand_hosts("gpu[" + ",".join(["0-9999"] * 30) + "]"), "more than 100000 hosts"),
    "digits": (lambda: expand_hosts("gpu[" + "7" * 5000 + "]"), "its brackets hold"),
    "tasks": (lambda: task_counts("1(x999999999)"), "at most 100000 nodes"),
    "digits of tasks": (lambda: task_counts("7" * 5000), "at most 100000 nodes"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_variables(name: str) -> None:
    call, said = TEXTS[name]
    with pytest.raises(ConfigError, match=said) as caught:
        call()
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("text", ["[" * 100_000, json.dumps({"PADDLE_TRAINER_ENDPOINTS": "x" * (1 << 26)})])
def test_the_file_of_long_variables(text: str, tmp_path: Path) -> None:
    (tmp_path / "saved").write_text(text)
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        read_list(Environment({"PADDLE_BACKUP_ENV_PATH": str(tmp_path / "saved")}), "PADDLE_TRAINER_ENDPOINTS")
