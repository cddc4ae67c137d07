"""What a column of a batch is."""

from __future__ import annotations

import numpy as np
import pytest

from fleet.errors import ConfigError
from fleet.features.column import FeatureColumn, Words


def test_text_is_kept_as_distinct_words() -> None:
    words = Words.of("site", np.array([["a", b"b"], ["a", "\u00fc"]], object))
    assert list(words.words) == [b"a", b"b", "\u00fc".encode()]
    assert words.codes.tolist() == [[0, 1], [0, 2]]


@pytest.mark.parametrize("wrong", [None, 3, 2.5])
def test_what_is_no_text_is_named(wrong: object) -> None:
    with pytest.raises(ConfigError, match=f"column 'site' holds {wrong}.*Fill missing values"):
        Words.of("site", np.array(["a", wrong], object))


def test_kinds() -> None:
    assert FeatureColumn(Words([b"a"], np.zeros(1, np.int64))).kind == "text"
    assert [FeatureColumn(np.zeros(1, kind)).kind for kind in ("int8", "uint64", "float16")] == ["int", "int", "float"]


@pytest.mark.parametrize(("values", "odd"), [([1.0, None], "None"), ([1, 1 << 70], str(1 << 70)), ([None], "None")])
def test_what_is_no_number_is_named_among_numbers(values: list[object], odd: str) -> None:
    with pytest.raises(ConfigError, match=f"column 'a' holds {odd}, which is no number of 64 bits, and no text"):
        Words.of("a", values)


def test_numbers_that_are_objects_need_a_dtype() -> None:
    for values in ([1, 2], [np.int64(1), 2.5], [np.float32(1)]):
        with pytest.raises(ConfigError, match="column 'a' holds numbers as Python objects"):
            Words.of("a", np.array(values, object))
