"""What no table trains: a save has it, and whoever starts or goes on from the save takes it."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fleet
from fleet.errors import CheckpointError, OptionWarning
from fleet.facade import Fleet
from tests.helpers.served import run_job, strategy_of

_SEEDING = threading.Lock()


class Normed(nn.Module):
    """Rows, batch norm, a frozen layer, a constant, and a buffer that no state has."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with _SEEDING:  # the generator belongs to the whole process
            torch.manual_seed(seed)
            self.ads, self.bn, self.out = fleet.SparseEmbedding(3), nn.BatchNorm1d(3), nn.Linear(3, 1)
            self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("cache", torch.tensor(float(seed)), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.frozen(self.bn(self.ads(ids))) * self.scale)


def start(own: Fleet, mode: str, seed: int, num_workers: int = 1, make: Any = Normed) -> tuple[Any, Any]:
    net = make(seed)
    trained = [p for p in net.parameters() if p.requires_grad]
    kind = torch.optim.SGD if mode == "geo" else torch.optim.Adam
    optimizer = own.distributed_optimizer(kind(trained, 0.01), strategy_of(mode, num_workers))
    own.distributed_model(net)
    return net, optimizer


def steps(net: Any, optimizer: Any, own: Fleet, count: int, first: int = 0) -> None:
    for step in range(first, first + count):
        (net(torch.arange(8) + 8 * own.worker_index() + step).square().mean() * (1 - 0.5 * step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def job(mode: str, what: str, folder: Path, seed: int = 0, num_workers: int = 1, make: Any = Normed) -> list[Any]:
    """Trains and saves, or begins with the save (``init``, ``load``); returns the state then, and a weight later."""

    def serve(own: Fleet, index: int) -> None:
        start(own, mode, 9, num_workers, make)
        own.init_server(str(folder) if what == "init" else None)
        own.run_server()

    def work(own: Fleet, rank: int) -> Any:
        net, optimizer = start(own, mode, seed + rank, num_workers, make)
        own.init_worker()
        if what == "load":
            own.load_model(str(folder))
        if what == "save":
            steps(net, optimizer, own, 3)
            own.save_persistables(str(folder))
        found = {name: value.clone() for name, value in net.state_dict().items() if not name.startswith("ads")}
        steps(net, optimizer, own, 3, 3)
        after = net.out.weight.detach().clone()
        own.stop_worker()
        return found, after

    return run_job(work, serve=serve, num_workers=num_workers, strategy=strategy_of(mode, num_workers))


@pytest.mark.parametrize("mode", ["sync", "async", "geo", "hybrid"])
def test_whoever_goes_on_from_a_save_has_its_buffers(mode: str, tmp_path: Path) -> None:
    """Issue 37, 1: batch norm began again from mean 0, and a hybrid job's optimizer afresh, without a word."""
    [(saved, on)] = job(mode, "save", tmp_path)
    assert saved["bn.num_batches_tracked"] == 3
    for what in ("init", "load"):
        [(found, after)] = job(mode, what, tmp_path, seed=5)
        for name, value in saved.items():
            assert torch.equal(found[name], value), (what, name)
        if mode in ("sync", "hybrid"):
            assert torch.equal(after, on), what


def test_workers_with_other_statistics_are_told_whose_a_save_has(tmp_path: Path) -> None:
    """Issue 37, 1: each worker has its own, and all that start from the save have worker 0's."""
    with pytest.warns(OptionWarning, match=r"values in some of scale, bn.running_mean, .*The save has worker 0"):
        first, second = job("sync", "save", tmp_path, num_workers=2)
    assert not torch.equal(first[0]["bn.running_mean"], second[0]["bn.running_mean"])
    for found, _ in job("sync", "init", tmp_path, num_workers=2):
        assert torch.equal(found["bn.running_mean"], first[0]["bn.running_mean"])
        assert torch.equal(found["frozen.weight"], first[0]["frozen.weight"])


class Constant(Normed):
    """Its buffers never change, and are the same on all workers."""

    def __init__(self, seed: int) -> None:
        super().__init__(7)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.ads(ids) * self.scale)


def test_workers_with_the_same_buffers_are_told_nothing(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        job("sync", "save", tmp_path, num_workers=2, make=Constant)


@pytest.mark.parametrize("mode", ["sync", "hybrid"])
def test_damaged_and_other_buffers_are_refused(mode: str, tmp_path: Path) -> None:
    job(mode, "save", tmp_path)
    path = tmp_path / "buffers.pt"
    content = path.read_bytes()
    whole = torch.load(path, weights_only=True)
    other = [
        {**whole, "0/scale": torch.zeros(3)},
        {k: v for k, v in whole.items() if k != "0/scale"},
        {**whole, "0/x": 1},
    ]
    for number, state in enumerate(other):
        torch.save(state, path)
        name = "scale" if number < 2 else "x"
        with pytest.raises(CheckpointError, match=rf"buffers.pt: saved from another model: '{name}' is .*Nothing was"):
            job(mode, "load" if number else "init", tmp_path)
    path.write_bytes(content[:-200])
    with pytest.raises(CheckpointError, match=r"buffers.pt is damaged.*Nothing was loaded"):
        job(mode, "load", tmp_path)


def test_a_save_without_them_removes_those_of_an_earlier_one(tmp_path: Path) -> None:
    job("sync", "save", tmp_path)

    class Plain(Constant):
        def __init__(self, seed: int) -> None:
            super().__init__(seed)
            del self.frozen, self.bn, self.scale
            self.scale = 2.0

    job("sync", "save", tmp_path, make=Plain)
    assert not (tmp_path / "buffers.pt").exists()
