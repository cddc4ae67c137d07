"""Save and load: modes, other server counts, damage (D.8, G5, 003-07, 003-19)."""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fleet.common.plain_files import replacing
from fleet.errors import CheckpointError, ConfigError
from fleet.ps import (
    Accessor,
    CountFilterEntry,
    DenseTable,
    DenseTableConfig,
    Initializer,
    Rule,
    SparseTable,
    SparseTableConfig,
    load_dense,
    load_table,
    plan_dense_blocks,
    save_dense,
    save_table,
    servers_of_keys,
)
from fleet.ps.files.manifest import read_parts
from fleet.ps.files.table_files import check_save_mode
from fleet.ps.table.partition import range_bounds
from tests.fleet.ps._tables import make_rows, rows_of
from tests.fleet.ps.reference_store import table_of

CONFIGS = {
    "plain adam": SparseTableConfig("t", 4, Rule("adam"), initializer=Initializer("normal", 0, 1)),
    "accessor": SparseTableConfig(
        "t", 6, Rule("adam"), Rule("std_adagrad"), Initializer("normal", 0, 1), Accessor(embedx_threshold=0.15)
    ),
    "counted": SparseTableConfig("t", 4, Rule("sgd"), entry=CountFilterEntry(2)),
}


def _train(tables: list[SparseTable], routing: str, seed: int = 0, steps: int = 4) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        keys = np.unique(rng.integers(-800, 800, 700))
        gradients = rng.normal(size=(len(keys), tables[0].layout.num_weights)).astype(np.float32)
        owners = servers_of_keys(keys, len(tables), routing)
        for server, table in enumerate(tables):
            table.pull(keys[owners == server])
            table.push(keys[owners == server], gradients[owners == server])


def _whole(tables: list[SparseTable]) -> dict[int, object]:
    rows: dict[int, object] = {}
    for table in tables:
        rows |= rows_of(table)
    return rows


@pytest.mark.parametrize("routing", ["range", "modulo"])
@pytest.mark.parametrize("name", CONFIGS)
def test_three_servers_to_two(name: str, routing: str, tmp_path: Path) -> None:
    """003-19: a save of 3 servers, loaded by 2, is the same table row for row, state and counters included."""
    before = [SparseTable(CONFIGS[name]) for _ in range(3)]
    _train(before, routing)
    for server, table in enumerate(before):
        save_table(table, tmp_path, server=server, num_servers=3, save_id="one")
    after, bounds = [table_of(CONFIGS[name], kernels) for kernels in (True, False)], range_bounds(2)
    for server, table in enumerate(after):
        ranges = (bounds[server], bounds[server + 1]) if routing == "range" else None

        def mine(keys: np.ndarray, server: int = server) -> np.ndarray:
            return servers_of_keys(keys, 2, routing) == server

        loaded = load_table(table, tmp_path, mine=mine, ranges=ranges)
        assert loaded == len(rows_of(table))
    assert _whole(after) == _whole(before)
    for tables in (before, after):
        _train(tables, routing, seed=9)
    old, new = _whole(before), _whole(after)
    assert old.keys() == new.keys()
    for key in old:
        np.testing.assert_allclose(old[key][4], new[key][4], rtol=1e-4, atol=1e-5)  # type: ignore[index]


def test_ranges_leave_blocks_unread(tmp_path: Path) -> None:
    """Study 3: a loader reads what it will hold, not the whole save."""
    table = SparseTable(CONFIGS["plain adam"])
    make_rows(table, range(50_000))
    save_table(table, tmp_path)
    data = next((tmp_path / "t").glob("*.rows"))
    content = bytearray(data.read_bytes())
    content[-1000] ^= 1
    data.write_bytes(content)
    small = SparseTable(CONFIGS["plain adam"])
    first = range_bounds(8)[1]
    assert load_table(small, tmp_path, mine=lambda keys: servers_of_keys(keys, 8) == 0, ranges=(0, first)) > 5000
    with pytest.raises(CheckpointError, match="checksum"):
        load_table(SparseTable(CONFIGS["plain adam"]), tmp_path)


