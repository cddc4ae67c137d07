"""ElasticSampler: no sample lost, none seen twice, whatever happens to the number of workers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler

from fleet.elastic import ElasticSampler
from fleet.errors import CheckpointError, ConfigError
from fleet.job.logical_workers import LogicalWorkers


class Numbers(Dataset[int]):
    """Each sample is its own number."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, place: int) -> int:
        return place


def use(state: dict[str, Any] | None, epoch: int, *, workers: int, batches: int, size: int, **made: Any) -> Any:
    """Runs ``batches`` batches on each of ``workers`` workers; returns what each saw and their common state."""
    seen, states = [], []
    for rank in range(workers):
        data = Numbers(made["length"])
        sampler = ElasticSampler(
            data,
            shuffle=made["shuffle"],
            seed=made["seed"],
            drop_last=made["drop_last"],
            num_workers=workers,
            rank=rank,
        )
        if state is not None:
            sampler.load_state_dict(state)
        sampler.set_epoch(epoch)
        own: list[int] = []
        for turn, batch in enumerate(sampler.batches(DataLoader(data, batch_size=size, sampler=sampler))):
            own += batch.tolist()
            if turn + 1 == batches:
                break
        seen.append(own)
        states.append(sampler.state_dict())
    assert all(found == states[0] for found in states)
    return seen, states[0]


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 60),
    shuffle=st.booleans(),
    seed=st.integers(0, 3),
    size=st.integers(1, 5),
    pieces=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), max_size=4),
    last=st.integers(1, 5),
)
def test_each_sample_of_an_epoch_is_seen_once_through_any_changes(
    length: int, shuffle: bool, seed: int, size: int, pieces: list[tuple[int, int]], last: int
) -> None:
    """004-14: runs of some workers and batches, each stopped and continued by another number of workers."""
    made = {"length": length, "shuffle": shuffle, "seed": seed, "drop_last": False, "size": size}
    state, seen, repeats = None, [], 0
    for workers, batches in [*pieces, (last, -1)]:
        found, state = use(state, 3, workers=workers, batches=batches, **made)
        # Dealt out in turns: place by place over the workers.
        turns = max(map(len, found))
        seen += [own[turn] for turn in range(turns) for own in found]
        if state["done"] == length and repeats == 0:
            repeats = len(seen) - length
    order = ElasticSampler(Numbers(length), shuffle=shuffle, seed=seed, num_workers=1, rank=0)
    order.set_epoch(3)
    assert seen[:length] == list(order)
    assert 0 <= repeats < max(workers for workers, _ in [*pieces, (last, -1)])
    assert len(seen) == length + repeats


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("length", "workers"), [(10, 3), (2, 5), (12, 4)])
def test_the_order_is_that_of_torch(length: int, workers: int, shuffle: bool, drop_last: bool) -> None:
    for rank in range(workers):
        theirs = DistributedSampler(Numbers(length), workers, rank, shuffle=shuffle, seed=7, drop_last=drop_last)
        ours = ElasticSampler(
            Numbers(length), shuffle=shuffle, seed=7, drop_last=drop_last, num_workers=workers, rank=rank
        )
        for epoch in range(2):
            theirs.set_epoch(epoch)
            ours.set_epoch(epoch)
            assert len(ours) == len(theirs)
            assert list(ours) == list(theirs)
            ours.record(len(ours))


def test_what_loader_processes_fetched_ahead_is_not_used() -> None:
    """peers 4.1: Accelerate repeats and drops samples here; two processes with four batches each fetched ahead."""
    data = Numbers(40)
    sampler = ElasticSampler(data, seed=1, num_workers=2, rank=1)
    loader = DataLoader(data, batch_size=3, sampler=sampler, num_workers=2, prefetch_factor=4)
    seen = []
    for turn, batch in enumerate(sampler.batches(loader)):
        seen += batch.tolist()
        if turn == 1:
            break
    assert sampler.state_dict()["done"] == 12
    again = ElasticSampler(data, seed=1, num_workers=2, rank=1)
    again.load_state_dict(sampler.state_dict())
    assert seen + list(again) == list(ElasticSampler(data, seed=1, num_workers=2, rank=1))


