"""What goes to which server, and how answers come together again."""

from __future__ import annotations

import numpy as np
import pytest

from fleet.errors import ConfigError
from fleet.ps.client.client import Ticket, fill
from fleet.ps.client.shards import Gradient, TableMap, body_of_specs, joined, split
from fleet.ps.table.dense_table import DenseTableConfig
from fleet.ps.table.layout import SparseTableConfig
from fleet.ps.table.partition import servers_of_keys
from fleet.ps.wire.messages import Header, MessageError, MessageFlag, Op, TablePart, decode_control, encode_parts
from tests.fleet.ps.service import ids


@pytest.mark.parametrize("routing", ["range", "modulo"])
@pytest.mark.parametrize("num_servers", [1, 2, 7])
def test_every_id_goes_to_its_server_and_to_no_other(routing, num_servers):
    table = TableMap(0, SparseTableConfig("a", 3), num_servers, routing)
    keys = np.random.default_rng(0).integers(-(2**60), 2**60, 500)
    gradient = Gradient(keys, np.arange(1500, dtype=np.float32).reshape(500, 3), slots=np.arange(500, dtype=np.uint32))
    parts = [part for part, _ in split(table, table.gradient_part(gradient))]
    seen = {}
    for server, part in enumerate(parts):
        assert (servers_of_keys(part.ids, num_servers, routing) == server).all()
        for key, row, slot in zip(part.ids.tolist(), part.rows, part.slots.tolist(), strict=True):
            seen[key] = (row.tolist(), slot)
    assert len(seen) == len(set(keys.tolist())) == sum(part.n for part in parts)
    for place, key in enumerate(keys.tolist()):
        assert seen[key] == (gradient.rows[place].tolist(), place)


@pytest.mark.parametrize("num_servers", [1, 3])
def test_tables_of_one_width_go_to_a_server_in_one_part(num_servers):
    rng = np.random.default_rng(0)
    configs = [SparseTableConfig("a", 3), SparseTableConfig("b", 2), SparseTableConfig("c", 3)]
    tables = [TableMap(number, config, num_servers) for number, config in enumerate(configs)]
    keys = [rng.integers(-(2**60), 2**60, n) for n in (40, 5, 1)]
    gradients = [
        Gradient(some, rng.standard_normal((len(some), config.dim), np.float32))
        for some, config in zip(keys, configs, strict=True)
    ]
    parts = joined((table, table.gradient_part(one)) for table, one in zip(tables, gradients, strict=True))
    assert [part.table_ids for _, part in parts] == [(0, 2), (1,)]
    found = {number: {} for number in range(3)}
    for table, part in parts:
        for server, (own, places) in enumerate(split(table, part)):
            assert own.ids is not None
            np.testing.assert_array_equal(own.ids, part.ids[places])
            assert (servers_of_keys(own.ids, num_servers, "range") == server).all()
            for one in own.each() if own.n else ():
                assert one.n
                found[one.table_id].update(zip(one.ids.tolist(), one.rows.tolist(), strict=True))
    for number, gradient in enumerate(gradients):
        assert found[number] == dict(zip(gradient.ids.tolist(), gradient.rows.tolist(), strict=True))


def test_shows_and_slots_keep_tables_apart():
    tables = [TableMap(number, SparseTableConfig(str(number), 1), 1) for number in range(4)]
    ones = np.ones((1, 1), np.float32)
    more = [{}, {"shows": ones[0]}, {"slots": np.zeros(1, np.uint32)}, {}]
    parts = joined(
        (table, table.gradient_part(Gradient(ids(1), ones, **each))) for table, each in zip(tables, more, strict=True)
    )
    assert [part.table_ids for _, part in parts] == [(0, 3), (1,), (2,)]


def test_dense_values_are_cut_into_blocks():
    table = TableMap(0, DenseTableConfig("a", 7), 3)
    values = np.arange(7, dtype=np.float32)
    parts = table.dense_parts(table.check_values(values))
    assert [part.rows[:, 0].tolist() for part in parts] == [[0, 1, 2], [3, 4, 5], [6]]
    assert [table.spec(server)["size"] for server in range(3)] == [3, 3, 1]
    with pytest.raises(ConfigError, match="7 float32"):
        table.check_values(values[:6])
    with pytest.raises(ConfigError, match="dense"):
        table.check_ids(ids(1))


def test_the_message_that_creates_tables_has_a_limit(monkeypatch):
    """Names of parameters are left out first, then their shapes: a server can do without."""
    table = TableMap(0, DenseTableConfig("a", 7, shapes=((2, 3), (1,)), names=("weight" * 9, "bias")), 2)
    specs = {"0": table.spec(1)}
    assert specs["0"]["shapes"] == [(2, 3), (1,)]
    for limit, left_out in ((400, []), (200, ["names"]), (130, ["names", "shapes"])):
        monkeypatch.setattr("fleet.ps.wire.messages.MAX_CONTROL_BYTES", limit)
        found = decode_control(body_of_specs(specs))["tables"]["0"]
        assert sorted(specs["0"].keys() - found.keys()) == left_out


def answer(parts):
    body = b"".join(bytes(buffer) for buffer in encode_parts(parts))
    return Header(Op.PULL, MessageFlag.RESPONSE, n_tables=len(parts)), memoryview(bytearray(body))


def test_answers_are_put_in_their_places():
    rows, values = np.zeros((3, 2), np.float32), np.zeros((4, 1), np.float32)
    ticket = Ticket()
    take = fill([(TablePart(0, 2, 2), (rows, ids(2, 0))), (TablePart(1, 4, 1), values)], ticket)
    first, second = np.arange(4, dtype=np.float32).reshape(4, 1), np.arange(4, 8, dtype=np.float32).reshape(4, 1)
    header, body = answer([TablePart(0, 4, 1, rows=first), TablePart(1, 4, 1, rows=second)])
    take(header._replace(step=7), body)
    take(header._replace(step=5), body)
    assert ticket.reached == 5  # of two servers the one that is behind
    assert rows.tolist() == [[2, 3], [0, 0], [0, 1]]
    assert values[:, 0].tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [TablePart(0, 3, 1, rows=np.zeros((3, 1), np.float32))],
        [TablePart(5, 4, 1, rows=np.zeros((4, 1), np.float32))],
        [TablePart(0, 4, 1)],
    ],
)
def test_an_answer_of_another_shape_is_refused(parts):
    target = np.zeros((2, 2), np.float32)
    with pytest.raises(MessageError):
        fill([(TablePart(0, 2, 2), target)], Ticket())(*answer(parts))
    assert not target.any()
