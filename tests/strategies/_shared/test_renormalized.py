"""Embeddings whose forward writes into the weight are refused where workers would part, or servers would undo it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fleet
from fleet.errors import UnsupportedOptionError
from fleet.facade import Fleet
from tests.helpers.served import run_job, strategy_of
from tests.helpers.workers import run_workers

REFUSED = r"'0' has max_norm=1.0.*rows \* \(max_norm / rows.norm"


def new_net(kind: Any = nn.Embedding) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(kind(5, 3, max_norm=1.0), nn.Linear(3, 1))


def refusals(rank: int, world_size: int) -> list[str]:
    fleet.fleet.init(is_collective=True, log_level="ERROR")
    found = []
    for kind in (nn.Embedding, nn.EmbeddingBag):
        with pytest.raises(UnsupportedOptionError, match=REFUSED) as caught:
            fleet.fleet.distributed_model(new_net(kind))
        found.append(str(caught.value))
    frozen = new_net()
    frozen[0].weight.requires_grad_(False)
    fleet.fleet.distributed_model(frozen)
    return found


def test_workers_that_exchange_gradients_do_not_see_each_others_rows() -> None:
    for found in run_workers(refusals, 2, backend=None):
        assert ["Embedding " in found[0], "EmbeddingBag " in found[1]] == [True, True]
        assert all("train different weights" in text for text in found)


@pytest.mark.parametrize("mode", ["geo", "hybrid"])
def test_workers_with_dense_parameters_of_their_own(mode: str) -> None:
    def work(own: Fleet, rank: int) -> None:
        net = new_net()
        own.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1), strategy_of(mode, 2))
        with pytest.raises(UnsupportedOptionError, match=REFUSED):
            own.distributed_model(net)
        own.distributed_model(nn.Linear(2, 2))

    def serve(own: Fleet, index: int) -> None:
        pass

    run_job(work, num_workers=2, serve=serve, strategy=strategy_of(mode, 2))


@pytest.mark.parametrize(("mode", "is_refused"), [("sync", True), ("async", True), ("geo", False), ("hybrid", False)])
def test_one_worker_may_write_what_no_server_undoes(mode: str, is_refused: bool) -> None:
    own, net = Fleet(), new_net()
    made = strategy_of(mode)
    own.init(strategy=made, log_level="ERROR")
    optimizer = own.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1), made)
    model = own.distributed_model(net)
    if is_refused:
        with pytest.raises(UnsupportedOptionError, match=REFUSED):
            own.init_worker()
        own.session.close()
        return
    own.init_worker()
    plain = new_net()
    other = torch.optim.SGD(plain.parameters(), 0.1)
    for step in range(4):
        ids = torch.tensor([step, 4])
        for one, its in ((model, optimizer), (plain, other)):
            its.zero_grad()
            one(ids).square().sum().backward()
            its.step()
    torch.testing.assert_close(net[0].weight, plain[0].weight)
    own.stop_worker()
    own.session.close()
