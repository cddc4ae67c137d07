"""The loops that people write over fleet.prefetch(loader): the bits of the same loop without it, and its requests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fleet
from fleet.facade import Fleet
from fleet.ps.client.client import Client
from fleet.ps.client.shards import Keys
from fleet.ps.worker.geo import GeoRows
from fleet.training.batch_loops import BatchLoops
from tests.helpers.served import run_job, strategy_of

TABLES = 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = fleet.SparseEmbedding(4)
        self.item = fleet.SparseEmbedding(4)
        self.out = nn.Linear(8, 1)
        nn.init.ones_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        return (self.out(torch.cat([self.user(user), self.item(item)], 1)) - 1).square().mean()


@dataclass
class Run:
    """A worker, and what its loop is made of."""

    own: Fleet
    model: Any
    optimizer: Any
    prefetch: Callable[[Iterable[Any]], Iterable[Any]]
    pulls: list[int]  # requests for rows so far

    def step(self, user: torch.Tensor, item: torch.Tensor) -> float:
        loss = self.model(user, item)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


Loop = Callable[[Run], list[Any]]


def draw(count: int, seed: int = 0, size: int = 5) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 30, (size, 2), generator=made) for _ in range(count)]


def run_loop(loop: Loop, monkeypatch: pytest.MonkeyPatch, mode: str = "sync", prefetches: bool = True) -> list[Any]:
    """Returns what the loop of one worker returned."""
    made = strategy_of(mode, 1)
    pulls = [0]
    plain = Client.pull

    def pull(client: Client, wanted: Any, **how: Any) -> Any:
        pulls[0] += any(ids is not None for ids in wanted.values())
        return plain(client, wanted, **how)

    def work(own: Fleet, rank: int) -> list[Any]:
        net = Net()
        optimizer = own.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1), made)
        model = own.distributed_model(net)
        own.init_worker()
        found = loop(Run(own, model, optimizer, own.prefetch if prefetches else lambda loader: loader, pulls))
        own.stop_worker()
        return found

    with monkeypatch.context() as patched:
        patched.setattr(Client, "pull", pull)
        return run_job(work, strategy=made)[0]


def evaluated_first(run: Run) -> list[float]:
    losses = []
    for number, batch in enumerate(run.prefetch(draw(8))):
        if number % 3 == 0:
            with torch.no_grad():
                losses += [float(run.model(*other.unbind(1))) for other in draw(2, seed=1)]
        losses.append(run.step(*batch.unbind(1)))
    return losses


def evaluated_by_the_same_loader(run: Run) -> list[float]:
    batches = run.prefetch(draw(4))
    with torch.no_grad():
        losses = [float(run.model(*batch.unbind(1))) for batch in batches]
    return losses + [run.step(*batch.unbind(1)) for _ in range(2) for batch in batches]


def hashed_in_place(run: Run) -> list[float]:
    return [run.step(*batch.mul_(1_000_003).unbind(1)) for batch in run.prefetch(draw(12))]


def negatives_added(run: Run) -> list[float]:
    losses = []
    for batch in run.prefetch([{"user": ids[:, 0], "item": ids[:, 1]} for ids in draw(6)]):
        for name, ids in batch.items():
            batch[name] = torch.cat([ids, ids + 100])
        losses.append(run.step(batch["user"], batch["item"]))
    return losses


def several_steps(run: Run) -> list[float]:
    return [run.step(*batch.unbind(1)) for batch in run.prefetch(draw(5)) for _ in range(3)]


def two_in_turn(run: Run) -> list[float]:
    pairs = zip(run.prefetch(draw(5)), run.prefetch(draw(5, seed=1)), strict=True)
    return [run.step(*batch.unbind(1)) for pair in pairs for batch in pair]


def broken_off(run: Run) -> list[float]:
    losses = []
    batches = run.prefetch(draw(6))
    for number, batch in enumerate(batches):
        losses.append(run.step(*batch.unbind(1)))
        if number == 3:
            break
    return losses + [run.step(*batch.unbind(1)) for batch in batches]


def of_default_dicts(run: Run) -> list[float]:
    made: list[dict[str, Any]] = []
    for number, ids in enumerate(draw(6)):
        batch: dict[str, Any] = defaultdict(list, user=ids[:, 0])
        batch["other" if number == 4 else "item"] = ids[:, 1]
        made.append(batch)
    return [run.step(batch["user"], batch["item" if "item" in batch else "other"]) for batch in run.prefetch(made)]


def of_odd_arrays(run: Run) -> list[float]:
    made = []
    for ids in draw(5):
        user, item = ids.numpy().T.copy()
        item.flags.writeable = False
        pairs = np.array(list(zip(user, item, strict=True)), [("user", "i8"), ("few", "i1")])
        made.append((user[::-1], item, user.astype(">i4"), user.astype(np.longdouble), pairs["user"], pairs, ["text"]))
    return [run.step(torch.tensor(b[0].copy()), torch.tensor(b[1])) for b in run.prefetch(made)]


def beside_odd_things(run: Run) -> list[float]:
    odd = {
        "class": Run,
        "sparse": torch.eye(2).to_sparse(),
        "meta": torch.zeros(5, device="meta"),
        "few bits": torch.zeros(5, dtype=torch.float8_e4m3fn),
        "unsigned": torch.zeros(5, dtype=torch.uint16),
        "huge": torch.full((5,), 1e30),
        "none": torch.full((5,), float("nan")),
    }
    return [run.step(*batch["ids"].unbind(1)) for batch in run.prefetch([{**odd, "ids": ids} for ids in draw(5)])]


LOOPS: list[Loop] = [
    evaluated_first,
    evaluated_by_the_same_loader,
    hashed_in_place,
    negatives_added,
    several_steps,
    two_in_turn,
    broken_off,
    of_default_dicts,
    of_odd_arrays,
    beside_odd_things,
]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_sees_the_bits_that_it_sees_without(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_loop(loop, monkeypatch) == run_loop(loop, monkeypatch, prefetches=False)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_that_reads_ahead_gets_every_batch(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker in geo mode trains rows that nobody else changes: the bits are those without prefetch."""
    assert run_loop(loop, monkeypatch, "geo") == run_loop(loop, monkeypatch, "geo", prefetches=False)


