"""Samples are known by their content, and places by the user's line."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, Subset, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from fleet.verify.loader_replay import CannotReplay, ReplayedBatches, _facts, _sample, install_batches, rows_of
from fleet.verify.record_files import RecordFile, read_record


def test_rows_of_equal_samples_are_equal() -> None:
    x, y = torch.tensor([[1.0], [2.0], [1.0]]), torch.tensor([0, 1, 0])
    rows = rows_of([x, y])
    assert rows[0] == rows[2] != rows[1]


def test_a_sample_of_a_subset_is_that_of_the_data_set() -> None:
    data = TensorDataset(torch.arange(10))
    assert _sample(Subset(Subset(data, [5, 6, 7]), [2, 0]), 0) == 7


def test_the_sampler_of_a_loader_is_the_one_that_chooses() -> None:
    data = TensorDataset(torch.arange(10))
    sampler = DistributedSampler(data, 2, 0)
    assert _facts(DataLoader(data, 5, sampler=sampler))["replicas"] == 2
    assert _facts(DataLoader(data, batch_sampler=BatchSampler(sampler, 5, True)))["replicas"] == 2
    uneven = DistributedSampler(TensorDataset(torch.arange(9)), 2, 0)
    assert [_facts(DataLoader(data, 5, sampler=one))["fill"] for one in (sampler, uneven)] == [0, 1]
    own: Any = [[0, 1], [2, 3]]
    assert _facts(DataLoader(data, batch_sampler=own))["sampler"] == "list"


def test_batches_that_are_dealt_out_are_those_of_another_sampler() -> None:
    class Dealt(BatchSampler):
        """The batches of another one for one of two workers, as Accelerate's."""

        def __init__(self, inner: BatchSampler) -> None:
            self.batch_sampler, self.num_processes, self.batch_size, self.even_batches = inner, 2, 5, True

        def __len__(self) -> int:
            return 1

    loader = DataLoader(TensorDataset(torch.arange(11)), 5, shuffle=True)
    facts = _facts(DataLoader(loader.dataset, batch_sampler=Dealt(loader.batch_sampler)))  # type: ignore[arg-type]
    found = [facts[name] for name in ("sampler", "planned", "replicas", "fill", "length")]
    assert found == ["RandomSampler", 6, 2, 10, 1]


class Ahead:
    """A loader that takes a batch ahead, so that it knows which is the last one, as Accelerate's."""

    def __init__(self, base: DataLoader[Any]) -> None:
        self.base = base
        self.is_over = False

    def __iter__(self) -> Iterator[Any]:
        loop = iter(self.base)
        batch = next(loop)
        for following in loop:
            yield batch
            batch = following
        self.is_over = True
        yield batch


class Told(TensorDataset):
    """Samples that are taken while ``at_work`` ends with True."""

    at_work: list[bool]

    def __getitem__(self, index: int) -> Any:
        assert self.at_work[-1], "a sample that is drawn counts as a draw of the training loop"
        return super().__getitem__(index)


