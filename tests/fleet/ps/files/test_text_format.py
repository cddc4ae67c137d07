"""Text rows: Paddle's own lines, round trips, wrong lines (D.8, 003-08)."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from fleet.errors import CheckpointError
from fleet.ps import (
    Accessor,
    Initializer,
    Rule,
    SparseTable,
    SparseTableConfig,
    export_text,
    import_text,
    load_table,
    rule_from_paddle,
    servers_of_keys,
)
from fleet.ps.table.rules import RULES
from tests.fleet.ps._tables import DATA, make_rows, rows_of
from tests.fleet.ps.reference_store import table_of


@pytest.mark.parametrize("rule", [name for name, spec in RULES.items() if spec.sparse])
@pytest.mark.parametrize("accessor", [None, Accessor(embedx_threshold=0.25)], ids=["plain", "accessor"])
@pytest.mark.parametrize("compress", [False, True], ids=["text", "gz"])
def test_round_trip_over_servers(rule: str, accessor: Accessor | None, compress: bool, tmp_path: Path) -> None:
    """003-08: one part per server; together they are the whole table, bit for bit."""
    config = SparseTableConfig("t", 5, Rule(rule), initializer=Initializer("normal", 0, 1), accessor=accessor)
    rng, tables = np.random.default_rng(0), [SparseTable(config) for _ in range(2)]
    everything = np.unique(rng.integers(-(2**62), 2**62, 40))
    for step in range(5):
        keys = everything[:: 1 + step].copy()
        owners = servers_of_keys(keys, 2)
        for server, table in enumerate(tables):
            own = keys[owners == server]
            table.pull(own)
            table.push(own, rng.normal(size=(len(own), 5)).astype(np.float32), slots=np.full(len(own), 7, np.uint32))
    written = [export_text(table, tmp_path, server=i, compress=compress).rows for i, table in enumerate(tables)]
    assert sorted(path.name for path in (tmp_path / "t").iterdir()) == [
        f"part-00{i}-00000{'.gz' if compress else ''}" for i in range(2)
    ]
    whole = rows_of(tables[0]) | rows_of(tables[1])
    assert sum(written) == len(whole) == 40
    for use_kernels in (True, False):
        copy = table_of(config, use_kernels)
        assert load_table(copy, tmp_path) == 40
        assert rows_of(copy) == whole


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("async_sgd_naive", "SparseNaiveSGDRule"),
        ("async_sgd_adagrad", "SparseAdaGradSGDRule"),
        ("async_sgd_std_adagrad", "StdAdaGradSGDRule"),
        ("async_sgd_default", "SparseAdamSGDRule"),
    ],
)
def test_reads_what_paddle_wrote(name: str, rule: str, tmp_path: Path) -> None:
    """D.8: the recorded part of a real save loads, and comes out again with the same numbers."""
    with np.load(DATA / f"{name}.npz", allow_pickle=False) as file:
        text = str(file["table0_text"])
    folder = tmp_path / "emb"
    folder.mkdir()
    (folder / "part-000-00000.gz").write_bytes(gzip.compress(text.encode()))
    table = SparseTable(SparseTableConfig("emb", 4, rule_from_paddle(rule), accessor=Accessor()))
    assert import_text(table, tmp_path) == 10
    rows = table.pull(np.arange(10), create=False)
    lines = {int(line.split()[0]): line.split() for line in text.splitlines() if line.strip()}
    np.testing.assert_allclose(rows[:, 0], [float(lines[key][6]) for key in range(10)], rtol=1e-6)
    export_text(table, tmp_path / "again")
    for line in (tmp_path / "again" / "emb" / "part-000-00000").read_text().splitlines():
        numbers = np.array(line.split(), float)
        np.testing.assert_allclose(numbers, np.array(lines[int(numbers[0])], float), rtol=2e-6)


def test_unsigned_keys_and_rows_without_embedx(tmp_path: Path) -> None:
    """D.8: Paddle prints ids as unsigned; a short line is a row without embedx part."""
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "part-000-00000").write_text(f"{2**64 - 1} 3 2 0.1 1 0 0.5\n5 3 0 0 9 1 0.5 1 2 3\n\n")
    table = SparseTable(SparseTableConfig("t", 4, Rule("sgd"), accessor=Accessor(embedx_threshold=5)))
    assert import_text(table, tmp_path) == 2
    assert table.pull(np.array([-1, 5]), create=False).tolist() == [[0.5, 0, 0, 0], [0.5, 1, 2, 3]]
    rows = rows_of(table)
    assert rows[-1][0] == 2
    assert rows[-1][3] is False
    assert rows[5][3] is True
    np.testing.assert_allclose(rows[-1][5], (1, 0, 0.1, 3), rtol=1e-6)
    assert import_text(SparseTable(table.config), tmp_path, mine=lambda keys: keys == 5) == 1


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("1 0 0 0 1 0", "6 numbers"),
        ("1 0 0 0 1 0 0.5 1 2", "9 numbers"),
        ("1 0 0 0 1 0 0.5 1 2 x", "could not convert"),
        ("1.5 0 0 0 1 0 0.5 1 2 3", "invalid literal"),
        (f"{2**64} 0 0 0 1 0 0.5 1 2 3", "64 bits"),
        ("1 0 0 0 1 0 0.5 1 2 \N{DEGREE SIGN}", "codec"),
    ],
)
def test_wrong_lines(line: str, word: str, tmp_path: Path) -> None:
    """A line that is no row of this table is refused by file and line; the table stays as it was."""
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "part-000-00000").write_text("5 0 0 0 9 1 0.5 1 2 3\n" * 5000 + f"{line}\n")
    table = SparseTable(SparseTableConfig("t", 4, Rule("sgd"), accessor=Accessor()))
    for _ in range(2):
        before = rows_of(table)
        for load in (import_text, load_table):
            with pytest.raises(CheckpointError, match=f"part-000-00000.*{word}"):
                load(table, tmp_path)
        assert rows_of(table) == before
        make_rows(table, [5, 6])


def test_damaged_gz(tmp_path: Path) -> None:
    """A cut or scrambled compressed part is refused by name."""
    table = SparseTable(SparseTableConfig("t", 4, Rule("sgd")))
    make_rows(table, range(100))
    path = export_text(table, tmp_path, compress=True).path
    whole = path.read_bytes()
    for damaged in (whole[:-20], whole[:40] + b"\0\0\0\0" + whole[44:], b"plain"):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="part-000-00000.gz"):
            import_text(SparseTable(table.config), tmp_path)
    with pytest.raises(CheckpointError, match="no text parts"):
        import_text(table, tmp_path / "nowhere")