def test_geo_finds_the_ids_of_a_batch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rows are requested, their lookup and their training take the places that the request has found."""
    finds = [0]
    find = GeoRows.find

    def counted(rows: GeoRows, keys: Keys) -> Any:
        finds[0] += 1
        return find(rows, keys)

    monkeypatch.setattr(GeoRows, "find", counted)

    def loop(run: Run) -> list[int]:
        finds[0] = 0
        for batch in run.prefetch(draw(8)):
            run.step(*batch.unbind(1))
        return [finds[0]]

    assert run_loop(loop, monkeypatch, "geo") == run_loop(loop, monkeypatch, "geo", prefetches=False)


def test_an_evaluation_before_the_first_step_leaves_the_rows_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def loop(run: Run) -> list[int]:
        found = []
        for batch in run.prefetch(draw(6)):
            with torch.no_grad():
                run.model(*draw(1, seed=1)[0].unbind(1))
            before = run.pulls[0]
            run.step(*batch.unbind(1))
            found.append(run.pulls[0] - before)
        return found

    assert run_loop(loop, monkeypatch) == [TABLES, *[1] * 5]


@pytest.mark.parametrize(("mode", "pulls"), [("sync", 1), ("async", TABLES)])
def test_ids_that_the_loop_changes(mode: str, pulls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rows are requested a batch ahead, useless requests end; elsewhere the first lookup sees the changed ids."""

    def loop(run: Run) -> list[int]:
        counts = []
        for batch in run.prefetch(draw(16)):
            run.step(*batch.mul_(1_000_003).unbind(1))
            counts.append(run.pulls[0] - sum(counts))
        return counts

    assert run_loop(loop, monkeypatch, mode)[-4:] == [pulls] * 4


def test_a_loop_in_each_epoch_says_once_what_it_does_not_request(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def loop(run: Run) -> list[Any]:
        monkeypatch.setattr(run.own.session.job, "say", said.append)  # type: ignore[union-attr]
        for _ in range(3):
            for batch in run.prefetch(draw(5)):
                run.step(*(batch * 7 % 97).unbind(1))
        return []

    run_loop(loop, monkeypatch)
    assert len([line for line in said if "looks up" in line]) == TABLES


def test_rare_batches_of_another_form_leave_the_rows_of_the_others_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def loop(run: Run) -> list[int]:
        counts = []
        made = [{"ids": ids + 100} if number % 4 == 3 else {"ids": ids} for number, ids in enumerate(draw(24))]
        for number, batch in enumerate(run.prefetch(made)):
            ids = batch["ids"]
            run.step(*(ids * 7 % 97 if number % 4 == 3 else ids).unbind(1))
            counts.append(run.pulls[0] - sum(counts))
        return counts

    assert run_loop(loop, monkeypatch)[-4:] == [1, 1, 1, 1 + TABLES]


def test_an_error_of_the_loader_comes_behind_the_batches_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def loader() -> Iterator[torch.Tensor]:
        yield from draw(3)
        raise KeyError("the fourth batch")

    def loop(run: Run) -> list[float]:
        batches = iter(run.prefetch(loader()))
        losses = [run.step(*next(batches).unbind(1)) for _ in range(3)]
        with pytest.raises(KeyError, match="fourth"):
            next(batches)
        return losses

    assert len(run_loop(loop, monkeypatch, "async")) == 3


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_stream_counts_a_batch_with_its_own_step(ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def lines(partition: int, start: int) -> Iterator[tuple[int, int]]:
        return ((number, number) for number in range(start, 20))

    def loop(run: Run) -> list[Any]:
        monkeypatch.setattr("fleet.dataset.stream.running_session", lambda: run.own.session)
        stream = fleet.StreamDataset(lines, torch.as_tensor, batch_size=4, name="ids", timeout_s=0.2, ahead=ahead)
        trainer = run.own.session.server_job.running()  # type: ignore[union-attr]
        seen = []
        for ids in run.prefetch(stream):
            run.step(ids, ids)
            positions = trainer.connection.read_streams().positions()
            assert positions is not None
            seen.append((int(ids[-1]), positions["ids"]["0"][1]))
        return seen

    # With ahead=1 the stream takes the next batch as the sign that the one before is trained; the last has none.
    expected = [(last, last + 1) for last in (3, 7, 11, 15, 19)]
    assert run_loop(loop, monkeypatch, "async")[: 5 - ahead] == expected[: 5 - ahead]


@pytest.mark.parametrize("saves", [False, True])
def test_data_whose_position_is_saved_is_not_read_in_advance(saves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Checkpoint:
        def save_when_due(self, data: object) -> None:
            pass

    def loop(run: Run) -> list[int]:
        loops = run.own.session.job.listeners.get(BatchLoops)  # type: ignore[union-attr]
        if saves:
            loops.checkpoints.append(Checkpoint())
        given: list[int] = []

        def batches() -> Iterator[torch.Tensor]:
            for number, batch in enumerate(draw(4)):
                given.append(number)
                yield batch

        found = []
        for batch in run.prefetch(loops.over("data", batches())):
            run.step(*batch.unbind(1))
            found.append(len(given))
        return found

    assert run_loop(loop, monkeypatch, "async") == ([1, 2, 3, 4] if saves else [2, 3, 4, 4])
