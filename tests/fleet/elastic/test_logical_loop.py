"""Loops over logical workers: batches and their random numbers are the same on any host and in any loader."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import fleet
from fleet.elastic import ElasticSampler
from fleet.elastic.logical_loop import NumberedBatch, NumberedBatches, SeededDataset, logical_ranks
from fleet.errors import ConfigError
from tests.helpers.fleets import own_fleet
from tests.strategies.reproducible.turns import network, rows, start, turns, wrapped


class Augmented(Dataset[Any]):
    """Samples with noise of two generators."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, place: int) -> Any:
        return place, float(torch.rand(())), float(np.random.rand())


class Gathered(Augmented):
    """The same, fetched by batch."""

    def __getitems__(self, places: list[int]) -> list[Any]:
        return [self[place] for place in places]


def passes(seed: int, epochs: int, data: Dataset[Any] | None = None, again: int | None = None, **how: Any) -> list[Any]:
    """Returns what the batches of 3 logical workers hold, and what a turn draws, epoch by epoch."""
    torch.manual_seed(seed)
    start(3)
    data = Augmented() if data is None else data
    sampler = ElasticSampler(data, batch_size=2, seed=1)  # type: ignore[arg-type]
    loader = DataLoader(data, batch_size=2, sampler=sampler, **how)
    found = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        if again is not None and epoch:
            torch.manual_seed(again)
        for batch in sampler.batches(loader):
            found.append((turns().rank, [part.tolist() for part in batch], float(torch.rand(()))))
    return found


# ---- ranks ----------------------------------------------------------------------------------------------------------


def test_ranks_of_a_round() -> None:
    start(3)
    for round_ in range(2):
        seen = []
        for rank in logical_ranks():
            seen.append(rank)
            assert turns().rank == rank
            assert turns().round == round_
        assert seen == [0, 1, 2]
        assert not turns().is_open


def test_without_the_option_there_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    own_fleet(monkeypatch)
    assert [*logical_ranks()] == [0]
    fleet.init(is_collective=True, log_level="ERROR")
    assert [*logical_ranks()] == [fleet.data_rank()] == [0]


def test_a_loop_that_is_left_amid_an_update_is_refused() -> None:
    start(3)
    for _ in logical_ranks():
        break
    with pytest.raises(ConfigError, match="left after 1 of 3 batches of an update"):
        next(logical_ranks())


def test_a_loop_may_be_left_at_an_update() -> None:
    start(3)
    model, optimizer = wrapped(network())
    data = Augmented()
    sampler = ElasticSampler(data, batch_size=2)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    for update in range(2):
        for _ in sampler.batches(loader):
            loss = model(rows(update, turns().rank)).mean()
            loss.backward()
            optimizer.step()
            if fleet.update_loss(loss) is not None:
                break
    assert sampler.done == 12
    assert turns().round == 2


def test_two_loops_at_a_time_are_refused() -> None:
    start(1)  # where every turn is the last one
    data = Augmented()
    samplers = [ElasticSampler(data, batch_size=2) for _ in range(2)]
    both = [sampler.batches(DataLoader(data, batch_size=2, sampler=sampler)) for sampler in samplers]
    with pytest.raises(ConfigError, match="one loop at a time goes over sampler.batches"):
        next(zip(*both, strict=True))


def test_an_evaluation_at_an_update_is_a_loop_of_its_own() -> None:
    start(2)
    data = Augmented()
    samplers = [ElasticSampler(data, batch_size=2, shuffle=False) for _ in range(2)]
    loaders = [DataLoader(data, batch_size=2, sampler=sampler) for sampler in samplers]
    seen = []
    for batch in samplers[0].batches(loaders[0]):
        seen.append(batch[0].tolist())
        if turns().is_last and len(seen) == 4:
            inner = [each[0].tolist() for each in samplers[1].batches(loaders[1])]
    assert seen == inner
    assert [place for each in seen for place in each][:23] == [*range(23)]


# ---- samples and their numbers --------------------------------------------------------------------------------------


