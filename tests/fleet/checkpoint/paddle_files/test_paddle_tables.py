"""Saves of Paddle's parameter server: recorded ones of each mode, row for row, and what is refused."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fleet import ps
from fleet.checkpoint.paddle_files.paddle_state import paddle_state
from fleet.checkpoint.paddle_files.paddle_tables import load_paddle_table, paddle_dense
from fleet.errors import CheckpointError
from tests.helpers.paddle_files import RECORDED

RULES = {"adam": "SparseAdamSGDRule", "adagrad": "SparseAdaGradSGDRule", "adam_dense_adam": "SparseAdamSGDRule"}
OLDER = Path(__file__).parents[3] / "data" / "ps"
OLDER_RULES = {
    "async_sgd_naive": "SparseNaiveSGDRule",
    "async_sgd_adagrad": "SparseAdaGradSGDRule",
    "async_sgd_std_adagrad": "StdAdaGradSGDRule",
    "async_sgd_default": "SparseAdamSGDRule",
}


def table_of(rule: str) -> ps.SparseTable:
    return ps.SparseTable(ps.SparseTableConfig("ads", 4, ps.rule_from_paddle(rule), accessor=ps.Accessor()))


def write_shards(folder: Path, text: str, *, compress: bool, server: int = 0, shards: range = range(1000)) -> None:
    """Writes rows as Paddle's server does: a file for each shard, and key % 1000 is the shard."""
    (folder / "000").mkdir(parents=True, exist_ok=True)
    lines: dict[int, list[str]] = {}
    for line in text.splitlines():
        if line.strip():
            lines.setdefault(int(line.split()[0]) % 1000, []).append(line)
    for shard in shards:
        data = "".join(f"{line}\n" for line in lines.get(shard, [])).encode()
        name = f"part-{server:03d}-{shard:05d}"
        path = folder / "000" / (f"{name}.gz" if compress else name)
        path.write_bytes(gzip.compress(data) if compress else data)


def rows_of(table: ps.SparseTable, folder: Path) -> dict[int, list[float]]:
    """Returns the numbers of each row as Paddle would print them."""
    ps.export_text(table, folder)
    lines = (folder / "ads" / "part-000-00000").read_text().splitlines()
    return {int(line.split()[0]): [float(number) for number in line.split()[1:]] for line in lines}


def numbers_in(text: str) -> dict[int, list[float]]:
    return {int(line.split()[0]): [float(n) for n in line.split()[1:]] for line in text.splitlines() if line.strip()}


@pytest.fixture(params=list(RULES))
def recorded(request: pytest.FixtureRequest) -> Iterator[tuple[str, Any]]:
    with np.load(RECORDED / "tables" / f"{request.param}.npz") as file:
        yield request.param, file


@pytest.mark.parametrize("mode", range(4))
def test_rows_of_each_mode(recorded: tuple[str, Any], mode: int, tmp_path: Path) -> None:
    """The rows are those that Paddle's trainer pulled, and every statistic and state that of the text."""
    name, file = recorded
    text = str(file[f"mode{mode}"])
    compress = ".gz" in file["names"][mode]
    assert compress == (mode in (0, 3))
    write_shards(tmp_path, text, compress=compress, shards=range(10))
    table = table_of(RULES[name])
    assert load_paddle_table(table, tmp_path, num_shards=10) == 10
    np.testing.assert_allclose(table.pull(np.arange(10), create=False), file["rows"], rtol=5e-6)
    found, wanted = rows_of(table, tmp_path / "again"), numbers_in(text)
    assert found.keys() == wanted.keys()
    for key, numbers in wanted.items():
        np.testing.assert_allclose(found[key], numbers, rtol=2e-6)


@pytest.mark.parametrize("name", OLDER_RULES)
def test_rows_of_each_rule(name: str, tmp_path: Path) -> None:
    with np.load(OLDER / f"{name}.npz") as file:
        text, dense = str(file["table0_text"]), str(file["dense_text"])
    write_shards(tmp_path, text, compress=True, shards=range(10))
    table = table_of(OLDER_RULES[name])
    assert load_paddle_table(table, tmp_path, num_shards=10) == 10
    found = rows_of(table, tmp_path / "again")
    for key, numbers in numbers_in(text).items():
        np.testing.assert_allclose(found[key], numbers, rtol=2e-6)
    (tmp_path / "001").mkdir()
    (tmp_path / "001" / "part-000.gz").write_bytes(gzip.compress(dense.encode()))
    state = paddle_dense(tmp_path, {"w": (4, 1), "b": (1,)})
    np.testing.assert_allclose([*state["b"], *state["w"].reshape(-1)], [float(n) for n in dense.split()], rtol=1e-7)