def _mode_table() -> SparseTable:
    accessor = Accessor(base_threshold=0.5, delta_threshold=0.3, delta_keep_days=1)
    return SparseTable(SparseTableConfig("t", 2, Rule("sgd"), accessor=accessor))


def _push(table: SparseTable, key: int, show: float) -> None:
    table.push(np.array([key]), np.ones((1, 2), np.float32), np.array([show], np.float32))


def _saved_keys(folder: Path, table: SparseTable) -> list[int]:
    copy = SparseTable(table.config)
    copy.chain.begin(read_parts(folder / "t")[0].continues)
    load_table(copy, folder)
    return sorted(copy.keys().tolist())


def test_modes(tmp_path: Path) -> None:
    """D.8, G5: which rows each mode takes, and what it does to the rows afterwards."""
    table = _mode_table()
    _push(table, 1, 10)  # score 1.0, delta 1.0
    _push(table, 2, 4)  # score 0.4: below base
    _push(table, 3, 10)
    save_table(table, tmp_path / "a", mode=1)
    assert _saved_keys(tmp_path / "a", table) == [1, 3]
    deltas = {key: round(row[5][2], 5) for key, row in rows_of(table).items()}
    assert deltas == {1: 0.0, 2: 0.4, 3: 0.0}, "only the saved rows' deltas are taken off"
    _push(table, 3, 5)
    _push(table, 1, 1)
    save_table(table, tmp_path / "b", mode=1)
    assert _saved_keys(tmp_path / "b", table) == [3], "row 1 changed by less than the delta threshold"
    save_table(table, tmp_path / "c", mode=2)
    assert _saved_keys(tmp_path / "c", table) == [1, 3]
    assert {round(row[5][2], 5) for key, row in rows_of(table).items() if key != 2} == {0.0}
    for _ in range(2):
        save_table(table, tmp_path / "d", mode=3)
    assert _saved_keys(tmp_path / "d", table) == [1, 2, 3]
    assert {row[0] for row in rows_of(table).values()} == {2}
    save_table(table, tmp_path / "e", mode=2)
    assert _saved_keys(tmp_path / "e", table) == [], "unseen for longer than delta_keep_days"
    save_table(table, tmp_path / "f", mode=0)
    assert _saved_keys(tmp_path / "f", table) == [1, 2, 3]
    assert {row[0] for row in rows_of(table).values()} == {2}


