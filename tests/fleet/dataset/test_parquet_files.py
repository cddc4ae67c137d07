"""What becomes of nulls and of columns that are no numbers."""

import pytest

import fleet
from fleet.errors import CheckpointError, ConfigError, FleetError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def test_nulls_are_refused_or_filled(tmp_path):
    file = tmp_path / "nulls.parquet"
    pq.write_table(pa.table({"a": pa.array([1, None, 3]), "bag": pa.array([[1], None, [2, None]])}), file)
    with pytest.raises(FleetError, match="column 'a' of .* holds nulls"):
        list(fleet.ParquetDataset(file, batch_size=3))
    (batch,) = fleet.ParquetDataset(file, batch_size=3, fill=0)
    assert batch["a"].tolist() == [1, 0, 3]
    assert batch["bag"].tolist() == [1, 2, 0]
    assert batch["bag.offsets"].tolist() == [0, 1, 1]


def test_strings_and_missing_files_are_refused(tmp_path):
    pq.write_table(pa.table({"name": ["a"]}), tmp_path / "s.parquet")
    with pytest.raises(ConfigError, match="column 'name' is string"):
        fleet.ParquetDataset(tmp_path, batch_size=1)
    with pytest.raises(ConfigError, match="no file"):
        fleet.ParquetDataset(tmp_path / "none*", batch_size=1)


def test_row_groups_that_are_damaged_or_gone_are_named(tmp_path):
    file = tmp_path / "c.parquet"
    pq.write_table(pa.table({"a": list(range(1000))}), file, row_group_size=500)
    dataset = fleet.ParquetDataset(file, batch_size=100)
    whole = file.read_bytes()
    file.write_bytes(whole[:200] + b"\xff" * 60 + whole[260:])
    with pytest.raises(FleetError, match=r"row group 0 of .*c\.parquet cannot be read"):
        list(dataset)
    file.unlink()
    with pytest.raises(FleetError, match=r"row group 0 of .*c\.parquet cannot be read"):
        list(dataset)
    for state in (None, {1: 2}):
        with pytest.raises(CheckpointError, match="a state of state_dict"):
            dataset.load_state_dict(state)


def test_pages_with_checksums_are_checked(tmp_path):
    """Without compression nothing else notices a byte that changed: it was another value."""
    file = tmp_path / "checked.parquet"
    table = pa.table({"a": list(range(5000))})
    pq.write_table(table, file, compression="none", use_dictionary=False, write_page_checksum=True)
    (whole,) = fleet.ParquetDataset(file, batch_size=5000)
    assert whole["a"].tolist() == list(range(5000))
    damaged = bytearray(file.read_bytes())
    damaged[20000] ^= 255
    file.write_bytes(damaged)
    with pytest.raises(FleetError, match=r"row group 0 of .*checked\.parquet cannot be read.*The file is damaged"):
        list(fleet.ParquetDataset(file, batch_size=5000))


@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_file_of_the_same_layout_is_not_taken_for_the_one_before(is_replaced, tmp_path):
    def write(start, path):
        pq.write_table(pa.table({"a": list(range(start, start + 6))}), path, row_group_size=3, compression="none")

    path, other = tmp_path / "f.parquet", tmp_path / "other"
    write(0, path)
    dataset = fleet.ParquetDataset(path, batch_size=3)
    assert [batch["a"].tolist() for batch in dataset] == [[0, 1, 2], [3, 4, 5]]
    write(100, other)
    size = path.stat().st_size
    if is_replaced:
        other.replace(path)
    else:
        path.write_bytes(other.read_bytes())
    assert path.stat().st_size == size
    with pytest.raises(FleetError, match=r"row group 0 of .*f.parquet cannot be read: .*changed or removed after"):
        list(dataset)
    assert next(iter(fleet.ParquetDataset(path, batch_size=3)))["a"].tolist() == [100, 101, 102]


def test_hashes_keep_their_bits(tmp_path):
    ids = [0, 5, 2**63 + 5, 2**64 - 1]
    pq.write_table(
        pa.table({"id": pa.array(ids, pa.uint64()), "bag": pa.array([ids] * 4, pa.list_(pa.uint64()))}),
        tmp_path / "u.parquet",
    )
    (batch,) = fleet.ParquetDataset(tmp_path, batch_size=4)
    assert batch["id"].tolist() == [0, 5, 5 - 2**63, -1]
    assert batch["bag"].tolist() == [0, 5, 5 - 2**63, -1] * 4


def test_fill_of_each_type(tmp_path):
    columns = {"flag": pa.array([True, None]), "half": pa.array([0.5, None]), "wide": pa.array([1, None], pa.uint64())}
    pq.write_table(pa.table(columns), tmp_path / "n.parquet")
    (batch,) = fleet.ParquetDataset(tmp_path, batch_size=2, fill=0)
    assert [batch[name].tolist() for name in columns] == [[True, False], [0.5, 0.0], [1, 0]]
    with pytest.raises(ConfigError, match=r"fill=7\): column 'flag' is bool, and takes 0 or 1"):
        fleet.ParquetDataset(tmp_path, batch_size=2, fill=7)


def test_a_column_of_the_name_of_offsets_is_refused(tmp_path):
    pq.write_table(pa.table({"bag": [[1]], "bag.offsets": [5]}), tmp_path / "b.parquet")
    with pytest.raises(ConfigError, match=r"the starts of the bags of 'bag' 'bag.offsets', and so is a column"):
        fleet.ParquetDataset(tmp_path, batch_size=1)
    assert len(list(fleet.ParquetDataset(tmp_path, columns=["bag"], batch_size=1))) == 1


def test_files_of_a_folder(tmp_path, monkeypatch):
    for name in ("day=1/a", "_temporary/a", ".hidden", "_unfinished"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        pq.write_table(pa.table({"id": [len(name)]}), tmp_path / f"{name}.parquet")
    assert [batch["id"].tolist() for batch in fleet.ParquetDataset(tmp_path, batch_size=4)] == [[7]]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="a file twice"):
        fleet.ParquetDataset(["day=1/a.parquet", "./day=1/a.parquet"], batch_size=1)
