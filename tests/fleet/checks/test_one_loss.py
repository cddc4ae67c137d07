"""OneLoss: the workers along mp, sep and cp begin backward from one loss (invariant 4)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fleet import fleet
from fleet.checks.one_loss import are_one, is_checked
from fleet.errors import ConfigError, FleetError
from fleet.layers.mpu.mp_ops import _mp_allreduce
from fleet.meta_parallel import LayerDesc, ParallelCrossEntropy, PipelineLayer, split_inputs_sequence_dim
from tests.helpers.workers import run_workers

Loss = Callable[[Any, Tensor, Tensor], Tensor]


def test_what_counts_as_one() -> None:
    """Rounding passes, and so do values that are not finite; another value or number of losses does not."""
    assert are_one([[(2.0, 1e-5), (float("nan"), 1e-5)], [(2.00001, 1e-5), (float("nan"), 1e-5)]])
    assert are_one([[(float("inf"), 1e-5)], [(float("inf"), 1e-5)]])
    assert are_one([[(1.0, 0.02)], [(1.01, 0.02)]])  # a loss in 16 bit
    assert not are_one([[(1.0, 1e-5)], [(1.0001, 1e-5)]])
    assert not are_one([[(1.0, 1e-5)], [(float("nan"), 1e-5)]])
    assert not are_one([[(1.0, 1e-5)] * 2, [(1.0, 1e-5)]])
    assert [number for number in range(700) if is_checked(number, 300)] == [0, 1, 2, 300, 600]
    assert not is_checked(0, 0)


def divided_words() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(8, 6), nn.Tanh(), nn.Linear(6, 8))


def said(loss: Loss, *, steps: int = 3, passes: int = 1, **options: Any) -> str:
    """Trains with ``loss(model, x, y)``; returns the error of the first step, and otherwise the loop's warnings."""
    strategy = fleet.DistributedStrategy()
    for name, value in options.items():
        setattr(strategy, name, value)
    fleet.init(is_collective=True, strategy=strategy)
    net = divided_words()
    model = fleet.distributed_model(net)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            x, y = torch.randint(0, 8, (2, 4, 6), generator=torch.Generator().manual_seed(3))
            try:
                for _ in range(passes):
                    value = loss(model, x, y)
                    value.backward()
                optimizer.step()
            except ConfigError as error:
                assert step == 0, "an update was made from different losses"
                return f"{error}"
            optimizer.zero_grad()
    return "; ".join(f"{warning.message}" for warning in caught)


def entropy(logits: Tensor) -> Tensor:
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1).mean()


def parallel(logits: Tensor, y: Tensor) -> Tensor:
    return ParallelCrossEntropy()(logits, y).mean()


