"""Impressions as a stream of JSON events, for ``fleet.StreamDataset``.

source = ImpressionStream(folder, partitions=4)
fleet.StreamDataset(source, json.loads, batch_size=256, name="impressions", partitions=4, collate=batch_of)
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

LEFT_OUT = ("p_click", "p_purchase")  # nobody sees these as they happen
LISTS = ("history", "history_category")


class ImpressionStream:
    """The impressions of files in time order: each user's in one partition, numbered from 0 there.

    Args:
        folder: of Parquet files, whose names are in time order.
        partitions: how many; as many are given to ``fleet.StreamDataset``.

    Raises:
        ValueError: there are no files.
    """

    def __init__(self, folder: Path, partitions: int = 1) -> None:
        self._files = sorted(folder.rglob("*.parquet"))
        self._partitions = partitions
        self._ends: list[int] | None = None
        if not self._files:
            raise ValueError(f"{str(folder)!r} holds no Parquet files; give impressions/train or test of a shop.")

    def __call__(self, partition: int, offset: int) -> Iterator[tuple[int, str]]:
        """Yields the offset and the JSON text of each event of a partition, from an offset on."""
        following = 0
        for file, group, users in self._groups():
            rows = np.flatnonzero(users % self._partitions == partition)
            first = following
            following += len(rows)
            if following > offset:
                skipped = max(offset - first, 0)
                columns = file.read_row_group(group).drop_columns(LEFT_OUT).take(rows[skipped:])
                values = [_values(columns[name].to_numpy()) for name in columns.column_names]
                for number, event in enumerate(zip(*values, strict=True), first + skipped):
                    yield number, json.dumps(dict(zip(columns.column_names, event, strict=True)))

    def end(self, partition: int) -> int:
        """Returns the offset after the last event, for ``StreamDataset.lag()``."""
        if self._ends is None:
            counts = [np.bincount(users % self._partitions, minlength=self._partitions) for *_, users in self._groups()]
            self._ends = np.sum(counts, axis=0).tolist()
        return self._ends[partition]

    def _groups(self) -> Iterator[tuple[pq.ParquetFile, int, NDArray[np.int64]]]:
        """Yields each row group with the users of its rows."""
        for path in self._files:
            with pq.ParquetFile(path) as file:
                for group in range(file.num_row_groups):
                    yield file, group, file.read_row_group(group, ["user"])["user"].to_numpy()


def _values(column: NDArray[Any]) -> list[Any]:
    """Returns the numbers, or lists of numbers, of a column; several times as fast as pyarrow's own."""
    return [one.tolist() for one in column] if column.dtype == object else column.tolist()


def batch_of(events: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Returns events as a batch like those of ``fleet.ParquetDataset``: lists flat, and where each begins."""
    batch: dict[str, Tensor] = {}
    for name in events[0]:
        values = [event[name] for event in events]
        if name in LISTS:
            lengths = torch.tensor([len(value) for value in values])
            batch[name] = torch.tensor([one for value in values for one in value], dtype=torch.int64)
            batch[f"{name}.offsets"] = lengths.cumsum(0) - lengths
        else:
            batch[name] = torch.tensor(values)
    return batch
