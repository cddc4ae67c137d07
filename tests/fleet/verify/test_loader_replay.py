"""Samples are known by their content, and places by the user's line."""

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import fleet
from fleet.verify import loader_replay
from fleet.verify.loader_replay import ReplayedBatches, _sample, is_library, rows_of
from fleet.verify.record_files import RecordFile


def test_rows_of_equal_samples_are_equal() -> None:
    x, y = torch.tensor([[1.0], [2.0], [1.0]]), torch.tensor([0, 1, 0])
    rows = rows_of([x, y])
    assert rows[0] == rows[2] != rows[1]


def test_a_sample_of_a_subset_is_that_of_the_data_set() -> None:
    data = TensorDataset(torch.arange(10))
    assert _sample(Subset(Subset(data, [5, 6, 7]), [2, 0]), 0) == 7


def test_torch_is_a_library_and_this_file_is_not() -> None:
    assert is_library(str(torch.__file__))
    assert not is_library(__file__)


def test_this_project_is_a_library_through_a_symbolic_link_as_well(tmp_path: Path) -> None:
    (tmp_path / "fleet").symlink_to(Path(str(fleet.__file__)).parent)
    linked = tmp_path / "fleet" / "verify" / "loader_replay.py"
    spec = importlib.util.spec_from_file_location("linked_loader_replay", linked)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.is_library(str(linked))
    assert module.is_library(str(loader_replay.__file__))
    assert not module.is_library(__file__)


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
