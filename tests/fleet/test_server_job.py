"""Training with parameter servers through the facade: modes, files, roles (D.1, D.7, D.8)."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import fleet
from fleet.errors import ConfigError, NotInitializedError, OptionWarning
from fleet.facade import Fleet
from tests.helpers.served import WideAndDeep, batches, run_job, train

Make = Any
_SEEDING = threading.Lock()
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.01),
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
}


def strategy(mode: str, **configs: Any) -> fleet.DistributedStrategy:
    made = fleet.DistributedStrategy()
    made.a_sync = mode != "sync"
    made.a_sync_configs = {**({"k_steps": 3} if mode == "geo" else {}), **configs}
    return made


def served(own: Fleet, made: fleet.DistributedStrategy, make: Make, seed: int = 0) -> tuple[Any, Any]:
    """Returns model and optimizer after the worker has started."""
    with _SEEDING:  # the generator belongs to the whole process
        torch.manual_seed(seed)
        net = WideAndDeep()
    optimizer = own.distributed_optimizer(make(net.parameters()), made)
    model = own.distributed_model(net)
    own.init_worker()
    return model, optimizer


class Reference(nn.Module):
    """The same model in plain torch: every id it meets is a row of one matrix."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        net = WideAndDeep()
        with torch.no_grad():
            rows = net.ads.lookup_rows(torch.arange(40) * 10**12)
        self.ads = nn.Parameter(rows)
        self.words, self.out = net.words, net.out
        self.words.sparse = False

    def forward(self, ads: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        found = self.ads[ads // 10**12].sum(1)
        return self.out(torch.cat([found, self.words(words)], 1))


@pytest.mark.parametrize("name", ["sgd", "momentum", "adagrad"])
def test_sync_training_of_two_workers_equals_one_process_on_the_mean_gradient(name: str) -> None:
    """002-18, D.7, 001-10: with rules that leave an untouched row alone, plain torch gives the same numbers."""
    make = OPTIMIZERS[name]
    if name != "adagrad":  # decay and momentum move rows without gradient in plain torch; the servers' rows rest
        make = lambda p: torch.optim.SGD(p, 0.1)  # noqa: E731
    reference = Reference()
    expected = train(reference, make(reference.parameters()), batches(6))

    def work(own: Fleet, rank: int) -> Any:
        model, optimizer = served(own, strategy("sync"), make, seed=rank)
        losses = train(model, optimizer, batches(6, rank, 2))
        own.stop_worker()
        return losses, model.state_dict()

    first, again = (run_job(work, num_servers=2, num_workers=2, strategy=strategy("sync")) for _ in range(2))
    for rank in range(2):
        assert first[rank][0] == again[rank][0]
        assert all(torch.equal(first[rank][1][key], again[rank][1][key]) for key in first[0][1])
        torch.testing.assert_close(first[rank][1]["out.weight"], reference.out.weight.data, atol=1e-6, rtol=0)
        torch.testing.assert_close(first[rank][1]["words.weight"], reference.words.weight.data, atol=1e-6, rtol=0)
    mean = [(a + b) / 2 for a, b in zip(first[0][0], first[1][0], strict=True)]
    torch.testing.assert_close(torch.tensor(mean), torch.tensor(expected), atol=1e-6, rtol=0)