def test_a_failed_delta_save_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D.8: delta scores are taken off only after the file is complete."""
    table = _mode_table()
    _push(table, 1, 10)
    monkeypatch.setattr("fleet.ps.files.table_files.encode_block", lambda block: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_table(table, tmp_path, mode=1)
    assert not list((tmp_path / "t").iterdir()), "nothing is left of it"
    monkeypatch.undo()
    assert save_table(table, tmp_path, mode=1).rows == 1


@pytest.mark.parametrize("mode", [4, 5, -1, "0", True])
def test_other_modes_are_refused(mode: object) -> None:
    """D.8: modes of GPU caches are not offered."""
    with pytest.raises(ConfigError, match="not offered"):
        check_save_mode(mode)  # type: ignore[arg-type]


def test_delta_needs_an_accessor(tmp_path: Path) -> None:
    """A mode that selects by score is refused on a table that keeps none."""
    with pytest.raises(ConfigError, match="no accessor"):
        save_table(SparseTable(CONFIGS["plain adam"]), tmp_path, mode=1)


def _saved(tmp_path: Path) -> tuple[Path, Path]:
    table = SparseTable(CONFIGS["plain adam"])
    _train([table], "range")
    save_table(table, tmp_path)
    return next((tmp_path / "t").glob("*.rows")), tmp_path / "t" / "part-000.json"


@pytest.mark.parametrize("has_rows", [True, False])
@pytest.mark.parametrize("place", [0, 20, 47, 60, 2000, -5])
def test_damaged_rows(place: int, has_rows: bool, tmp_path: Path) -> None:
    """One flipped bit anywhere is found; the message names the file; the table stays as it was."""
    data, _ = _saved(tmp_path)
    content = bytearray(data.read_bytes())
    content[place] ^= 4
    data.write_bytes(content)
    table = SparseTable(CONFIGS["plain adam"])
    if has_rows:
        _train([table], "range", seed=5)
    before = rows_of(table)
    with pytest.raises(CheckpointError, match=data.name):
        load_table(table, tmp_path)
    assert rows_of(table) == before


def test_cut_and_lost_files(tmp_path: Path) -> None:
    """A short row file, a lost one, a damaged or foreign manifest: each is refused by name."""
    data, manifest = _saved(tmp_path)
    table, whole, text = SparseTable(CONFIGS["plain adam"]), data.read_bytes(), manifest.read_text()
    data.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=f"{data.name}.*the manifest says"):
        load_table(table, tmp_path)
    data.unlink()
    with pytest.raises(CheckpointError, match="absent"):
        load_table(table, tmp_path)
    data.write_bytes(whole)
    other_rows, other_format = text.replace('\\"rows\\": ', '\\"rows\\": 1'), text.replace('"format": 1', '"format": 9')
    for damaged in (text[:-10], other_rows, "[]", other_format):
        manifest.write_text(damaged)
        with pytest.raises(CheckpointError, match="part-000.json"):
            load_table(table, tmp_path)
    outer = json.loads(text)
    body = json.loads(outer["part"])
    extents = body["extents"]
    more_rows = [{**extents[0], "rows": extents[0]["rows"] + 1}, *extents[1:]]
    for forged, rule in ((more_rows, "the manifest says"), (extents * 2, "its extents do not fit its size")):
        outer["part"] = json.dumps({**body, "extents": forged})
        outer["crc32"] = zlib.crc32(outer["part"].encode())
        manifest.write_text(json.dumps(outer))
        with pytest.raises(CheckpointError, match=rule):
            load_table(table, tmp_path)
    manifest.unlink()
    with pytest.raises(CheckpointError, match="no saved table here"):
        load_table(table, tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        load_table(table, tmp_path / "nowhere")
    assert table.num_rows == 0


def test_a_table_that_a_save_does_not_have(tmp_path: Path) -> None:
    """The message names the folder that was given, which is there, and the tables that it has."""
    _saved(tmp_path)
    save_dense(DenseTable(DenseTableConfig("a/b", 6, Rule("sgd"))), tmp_path)
    other = SparseTable(replace(CONFIGS["plain adam"], name="two words"))
    for folder, has in ((tmp_path, r"the tables \['a/b', 't'\]"), (tmp_path / "t", "no tables")):
        with pytest.raises(
            CheckpointError, match=rf"^{folder}: no saved table here .* 'two words'; the folder has {has}"
        ):
            load_table(other, folder)


def test_half_a_save_is_refused(tmp_path: Path) -> None:
    """A server died between two saves: absent or mixed parts are refused, a later complete save is taken."""
    tables = [SparseTable(CONFIGS["plain adam"]) for _ in range(3)]
    _train(tables, "range")
    save_table(tables[0], tmp_path, server=0, num_servers=2, save_id="one")
    with pytest.raises(CheckpointError, match=r"part-001\.json"):
        load_table(SparseTable(CONFIGS["plain adam"]), tmp_path)
    save_table(tables[1], tmp_path, server=1, num_servers=2, save_id="one")
    save_table(tables[0], tmp_path, server=0, num_servers=2, save_id="two")
    with pytest.raises(CheckpointError, match="different saves"):
        load_table(SparseTable(CONFIGS["plain adam"]), tmp_path)
    save_table(tables[2], tmp_path, save_id="three")
    copy = SparseTable(CONFIGS["plain adam"])
    load_table(copy, tmp_path)
    assert rows_of(copy) == rows_of(tables[2])
    assert len(list((tmp_path / "t").iterdir())) == 2, "files of the older saves are gone"


@pytest.mark.parametrize(
    ("change", "word"),
    [({"dim": 5}, "dim"), ({"rule": Rule("sgd")}, "rule"), ({"accessor": Accessor()}, "embed_rule|accessor")],
)
def test_rows_of_another_shape(change: dict[str, object], word: str, tmp_path: Path) -> None:
    """A table of other columns or state is refused before anything is read."""
    _saved(tmp_path)
    table = SparseTable(replace(CONFIGS["plain adam"], **change))  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=word):
        load_table(table, tmp_path)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("name", ["__model__", "model.pdmodel"])
def test_layouts_of_other_programs_are_named(inside: bool, name: str, tmp_path: Path) -> None:
    """003-09: a model directory of the 1.x layout, which has no folder of the table, gives a clear error."""
    folder = tmp_path / "t" if inside else tmp_path
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=rf"a model that Paddle wrote \({name}\), which only Paddle reads"):
        load_table(SparseTable(CONFIGS["plain adam"]), tmp_path)


@pytest.mark.parametrize("name", ["a/b", "..", "emb.0", "two words", "buffers.pt", "export.json", "dense.0"])
def test_table_names_stay_inside_the_folder(name: str, tmp_path: Path) -> None:
    """A table's name cannot leave the checkpoint's folder."""
    table = SparseTable(replace(CONFIGS["plain adam"], name=name))
    make_rows(table, range(5))
    save_table(table, tmp_path / "c")
    assert [path.parent for path in (tmp_path / "c").iterdir()] == [tmp_path / "c"]
    assert sorted(tmp_path.iterdir()) == [tmp_path / "c"]
    assert load_table(SparseTable(table.config), tmp_path / "c") == 5


def test_a_sparse_table_called_as_a_dense_one_keeps_its_files(tmp_path: Path) -> None:
    """The rows of SparseEmbedding(name="dense.0") were lost: the dense parameters were written to its folder."""
    table = SparseTable(replace(CONFIGS["plain adam"], name="dense.0"))
    make_rows(table, range(5))
    dense = DenseTable(DenseTableConfig("dense.0", 6, Rule("sgd")))
    save_table(table, tmp_path)
    save_dense(dense, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense%2E0", "dense.0"]
    assert load_table(SparseTable(table.config), tmp_path) == 5
    load_dense(dense, tmp_path)


def test_crash_between_the_two_files_leaves_the_old_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest is the switch: until it is replaced, the older rows are the ones that load."""
    table = SparseTable(CONFIGS["plain adam"])
    _train([table], "range")
    save_table(table, tmp_path)
    old = rows_of(table)
    _train([table], "range", seed=5)
    full = "fleet.ps.files.table_files.write_manifest"
    monkeypatch.setattr(full, lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save_table(table, tmp_path)
    copy = SparseTable(CONFIGS["plain adam"])
    load_table(copy, tmp_path)
    assert rows_of(copy) == old


@pytest.mark.parametrize("rule", ["sgd", "adagrad", "adam"])
def test_dense_on_another_number_of_servers(rule: str, tmp_path: Path) -> None:
    """003-19: dense blocks of 3 servers become those of 2, with their state."""
    rng, size = np.random.default_rng(0), 101
    values, gradients = rng.normal(size=size).astype(np.float32), rng.normal(size=(5, size)).astype(np.float32)

    def servers(number: int) -> list[tuple[int, DenseTable]]:
        blocks = plan_dense_blocks(size, number)
        return [(a, DenseTable(DenseTableConfig("mlp", b - a, Rule(rule)))) for a, b in blocks]

    before = servers(3)
    for start, table in before:
        table.set_values(values[start : start + table.config.size])
        for gradient in gradients[:3]:
            table.push(gradient[start : start + table.config.size])
    for server, (start, table) in enumerate(before):
        save_dense(table, tmp_path, start=start, total=size, server=server, num_servers=3)
    after = servers(2)
    for start, table in after:
        load_dense(table, tmp_path, start=start, total=size)
    for tables in (before, after):
        for start, table in tables:
            for gradient in gradients[3:]:
                table.push(gradient[start : start + table.config.size])
    old, new = (np.concatenate([table.pull() for _, table in tables]) for tables in (before, after))
    np.testing.assert_array_equal(old, new)
    with pytest.raises(CheckpointError, match="under rule"):
        load_dense(DenseTable(DenseTableConfig("mlp", 101, Rule("momentum"))), tmp_path, total=size)
    data = next((tmp_path / "mlp").glob("part-001-*.dense"))
    content = bytearray(data.read_bytes())
    content[3] ^= 1
    data.write_bytes(content)
    with pytest.raises(CheckpointError, match=data.name):
        load_dense(after[0][1], tmp_path, total=size)


@pytest.mark.parametrize("num_servers", [1, 3])
def test_a_dense_save_of_parameters_of_other_shapes_is_refused(num_servers: int, tmp_path: Path) -> None:
    """The same number of elements; where one side does not know its shapes, as before there were any, it is loaded."""
    shapes, names = ((6, 4), (4,), (2,)), ("fc.weight", "", "out.bias")
    whole = DenseTableConfig("mlp", 30, Rule("sgd"), shapes, names)
    for server, (start, stop) in enumerate(plan_dense_blocks(30, num_servers)):
        table = DenseTable(replace(whole, size=stop - start))
        table.set_values(np.arange(start, stop, dtype=np.float32))
        save_dense(table, tmp_path / "new", start=start, total=30, server=server, num_servers=num_servers)
        table.config = replace(table.config, shapes=None)
        save_dense(table, tmp_path / "old", start=start, total=30, server=server, num_servers=num_servers)
    for folder, known in (("new", shapes), ("new", None), ("old", shapes), ("old", ((4, 6), (6,)))):
        table = DenseTable(replace(whole, shapes=known))
        load_dense(table, tmp_path / folder)
        assert table.pull().tolist() == list(range(30))
    for others, first in (
        (((4, 6), (4,), (2,)), r"parameter 0 \('fc.weight'\) is \[6, 4\] there and \[4, 6\] here"),
        (((6, 4), (1, 4), (2,)), r"of 'mlp', parameter 1 is \[4\] there and \[1, 4\] here"),
        (((6, 4), (4,), (1,), (1,)), r"parameter 2 \('out.bias'\) is \[2\] there and \[1\] here"),
        (((6, 4), (4,)), r"parameter 2 \('out.bias'\) is \[2\] there and absent here"),
        (((6, 4), (4,), (2,), ()), r"parameter 3 is absent there and \[\] here"),
    ):
        size = min(30, sum(int(np.prod(shape)) for shape in others))
        table = DenseTable(replace(whole, size=size, shapes=others))
        with pytest.raises(CheckpointError, match=rf"mlp/part-000.json.*{first}\."):
            load_dense(table, tmp_path / "new")
        assert not table.is_set


def test_a_file_that_cannot_be_finished_leaves_nothing(tmp_path):
    """PS design 3: a full disk refuses the end of the buffer once more when the file is closed."""
    with pytest.raises(OSError), open(os.devnull, "rb") as unwritable, replacing(tmp_path / "x.rows") as file:  # noqa: PT011, PT012
        file.write(b"rows")
        os.dup2(unwritable.fileno(), file.fileno())
        file.flush()
    assert not list(tmp_path.iterdir())
