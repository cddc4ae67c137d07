"""Parameters that stages share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fleet import fleet
from fleet.meta_parallel import LayerDesc, PipelineLayer, SharedLayerDesc
from tests.helpers.staged_training import CE, Case, batch_of, logits, start
from tests.helpers.workers import run_workers

STEPS = 50


def tied_layers() -> list[object]:
    """Returns an embedding at both ends and in the middle of four stages."""
    desc = ("emb", nn.Embedding)
    return [
        SharedLayerDesc(*desc, None, "weight", 5, 4),
        LayerDesc(nn.Linear, 4, 4),
        SharedLayerDesc(*desc, lambda layer, x: x + layer.weight.mean(0), "weight", 5, 4),
        SharedLayerDesc(*desc, logits, "weight", 5, 4),
    ]


def train(rank: int, world_size: int, degrees: dict[str, int]) -> tuple[list[float], Tensor | None, Tensor | None]:
    """Returns the losses, the shared weight, and its momentum, where this worker has them."""
    start(Case(degrees))
    torch.manual_seed(3)
    layers = PipelineLayer(tied_layers(), loss_fn=CE)
    inner = torch.optim.AdamW(layers.parameters(), lr=0.01)
    model, optimizer = fleet.distributed_model(layers), fleet.distributed_optimizer(inner)
    weight = layers.tied_parameters("emb")
    replicas, mine = fleet.data_replicas(), fleet.data_rank()
    if degrees.get("pp_degree", 1) > 1 and weight:
        stages = (0, 1) if degrees["pp_degree"] == 2 else (0, 2, 3)
        assert weight[0].fleet_tied == stages
    torch.manual_seed(7)
    losses = []
    for _ in range(STEPS):
        x, y = batch_of("tied", 8 * replicas)
        rows = slice(8 * mine, 8 * mine + 8)
        losses.append(model.train_batch([x[rows], y[rows]], optimizer).item())
    if not weight:
        return losses, None, None
    return losses, weight[0].detach().clone(), inner.state[weight[0]]["exp_avg"]


def test_copies_stay_equal_bit_by_bit() -> None:
    """Study 6, ties: 50 steps of AdamW; three of four stages hold the weight; the losses of one process."""
    ((alone, weight, _),) = run_workers(train, 1, {}, backend=None)
    found = run_workers(train, 4, {"pp_degree": 4, "dp_degree": 1}, backend=None)
    held = [(own, state) for _, own, state in found if own is not None]
    assert len(held) == 3
    for own, state in held:
        assert torch.equal(own, held[0][0])
        assert torch.equal(state, held[0][1])
    torch.testing.assert_close(held[0][0], weight, rtol=1e-4, atol=1e-5)
    assert found[0][0] == found[3][0]
    assert max(abs(a - b) for a, b in zip(found[0][0], alone, strict=True)) < 1e-5


def test_copies_stay_equal_over_stages_and_data() -> None:
    """Study 6, ties: the same with two workers for each stage, whose sums must not depend on the stage."""
    found = run_workers(train, 4, {"pp_degree": 2, "dp_degree": 2, "sharding_degree": 1}, backend=None)
    weights = [own for _, own, _ in found if own is not None]
    assert len(weights) == 4
    assert all(torch.equal(own, weights[0]) for own in weights)