def test_an_epoch_that_ended_is_over_and_the_next_begins_at_its_start() -> None:
    data = Numbers(5)
    sampler = ElasticSampler(data, num_workers=1, rank=0)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    assert sum(len(batch) for batch in sampler.batches(loader)) == 5
    again = ElasticSampler(data, num_workers=1, rank=0)
    again.load_state_dict(sampler.state_dict())
    loader = DataLoader(data, batch_size=2, sampler=again)
    assert list(again.batches(loader)) == []
    assert len(list(again.batches(loader))) == 3  # without set_epoch the same epoch comes again, as in torch
    again.set_epoch(1)
    assert again.done == 0
    assert len(again) == 5


def test_samples_recorded_by_hand() -> None:
    data = Numbers(10)
    sampler = ElasticSampler(data, num_workers=2, rank=0)
    loader = DataLoader(data, batch_sampler=BatchSampler(sampler, 2, drop_last=False))
    for batch in loader:
        sampler.record(len(batch))
        break
    assert sampler.done == 4


def test_forgotten_records_are_an_error() -> None:
    """Otherwise a resumed epoch would silently begin anew."""
    sampler = ElasticSampler(Numbers(10), num_workers=1, rank=0)
    next(iter(sampler))
    with pytest.raises(ConfigError, match=r"1 samples were handed out and none were recorded"):
        sampler.state_dict()


@pytest.mark.parametrize(
    ("change", "match"),
    [({"length": 9}, "num_samples 10"), ({"seed": 1}, "seed 0"), ({"shuffle": False}, "shuffle True")],
)
def test_another_order_is_refused(change: dict[str, Any], match: str) -> None:
    state = ElasticSampler(Numbers(10), num_workers=1, rank=0).state_dict()
    made: dict[str, Any] = {"length": 10, "seed": 0, "shuffle": True, **change}
    sampler = ElasticSampler(Numbers(made["length"]), seed=made["seed"], shuffle=made["shuffle"], num_workers=1, rank=0)
    with pytest.raises(CheckpointError, match=match):
        sampler.load_state_dict(state)


def test_wrong_arguments() -> None:
    data = Numbers(4)
    sampler = ElasticSampler(data, num_workers=1, rank=0)
    with pytest.raises(ConfigError, match="with a length"):
        ElasticSampler(iter([1]))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="together"):
        ElasticSampler(data, rank=1)
    with pytest.raises(ConfigError, match="from 0 to 1"):
        ElasticSampler(data, num_workers=2, rank=2)
    with pytest.raises(ConfigError, match="from 0"):
        sampler.set_epoch(-1)
    with pytest.raises(ConfigError, match="sampler=this sampler"):
        sampler.batches(DataLoader(data))
    with pytest.raises(ConfigError, match="batch_size"):
        sampler.batches(DataLoader(data, batch_size=None, sampler=sampler))
    with pytest.raises(ConfigError, match="in_order"):
        sampler.batches(DataLoader(data, sampler=sampler, num_workers=1, in_order=False))


def test_the_state_is_plain_data(tmp_path: Any) -> None:
    sampler = ElasticSampler(Numbers(4), num_workers=1, rank=0)
    torch.save(sampler.state_dict(), tmp_path / "state")
    assert torch.load(tmp_path / "state", weights_only=True) == sampler.state_dict()


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("stop", [0, 1, 2, 3, 4])
def test_a_resumed_run_draws_as_often_as_the_whole_one(stop: int, persistent: bool) -> None:
    """Issue 37, 1: a loader with persistent workers draws once, in its first epoch; the resumed program drew again."""

    def run(saved: tuple[Any, Any] | None = None) -> tuple[list[Any], tuple[Any, Any] | None]:
        """Returns the generator after each of four batches in two epochs, and what a save after ``stop`` has."""
        torch.manual_seed(3)
        sampler = ElasticSampler(range(8), num_workers=1, rank=0)
        loader = DataLoader(range(8), 4, sampler=sampler, num_workers=1, persistent_workers=persistent)
        states, kept = [], (sampler.state_dict(), torch.get_rng_state()) if stop == 0 else None
        if saved is not None:
            sampler.load_state_dict(saved[0])
            torch.set_rng_state(saved[1])
        for epoch in range(sampler.epoch + (sampler.done == 8), 2):
            sampler.set_epoch(epoch)
            for _ in sampler.batches(loader):
                torch.rand(1)
                states.append(torch.get_rng_state())
                if len(states) == stop:
                    kept = sampler.state_dict(), torch.get_rng_state()
        return states, kept

    whole, saved = run()
    rest, _ = run(saved)
    assert len(rest) == 4 - stop
    assert all(torch.equal(a, b) for a, b in zip(rest, whole[stop:], strict=True))


