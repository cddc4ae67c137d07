"""Errors of torch and gloo say which worker is missing, which parameter is meant, and which option helps."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import fleet
from fleet.common.log import LOGGER
from fleet.common.notes import add_note
from fleet.errors import ConfigError, RendezvousError
from fleet.job.broken_exchange import UncaughtErrors, explained
from fleet.job.whereabouts import ENDED, Whereabouts
from tests.helpers.workers import run_workers

GONE: Any = SimpleNamespace(
    others_after=lambda error: {1: Whereabouts(ENDED, ", after step 3")},
    described=lambda rank: f"pp {rank}",
)
CLOSED = RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:4. GLHF!")


def test_a_lost_connection_names_who_has_ended() -> None:
    meaning = explained(CLOSED, [], GONE, "[rank 0 of 2]")
    assert isinstance(meaning, RendezvousError)
    assert "rank 1 (pp 1): has ended, after step 3" in f"{meaning}"


def test_what_broke_off_is_said_before_the_others_are_asked() -> None:
    """A launcher that sees a killed worker ends this one while it still waits for that one's answer."""
    said: list[str] = []

    def killed(error: BaseException) -> Any:
        raise KeyboardInterrupt

    asking: Any = SimpleNamespace(others_after=killed, described=GONE.described)
    broken = RuntimeError(f"{CLOSED}")
    add_note(broken, "Stage 0 was in the backward of micro-batch 1.")
    logged = patch.object(LOGGER, "error", lambda text, *given: said.append(text % given))
    with logged, pytest.raises(KeyboardInterrupt):
        explained(broken, [], asking, "[rank 0 of 2]")
    assert "Stage 0 was in the backward of micro-batch 1. Asking the other workers" in said[0]


def test_other_errors_are_left_alone() -> None:
    assert explained(RuntimeError("shape mismatch"), [], GONE, "") is None
    assert explained(ConfigError("Connection closed by peer"), [], GONE, "") is None
    assert explained(KeyError("Connection closed by peer"), [], GONE, "") is None
    assert explained(CLOSED, [], None, "") is None


def test_what_nobody_catches_is_explained_below_it(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.excepthook
    uncaught = UncaughtErrors([], GONE, "[rank 0 of 2]")
    sys.excepthook(RuntimeError, CLOSED, None)
    uncaught.close()
    assert sys.excepthook is before
    first, _, meaning = capsys.readouterr().err.partition("\n\n")
    assert "GLHF" in first
    assert meaning.startswith("RendezvousError: [rank 0 of 2] the exchange with the other workers broke off")


class Branches(torch.nn.Module):
    """Uses a part of itself when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = torch.nn.Linear(2, 2).requires_grad_(False)
        self.body, self.extra = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, full: bool) -> torch.Tensor:
        """Runs one or both."""
        return self.extra(self.body(x)) if full else self.body(self.frozen(x))


def _unused(rank: int, world_size: int) -> str:
    fleet.init(is_collective=True)
    earlier = fleet.distributed_model(torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3))))
    earlier(torch.ones(1, 2)).sum().backward()
    model = fleet.distributed_model(Branches())
    try:
        model(torch.ones(1, 2), full=False).sum().backward()
    except ConfigError as error:
        return f"{error}"
    return ""


def test_an_unused_parameter_is_named_with_the_option_that_allows_it() -> None:
    """torch: 'Parameter indices which did not receive grad for rank 1: 2 3', a forward later; of the model that ran."""
    for said in run_workers(_unused, 2, backend=None):
        assert "parameters 'extra.weight', 'extra.bias' took no part" in said
        assert "strategy.find_unused_parameters = True" in said


def _unused_in_a_closure(rank: int, world_size: int) -> str:
    fleet.init(is_collective=True, log_level="ERROR")
    net = Branches()
    optimizer = fleet.distributed_optimizer(torch.optim.Adam([*net.body.parameters(), *net.extra.parameters()]))
    model = fleet.distributed_model(net)

    def closure() -> torch.Tensor:
        loss = model(torch.full((1, 2), rank + 1.0), full=False).square().sum()
        loss.backward()
        return loss

    try:
        optimizer.step(closure)
    except ConfigError as error:
        return f"{error}"
    return ""


def test_a_step_with_a_closure_names_the_unused_parameter() -> None:
    """As Lightning's steps are: the states differ before the next forward could say why."""
    for said in run_workers(_unused_in_a_closure, 2, backend=None):
        assert "parameters 'extra.weight', 'extra.bias' took no part" in said
        assert "strategy.find_unused_parameters = True" in said


def _uneven(rank: int, world_size: int) -> str:
    fleet.init(is_collective=True, log_level="ERROR")
    net = torch.nn.Linear(2, 2)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1))
    model = fleet.distributed_model(net)
    try:
        for _ in range(3 - rank):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    except RuntimeError as error:
        return _meaning(error)
    fleet.session.close()
    dist.destroy_process_group()
    time.sleep(2.0)
    return ""


