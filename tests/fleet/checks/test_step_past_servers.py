"""A step past the parameter servers is refused, where its updates would be lost, or one worker's alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fleet.errors import ConfigError
from fleet.facade import Fleet
from tests.helpers.served import run_job, strategy_of


class Net(nn.Module):
    """A table, and a layer that the distributed optimizer may not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(10, 4, sparse=True)
        self.out = nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.emb(ids))


def start(own: Fleet, mode: str, net: Net, parameters: Any) -> tuple[Any, Any, Any]:
    plain = torch.optim.SGD(parameters, 0.01)
    optimizer = own.distributed_optimizer(plain, strategy_of(mode))
    model = own.distributed_model(net)
    own.init_worker()
    return model, optimizer, plain


@pytest.mark.parametrize("mode", ["sync", "async", "geo", "hybrid"])
def test_the_optimizer_that_was_wrapped_does_not_step_by_itself(mode: str) -> None:
    own = Fleet()
    own.init(strategy=strategy_of(mode), log_level="ERROR")
    net = Net()
    model, optimizer, plain = start(own, mode, net, net.parameters())
    for _ in range(3):
        model(torch.arange(3)).sum().backward()
        before = net.out.weight.detach().clone()
        for wrong in (plain, torch.optim.Adam(net.out.parameters())):
            with pytest.raises(
                ConfigError, match=r"test_step_past_servers.py:\d+.*Call step\(\) on the optimizer that"
            ):
                wrong.step()
        assert torch.equal(net.out.weight, before)
        optimizer.step()
        optimizer.zero_grad()
    own.stop_worker()
    plain.step()  # training on servers has ended
    own.session.close()


def test_parameters_of_another_optimizer_would_be_trained_by_each_worker_alone() -> None:
    net = Net()

    def work(own: Fleet, rank: int) -> str:
        mine = net if rank == 0 else Net()
        model, optimizer, _ = start(own, "sync", mine, mine.emb.parameters())
        other = torch.optim.Adam(mine.out.parameters())
        elsewhere = nn.Linear(2, 2)  # no part of the model
        elsewhere(torch.ones(2)).sum().backward()
        torch.optim.Adam(elsewhere.parameters()).step()
        model(torch.arange(3)).sum().backward()
        with pytest.raises(ConfigError, match=r"'out.bias', 'out.weight'.*Each worker would train them alone") as found:
            other.step()
        optimizer.step()
        own.stop_worker()
        return str(found.value)

    found = run_job(work, num_workers=2, strategy=strategy_of("sync"))
    assert all("a group of the optimizer" in text for text in found)


def test_one_worker_may_have_an_optimizer_of_its_own_for_the_rest() -> None:
    """As in plain torch: there is nobody to differ from."""
    own = Fleet()
    own.init(strategy=strategy_of("sync"), log_level="ERROR")
    net = Net()
    model, optimizer, _ = start(own, "sync", net, net.emb.parameters())
    other = torch.optim.Adam(net.out.parameters())
    before = net.out.weight.detach().clone()
    model(torch.arange(3)).sum().backward()
    other.step()
    optimizer.step()
    assert not torch.equal(net.out.weight, before)
    own.stop_worker()
    own.session.close()
