"""Loops over datasets request the rows of a batch together, without being asked, and read nothing in advance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fleet
from fleet.dataset.rows_of_batches import with_rows
from fleet.facade import Fleet
from tests.fleet.ps_job.test_prefetch import Sent
from tests.helpers.served import run_job, strategy_of


class TwoTables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = fleet.SparseEmbedding(4, combiner="sum")
        self.item = fleet.SparseEmbedding(4, combiner="sum")
        self.out = nn.Linear(8, 1)

    def forward(self, user: Any, item: Any) -> torch.Tensor:
        found = [table(ids[0], ids[1][:-1]) for table, ids in ((self.user, user), (self.item, item))]
        return self.out(torch.cat(found, 1)).mean()


def slots_file(folder: Path) -> str:
    draw = torch.Generator().manual_seed(0)
    lines = []
    for _ in range(24):
        counts = torch.randint(1, 4, (2,), generator=draw).tolist()
        ids = [torch.randint(0, 10**15, (count,), generator=draw).tolist() for count in counts]
        lines.append(" ".join(f"{len(part)} {' '.join(map(str, part))}" for part in ids))
    path = folder / "part-0"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.mark.parametrize("kind", ["QueueDataset", "InMemoryDataset"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_step_asks_for_its_rows_once(kind: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = slots_file(tmp_path)
    made = strategy_of(mode, 1)

    def work(own: Fleet, rank: int) -> list[int]:
        monkeypatch.setattr("fleet.dataset.rows_of_batches.running_session", lambda: own.session)
        net = TwoTables()
        optimizer = own.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.5), made)
        model = own.distributed_model(net)
        own.init_worker()
        sent = Sent(own)
        dataset = fleet.DatasetFactory().create_dataset(kind)
        dataset.init(use_var=[fleet.dataset.Slot(name, lod_level=1) for name in ("user", "item")], batch_size=4)
        dataset.set_filelist([path])
        if kind == "InMemoryDataset":
            dataset.load_into_memory()
        pulls = []
        for batch in dataset:
            model(batch["user"], batch["item"]).backward()
            optimizer.step()
            optimizer.zero_grad()
            pulls.append(sent.pulls() - sum(pulls))
        own.stop_worker()
        return pulls

    assert run_job(work, strategy=made)[0] == [2, 1, 1, 1, 1, 1]


def test_nothing_is_read_in_advance(monkeypatch: pytest.MonkeyPatch) -> None:
    made = strategy_of("async", 1)

    def work(own: Fleet, rank: int) -> list[int]:
        monkeypatch.setattr("fleet.dataset.rows_of_batches.running_session", lambda: own.session)
        net = nn.Sequential(fleet.SparseEmbedding(4))
        optimizer = own.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.5), made)
        model = own.distributed_model(net)
        own.init_worker()
        source = iter(range(9))
        for number in with_rows(torch.tensor([each]) for each in source):
            model(number).sum().backward()
            optimizer.step()
            if number == 3:
                break
        own.stop_worker()
        return list(source)

    assert run_job(work, strategy=made)[0] == [4, 5, 6, 7, 8]


def test_without_servers_batches_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet.dataset.rows_of_batches.running_session", lambda: None)
    assert list(with_rows(iter([1, 2]))) == [1, 2]