def trained(folder: Path, sources: list[Path], most: int, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Returns up to ``most`` batches with which a loop that looks ahead trains, and which was the last."""
    folder.mkdir()
    record = RecordFile(folder)
    data = Told(torch.arange(8))
    data.at_work = [False]
    batches = ReplayedBatches(record, data.at_work.append, sources)
    found = []
    with monkeypatch.context() as patch:
        for kind, names in ((DataLoader, "__init__ __iter__ __len__"), (_BaseDataLoaderIter, "_next_index _reset")):
            for name in names.split():
                patch.setattr(kind, name, getattr(kind, name))
        install_batches(batches)
        loop = batches.around_loop(Ahead.__iter__, lambda one: one.base, lambda one: one.is_over, own_batches=True)
        loader = Ahead(DataLoader(data, batch_size=2))
        for (rows,) in islice(loop(loader), most):
            assert not data.at_work[-1]
            found.append((rows.tolist(), loader.is_over))
            batches.trained()
    record.close()
    return found


def test_a_loader_that_looks_ahead_tells_what_its_loop_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process is not shown the end of the loader where the workers' loop was not at its end."""
    for name, most, end in (("some", 2, False), ("four", 4, True), ("all", 9, True)):
        worker = tmp_path / name
        own = trained(worker, [], most, monkeypatch)
        assert [(one["samples"], one["n"]) for one in read_record(worker, "batch")] == [
            (rows, n) for n, (rows, _) in enumerate(own)
        ]
        alone = trained(tmp_path / f"{name} alone", [worker, worker], len(own), monkeypatch)
        assert alone == [(2 * rows, last) for rows, last in own]
        assert alone[-1][1] is end


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


def trained_with(folder: Path, *events: str) -> list[str]:
    """Returns the batches written down: "x" is given by loader x, "look" and "train" are passes through a model."""
    folder.mkdir()
    record = RecordFile(folder)
    batches = ReplayedBatches(record, lambda entered: None)
    passes = {"look": batches.evaluated, "train": batches.trained}
    for n, event in enumerate(events):
        if event in passes:
            passes[event]()
        else:
            batches.gave(event, (1, n), torch.ones(2), None, None)
    record.close()
    return [one["key"] for one in read_record(folder, "batch")]


def test_a_batch_that_a_teacher_saw_first_is_one_of_training_and_those_of_an_evaluation_are_not(tmp_path: Path) -> None:
    assert trained_with(tmp_path / "teacher", *["x", "look", "train"] * 2) == ["x", "x"]
    assert trained_with(tmp_path / "after", "x", "train", "t", "look", "x", "train") == ["x", "x"]
    assert trained_with(tmp_path / "between", "x", "t", "look", "t", "look", "train", "x", "train") == ["x", "x"]
    assert trained_with(tmp_path / "ahead", *["x", "x", "train", "train"] * 2) == ["x"] * 4
    assert trained_with(tmp_path / "pairs", "x", "u", "look", "train", "x", "u", "look", "train") == ["x", "u"] * 2


def test_batches_of_own_lengths_are_filled_up_as_the_collator_does(tmp_path: Path) -> None:
    """One process has the samples of both workers in one batch, with what each worker had in its places."""
    data = [torch.tensor(words) for words in ([1, 2, 3], [4], [5, 6], [7])]

    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-1)

    record = RecordFile(tmp_path)
    batches = ReplayedBatches(record, lambda entered: None)

    def whole(loader: DataLoader[Any], indices: list[int] | None) -> list[list[int]]:
        parts = [{"key": "a", "indices": [0, 1]}, {"key": "a", "indices": indices}]
        (made,) = batches._whole(loader, parts, [[collate(data[:2]) * 10, collate(data[2:]) * 10]])
        rows: list[list[int]] = made.tolist()
        return rows

    loader: DataLoader[Any] = DataLoader(data, batch_size=2, collate_fn=collate)  # type: ignore[arg-type]
    assert whole(loader, [2, 3]) == [[10, 20, 30], [40, -10, -10], [50, 60, -1], [70, -10, -1]]
    with pytest.raises(CannotReplay, match="own longest sample"):
        whole(loader, None)
    with pytest.raises(CannotReplay, match="own longest sample"):
        whole(DataLoader(data, batch_size=2), [2, 3])  # type: ignore[arg-type]
    record.close()


def test_batches_that_are_taken_at_once_are_all_trained_with(tmp_path: Path) -> None:
    record = RecordFile(tmp_path)
    batches = ReplayedBatches(record, lambda entered: None)

    def give(first: int) -> None:
        for n in (first, first + 1):
            batches.gave("a.py:1#1", (1, n), torch.tensor([n]), [n], [n])
        batches.ended("a.py:1#1", (1, first + 2))

    batches.around_batches(give)(0)
    for _ in range(2):
        batches.trained()
    give(2)  # one by one, and trained with none
    batches.trained()
    assert [batch["n"] for batch in read_record(tmp_path, "batch")] == [0, 1]
    record.close()