def test_an_epoch_that_is_begun_again_has_new_noise() -> None:
    """A script that does not call set_epoch() gets the order again, and other augmentations of it."""

    def run(state: Any = None) -> tuple[list[Any], Any]:
        sampler = ElasticSampler(data, batch_size=2, shuffle=False)
        loader = DataLoader(data, batch_size=2, sampler=sampler)
        if state is not None:
            sampler.load_state_dict(state)
        found = []
        kept = None
        for _ in range(2 - (state is not None)):
            for batch in sampler.batches(loader):
                found.append([part.tolist() for part in batch])
                kept = sampler.state_dict() if len(found) == 15 else kept
        return found, kept

    start(3)
    torch.manual_seed(5)
    data = Augmented()
    found, kept = run()
    assert [places for places, *_ in found[:12]] == [places for places, *_ in found[12:]]
    assert len({noise for _, noises, _ in found for noise in noises}) == 2 * 24
    start(3)
    torch.manual_seed(5)
    rest, _ = run(kept)
    assert rest == found[15:]


@pytest.mark.parametrize(
    "how",
    [
        {"num_workers": 2},
        {"num_workers": 1, "prefetch_factor": 5},
        {"num_workers": 2, "persistent_workers": True},
    ],
    ids=["processes", "far ahead", "persistent"],
)
def test_loader_processes_give_the_same_samples(how: dict[str, Any]) -> None:
    expected = passes(5, 2)
    assert passes(5, 2, **how) == expected
    gc.collect()  # persistent processes end with their loader
    assert len({noise for _, (_, noises, _), _ in expected for noise in noises}) == 2 * 24
    assert passes(6, 2) != expected


def test_a_seed_between_two_epochs_counts_in_loader_processes_too() -> None:
    expected = passes(5, 2, again=9)
    assert passes(5, 2, again=9, num_workers=2) == expected
    assert expected[:12] == passes(5, 1)
    assert expected[12:] != passes(5, 2)[12:]


def test_a_seed_that_comes_before_the_loop_counts() -> None:
    """The job began with another one."""
    found = []
    for workers in (0, 1):
        start(1)
        torch.manual_seed(3)
        data = Augmented()
        sampler = ElasticSampler(data, batch_size=2)
        loader = DataLoader(data, batch_size=2, sampler=sampler, num_workers=workers)
        found.append(next(sampler.batches(loader))[1].tolist())
        torch.manual_seed(4)
    assert found[0] == found[1]


def test_data_that_is_fetched_by_batch() -> None:
    assert passes(5, 1, Gathered()) == passes(5, 1) == passes(5, 1, Gathered(), num_workers=1)


def test_attributes_of_the_data_set_are_there() -> None:
    data = Augmented()
    data.classes = 7  # type: ignore[attr-defined]
    seeded = SeededDataset(data)
    assert seeded.classes == 7
    with pytest.raises(AttributeError):
        _ = seeded.missing
    copied = pickle.loads(pickle.dumps(seeded))
    assert copied.classes == 7


def test_batches_have_numbers() -> None:
    def numbers() -> Iterator[tuple[int, ...]]:
        yield from ((0, place) for place in range(2))

    found = [*NumberedBatches(lambda: iter(range(4)), 2, numbers)]
    assert found == [[0, 1], [2, 3]]
    assert [batch.number for batch in found] == [(0, 0), (0, 1)]
    sent = pickle.loads(pickle.dumps(found[1]))  # to a loader's process
    assert isinstance(sent, NumberedBatch)
    assert (sent, sent.number) == ([2, 3], (0, 1))


# ---- loaders that are refused ---------------------------------------------------------------------------------------


def test_a_loader_of_another_batch_size_is_refused() -> None:
    start(2)
    sampler = ElasticSampler(Augmented(), batch_size=2)
    with pytest.raises(ConfigError, match=r"deals batches of 2 \(ElasticSampler\(batch_size=...\)\).*batch_size is 4"):
        sampler.batches(DataLoader(Augmented(), batch_size=4, sampler=sampler))


def test_a_sampler_without_a_batch_size_is_refused() -> None:
    start(2)
    with pytest.raises(ConfigError, match=r"logical workers get whole batches. Write ElasticSampler\(data, batch_size"):
        ElasticSampler(Augmented())


def test_a_sampler_from_before_the_job_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    own_fleet(monkeypatch)
    data = Augmented()
    sampler = ElasticSampler(data, batch_size=2)
    placed = ElasticSampler(data, batch_size=2, num_workers=1, rank=0)
    start(2)
    with pytest.raises(ConfigError, match=r"made before fleet.init\(\) turned 'reproducible' on.*Make it afterwards"):
        sampler.batches(DataLoader(data, batch_size=2, sampler=sampler))
    assert len([*placed.batches(DataLoader(data, batch_size=2, sampler=placed))]) == 12
