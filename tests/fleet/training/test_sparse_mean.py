"""fleet.mean beside embeddings with sparse gradients: passes of unlike counts, and one that counts nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fleet import fleet
from tests.helpers.checked_training import start, weights
from tests.helpers.workers import run_workers

COUNTS = [[(3, 1), (2, 4)], [(1, 5), (4, 0)]]  # of each worker, update and pass


def table() -> nn.Embedding:
    torch.manual_seed(0)
    return nn.Embedding(8, 3, sparse=True)


def ids_of(rank: int, update: int, number: int) -> Tensor:
    return torch.arange(COUNTS[rank][update][number]) + rank + update


def trained(rank: int, world_size: int, options: dict[str, object]) -> Tensor:
    start(options)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD((net := table()).parameters(), 0.5))
    model = fleet.distributed_model(net)
    for update in range(2):
        for number in range(2):
            ids = ids_of(rank, update, number)
            fleet.mean(model(ids).square().sum(), len(ids)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=str)
def test_sparse_gradients_are_those_of_one_process(options: dict[str, object]) -> None:
    net = table()
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    for update in range(2):
        every = [ids_of(rank, update, number) for rank in range(2) for number in range(2)]
        (sum(net(ids).square().sum() for ids in every) / sum(map(len, every))).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    for found in run_workers(trained, 2, options, backend=None):
        assert torch.allclose(found, net.weight.flatten(), atol=1e-6)