# ---- whole batches --------------------------------------------------------------------------------------------------


def dealt(length: int, size: int, workers: int, rank: int, state: Any = None, **made: Any) -> tuple[list[Any], Any]:
    """Returns the batches of an epoch of a worker, and its sampler."""
    data = Numbers(length)
    sampler = ElasticSampler(data, num_workers=workers, rank=rank, batch_size=size, seed=3, **made)
    if state is not None:
        sampler.load_state_dict(state)
    loader = DataLoader(data, batch_size=size, sampler=sampler)
    return [batch.tolist() for batch in sampler.batches(loader)], sampler


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("length", "size", "workers"), [(24, 2, 3), (23, 2, 3), (7, 4, 2), (3, 2, 4)])
def test_whole_batches_are_dealt_in_turns(length: int, size: int, workers: int, drop_last: bool) -> None:
    """Round u gives worker r the positions from (u v + r) B of the order on; the last one is padded or dropped."""
    order = list(ElasticSampler(Numbers(length), num_workers=1, rank=0, seed=3))
    per_round = size * workers
    rounds = length // per_round if drop_last else -(-length // per_round)
    for rank in range(workers):
        found, sampler = dealt(length, size, workers, rank, drop_last=drop_last)
        starts = [(number * workers + rank) * size for number in range(rounds)]
        assert found == [[order[place % length] for place in range(start, start + size)] for start in starts]
        assert sampler.done == (rounds * per_round if drop_last else length)
        assert len(sampler) == rounds * size


@pytest.mark.parametrize("hosts", [1, 2, 3, 4, 5])
def test_logical_workers_have_the_same_batches_on_any_host(hosts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Acceptance 4: a sampler that deals by physical rank fails here."""
    by_rank = [dealt(43, 2, 5, rank)[0] for rank in range(5)]
    for host in range(hosts):
        logical = LogicalWorkers(5, hosts, host)
        monkeypatch.setattr("fleet.elastic.sampler.running_logical", lambda logical=logical: logical)
        data = Numbers(43)
        sampler = ElasticSampler(data, batch_size=2, seed=3)
        assert (sampler.num_workers, len(sampler)) == (5, 5 * 2), "rounds, whoever hosts them"
        loader = DataLoader(data, batch_size=2, sampler=sampler)
        found: dict[int, list[Any]] = {rank: [] for rank in logical.ranks}
        done = []
        for batch in sampler.batches(loader):
            found[logical.rank].append(batch.tolist())
            done.append(sampler.done)
            logical.end_turn()  # no job that would do so
        assert found == {rank: by_rank[rank] for rank in logical.ranks}
        size = len(logical.ranks)
        assert done[size - 1 :: size] == [10, 20, 30, 40, 43]
        assert {*done[: size - 1]} <= {0}


@pytest.mark.parametrize("hosts", [1, 2, 3])
def test_an_epoch_goes_on_with_another_number_of_hosts(hosts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [dealt(43, 2, 3, rank)[0] for rank in range(3)]
    state = {"epoch": 0, "done": 12, "seed": 3, "shuffle": True, "num_samples": 43}
    for host in range(hosts):
        logical = LogicalWorkers(3, hosts, host)
        monkeypatch.setattr("fleet.elastic.sampler.running_logical", lambda logical=logical: logical)
        data = Numbers(43)
        sampler = ElasticSampler(data, batch_size=2, seed=3)
        sampler.load_state_dict(state)
        found = []
        for batch in sampler.batches(DataLoader(data, batch_size=2, sampler=sampler)):
            found.append(batch.tolist())
            logical.end_turn()
        expected = [whole[rank][number] for number in range(2, 8) for rank in logical.ranks]
        assert found == expected
        sampler.load_state_dict(state)
        numbers = [(rank, number) for *_, rank, number in sampler._numbers()]
        assert numbers == [(rank, number) for number in range(2, 8) for rank in logical.ranks]


def test_a_batch_size_and_other_wrong_arguments() -> None:
    with pytest.raises(ConfigError, match="takes the number of samples of a batch"):
        ElasticSampler(Numbers(4), num_workers=1, rank=0, batch_size=0)
    sampler = ElasticSampler(Numbers(4), num_workers=1, rank=0, batch_size=2)
    with pytest.raises(ConfigError, match="deals batches of 2.*the loader's batch_size is 1. Give both the same"):
        sampler.batches(DataLoader(Numbers(4), sampler=sampler))
