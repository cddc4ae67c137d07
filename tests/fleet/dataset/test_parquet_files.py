"""What becomes of nulls and of columns that are no numbers."""

import pytest

import fleet
from fleet.errors import ConfigError, FleetError

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
