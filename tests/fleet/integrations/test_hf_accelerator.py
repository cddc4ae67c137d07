"""The Accelerator of FleetTrainer in one process: what it wraps, clips and ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fleet.errors import ConfigError
from fleet.training.fleet_model import FleetModel
from fleet.training.fleet_optimizer import FleetOptimizer
from tests.helpers.fleets import own_fleet


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Any:
    from accelerate import Accelerator

    from fleet.integrations._hf_accelerator import FleetAccelerator

    own = own_fleet(monkeypatch)
    own.init(is_collective=True)
    return FleetAccelerator.take_over(Accelerator(cpu=True), own.session)


def test_model_and_optimizer_are_fleets(accelerator: Any) -> None:
    module = torch.nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    assert isinstance(model, FleetModel)
    assert isinstance(optimizer.optimizer, FleetOptimizer)
    assert accelerator.prepare_model(module) is model
    assert accelerator.unwrap_model(model) is module
    assert accelerator.prepare_optimizer(optimizer) is optimizer


def test_an_optimizer_of_another_accelerator_is_refused(accelerator: Any) -> None:
    from accelerate.optimizer import AcceleratedOptimizer

    optimizer = AcceleratedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))
    with pytest.raises(ConfigError, match="pass your own"):
        accelerator.prepare_optimizer(optimizer)


def test_clipping_returns_the_norm_before_it(accelerator: Any) -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    parameter.grad = torch.full((4,), 2.0)
    assert float(accelerator.clip_grad_norm_([parameter], 1.0)) == pytest.approx(4.0)
    assert float(parameter.grad.norm()) == pytest.approx(1.0, abs=1e-5)


def test_a_skipped_step_is_known(accelerator: Any) -> None:
    """Trainer keeps the learning rate then; without amp every step counts."""
    from fleet.integrations._hf_accelerator import FleetAcceleratedOptimizer

    module = torch.nn.Linear(3, 1)
    inner = accelerator.session.wrap_optimizer(torch.optim.SGD(module.parameters(), lr=0.1))
    optimizer = FleetAcceleratedOptimizer(inner, may_skip=True)
    optimizer.step()
    assert not optimizer.step_was_skipped
    inner.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)  # the user's is not stepped
    optimizer.step()
    assert optimizer.step_was_skipped


def test_the_count_of_workers_is_one_inside_a_loss_alone(accelerator: Any) -> None:
    assert (accelerator.num_processes, accelerator.process_index) == (1, 0)
    with accelerator.counting_one():
        assert accelerator.num_processes == 1
    assert torch.equal(accelerator.gather(torch.arange(3)), torch.arange(3))


def test_the_end_of_training_leaves_the_groups_to_fleet(accelerator: Any) -> None:
    accelerator.end_training()
    assert not accelerator.session.job.closed
