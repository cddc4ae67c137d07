"""The exchange of a stage's gradients among its copies."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fleet
from fleet.strategies._gradients.gradient_exchange import GradientExchange
from fleet.strategies._gradients.reducer import GradientReducer, overlapped_buckets
from fleet.strategies.pipeline.stage import stage_of
from tests.helpers.workers import run_workers


def nothing() -> None:
    """Sums no ties."""


def exchanges(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1))
    x = torch.full((3, 2), 1.0 + rank)
    for overlaps in (False, True):
        exchange = GradientExchange("pipeline", group, divisor=2)
        reducer = GradientReducer([list(layers.parameters())], exchange, bucket_bytes=30, overlaps=overlaps)
        reducer.begin()
        layers(x).sum().backward()  # a micro-batch before the last
        with reducer.last_backward(0):
            layers(x).sum().backward()
            assert len(reducer._started) == (2 if overlaps else 0)  # in step with backward, not after it
        reducer.finish(nothing, dict)
        found = [p.grad.clone() for p in layers.parameters() if p.grad is not None]
        for p in layers.parameters():
            p.grad = None
        for other in (1.0, 2.0):
            layers(torch.full((3, 2), other)).sum().backward()
        for p, grad in zip(layers.parameters(), found, strict=True):
            assert p.grad is not None
            torch.testing.assert_close(grad, p.grad)  # two passes of each worker, divided by two
            p.grad = None

    earlier_steps_and_unused(rank, layers)


def earlier_steps_and_unused(rank: int, layers: nn.Sequential) -> None:
    exchange = GradientExchange("pipeline", dist.group.WORLD, divisor=1)
    # Gradients of an earlier step stay as they were and are added once.
    reducer = GradientReducer([list(layers.parameters())], exchange)
    weight = layers[0].weight
    weight.grad = torch.ones_like(weight)
    reducer.begin()
    for p in layers.parameters():
        p.grad = torch.ones_like(p)
    reducer.finish(nothing, dict)
    assert torch.equal(weight.grad, torch.full_like(weight, 3.0))
    assert torch.equal(layers[2].weight.grad, torch.full_like(layers[2].weight, 2.0))

    # The same parameter without a gradient on every worker: refused by name, or left alone.
    for p in layers.parameters():
        p.grad = None
    strict = GradientReducer([list(layers.parameters())], exchange)
    strict.begin()
    with pytest.raises(ValueError, match=r"'bias' took no part.*find_unused_parameters"):
        strict.finish(nothing, lambda: {p: "bias" for p in layers.parameters()})
    loose = GradientReducer([list(layers.parameters())], exchange, finds_unused=True)
    loose.begin()
    if rank == 1:
        weight.grad = torch.ones_like(weight)
    loose.finish(nothing, dict)
    assert torch.equal(weight.grad, torch.ones_like(weight))
    assert layers[1].weight.grad is None

    # Float16 on the wire loses small values unless a factor lifts them.
    for factor, kept in ((1.0, False), (4096.0, True)):
        exchange.wire_dtype, exchange.wire_factor = torch.float16, lambda factor=factor: factor
        narrow = GradientReducer([[weight]], exchange, finds_unused=True)
        weight.grad = None
        narrow.begin()
        weight.grad = torch.full_like(weight, 1e-8)
        narrow.finish(nothing, dict)
        assert bool((weight.grad > 0).all()) is kept


def flags_in_narrow_types(rank: int, world_size: int) -> None:
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1))
    weight = layers[0].weight
    exchange = GradientExchange("pipeline", dist.group.WORLD, divisor=1)
    for dtype in (torch.float16, torch.bfloat16):
        exchange.wire_dtype, exchange.divisor = dtype, 1e6
        exchange.wire_factor = lambda: 1e-8
        for p in layers.parameters():
            p.grad = None
        flagged = GradientReducer([list(layers.parameters())], exchange, finds_unused=True)
        flagged.begin()
        if rank == 1:
            weight.grad = torch.zeros_like(weight)
        flagged.finish(nothing, dict)
        assert [p.grad is not None for p in layers.parameters()] == [True, *[False] * 5]


def test_the_header_says_who_has_a_gradient() -> None:
    """In any type of the wire, whatever the divisor and the factor are."""
    run_workers(flags_in_narrow_types, 2, timeout_s=60)


def test_gradients_are_exchanged_once() -> None:
    """Section 7.5 and study 4: overlapped and not, divided, over several steps, unused, as float16."""
    run_workers(exchanges, 2, timeout_s=60)


def test_buckets_that_travel_during_backward() -> None:
    """Several start before the end of backward, whatever the full size is; the last one is small and never empty."""
    layers = [torch.zeros(256 * 1024) for _ in range(8)]  # 1 MiB each
    assert [len(bucket) for bucket in overlapped_buckets(layers, 32 * 2**20, 2**20)] == [1] * 8
    assert [len(bucket) for bucket in overlapped_buckets(layers, 32 * 2**20, 2 * 2**20)] == [2, 2, 2, 2]
    assert [len(bucket) for bucket in overlapped_buckets([torch.zeros(8)] * 64, 64, 32)] == [2] * 31 + [1, 1]
    biases = [torch.zeros(256), torch.zeros(2**20), torch.zeros(64), torch.zeros(64)]
    assert [len(bucket) for bucket in overlapped_buckets(biases, 32 * 2**20, 512)] == [2, 2]
    assert [len(bucket) for bucket in overlapped_buckets([torch.zeros(2**20)], 2**20, 512)] == [1]
    by_type = [torch.zeros(4), torch.zeros(4, dtype=torch.float64), torch.zeros(4)]
    assert sorted(map(len, overlapped_buckets(by_type, 64, 1024))) == [1, 2]


def buckets_of_a_stage(rank: int, world_size: int) -> int:
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"pp_degree": 2, "dp_degree": 2, "pp_configs": {"dp_comm_overlap": True}}
    strategy.last_comm_group_size_MB = 0.001
    strategy.pipeline_configs = {"accumulate_steps": 2, "micro_batch_size": 1}
    fleet.init(is_collective=True, strategy=strategy, log_level="ERROR")
    layers = [nn.Linear(16, 16) for _ in range(32)]
    model = fleet.meta_parallel.PipelineLayer(layers, num_stages=2, loss_fn=lambda out, _: out.mean())
    fleet.distributed_model(model)
    stage = stage_of(model)
    assert stage is not None
    stage.reducer.begin()
    return len(stage.reducer._buckets)


def test_the_size_of_the_last_bucket_is_the_users() -> None:
    """16 layers a stage of 1088 bytes each: eight of an eighth, less what the last one takes."""
    assert run_workers(buckets_of_a_stage, 4, backend=None, timeout_s=60) == [9] * 4
