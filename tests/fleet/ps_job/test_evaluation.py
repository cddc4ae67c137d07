"""A lookup makes no row: evaluation leaves tables, saves and journals as they were, in every mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fleet
from fleet.facade import Fleet
from tests.helpers.served import run_job, strategy_of
from tests.helpers.trainers import thread_trainers

START = fleet.ps.Initializer("uniform", -0.5, 0.5)
TABLES = ("ads", "fields.user", "fields.item", "free")
RATE = 0.5
Ids = dict[str, torch.Tensor]
Kinds = list[tuple[bool, Callable[[], AbstractContextManager[Any]]]]
# Whether the module trains, and the context of the lookup.
QUIET: Kinds = [(False, nullcontext), (True, torch.no_grad), (False, torch.no_grad), (True, torch.inference_mode)]


class Net(nn.Module):
    """An embedding alone, two in a collection, and one of a model that somebody else wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.ads = fleet.SparseEmbedding(4, combiner="sum", initializer=START)
        self.fields = fleet.SparseEmbeddings({"user": 4, "item": 4}, initializer=START)
        self.free = nn.Embedding(1, 4)
        self.out = nn.Linear(4, 1, bias=False)

    def rows(self, ids: Ids) -> torch.Tensor:
        """Returns the sum of the rows of each sample."""
        return self.ads(ids["ads"]) + sum(self.fields(ids["fields"]).values()) + self.free(ids["free"])

    def forward(self, ids: Ids) -> torch.Tensor:
        """Returns a number per sample."""
        return self.out(self.rows(ids))


def batch(first: int, size: int = 6) -> Any:
    """Returns ids from ``first`` on, other ones in each table."""
    ids = torch.arange(first, first + size) * 10**12
    return {"ads": ids[:, None] + torch.arange(2), "fields": {"user": ids + 3, "item": ids + 4}, "free": ids + 5}


def evaluate(own: Fleet, model: Any, start: int) -> Iterator[torch.Tensor]:
    """Yields the outputs for ids of ``start`` on, in every way of evaluating, with and without prefetch."""
    for prefetches in (False, True):
        for training, context in QUIET:
            model.train(training)
            data = [batch(start), batch(start + 3)]
            with context():
                for ids in own.prefetch(data) if prefetches else data:
                    yield model(ids).detach().clone()
    model.train()


def sizes(folder: Path) -> dict[str, int]:
    """Returns the files below a folder and their sizes."""
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def saved(own: Fleet, folder: Path) -> dict[str, bytes]:
    """Returns the rows in a save, by table and server."""
    own.save_persistables(str(folder), mode=0)
    part = len("part-000")
    return {f"{path.parent.name}/{path.name[:part]}": path.read_bytes() for path in folder.rglob("*.rows")}


def counts(own: Fleet) -> dict[str, int]:
    """Returns the rows of each table over all servers."""
    tables = own.session.server_job.running().tables
    return {name: tables.facts(tables.number(name))["rows"] for name in TABLES}


@pytest.mark.parametrize("mode", ["sync", "async", "geo", "hybrid"])
def test_evaluation_leaves_everything_as_it_was(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainers = thread_trainers(1)
    monkeypatch.setattr("fleet.ps_job.hybrid_job.meet_trainers", lambda job: trainers[job.global_rank])
    monkeypatch.setenv("FLEET_PS_FOLDER", str(tmp_path / "state"))
    made = strategy_of(mode, k_steps=1)
    made.a_sync_configs = {**made.a_sync_configs, "unbounded_modules": ["free"]}
    made.sparse_table_configs = {"free": {"initial_range": 0.5}}

    def work(own: Fleet, rank: int) -> None:
        torch.manual_seed(0)
        net = Net()
        net.out.requires_grad_(False)
        optimizer = own.distributed_optimizer(torch.optim.SGD(net.parameters(), RATE), made)
        model = own.distributed_model(net)
        own.init_worker()
        for ids in own.prefetch([batch(0), batch(2), batch(4)]):
            model(ids).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        own.session.server_job.running().connection.flush()
        before = counts(own)
        assert before == {"ads": 20, "fields.user": 10, "fields.item": 10, "free": 10}
        first, journal = saved(own, tmp_path / "first"), sizes(tmp_path / "state")
        assert len(first) == 2 * len(TABLES)
        assert sum(journal.values()) > 0
        found = list(evaluate(own, model, 7))
        assert counts(own) == before
        assert sizes(tmp_path / "state") == journal
        assert saved(own, tmp_path / "second") == first
        own.print_table_stat("ads")
        assert ": 20 rows" in capsys.readouterr().out
        for one, other in zip(found[::2], found[1::2], strict=True):
            assert torch.equal(one, found[0])
            assert torch.equal(other, found[1])
        check_start(own, model, optimizer, found[0])
        own.stop_worker()

    run_job(work, num_servers=2, strategy=made)


def check_start(own: Fleet, model: Any, optimizer: Any, evaluated: torch.Tensor) -> None:
    """Training of ids begins with the weights that evaluation gave them."""
    net, ids = model.module, batch(7)
    output = model(ids)
    assert torch.equal(output.detach()[3:], evaluated[3:])  # of ids without a row
    with torch.no_grad():
        begun = net.rows(ids)[3:].clone()
    output.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    own.session.server_job.running().connection.flush()
    with torch.no_grad():
        trained = net.rows(ids)[3:]
    # Five rows of a sample have each the gradient of the layer's weights.
    torch.testing.assert_close(begun - trained, (5 * RATE * net.out.weight).expand(3, 4), rtol=1e-4, atol=1e-6)
    assert counts(own) == {"ads": 26, "fields.user": 13, "fields.item": 13, "free": 13}
