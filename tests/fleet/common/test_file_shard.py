"""How a list of files is divided."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fleet.common.file_shard import split_files


def test_the_first_workers_take_one_more() -> None:
    """B.5."""
    files = list("abcde")
    assert [split_files(files, rank, 3) for rank in range(3)] == [["a", "b"], ["c", "d"], ["e"]]
    assert [split_files(["a"], rank, 3) for rank in range(3)] == [["a"], [], []]


@given(st.lists(st.text(), max_size=50), st.integers(1, 20))
def test_parts_are_the_whole_in_order(files: list[str], count: int) -> None:
    parts = [split_files(files, index, count) for index in range(count)]
    assert [name for part in parts for name in part] == files
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