def whole(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def penalty(model: nn.Module, of: Callable[[Tensor], Tensor]) -> Tensor:
    return sum((of(p) for p in model.parameters()), torch.zeros(()))


def summed(p: Tensor) -> Tensor:
    part = p.square().sum()
    return _mp_allreduce(part) if getattr(p, "is_distributed", False) else part


def along_mp(rank: int, world_size: int) -> dict[str, list[str]]:
    """Returns what is said of right and of wrong losses of a divided model."""

    def run(style: str, loss: Loss, **options: Any) -> str:
        plan = {"plan": {"0": "vocab", "2": style}}
        return said(loss, hybrid_configs={"mp_degree": 2}, tensor_parallel_configs=plan, **options)

    right = [
        run("column", lambda model, x, y: parallel(model(x), y)),
        run("column_gather", lambda model, x, y: whole(logits := model(x), y) + 0.3 * entropy(logits)),
        run("column", lambda model, x, y: parallel(model(x), y) + 0.01 * penalty(model, summed)),
        run("column_gather", lambda model, x, y: whole(model(x), y) / 2, passes=2),
        run("column_gather", lambda model, x, y: whole(model(x), y), amp=True),
        run("column_gather", lambda model, x, y: whole(model(x), y), gradient_merge=True),
    ]
    wrong = [
        run("column", lambda model, x, y: parallel(logits := model(x), y) + 0.3 * entropy(logits)),
        run("column", lambda model, x, y: parallel(model(x), y) + 0.01 * penalty(model, Tensor.norm)),
        run("column_gather", lambda model, x, y: whole(model(x), (y + rank) % 8)),
        run("column_gather", lambda model, x, y: whole(model(x)[rank::2], y[rank::2])),
    ]
    return {"right": right, "wrong": wrong}


def along_sep(rank: int, world_size: int) -> dict[str, list[str]]:
    """Returns what is said of right and of wrong losses over a divided sequence."""

    def run(form: Callable[[Tensor, Tensor], Tensor], before: Loss | None = None, **options: Any) -> str:
        def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
            if before is not None:
                before(model, x, y)
            own = split_inputs_sequence_dim(y).flatten()
            return form(model(split_inputs_sequence_dim(x)).flatten(0, 1), own)

        return said(loss, hybrid_configs={"sep_degree": 2}, **options)

    def total(logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits, y, reduction="sum")

    def mean(logits: Tensor, y: Tensor) -> Tensor:
        return fleet.mean(total(logits, y), y.numel())

    def of_one(model: Any, x: Tensor, y: Tensor) -> Tensor:
        with model.no_sync():
            found = whole(model(split_inputs_sequence_dim(x)), split_inputs_sequence_dim(y))
            if rank:
                found.backward()
        return found

    right = [run(mean), run(mean, gradient_merge=True), run(lambda logits, y: mean(logits, y) * 2, amp=True)]
    wrong = [
        run(lambda logits, y: F.cross_entropy(logits, y)),
        run(lambda logits, y: mean(logits, y) + F.cross_entropy(logits, y)),
        run(lambda logits, y: total(logits, y) / (2 * y.numel())),
        run(mean, before=of_one),
    ]
    return {"right": right, "wrong": wrong}


def along_both(rank: int, world_size: int) -> list[dict[str, list[str]]]:
    return [along_mp(rank, world_size), along_sep(rank, world_size)]


def test_one_form_is_right() -> None:
    """Losses of the whole pass without a word; those of a part, also in one of several terms, are refused.

    Along sep these are a mean over own tokens, a part of the whole mean, and a pass of one worker alone.
    """
    for mp, sep in run_workers(along_both, 2, backend=None):
        assert mp["right"] == [""] * 6
        assert sep["right"] == [""] * 3
        for text in mp["wrong"] + sep["wrong"]:
            assert "began backward from different losses" in text
            assert "rank 1: " in text
            assert "test_one_loss.py" in text
        assert all("ParallelCrossEntropy" in text for text in mp["wrong"])
        assert all("fleet.mean(sum over the own tokens, number of own tokens)" in text for text in sep["wrong"])
        assert "rank 0: 1 losses" in sep["wrong"][-1]
        assert "rank 1: 2 losses" in sep["wrong"][-1]


def staged(rank: int, world_size: int) -> list[str]:
    """Trains two stages of divided layers; returns what is said of a right and of a wrong loss."""
    found = []
    for is_right in (True, False):
        strategy = fleet.DistributedStrategy()
        strategy.hybrid_configs = {"mp_degree": 2, "pp_degree": 2}
        strategy.pipeline_configs = {"accumulate_steps": 2, "micro_batch_size": 2}
        fleet.init(is_collective=True, strategy=strategy)
        meta, size = fleet.meta_parallel, {"has_bias": True, "gather_output": True}
        layers = [LayerDesc(meta.ColumnParallelLinear, 4, 4, **size) for _ in range(2)]
        part = fleet.get_hybrid_communicate_group().get_model_parallel_rank()

        def loss(output: Tensor, label: Tensor, first: int = 0 if is_right else part) -> Tensor:
            return (output[:, first:] - label[:, first:]).square().mean()

        net = PipelineLayer(layers, loss_fn=loss)
        model = fleet.distributed_model(net)
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1))
        x = torch.arange(16.0).view(4, 4) / 8
        try:
            for _ in range(2):
                model.train_batch([x, x.flip(0)], optimizer)
            found.append("")
        except FleetError as error:
            found.append(f"{error}")
    return found


@pytest.mark.slow
def test_of_a_pipeline_the_last_stage() -> None:
    """Only the last stage has a loss."""
    found = run_workers(staged, 4, backend=None)
    assert [right for right, _ in found] == [""] * 4
    assert all("different losses" in wrong for _, wrong in found[2:])
