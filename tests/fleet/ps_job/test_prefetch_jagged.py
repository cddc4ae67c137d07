"""``fleet.prefetch`` with ids in jagged tensors: the bits of the loop without it, and two messages a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fleet
from fleet.facade import Fleet
from fleet.ps.embeddings.jagged_ids import features_of, jagged_ids
from fleet.ps.wire.messages import Op
from tests.fleet.ps.embeddings.features import Keyed
from tests.fleet.ps_job.test_prefetch import train
from tests.helpers.served import run_job, strategy_of

NAMES = ("user", "words", "tags", "slots")
BATCHES, SIZE = 7, 4
SETTINGS: dict[str, dict[str, Any]] = {
    "user": {},
    "words": {"combiner": "mean", "padding_idx": 0},
    "tags": {"combiner": "sum"},
    "slots": {"combiner": "sum", "num_slots": 2, "separate_slots": True},
}
START = fleet.ps.Initializer("uniform", -0.5, 0.5)


def lists_of(step: int, rank: int) -> dict[str, list[list[int]]]:
    draw = torch.Generator().manual_seed(10 * step + rank)

    def bags(count: int, least: int, most: int) -> list[list[int]]:
        sizes = torch.randint(least, most + 1, (count,), generator=draw).tolist()
        return [torch.randint(0, 30, (size,), generator=draw).tolist() for size in sizes]

    return {
        "user": bags(SIZE, 1, 1),
        "words": bags(SIZE, 0, 5),
        "tags": bags(SIZE, 0, 3),
        "slots": bags(2 * SIZE, 0, 2),
    }


def as_tensors(bags: list[list[int]], layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([torch.tensor(bag, dtype=torch.int64) for bag in bags], layout=layout)


def as_pair(bags: list[list[int]]) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([len(bag) for bag in bags])
    return torch.tensor([one for bag in bags for one in bag], dtype=torch.int64), lengths.cumsum(0) - lengths


def batch_of(form: str, step: int, rank: int) -> Any:
    lists = lists_of(step, rank)
    if form == "keyed":
        return {"sparse": Keyed(lists), "dense": torch.ones(SIZE)}
    made: dict[str, Any] = {"user": as_pair(lists["user"])[0]}
    for name in NAMES[1:]:
        bags = lists[name]
        made[name] = as_pair(bags) if form == "pairs" else as_tensors(bags, getattr(torch, form))
    return {"sparse": made, "dense": torch.ones(SIZE)}


class Model(nn.Module):
    """A collection, or modules of their own that are given values and offsets."""

    def __init__(self, together: bool) -> None:
        super().__init__()
        tables = {name: {"dim": 4, **SETTINGS[name]} for name in NAMES}
        self.fields: Any
        if together:
            self.fields = fleet.SparseEmbeddings(tables, initializer=START)
        else:
            self.fields = nn.ModuleDict({n: fleet.SparseEmbedding(**t, initializer=START) for n, t in tables.items()})
        self.together = together
        self.out = nn.Linear(20, 1)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        sparse = batch["sparse"]
        if self.together:
            found = self.fields(sparse)
        else:
            parts = features_of(sparse) if isinstance(sparse, Keyed) else sparse
            found = {name: self._alone(name, parts[name]) for name in NAMES}
        rows = [found[name].reshape(SIZE, -1) for name in NAMES]
        total: Tensor = self.out(torch.cat(rows, 1)).sigmoid().mean()
        return total

    def _alone(self, name: str, ids: Any) -> Tensor:
        if isinstance(ids, Tensor) and not ids.is_nested:
            return self.fields[name](ids)
        if not isinstance(ids, tuple):
            found = ids if hasattr(ids, "starts") else jagged_ids(ids)
            ids = found.values, found.starts()
        return self.fields[name](ids[0], ids[1] if name != "user" else None)


Work = tuple[dict[str, Tensor], list[float], list[int], list[str]]


def trained(form: str, mode: str, monkeypatch: pytest.MonkeyPatch, *, together: bool, prefetches: bool) -> list[Work]:
    """Returns by worker what was learned, the losses, the messages of each step, and what was said."""
    workers = 2 if mode == "sync" else 1
    made = strategy_of(mode, workers)
    torch.manual_seed(3)
    start = Model(together)

    def work(own: Fleet, rank: int) -> Work:
        said: list[str] = []

        def hear(own: Fleet) -> None:
            monkeypatch.setattr(own.session.job, "say", said.append)

        batches = [batch_of(form, step, rank) for step in range(BATCHES)]
        probe = batch_of(form, 0, 0)
        ops = (Op.PULL, Op.PUSH)
        return *train(own, start, made, batches, probe, prefetches=prefetches, ops=ops, begun=hear), said

    return run_job(work, num_workers=workers, strategy=made, limit_s=100)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("together", [True, False], ids=["collection", "modules"])
@pytest.mark.parametrize("form", ["jagged", "strided", "pairs", "keyed"])
def test_sync_steps_see_the_same_bits_in_two_messages(
    form: str, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = trained(form, "sync", monkeypatch, together=together, prefetches=False)
    ahead = trained(form, "sync", monkeypatch, together=together, prefetches=True)
    for (found, losses, messages, said), (expected, expected_losses, *_) in zip(ahead, plain, strict=True):
        assert losses == expected_losses
        assert all(torch.equal(found[name], values) for name, values in expected.items())
        assert messages[1:] == [2] * (BATCHES - 1)
        assert not said


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("form", ["jagged", "pairs", "keyed"])
def test_async_steps_request_all_rows_of_the_next_batch(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients leave by another client."""
    ((_, _, messages, said),) = trained(form, "async", monkeypatch, together=False, prefetches=True)
    assert messages[0] >= len(NAMES)
    assert sum(messages[2:]) <= BATCHES - 2
    assert not said
