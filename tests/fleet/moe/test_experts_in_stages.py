"""Experts in the stages of a pipeline (surface 1.4: pp * moe_sharding * ep workers)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fleet
from fleet.clip import ClipGradByGlobalNorm
from fleet.job.running import running_session
from tests.helpers.workers import run_workers

SIZE = 8


class ExpertStage(nn.Module):
    """A norm and a layer of experts, of which this worker has ``num_experts``."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        experts = [nn.Linear(SIZE, SIZE) for _ in range(num_experts)]
        self.norm, self.experts = nn.LayerNorm(SIZE), fleet.moe.MoELayer(SIZE, experts, gate={"type": "naive"})

    def forward(self, x: Tensor) -> Tensor:
        """Returns the input with the experts' answers added."""
        return x + self.experts(self.norm(x))


def criterion(scores: Tensor, labels: Tensor) -> Tensor:
    """Returns the mean loss."""
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


def rows() -> tuple[Tensor, Tensor]:
    """Returns inputs and labels of 5 steps."""
    torch.manual_seed(1)
    return torch.randn(5, 8, 3, SIZE), torch.randint(SIZE, (5, 8, 3))


def staged(rank: int, world_size: int, start: dict[str, Tensor]) -> tuple[list[float], dict[str, Tensor]]:
    """Trains two stages, in each of which two workers on different rows share four experts."""
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"pp_degree": 2, "sharding_degree": 2, "ep_degree": 2}
    strategy.pipeline_configs = {"accumulate_steps": 2, "micro_batch_size": 2}
    fleet.init(is_collective=True, strategy=strategy)
    session, layer = running_session(), fleet.meta_parallel.LayerDesc
    assert session is not None
    linear = layer(nn.Linear, SIZE, SIZE)
    net = fleet.meta_parallel.PipelineLayer(
        [linear, layer(ExpertStage, 2), layer(ExpertStage, 2), linear],
        topology=fleet.get_hybrid_communicate_group().topology(),
        loss_fn=criterion,
    )
    model: Any = fleet.distributed_model(net)
    clip = ClipGradByGlobalNorm(0.3)
    optimizer = fleet.distributed_optimizer(fleet.optimizer.SGD(0.1, parameters=net.parameters(), grad_clip=clip))
    model.load_full_state_dict(start if rank == 0 else {})
    own = slice(4 * session.job.axes.data_rank, 4 * session.job.axes.data_rank + 4)
    losses = [model.train_batch([x[own], y[own]], optimizer).item() for x, y in zip(*rows(), strict=True)]
    return losses, model.full_state_dict()


@pytest.mark.slow
def test_trains_as_one_process() -> None:
    """Losses and weights, with clipping, are those of one process with all experts and rows; so are the names."""
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(SIZE, SIZE), ExpertStage(4), ExpertStage(4), nn.Linear(SIZE, SIZE))
    found = run_workers(staged, 4, {name: value.clone() for name, value in net.state_dict().items()}, backend=None)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step, (x, y) in enumerate(zip(*rows(), strict=True)):
        loss = criterion(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.3)
        optimizer.step()
        assert (found[0][0][step] + found[1][0][step]) / 2 == pytest.approx(loss.item(), abs=1e-5)
    for _, whole in found:
        assert list(whole) == list(net.state_dict())
        for name, value in net.state_dict().items():
            torch.testing.assert_close(whole[name], value, rtol=1e-5, atol=1e-6)
