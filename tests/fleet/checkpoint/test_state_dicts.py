"""A real model, divided by layers and by weights, goes on in one process and on other meshes from a checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import fleet
from fleet.errors import ConfigError
from fleet.meta_parallel import (
    ColumnParallelLinear,
    LayerDesc,
    PipelineLayer,
    RowParallelLinear,
    SharedLayerDesc,
    VocabParallelEmbedding,
)
from tests.helpers.workers import run_workers

# Of four workers; what a mesh leaves of them is dp.
MESHES: list[dict[str, int]] = [{"mp": 2, "pp": 2}, {"pp": 2}, {"mp": 4}, {}]
ROWS, MICRO = 8, 2


class Mlp(nn.Module):
    """A divided block."""

    def __init__(self) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(8, 16, has_bias=True, gather_output=False)
        self.down = RowParallelLinear(16, 8, input_is_parallel=True)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        """Adds what the block computes."""
        return self.norm(x + self.down(torch.tanh(self.up(x))))


def logits(layer: Any, x: Tensor) -> Tensor:
    """Gives a score to each row of the embedding, all of them on every worker."""
    from fleet.strategies.tensor_parallel.regions import copy_to, gather_from

    group = layer.place.group
    return gather_from(copy_to(x, group) @ layer.weight.t(), group)


def loss_of(scores: Tensor, labels: Tensor) -> Tensor:
    """Returns the cross entropy."""
    return nn.functional.cross_entropy(scores, labels)


def layers() -> list[Any]:
    """Returns a model with one weight on the first and the last stage."""
    return [
        SharedLayerDesc("embed", VocabParallelEmbedding, None, "weight", 12, 8),
        *(LayerDesc(Mlp) for _ in range(3)),
        SharedLayerDesc("embed", VocabParallelEmbedding, logits, "weight", 12, 8),
    ]


def rows(index: int) -> tuple[Tensor, Tensor]:
    """Returns input and label of one row."""
    generator = torch.Generator().manual_seed(index)
    return torch.randint(12, (), generator=generator), torch.randint(12, (), generator=generator)


def job(degrees: dict[str, int]) -> tuple[Any, Any, Any]:
    """Starts a job on a mesh; returns its model, optimizer and scheduler."""
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {f"{axis}_degree": size for axis, size in degrees.items()}
    fleet.init(is_collective=True, strategy=strategy, log_level="ERROR")
    micro_batches = ROWS // fleet.data_replicas() // MICRO
    strategy.pipeline_configs = {"accumulate_steps": micro_batches, "micro_batch_size": MICRO}
    fleet.init(is_collective=True, strategy=strategy, log_level="ERROR")
    torch.manual_seed(11)
    net = PipelineLayer(layers(), loss_fn=loss_of)
    matrices = [p for p in net.parameters() if p.dim() > 1]
    vectors = [p for p in net.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = fleet.distributed_optimizer(torch.optim.AdamW(groups, lr=0.01, eps=1e-3))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return fleet.distributed_model(net), optimizer, scheduler


def train(model: Any, optimizer: Any, scheduler: Any, sampler: Any, steps: int) -> list[float]:
    """Makes ``steps`` steps on the next rows; returns the losses over all replicas."""
    losses = []
    batch = ROWS // fleet.data_replicas()
    places = iter(sampler)
    for _ in range(steps):
        taken = [rows(next(places)) for _ in range(batch)]
        data = [torch.stack(column) for column in zip(*taken, strict=True)]
        sampler.record(batch)
        loss = model.train_batch(data, optimizer, scheduler)
        losses.append(float(fleet.metrics.sum(loss.detach())) / fleet.data_replicas())
    return losses


def every_mesh(rank: int, world_size: int, folder: str, start: Any, meshes: Any) -> Any:
    """Trains 3 steps on each mesh and saves; goes on from the checkpoint of the mesh before, for 3 steps."""
    losses, states = [], []
    for number, degrees in enumerate(meshes):
        model, optimizer, scheduler = job(degrees)
        sampler = fleet.elastic.ElasticSampler(range(64), seed=2)
        checkpoint = fleet.elastic.Checkpoint(f"{folder}/{number}", model, optimizer, scheduler, data=sampler)
        model.load_full_state_dict(start)
        first = train(model, optimizer, scheduler, sampler, 3)
        checkpoint.save()
        checkpoint.close()
        source = f"{folder}/{max(number - 1, 0)}"
        model, optimizer, scheduler = job(degrees)
        sampler = fleet.elastic.ElasticSampler(range(64), seed=2)
        with fleet.elastic.Checkpoint(source, model, optimizer, scheduler, data=sampler) as checkpoint:
            assert checkpoint.resume()
            assert checkpoint.step == 3
            assert sampler.done == 3 * ROWS
            losses.append(first + train(model, optimizer, scheduler, sampler, 3))
        states.append(model.full_state_dict())
    if world_size > 1:
        model, optimizer, _ = job({"mp": 2, "pp": 2})
        try:
            model.train_batch([torch.full((ROWS,), rank % 2), torch.zeros(ROWS, dtype=torch.int64)], optimizer)
        except ConfigError as error:
            return losses, states, f"{error}"
    return losses, states, ""


def test_a_real_model_goes_on_anywhere(tmp_path: Any) -> None:
    """Losses and weights of one process, before and after the change of the mesh; tied weights are there once."""
    torch.manual_seed(4)
    start = PipelineLayer(layers(), loss_fn=loss_of).state_dict()
    [alone] = run_workers(every_mesh, 1, f"{tmp_path}/one", start, [{}], backend=None)
    found = run_workers(every_mesh, 4, str(tmp_path), start, MESHES, backend=None)
    for losses, states, _ in found:
        for degrees, curve, state in zip(MESHES, losses, states, strict=True):
            torch.testing.assert_close(curve, alone[0][0], rtol=1e-5, atol=1e-5, msg=lambda m: f"{degrees}: {m}")  # noqa: B023
            assert list(state) == list(alone[1][0])
            torch.testing.assert_close(state, alone[1][0], rtol=1e-5, atol=1e-5)
    for *_, said in found:
        assert "different rows" in said
        assert "fleet.data_rank()" in said
        assert "pp 0, mp 1" in said
