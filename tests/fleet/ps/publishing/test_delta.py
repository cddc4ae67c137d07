"""The stored forms of rows: what comes back is the row itself, or its nearest value that the form can hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fleet.errors import ConfigError
from fleet.ps.publishing.delta import ENCODINGS, check_encoding, decode, encode, pack_rows, row_bytes, unpack_rows

FINITE = st.floats(-(2.0**100), 2.0**100, width=32)


def rows(n: int = 20, dim: int = 7) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((n, dim)).astype(np.float32)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (5, 0), (9, 8)])
def test_packed_rows_are_the_encoded_ones(encoding: str, shape: tuple[int, int]) -> None:
    values = rows(*shape)
    packed = pack_rows(values, encoding)
    assert packed.shape == (shape[0], row_bytes(shape[1], encoding))
    expected = decode(*encode(values, encoding))
    if shape[1]:
        np.testing.assert_array_equal(unpack_rows(packed.tobytes(), shape[1], encoding), expected)
        np.testing.assert_array_equal(unpack_rows([r.tobytes() for r in packed], shape[1], encoding), expected)


def test_float32_keeps_every_bit() -> None:
    values = np.array([[np.nan, -0.0, np.inf, 1e-45]], np.float32)
    assert unpack_rows(pack_rows(values, "float32").tobytes(), 4, "float32").tobytes() == values.tobytes()


@settings(max_examples=100, deadline=None)
@given(hnp.arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(1, 9)), elements=FINITE))
def test_int8_is_within_half_a_scale(values: np.ndarray) -> None:
    stored, scales = encode(values, "int8")
    assert scales is not None
    error = np.abs(decode(stored, scales).astype(np.float64) - values)
    assert (error <= scales[:, None] * (0.5 + 1e-4) + 1e-44 * 127).all()


def test_int8_of_zero_and_of_not_finite_rows() -> None:
    values = np.array([[0, 0], [1, np.inf], [np.nan, 2], [3, -1]], np.float32)
    stored, scales = encode(values, "int8")
    assert scales is not None
    back = decode(stored, scales)
    assert scales[0] == 0
    np.testing.assert_array_equal(back[0], [0, 0])
    assert np.isnan(back[1:3]).all()
    assert back[3, 0] == 3


def test_a_wrong_encoding_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"publish_values = 'fp4'.*'float32', 'bfloat16', 'int8'"):
        check_encoding("publish_values", "fp4")
    with pytest.raises(ConfigError, match="7 bytes are no rows of dim 2"):
        unpack_rows(b"1234567", 2, "float32")
