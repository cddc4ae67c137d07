"""How what remains of an epoch is divided."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.dataset.parquet import RowDivision, rows_of


@given(st.lists(st.integers(0, 9), max_size=5), st.integers(1, 7), st.sampled_from(["uneven", "drop", "repeat"]))
def test_every_rule_divides_evenly(lengths, size, rest):
    spans, at = [], 0
    for length in lengths:
        spans.append((at, at + length))
        at += length + 2
    rows = [i for start, stop in spans for i in range(start, stop)]
    division = RowDivision(tuple(spans), size, rest)
    shares = [[i for start, stop in division.share(rank) for i in range(start, stop)] for rank in range(size)]
    counts = {len(share) for share in shares}
    given_rows = [i for share in shares for i in share]
    assert max(counts) - min(counts) <= (rest == "uneven")
    assert given_rows[: len(rows)] == rows[: len(given_rows)]
    assert abs(len(given_rows) - len(rows)) < size
    if rest == "uneven":
        assert given_rows == rows


@pytest.mark.parametrize(("rest", "left"), [("uneven", 4), ("drop", 4), ("repeat", 4)])
def test_after_some_rows_the_others_remain(rest, left):
    assert rows_of(RowDivision(((0, 10),), 3, rest).after(2, 1)) == left
