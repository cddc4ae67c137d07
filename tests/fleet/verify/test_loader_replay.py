"""Samples are known by their content, and places by the user's line."""

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from fleet.verify.loader_replay import ReplayedBatches, _sample, rows_of
from fleet.verify.record_files import RecordFile


def test_rows_of_equal_samples_are_equal() -> None:
    x, y = torch.tensor([[1.0], [2.0], [1.0]]), torch.tensor([0, 1, 0])
    rows = rows_of([x, y])
    assert rows[0] == rows[2] != rows[1]


def test_a_sample_of_a_subset_is_that_of_the_data_set() -> None:
    data = TensorDataset(torch.arange(10))
    assert _sample(Subset(Subset(data, [5, 6, 7]), [2, 0]), 0) == 7


def test_draws_of_a_data_set_are_none_of_the_training_loop(tmp_path: Path) -> None:
    loading = [False]

    class Noisy(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> torch.Tensor:
            assert loading[-1], "a draw here would be counted"
            return torch.ones(3)

    record = RecordFile(tmp_path)
    batches = ReplayedBatches(record, loading.append)
    same: dict[str, Any] = {"indices": [0, 1], "rows": rows_of([torch.ones(2, 3)])}
    batches._compare_data(DataLoader(Noisy()), "key", [same])
    record.close()
    assert '"equal": true' in (tmp_path / "events.jsonl").read_text(encoding="utf-8")
