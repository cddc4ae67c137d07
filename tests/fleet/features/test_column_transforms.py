"""Hash, Cross and Vocabulary: ids that never change, and bags."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from fleet.errors import ConfigError
from fleet.features import Cross, Hash, Transforms, Vocabulary
from tests.fleet.features.test_mixing import fnv, mix

KEPT = 2**63 - 1


def test_ids_are_those_of_the_formula_in_every_form_of_a_column() -> None:
    words = ["a.com", "", "\u4e2d"]
    expected = [mix(fnv(word.encode()) ^ mix(0)) & KEPT for word in words]
    forms = [words, np.array(words), np.array(words, object), [word.encode() for word in words]]
    for form in forms:
        assert Transforms([Hash("x")])({"x": form})["x"].tolist() == expected
    keys = [3, -1, 2**40]
    expected = [mix((key & (2**64 - 1)) ^ mix(9)) % 1000 for key in keys]
    for form in (keys, np.array(keys), torch.tensor(keys), np.array(keys).astype(np.uint64)):
        assert Transforms([Hash("x", num_buckets=1000, seed=9)])({"x": form})["x"].tolist() == expected
    assert Transforms([Hash("x")])({"x": np.array([5, 200], np.uint8)})["x"].tolist() == (
        Transforms([Hash("x")])({"x": [5, 200]})["x"].tolist()
    )


def test_crosses_of_bags_are_all_pairs() -> None:
    batch = {"a": [1, 2, 3], "a.offsets": [0, 2], "b": ["x", "y", "z"], "b.offsets": [0, 1], "c": [7, 8]}
    found = Transforms([Cross(["a", "b"], out="ab"), Cross(["a", "c"], out="ac", num_buckets=50)])(batch)
    hashed = [mix(key ^ mix(0)) for key in (1, 2, 3)]
    words = [mix(fnv(word) ^ mix(0)) for word in (b"x", b"y", b"z")]
    rows = [([0, 1], [0]), ([2], [1, 2])]
    pairs = [pair for left, right in rows for pair in itertools.product(left, right)]
    assert found["ab"].tolist() == [mix(mix(hashed[i]) ^ words[j]) & KEPT for i, j in pairs]
    assert found["ab.offsets"].tolist() == [0, 2]
    single = [mix(key ^ mix(0)) for key in (7, 8)]
    assert found["ac"].tolist() == [mix(mix(hashed[i]) ^ single[row]) % 50 for i, row in ((0, 0), (1, 0), (2, 1))]
    three = Transforms([Cross(["a", "b", "c"], out="abc")])({"a": [1], "b": ["x"], "c": [7]})["abc"]
    assert three.tolist() == [mix(mix(mix(mix(hashed[0]) ^ words[0])) ^ single[0]) & KEPT]
    assert (
        len({Transforms([Cross(order, out="o")])({"p": [1], "q": [2]})["o"][0] for order in (["p", "q"], ["q", "p"])})
        == 2
    )


def test_columns_of_different_lengths_are_not_crossed() -> None:
    for batch in ({"a": [1, 2], "b": [1]}, {"a": [1, 2], "a.offsets": [0, 1], "b": [1]}):
        with pytest.raises(ConfigError, match="different numbers: {'a': 2, 'b': 1}"):
            Transforms([Cross(["a", "b"], out="ab")])(batch)
    with pytest.raises(ConfigError, match="'b' has the shape"):
        Transforms([Cross(["a", "b"], out="ab")])({"a": [[1, 2]], "b": [1]})


def test_vocabularies() -> None:
    words = ["b", "a"]
    found = Transforms([Vocabulary("x", words, num_oov=3)])({"x": [["a", "b"], ["c", "d"]]})["x"]
    assert found[0].tolist() == [1, 0]
    assert found[1].tolist() == [2 + (mix(fnv(word) ^ mix(0)) % 3) for word in (b"c", b"d")]
    numbers = Transforms([Vocabulary("x", [10, -5, 7])])({"x": np.array([7, -5, 11, 10], np.int32)})["x"]
    assert numbers.tolist() == [2, 1, 3, 0]
    assert Vocabulary.build(np.array([3, 1, 3, 2, 1, 9]), min_count=2) == [1, 3]
    assert Vocabulary.build(["a", "b", "b", "c"], max_size=2) == ["b", "a"]


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (lambda: Hash("x", num_buckets=0), "from 1 to"),
        (lambda: Hash("x", num_buckets=2.0), "integer"),  # type: ignore[arg-type]
        (lambda: Hash("x", seed=-1), "from 0 to"),
        (lambda: Cross(["a"], out="b"), "two or more"),
        (lambda: Cross("ab", out="b"), "two or more"),
        (lambda: Cross(["a", "a"], out="b"), "each once"),
        (lambda: Vocabulary("x", []), "each once"),
        (lambda: Vocabulary("x", "abc"), "each once"),
        (lambda: Vocabulary("x", ["a", "a"]), "each once"),
        (lambda: Vocabulary("x", ["a", 1]), "each once"),  # type: ignore[list-item]
        (lambda: Vocabulary("x", ["a"], num_oov=0), "from 1 to"),
        (lambda: Transforms([Vocabulary("x", ["a"])])({"x": [1]}), "its words are text, the column is int"),
    ],
)
def test_wrong_values(made: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        made()


@pytest.mark.parametrize("values", [[None, "a"], [1.5], [float("nan"), 1], [True]])
def test_a_vocabulary_is_of_words(values: list[Any]) -> None:
    with pytest.raises(ConfigError, match="of text or of integers"):
        Vocabulary.build(values)


def test_a_vocabulary_of_any_form_of_a_column() -> None:
    """What build gives is what Vocabulary takes."""
    for values in ([b"b", "a", b"b"], np.array(["b", "a", "b"]), np.array([b"b", b"a", b"b"])):
        assert Vocabulary("x", Vocabulary.build(values)).words == ("b", "a")
    for numbers in ([np.int64(3), 1, 3], np.array([3, 1, 3], np.int8), torch.tensor([3, 1, 3])):
        assert Vocabulary("x", Vocabulary.build(numbers)).words == (3, 1)
    with pytest.raises(ConfigError, match="the words of all rows in one"):
        Vocabulary.build([["a"], ["b"]])
    with pytest.raises(ConfigError, match="some values are text and some integers"):
        Vocabulary.build([7, "7"])
    with pytest.raises(ConfigError, match="None is 2 of the 3 values.*a word of their own"):
        Vocabulary.build([None, "a", None])
