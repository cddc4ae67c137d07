"""Tables of one width behind the server: one part of a message, whatever their number (issue: a hundred tables)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fleet.errors import PSError
from fleet.ps import Accessor, SparseTableConfig
from fleet.ps.server.job_state import Refused
from fleet.ps.server.served_group import ServedGroups
from fleet.ps.server.served_table import make_served_table
from fleet.ps.table.bounds import Bounds
from fleet.ps.table.dense_table import DenseTableConfig
from fleet.ps.table.table_spec import spec_of_config
from fleet.ps.wire.messages import TablePart, join_parts
from tests.fleet.ps.service import SGD, ZEROS, Gradient, ids, serving


def part(table_id: int, *keys: int, dim: int = 2) -> TablePart:
    return TablePart(table_id, len(keys), dim, ids(*keys), np.ones((len(keys), dim), np.float32))


def groups_of(*configs: Any) -> ServedGroups:
    return ServedGroups({number: make_served_table(spec_of_config(one)) for number, one in enumerate(configs)})


def test_tables_of_other_widths_or_kinds_make_no_group() -> None:
    groups = groups_of(
        SparseTableConfig("a", 2),
        SparseTableConfig("b", 3),
        DenseTableConfig("c", 4),
        SparseTableConfig("d", 2, accessor=Accessor()),
        SparseTableConfig("e", 2),
    )
    for table_id, name in ((1, "'b'"), (2, "'c'"), (3, "'d'")):
        with pytest.raises(Refused, match=f"{name} is dense, or has rows of another width than 'a'"):
            groups.find(join_parts([part(0, 1), part(table_id, 1)]))
    with pytest.raises(Refused, match="table 9 does not exist"):
        groups.find(join_parts([part(0, 1), part(9, 1)]))
    both = join_parts([part(0, 1), part(4, 1)])
    assert groups.find(both) is groups.find(both)
    wide = join_parts([part(0, 1, dim=3), part(4, 1, dim=3)])
    with pytest.raises(Refused, match="takes rows of dim 2"):
        groups.find(wide).check(wide, change=True)


def test_a_table_in_the_place_of_another_is_served_instead() -> None:
    configs = {number: SparseTableConfig(str(number), 2, SGD, initializer=ZEROS) for number in range(3)}
    with serving() as service:
        client = service.client(tables={key: configs[key] for key in (0, 1)})
        push = {key: Gradient(ids(5), np.ones((1, 2), np.float32)) for key in (0, 1)}
        client.wait(client.push(push))
        state = service.servers[0].state
        new = make_served_table(spec_of_config(configs[1]))
        state.adopt(1, new)
        client.wait(client.push(push))
        found = client.wait(client.pull({0: ids(5), 1: ids(5)}))
        assert (found[0][0, 0], found[1][0, 0]) == (-2, -1)
        assert new.table.num_rows == 1


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("num_servers", [1, 2])
def test_many_tables_train_as_one_at_a_time(mode: str, num_servers: int, wire: str) -> None:
    """Every table keeps its rule, width, statistics and limit; a step with all of them is a message a server."""
    rng = np.random.default_rng(0)
    configs: dict[int, Any] = {
        number: SparseTableConfig(f"t{number}", (2, 3)[number % 2], SGD, initializer=ZEROS) for number in range(6)
    }
    configs[6] = SparseTableConfig("counted", 2, SGD, initializer=ZEROS, accessor=Accessor())
    configs[7] = SparseTableConfig("bounded", 2, SGD, initializer=ZEROS, bounds=Bounds(max_rows=4096))
    configs[8] = DenseTableConfig("dense", 4, SGD)
    steps = []
    for _ in range(5):
        step: dict[int, Any] = {8: rng.standard_normal(4).astype(np.float32)}
        for number in rng.permutation(8)[:6].tolist():
            keys = rng.permutation(50)[: rng.integers(0, 20)].astype(np.int64) - 25
            more = {"shows": np.full(len(keys), 2, np.float32)} if number == 6 else {}
            step[number] = Gradient(keys, rng.standard_normal((len(keys), configs[number].dim), np.float32), **more)
        steps.append(step)
    every = np.arange(-25, 25)
    found = []
    for joined in (True, False):
        with serving(mode=mode, num_servers=num_servers) as service:
            client = service.client(tables=configs, wire=wire)
            client.wait(client.set_dense({8: np.zeros(4, np.float32)}))
            for step in steps:
                if joined or mode == "sync":  # sync takes one push a step
                    client.wait(client.push({key: _copy(value) for key, value in step.items()}))
                    continue
                for key, value in step.items():
                    client.wait(client.push({key: _copy(value)}, step=client.step + 1))
            asked = {number: every for number in range(8)}
            pulls = [asked] if joined else [{number: every} for number in asked]
            rows: dict[int, Any] = {}
            for one in pulls:
                rows.update(client.wait(client.pull(one, create=False)))
            found.append(rows)
    for number in range(8):
        np.testing.assert_array_equal(found[0][number], found[1][number])
        assert np.count_nonzero(found[0][number]) > 0


def _copy(value: Any) -> Any:
    if isinstance(value, Gradient):
        return Gradient(value.ids.copy(), value.rows.copy(), None if value.shows is None else value.shows.copy())
    return value.copy()


def test_a_group_on_a_full_disk_is_refused_before_anything_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = groups_of(SparseTableConfig("a", 2, bounds=Bounds(max_rows=5000)), SparseTableConfig("b", 2))
    asked = []

    def full(num_rows: int) -> None:
        asked.append(num_rows)
        raise PSError("the disk is full.")

    monkeypatch.setattr(groups.table(0).table, "make_room", full)
    both = join_parts([part(1, 1), part(0, 1, 2)])
    with pytest.raises(Refused, match="disk is full"):
        groups.find(both).check(both, change=True)
    assert asked == [2]
