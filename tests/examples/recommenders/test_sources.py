"""What ``--data`` names: each source becomes one folder of Parquet files, written once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import fleet
from tests.examples.recommenders.example import example_module, only_this_example
from tests.examples.scripts import ROOT
from tests.examples.wide_and_deep.example import criteo_line, write_criteo

sources = example_module("sources")
SMALL = "simulated:users=300,items=600,days=2,impressions=2000,seed=3"


def opened(source: str | Path, cache: Path) -> Path:
    with only_this_example():
        path: Path = sources.open_data(str(source), cache)
    return path


def test_a_simulated_folder_is_itself(folder: Path, tmp_path: Path) -> None:
    assert opened(folder, tmp_path) == folder
    assert list(tmp_path.iterdir()) == []


def test_a_shop_is_simulated_once(tmp_path: Path) -> None:
    first = opened(SMALL, tmp_path)
    written = (first / "items.parquet").stat().st_mtime_ns
    assert opened(SMALL, tmp_path) == first
    assert (first / "items.parquet").stat().st_mtime_ns == written
    assert opened(SMALL.replace("seed=3", "seed=4"), tmp_path) != first
    assert len(pq.read_table(first / "impressions")) == 2000


def test_workers_that_open_at_once_get_one_folder(tmp_path: Path) -> None:
    with only_this_example(), ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: sources.open_data(SMALL, tmp_path), range(4)))
    assert [path.name for path in tmp_path.iterdir()] == [path.name for path in found]


def test_a_source_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "part-0").write_text("1\t2\n")
    with pytest.raises(ValueError, match="line 1: 2 fields"):
        opened(tmp_path / "part-0", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_folder_that_holds_something_else_is_named(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n")
    with pytest.raises(ValueError, match=rf"--data '{tmp_path}' is not in Criteo's format.*Write simulated"):
        opened(tmp_path, tmp_path / "cache")


def test_files_in_criteos_format(tmp_path: Path) -> None:
    path = write_criteo(tmp_path / "part-0", 50)
    path.write_text(path.read_text() + criteo_line(1, ["3"], ["aa"]))
    found = opened(path, tmp_path / "cache")
    train = fleet.ParquetDataset(found / "impressions" / "train", batch_size=100)
    batch = next(iter(train))
    assert list(batch) == [*(f"C{n}" for n in range(1, 27)), *(f"I{n}" for n in range(1, 14)), "click"]
    assert len(batch["click"]) == 46
    assert batch["C1"].unique().numel() == 3
    assert not batch["C2"].any()
    assert batch["I1"][1] == pytest.approx(np.log(2))
    test = next(iter(fleet.ParquetDataset(found / "impressions" / "test", batch_size=100)))
    assert test["click"].tolist()[-1] == 1
    assert test["I1"][-1] == pytest.approx(np.log(4))


def test_changed_files_are_read_anew(tmp_path: Path) -> None:
    path = write_criteo(tmp_path / "part-0", 20)
    first = opened(path, tmp_path / "cache")
    write_criteo(path, 30)
    assert len(pq.read_table(opened(path, tmp_path / "cache") / "impressions")) == 30
    assert len(pq.read_table(first / "impressions")) == 20


def test_the_sample_of_criteo_is_read_where_it_is(tmp_path: Path) -> None:
    sample = ROOT / "shared" / "data" / "criteo"
    if not sample.is_dir():
        pytest.skip("the sample is not here")
    assert len(pq.read_table(opened(sample, tmp_path) / "impressions")) == 200


def test_flights(tmp_path: Path) -> None:
    found = opened("flights", tmp_path)
    batch = next(iter(fleet.ParquetDataset(found / "impressions" / "test", batch_size=1000)))
    assert {"carrier", "origin_x_dest", "conditions", "conditions.offsets", "I11", "click"} <= batch.keys()
    assert batch["conditions"].all()
    assert 0.05 < batch["click"].mean() < 0.5
    assert len(pq.read_table(found / "impressions", columns=["click"])) > 300_000


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("absent", "no such file or folder. Write simulated"),
        ("simulated:users", "'users' is not NAME=NUMBER with one of users, items"),
        ("simulated:people=3", "'people=3' is not NAME=NUMBER"),
        ("simulated:seed=1,seed=2", "'seed=2' is not NAME=NUMBER"),
        ("simulated:days=1", "--days 1: at least 2"),
    ],
)
def test_other_sources_are_refused(source: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        opened(source, tmp_path)
