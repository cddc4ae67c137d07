"""Samples in columns, and the bytes in which they travel."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.dataset.samples import Column, Samples, empty_samples, samples_from_bytes
from fleet.dataset.slots import Slot
from fleet.dataset.text import TextForm, parse
from fleet.errors import ConfigError
from fleet.ps.table.kernels import numba_cache
from fleet.ps.table.kernels.numba_cache import load_kernels

DTYPES = (np.dtype(np.uint8), np.dtype(np.int64), np.dtype(np.float32))


def column(rows: list[list[Any]], dtype: np.dtype[Any]) -> Column:
    """Returns a column with these rows."""
    ends = np.cumsum([0, *map(len, rows)]).astype(np.int64)
    return Column(np.array([value for row in rows for value in row], dtype), ends)


def rows_of(samples: Samples) -> list[tuple[tuple[Any, ...], ...]]:
    """Returns every sample as one tuple per column."""
    parts = [
        [tuple(c.values[c.offsets[i] : c.offsets[i + 1]].tolist()) for i in range(len(c))] for c in samples.columns
    ]
    return list(zip(*parts, strict=True))


@st.composite
def some_samples(draw: st.DrawFn, max_size: int = 6) -> Samples:
    """Returns samples with a column of each dtype."""
    count = draw(st.integers(0, max_size))
    values = [st.integers(0, 255), st.integers(-(2**63), 2**63 - 1), st.floats(width=32, allow_nan=False)]
    columns = []
    for elements, dtype in zip(values, DTYPES, strict=True):
        rows = draw(st.lists(st.lists(elements, max_size=4), min_size=count, max_size=count))
        columns.append(column(rows, dtype))
    return Samples(tuple(columns))


@settings(max_examples=40, deadline=None)
@given(some_samples(), st.data())
def test_take_part_and_join(samples: Samples, data: st.DataObject) -> None:
    rows = rows_of(samples)
    places = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8)) if rows else []
    assert rows_of(samples.gather(np.array(places, np.int64))) == [rows[place] for place in places]
    cut = data.draw(st.integers(0, len(rows)))
    parts = [samples.part(0, cut), empty_samples(DTYPES), samples.part(cut, len(rows))]
    assert rows_of(parts[0]) == rows[:cut]
    assert rows_of(Samples.joined(parts)) == rows


@settings(max_examples=40, deadline=None)
@given(some_samples())
def test_bytes_round_trip(samples: Samples) -> None:
    assert rows_of(samples_from_bytes(samples.to_bytes(), DTYPES)) == rows_of(samples)


@settings(max_examples=60, deadline=None)
@given(some_samples(), st.data())
def test_damaged_bytes_are_refused_or_read_within_their_bounds(samples: Samples, data: st.DataObject) -> None:
    """Bytes of another process are checked: nothing but ConfigError, whatever was changed or cut off."""
    whole = bytearray(samples.to_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    try:
        found = samples_from_bytes(damaged, DTYPES)
    except ConfigError:
        return
    assert len({len(part) for part in found.columns}) == 1


def test_cut_bytes_and_other_columns_are_named() -> None:
    data = Samples((column([[1], [2, 3]], DTYPES[1]),)).to_bytes()
    for wrong, dtypes, rule in [
        (data[:5], DTYPES[1:2], "not a header"),
        (data[:-1], DTYPES[1:2], "do not match"),
        (data[:20], DTYPES[1:2], "too early"),
        (data + b"x", DTYPES[1:2], "too many"),
        (data, DTYPES, "different slots"),
    ]:
        with pytest.raises(ConfigError, match=rule):
            samples_from_bytes(wrong, dtypes)


def test_take_repeats_and_reorders() -> None:
    samples = Samples((column([[1, 2], [], [3], [4, 5, 6]], DTYPES[1]),))
    places = np.array([3, 0, 1, 3])
    assert rows_of(samples.gather(places)) == [((4, 5, 6),), ((1, 2),), ((),), ((4, 5, 6),)]


def test_a_broken_numba_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the compiled loops a dataset would be slower by far, without a word."""
    monkeypatch.setattr(numba_cache, "numba_problem", lambda: "it is broken.")
    load_kernels.cache_clear()
    samples = Samples((column([[1, 2]], DTYPES[1]),))
    for use in (
        lambda: samples.gather(np.array([0])),
        lambda: parse(b"1 7\n", TextForm((Slot("x", lod_level=1),)), "f"),
    ):
        with pytest.raises(ConfigError, match=r"datasets need numba: it is broken\."):
            use()


@pytest.mark.parametrize("file", ["/site/me/numba.py", None])
def test_another_module_in_the_place_of_numba_is_named(file: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A numba.py beside the script, or the folder that an interrupted uninstall left."""
    other = types.ModuleType("numba")
    other.__dict__.update(__file__=file, __path__=["/site/numba"])
    monkeypatch.setitem(sys.modules, "numba", other)
    assert f"{file or '/site/numba'} is imported in its place" in numba_cache.numba_problem.__wrapped__()
