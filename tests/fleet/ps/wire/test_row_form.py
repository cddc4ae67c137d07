"""Rows as int8 with a scale each: bounded errors, nothing lost over many steps, and the same after a recovery."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fleet.errors import ConfigError
from fleet.ps.wire.messages import MessageError, TablePart, decode_parts, encode_parts
from fleet.ps.wire.row_form import Remainders, from_int8, to_int8, wide_parts, wire_parts
from tests.fleet.ps.service import Gradient, ids, rows, serving


def drawn(n: int, dim: int, seed: int = 0) -> np.ndarray:
    """Rows of very different sizes."""
    generator = np.random.default_rng(seed)
    return (generator.normal(size=(n, dim)) * 10.0 ** generator.integers(-6, 4, (n, 1))).astype(np.float32)


def test_a_number_is_off_by_half_a_scale_at_most() -> None:
    values = drawn(500, 8)
    values[7] = 0
    codes, scales = to_int8(values)
    np.testing.assert_allclose(scales, np.abs(values).max(1) / 127, rtol=1e-6)
    assert scales[7] == 0
    assert (np.abs(from_int8(codes, scales) - values) <= scales[:, None] * 0.5001).all()


def test_what_is_no_number_arrives_as_none() -> None:
    values = np.array([[1, np.nan], [np.inf, 2], [1, 2], [1e-45, 0]], np.float32)
    found = from_int8(*to_int8(values))
    assert np.isnan(found[:2]).all()
    np.testing.assert_allclose(found[2:], [[1, 2], [0, 0]], rtol=0.01)


def part_of(keys: list[int], values: np.ndarray) -> TablePart:
    return TablePart(0, len(keys), values.shape[1], ids(*keys), values.astype(np.float32))


def test_many_gradients_add_up_to_their_sum() -> None:
    left, generator = Remainders(), np.random.default_rng(1)
    keys = list(range(-20, 20))
    sent, true = np.zeros((40, 4)), np.zeros((40, 4))
    for _ in range(300):
        gradient = (generator.normal(size=(40, 4)) + [10.0, 0.01, 0.0, 1.0]).astype(np.float32)
        (part,) = wire_parts([part_of(keys, gradient)], "int8", left)
        sent += from_int8(part.rows, part.scales)
        true += gradient
    assert np.abs(sent - true).max() < 0.1  # one remainder; without feedback the second column is off by several


def test_two_keys_of_one_place_do_not_share_a_remainder() -> None:
    left = Remainders(max_bytes=1)  # two places
    for _ in range(5):
        part = part_of([1, 2, 3, 4], np.full((4, 2), [127.0, 0.4]))
        left.encode(part)
    keys, rest = left._tables[0]
    assert len(keys) == 2
    fresh = part_of([5], np.zeros((1, 2)))
    left.encode(fresh)
    assert not fresh.rows.any()
    assert np.abs(rest).max() <= 1.0


def test_remainders_are_forgotten() -> None:
    left = Remainders()
    left.encode(part_of([1], np.array([[127.0, 0.4]])))
    left.forget([0])
    part = part_of([1], np.array([[0.0, 0.0]]))
    left.encode(part)
    assert not part.rows.any()


def test_a_message_holds_int8_rows_beside_bfloat16() -> None:
    values = drawn(5, 3)
    parts = [part_of([1, 2, 3, 4, 5], values), TablePart(1, 4, 1, rows=np.arange(4, dtype=np.float32).reshape(4, 1))]
    body = b"".join(bytes(one) for one in encode_parts(wire_parts(parts, "int8", Remainders()), bfloat16=True))
    received = decode_parts(body, 2, bfloat16=True)
    assert received[0].rows is not None
    assert received[0].rows.dtype == np.int8
    np.testing.assert_array_equal(received[0].scales, parts[0].scales)
    wide = wide_parts(received)
    assert np.abs(wide[0].rows - values).max() <= np.abs(values).max() / 250
    np.testing.assert_array_equal(wide[1].rows[:, 0], np.arange(4))


def test_scales_without_rows_are_refused() -> None:
    body = b"".join(map(bytes, encode_parts([TablePart(0, 1, 1, ids(1), scales=np.ones(1, np.float32))])))
    with pytest.raises(MessageError, match="scales belong to the int8 rows"):
        decode_parts(body, 1)


def test_a_form_that_does_not_exist() -> None:
    with serving() as service, pytest.raises(ConfigError, match="wire is 'fp8'; it is one of 'float32'"):
        service.client(wire="fp8")


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_recovered_server_has_the_same_rows(tmp_path: Path, mode: str) -> None:
    keys = list(range(50))
    found = []
    for is_killed in (False, True):
        folder = tmp_path / f"{is_killed}"
        with serving(folder=folder, level=1, mode=mode) as service:
            client = service.client(wire="int8")
            for step in range(6):
                client.wait(client.push({0: Gradient(ids(*keys), drawn(50, 2, step)), 1: np.ones(5, np.float32)}))
                if is_killed and step == 3:
                    service.servers[0].stop()
                    service.start(0)
            found.append(rows(client, keys))
    np.testing.assert_array_equal(*found)


def test_remainders_stay_with_their_keys_while_their_table_grows() -> None:
    rng = np.random.default_rng(1)
    left = Remainders()
    keys = rng.choice(1 << 40, 20_000, replace=False)
    exact, received = np.zeros((20_000, 2)), np.zeros((20_000, 2))
    for start in [*range(0, 20_000, 1000)] * 2:
        rows = rng.standard_normal((1000, 2)).astype(np.float32)
        part = TablePart(0, 1000, 2, keys[start : start + 1000], rows.copy())
        left.encode(part)
        exact[start : start + 1000] += rows
        received[start : start + 1000] += from_int8(part.rows, part.scales)
    error = np.abs(exact - received).max(axis=1)
    assert np.quantile(error, 0.9) < 4.5 / 127 / 2, "of one remainder, not of two; some keys lost theirs to others"
    assert 20_000 < len(left._tables[0][0]) < 1 << 20