def _meaning(error: RuntimeError) -> str:
    with pytest.raises(RendezvousError) as caught:
        fleet.session.job.explain(error)
    assert caught.value.__cause__ is error
    return f"{caught.value}"


def test_a_worker_with_a_batch_more_is_told_who_had_fewer() -> None:
    said = run_workers(_uneven, 2, backend=None)[0]
    assert "`model(torch.ones(1, 2)).sum().backward()`" in said
    assert "rank 1: has ended, after step 2" in said
    assert "ElasticSampler" in said


def test_a_divided_parameter_outside_the_model_is_explained() -> None:
    """Each of torch's texts as 2.13 words it; the second and the third come of one backward, on workers 0 and 1."""
    for text in (
        "aten.mse_loss_backward.default got mixed torch.Tensor and DTensor, need to convert all torch.Tensor",
        "aten.add_.Tensor: in-place operations that require placement changes are not supported. The input has",
        "output with shape [1, 8] doesn't match the broadcast shape [0, 8]",
    ):
        assert "p.full_tensor().square().sum()" in f"{explained(RuntimeError(text), [], None, '[rank 0 of 2]')}"
    assert (
        explained(RuntimeError("output with shape [1, 8] doesn't match the broadcast shape [0, 4]"), [], None, "")
        is None
    )


def _gradient_penalty(rank: int, world_size: int) -> str:
    strategy = fleet.DistributedStrategy()
    strategy.sharding = True
    strategy.sharding_configs = {"stage": 3}
    fleet.init(is_collective=True, strategy=strategy, log_level="ERROR")
    net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1))
    model = fleet.distributed_model(net)
    x = torch.ones(1, 2, requires_grad=True)
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    try:
        slope.square().sum().backward()
    except RuntimeError as error:
        return f"{explained(error, [], None, '[rank 0 of 2]')}"
    return ""


def _norms(rank: int, world_size: int) -> tuple[str, float, float]:
    strategy = fleet.DistributedStrategy()
    strategy.sharding = True
    strategy.sharding_configs = {"stage": 2}
    fleet.init(is_collective=True, strategy=strategy, log_level="ERROR")
    net = torch.nn.Linear(2, 2)
    fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1))
    fleet.distributed_model(net)(torch.ones(1, 2)).sum().backward()
    gradients: list[Any] = [p.grad for p in net.parameters()]
    norm = torch.tensor([float(g.norm().full_tensor()) for g in gradients]).norm()
    try:
        torch.tensor([g.data.norm() for g in gradients])
    except RuntimeError as error:
        return f"{explained(error, [], None, '[rank 0 of 2]')}", float(norm), 6**0.5
    return "", 0.0, 1.0


def test_the_norm_of_a_divided_gradient_is_explained() -> None:
    """Lightning's grad_norm() writes torch.tensor() of norms; what the message names gives the whole norm."""
    for said, norm, expected in run_workers(_norms, 2, backend=None):
        assert ".full_tensor() on each on every worker" in said
        assert norm == pytest.approx(expected)


def test_a_gradient_penalty_under_stage_3_is_explained() -> None:
    for said in run_workers(_gradient_penalty, 2, backend=None):
        assert "(a gradient penalty, or two backward passes of one forward). Set sharding_configs['stage'] to 1" in said