def test_from_there_into_a_save_of_this_package(tmp_path: Path) -> None:
    """What fleet.init_server("model") starts from."""
    with np.load(RECORDED / "tables" / "adam.npz") as file:
        write_shards(tmp_path / "paddle", str(file["mode0"]), compress=True, shards=range(10))
        rows = file["rows"]
    table = table_of("SparseAdamSGDRule")
    load_paddle_table(table, tmp_path / "paddle", num_shards=10)
    ps.save_table(table, tmp_path / "model")
    again = table_of("SparseAdamSGDRule")
    assert ps.load_table(again, tmp_path / "model") == 10
    np.testing.assert_allclose(again.pull(np.arange(10), create=False), rows, rtol=5e-6)


def test_two_servers_and_a_later_delta(tmp_path: Path) -> None:
    base = "1 0 0 0 1 0 0.5 1 2 3\n700 0 0 0 1 0 0.25 1 2 3\n"
    write_shards(tmp_path, base, compress=True, shards=range(500))
    write_shards(tmp_path, base, compress=True, server=1, shards=range(500, 1000))
    table = table_of("SparseNaiveSGDRule")
    assert load_paddle_table(table, tmp_path) == 2
    write_shards(tmp_path / "delta", "700 0 0 0 2 0 0.75 1 2 3\n", compress=False)
    assert load_paddle_table(table, tmp_path / "delta") == 1
    assert table.pull(np.array([1, 700]), create=False)[:, 0].tolist() == [0.5, 0.75]
    (tmp_path / "000" / "part-001-00700.gz").unlink()
    with pytest.raises(CheckpointError, match=r"lacks 1 of 1000 shards: \[700\]"):
        load_paddle_table(table, tmp_path)
    write_shards(tmp_path, base, compress=False, shards=range(700, 701))
    write_shards(tmp_path, base, compress=False, shards=range(3, 4))
    with pytest.raises(CheckpointError, match=r"shard 3 twice: part-000-00003 and part-000-00003\.gz.*older one"):
        load_paddle_table(table, tmp_path)


def test_what_is_refused(tmp_path: Path) -> None:
    table = table_of("SparseAdamSGDRule")
    write_shards(tmp_path, "1 0 0 0 1 0 0.5 1 2 3\n", compress=False, shards=range(10))
    with pytest.raises(CheckpointError, match=r"lacks 990 of 1000 shards: \[10, 11"):
        load_paddle_table(table, tmp_path)
    with pytest.raises(CheckpointError, match="has more than 5 shards"):
        load_paddle_table(table, tmp_path, num_shards=5)
    with pytest.raises(CheckpointError, match=r"part-000-00001:1: 10 numbers; a row of this table has"):
        load_paddle_table(table, tmp_path, num_shards=10)
    assert table.num_rows == 0
    with pytest.raises(CheckpointError, match=r"002 is no folder.*tables here: \['000'\].*geo"):
        load_paddle_table(table, tmp_path, 2)
    with pytest.raises(CheckpointError, match="has no accessor"):
        load_paddle_table(ps.SparseTable(ps.SparseTableConfig("ads", 4)), tmp_path)
    with pytest.raises(CheckpointError, match="no file of a dense table"):
        paddle_dense(tmp_path, {"w": (1,)}, table_id=0)


def test_dense_parameters_of_several_servers_in_a_model(tmp_path: Path) -> None:
    (tmp_path / "001").mkdir()
    (tmp_path / "001" / "part-000").write_text("0.5 0 0\n1.5 0 0\n2 0 0\n")
    (tmp_path / "001" / "part-001").write_text("3 0 0\n4 0 0\n5 0 0\n6 0 0\n7 0 0\n")
    shapes = {"fc_0.w_0": (3, 2), "fc_0.b_0": (2,)}
    dense = paddle_dense(tmp_path, shapes)
    model = nn.Sequential(nn.Linear(3, 2))
    model.load_state_dict(paddle_state(dense, model=model))
    assert model[0].bias.tolist() == [0.5, 1.5]
    assert torch.equal(model[0].weight, torch.arange(2.0, 8.0).reshape(3, 2).t())
    with pytest.raises(CheckpointError, match=r"holds 7 elements or more; shapes has 6"):
        paddle_dense(tmp_path, {"fc_0.w_0": (3, 2)})
    with pytest.raises(CheckpointError, match=r"holds 8 elements; shapes has 9"):
        paddle_dense(tmp_path, {"fc_0.w_0": (3, 3)})
    (tmp_path / "001" / "part-002").write_text("x 1\n")
    with pytest.raises(CheckpointError, match=r"part-002, line 1.*damaged"):
        paddle_dense(tmp_path, shapes)
    (tmp_path / "001" / "part-000").unlink()
    with pytest.raises(CheckpointError, match=r"parts of servers \[1, 2\]"):
        paddle_dense(tmp_path, shapes)
    (tmp_path / "001" / "part-001.gz").write_bytes(b"")
    with pytest.raises(CheckpointError, match="server 1 twice"):
        paddle_dense(tmp_path, shapes)
