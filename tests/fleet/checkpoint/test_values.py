"""What is no tensor comes back with its types, and what could only be made by running code is refused."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, namedtuple
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fleet.checkpoint.values import decode, encode, tensor_names
from fleet.errors import CheckpointError, ConfigError
from tests.helpers.many_tensors import bits, comparable

Pair = namedtuple("Pair", "a b")
KEYS = st.one_of(st.text(max_size=5), st.integers(-5, 5), st.none(), st.booleans(), st.tuples(st.integers(0, 3)))
HASHABLE = st.one_of(
    KEYS, st.binary(max_size=4), st.complex_numbers(allow_nan=False), st.floats(allow_nan=False),
)  # fmt: skip
TENSORS = st.builds(
    lambda dtype, shape: torch.zeros(shape, dtype=dtype) + 1,
    st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.bool]),
    st.lists(st.integers(0, 2), max_size=2),
)
VALUES = st.recursive(
    st.one_of(HASHABLE, TENSORS, st.floats(), st.sampled_from([torch.half, np.float32(1.5), np.int8(3), np.bool_(1)])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.tuples(inner, inner), st.dictionaries(KEYS, inner, max_size=3),
        st.sets(HASHABLE, max_size=3),
    ),
    max_leaves=12,
)  # fmt: skip


def through_json(value: Any) -> tuple[Any, Any, dict[str, Tensor]]:
    tensors: dict[str, Tensor] = {}
    found = encode(value, "value", tensors)
    return decode(json.loads(json.dumps(found)), tensors.__getitem__), found, tensors


def is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return bits(one) == bits(other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=False)
        return len(one) == len(other) and all(is_same([*a], [*b]) for a, b in pairs)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(is_same(a, b) for a, b in zip(one, other, strict=False))
    return bool(one == other or one != one and other != other)


@given(VALUES)
def test_a_value_comes_back_with_its_types(value: Any) -> None:
    back, found, tensors = through_json(value)
    assert is_same(value, back)
    assert sorted(tensor_names(found)) == sorted(tensors)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3), np.arange(6).reshape(2, 3).T, np.array(3.5), np.zeros((0, 2), np.int16),
        np.arange(3, dtype=">i4"), np.array([True, False]), np.arange(2, dtype=np.uint64),
    ],
)  # fmt: skip
def test_an_array_comes_back_with_type_and_shape(array: Any) -> None:
    back, _, _ = through_json({"a": array})
    assert back["a"].dtype == array.dtype.newbyteorder("=")
    assert back["a"].shape == array.shape
    assert (back["a"] == array).all()


def test_an_array_that_cannot_be_written_is_taken_without_a_warning() -> None:
    array = np.arange(3)
    array.flags.writeable = False
    assert (through_json(array)[0] == array).all()


def test_types_with_another_plain_type_come_back_as_that() -> None:
    value = {"size": torch.Size([2, 3]), "set": frozenset({1}), "ordered": OrderedDict(a=1)}
    assert comparable(through_json(value)[0]) == {"size": (2, 3), "set": {1}, "ordered": {"a": 1}}


def test_a_counter_stays_one() -> None:
    back = through_json(Counter({3: 2, 7: 1}))[0]
    assert type(back) is Counter
    assert sorted(back.elements()) == [3, 3, 7]


def test_tensors_whose_places_have_one_name_stay_apart() -> None:
    value = {"a/b": torch.tensor(1), "a": {"b": torch.tensor(2)}}
    assert comparable(through_json(value)[0]) == comparable(value)
    keys = {1: torch.tensor(1), "1": torch.tensor(2)}
    assert comparable(through_json(keys)[0]) == comparable(keys)


def test_a_gradient_is_left_behind_and_memory_is_shared() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    tensors: dict[str, Tensor] = {}
    encode([parameter], "p", tensors)
    assert tensors["p/0"].data_ptr() == parameter.data_ptr()
    assert not tensors["p/0"].requires_grad


@pytest.mark.parametrize(
    "value",
    [
        Fraction(1, 2), lambda: 0, Pair(1, 2), object(), torch.nn.Linear(1, 1), np.array(["a"], dtype=object),
        np.datetime64("2020-01-01"), np.str_("a"), {torch.ones(1)}, {(torch.ones(1),): 1},
        torch.ones(2).to_sparse(), torch.ones(2, dtype=torch.complex128), np.zeros(1, dtype=np.complex128),
    ],
)  # fmt: skip
def test_what_a_file_without_code_cannot_hold_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"'place/0' is .*without code"):
        encode([value], "place", {})


@pytest.mark.parametrize(
    "found",
    [
        {"$": "code", "text": "print()"}, {"$": "dtype", "name": "load"}, {"$": "dtype", "name": "nothing"},
        {"$": "scalar", "dtype": "O", "value": 1}, {"$": "tensor"},
        {"$": "scalar", "dtype": "f4", "value": {"$": "tensor", "name": "a"}},
        {"$": "tensor", "name": "absent"}, {"$": "bytes", "hex": "zz"}, {"$": "tuple", "items": 3},
        {"$": "dict", "items": [[[], 1]]}, {"$": "set", "items": [[]]}, {"$": []}, {"$": "complex", "items": ["x"]},
    ],
)  # fmt: skip
def test_a_damaged_value_is_named(found: Any) -> None:
    with pytest.raises(CheckpointError, match="a value is"):
        decode([found], {}.__getitem__)
