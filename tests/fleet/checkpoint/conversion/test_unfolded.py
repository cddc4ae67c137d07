"""A value is read only where it is no far larger than its file, with what is shared counted wherever it stands."""

from __future__ import annotations

import time
from typing import Any

import pytest

from fleet.checkpoint.conversion.plain_pickle import Opaque
from fleet.checkpoint.conversion.unfolded import check_unfolded, most_of
from fleet.errors import CheckpointError


def doubled(times: int, pair: Any = lambda one: [one, one]) -> Any:
    found: Any = 1
    for _ in range(times):
        found = pair(found)
    return found


@pytest.mark.parametrize(
    "pair",
    [
        lambda one: [one, one],
        lambda one: (one, one),
        lambda one: {"a": one, "b": one},
        lambda one: Opaque("kind", (one, one)),
    ],
)
def test_what_is_shared_counts_wherever_it_stands(pair: Any) -> None:
    check_unfolded(doubled(10, pair), 1000, "x")
    with pytest.raises(CheckpointError, match="x: its 1000 bytes name the same values again and again"):
        check_unfolded(doubled(40, pair), 1000, "x")


def test_a_long_text_counts_by_its_length() -> None:
    text = "a" * 100_000
    check_unfolded([text] * 10, 100_000, "x")
    with pytest.raises(CheckpointError, match="unfold to"):
        check_unfolded([text] * 1000, 100_000, "x")


def test_a_value_inside_itself_and_one_that_is_too_deep() -> None:
    own: list[Any] = [1]
    own.append({"a": own})
    with pytest.raises(CheckpointError, match="inside itself"):
        check_unfolded(own, 1000, "x")
    check_unfolded(doubled(98, lambda one: [one]), 1000, "x")
    with pytest.raises(CheckpointError, match="5000 deep in each other; a state has 100 levels"):
        check_unfolded(doubled(5000, lambda one: [one]), 1000, "x")


def test_the_limit_grows_with_the_file() -> None:
    assert most_of(0) > 0
    assert most_of(10**9) > 10**9
    check_unfolded(list(range(10**6)), 10**6, "x")


def test_a_value_that_its_parent_names_many_times_is_measured_once() -> None:
    began = time.process_time()
    with pytest.raises(CheckpointError, match="name the same values again and again"):
        check_unfolded([list(range(3000))] * 3000, 20_000, "x")
    assert time.process_time() - began < 2.0  # 12 s where each name is measured
