"""Loss functions of a pipeline that return (sum, count)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fleet
from fleet.errors import ConfigError
from fleet.strategies.pipeline.counted_loss import CountedLoss
from tests.helpers.checked_training import start
from tests.helpers.mean_training import Case, batch, counted, expected, net_of, off, optimizer_of, train_pipeline
from tests.helpers.workers import run_workers

ONE = Case(21, 2, 1, "plain", "one")

PIPELINES: dict[int, list[tuple[Case, dict[str, Any]]]] = {
    2: [
        (Case(1, 1, 3, "plain", "one"), {"hybrid_configs": {"pp_degree": 2}}),
        (Case(2, 1, 4, "plain", "one", rule="adam", scales=True), {"hybrid_configs": {"pp_degree": 2}}),
        (
            Case(3, 1, 4, "plain", "one", empty=0.8),
            {
                "hybrid_configs": {"pp_degree": 2, "pp_configs": {"delay_scale_loss": True}},
                "pipeline_configs": {"accumulate_steps": 4, "micro_batch_size": 2, "schedule_mode": "F-then-B"},
            },
        ),
        (Case(4, 2, 2, "plain", "one"), {"hybrid_configs": {"pp_degree": 1, "dp_degree": 2}}),
        (Case(5, 2, 3, "plain", "one"), {"sharding": True, "sharding_configs": {"stage": 3, "sharding_degree": 2}}),
    ],
    4: [
        (Case(6, 2, 3, "plain", "one", rule="momentum"), {"hybrid_configs": {"pp_degree": 2, "dp_degree": 2}}),
        (
            Case(7, 2, 2, "plain", "one", empty=0.7),
            {"hybrid_configs": {"pp_degree": 2, "sharding_degree": 2, "pp_configs": {"sharding_comm_overlap": True}}},
        ),
        (
            Case(8, 2, 2, "plain", "one", rule="adam"),
            {
                "hybrid_configs": {"pp_degree": 2, "dp_degree": 2},
                "gradient_scale_configs": {"scale_strategy": "sum"},
            },
        ),
    ],
}


@pytest.mark.parametrize("workers", PIPELINES)
def test_a_pipeline_takes_sums_and_counts(workers: int) -> None:
    """The mean over the batch on all replicas, and the loss that every stage gets."""
    cases = PIPELINES[workers]
    results = run_workers(train_pipeline, workers, cases, backend=None)
    for at, (case, _) in enumerate(cases):
        right = expected(case)
        for result in results:
            assert not isinstance(result[at], str), (case, result[at])
            got, losses = result[at]
            assert off(got, right) < 1e-6, case
            assert losses == results[0][at][1]


def in_a_pipeline(rank: int, world_size: int) -> str:
    start({"hybrid_configs": {"pp_degree": 1, "dp_degree": 2}, "pipeline_configs": {"accumulate_steps": 2}})
    topology = fleet.get_hybrid_communicate_group().topology()
    layers = fleet.meta_parallel.PipelineLayer(
        list(net_of(ONE)), loss_fn=lambda out, y: fleet.mean(*counted(out, y)), topology=topology
    )
    optimizer = fleet.distributed_optimizer(optimizer_of(ONE, layers))
    model = fleet.distributed_model(layers)
    x, y, _ = batch(ONE, 0, 0, rank)
    with pytest.raises(ConfigError) as error:
        model.train_batch([x, y], optimizer)
    return str(error.value)


def test_a_pipeline_is_told_what_to_return() -> None:
    assert all("return (sum, count)" in text for text in run_workers(in_a_pipeline, 2, backend=None))


def test_gradients_are_divided_by_what_the_whole_step_counted() -> None:
    """The number in the meantime is a power of two near the count, so that it rounds nothing."""
    loss = CountedLoss(averaged=2.0)
    for counts in ((3, 2), (0, 70)):
        weight = torch.ones((), requires_grad=True)
        loss.begin()
        own = []
        for count in counts:
            started, mean = loss.take(weight * 6.0 * count, count)
            own.append(mean.item())
            started.backward()
        mean, factor = loss.finish()
        assert own == [6.0 if count else 0.0 for count in counts]
        assert mean.item() == 6.0
        assert weight.grad is not None
        assert float(weight.grad * factor) == pytest.approx(2.0 * 6.0)
    with pytest.raises(ConfigError, match="is not \\(sum of the loss, count\\)"):
        loss.take(torch.ones(2), 1)
