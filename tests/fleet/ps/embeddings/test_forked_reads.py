"""A process that is forked from a worker does not use its connection to the servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from fleet.errors import ConfigError
from tests.fleet.ps.worker.test_fixed_rows import MODES, Job

IDS = torch.arange(3)


class Reads(Dataset[str]):
    """Each sample is what one way to read rows says."""

    def __init__(self, ways: list[Callable[[], Any]]) -> None:
        self.ways = ways

    def __len__(self) -> int:
        return len(self.ways)

    def __getitem__(self, place: int) -> str:
        try:
            self.ways[place]()
        except ConfigError as error:
            return str(error)
        return ""


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("mode", MODES)
def test_a_process_of_a_loader_neither_asks_the_servers_nor_takes_the_workers_answers(mode: str) -> None:
    job = Job(mode)
    emb, ads = job.net.emb, job.net.ads
    ways = [lambda: emb(IDS), lambda: torch.no_grad()(emb)(IDS), lambda: emb.weight.detach().sum()]
    for _ in range(3):
        found = list(DataLoader(Reads([*ways, lambda: ads(IDS)]), batch_size=None, num_workers=1))
        wanted = [""] * 3 if mode == "geo" else ["nn.Embedding 'emb': its rows are on"] * 3
        for said, start in zip(found, [*wanted, "SparseEmbedding 'ads': its rows are on"], strict=True):
            assert said.startswith(start)
            assert bool(said) == ("was forked from a worker" in said) == bool(start)
        job.step()
    seen = job.model.emb(torch.arange(10)).detach()
    with torch.no_grad():
        assert torch.equal(job.model.emb(torch.arange(10)), seen)
    job.own.stop_worker()
    assert torch.equal(emb.weight.detach(), seen)
    job.own.session.close()
