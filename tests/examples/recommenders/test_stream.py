"""Impressions as a stream: every event once, in time order, from any offset, in batches like those of files."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import fleet
from tests.examples.recommenders.example import example_module

stream = example_module("simulator.stream")


def test_partitions_hold_each_event_once_and_a_user_whole(folder: Path) -> None:
    source = stream.ImpressionStream(folder / "impressions" / "test", partitions=3)
    users: list[set[int]] = []
    rows = 0
    for partition in range(3):
        offsets, texts = zip(*source(partition, 0), strict=True)
        events = [json.loads(text) for text in texts]
        assert offsets == tuple(range(source.end(partition)))
        assert [event["time"] for event in events] == sorted(event["time"] for event in events)
        users.append({event["user"] for event in events})
        rows += len(events)
    assert rows == sum(len(batch["user"]) for batch in batches_of_the_test(folder))
    assert not users[0] & users[1]
    assert not users[1] & users[2]


def test_a_partition_is_read_again_from_any_offset(folder: Path) -> None:
    days = folder / "impressions" / "train"
    source = stream.ImpressionStream(days, partitions=2)
    whole = list(source(1, 0))
    first_file = int(np.sum(pq.read_table(days / "day-00.parquet")["user"].to_numpy() % 2))
    for offset in (0, 1, 777, first_file - 1, first_file, len(whole) - 3, len(whole)):
        assert list(islice(source(1, offset), 50)) == whole[offset : offset + 50]


def test_batches_are_those_of_the_files_without_the_truth(folder: Path) -> None:
    source = stream.ImpressionStream(folder / "impressions" / "test")
    dataset = fleet.StreamDataset(
        source, json.loads, batch_size=100, name="impressions", partitions=1, collate=stream.batch_of
    )
    for streamed, read in zip(islice(dataset, 20), batches_of_the_test(folder), strict=False):
        wanted = {name: values for name, values in read.items() if not name.startswith("p_")}
        assert streamed.keys() == wanted.keys()
        for name, values in wanted.items():
            torch.testing.assert_close(streamed[name], values, rtol=0, atol=0)
    assert dataset.lag() == source.end(0) - 2000


def test_a_folder_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no Parquet files"):
        stream.ImpressionStream(tmp_path)


def batches_of_the_test(folder: Path) -> fleet.ParquetDataset:
    return fleet.ParquetDataset(folder / "impressions" / "test", batch_size=100)
