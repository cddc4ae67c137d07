"""Options of both kinds of job beside rows on servers: amp, recompute and hybrid in one process, loss scales."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fleet
from fleet.errors import ConfigError, UnsupportedOptionError
from fleet.facade import Fleet
from fleet.role_maker import UserDefinedRoleMaker
from tests.fleet.ps_job.test_server_job import alone, make_sgd, rows_of, served, strategy
from tests.helpers.served import WideAndDeep, batches, train


def _with(made: fleet.DistributedStrategy, options: dict[str, Any]) -> fleet.DistributedStrategy:
    for name, value in options.items():
        setattr(made, name, value)
    return made


def _trained(options: dict[str, Any]) -> tuple[list[float], torch.Tensor, torch.Tensor]:
    own, model, optimizer = alone(_with(strategy("sync"), options))
    losses = train(model, optimizer, batches(4))
    found = losses, rows_of(model), model.state_dict()["words.weight"].clone()
    own.stop_worker()
    own.session.close()
    return found


_RECOMPUTE = {"recompute": True, "recompute_configs": {"checkpoints": ["words", "out"]}}


@pytest.mark.parametrize(
    "options", [{"amp": True}, _RECOMPUTE, {"amp": True, "hybrid_configs": {"dp_degree": 1}}], ids=str
)
def test_options_that_act_beside_servers_act_with_the_server_inside(options: dict[str, Any]) -> None:
    """001-05: the script of a job with servers runs in one process too; a checkpointed embedding is still served."""
    losses, rows, words = _trained({})
    got_losses, got_rows, got_words = _trained(options)
    exact = "amp" not in options
    bounds = {"rtol": 0.0, "atol": 0.0 if exact else 5e-3}
    torch.testing.assert_close(got_losses, losses, **bounds)
    torch.testing.assert_close(got_rows, rows, **bounds)
    torch.testing.assert_close(got_words, words, **bounds)
    assert exact or got_losses != losses  # it did compute in 16 bit


def test_options_of_collective_training_are_refused_by_name() -> None:
    """001-05: the message names those alone that servers do not offer."""
    own = Fleet()
    made = _with(strategy("sync"), {"amp": True, "localsgd": True})
    own.init(strategy=made, log_level="WARNING")
    with pytest.raises(ConfigError, match="trains with localsgd, which"):
        served(own, made, make_sgd)
    own.session.close()


def test_rows_with_a_loss_scale_are_refused() -> None:
    """Rows would get gradients times the scale: float16 with amp, with servers elsewhere or inside."""
    made = _with(strategy("sync"), {"amp": True, "amp_configs": {"dtype": "float16"}})
    own = Fleet()
    role = UserDefinedRoleMaker(current_id=0, worker_num=1, server_endpoints=["127.0.0.1:1"])
    own.init(role, strategy=made, log_level="WARNING")
    with pytest.raises(UnsupportedOptionError, match="float16.*'bfloat16'"):
        own.distributed_model(WideAndDeep())
    own.distributed_model(torch.nn.Linear(2, 1))  # dense parameters are unscaled
    own.session.close()
    own = Fleet()
    own.init(strategy=made, log_level="WARNING")
    with pytest.raises(UnsupportedOptionError, match="float16.*'bfloat16'"):
        served(own, made, make_sgd)
    own.session.close()


@pytest.mark.parametrize("options", [{}, {"amp": True}], ids=["plain", "amp"])
@pytest.mark.parametrize("unscaled", [False, True])
def test_a_grad_scaler_is_refused_beside_rows(options: dict[str, Any], unscaled: bool) -> None:
    """It unscales parameters alone, so rows would move by the scale; nothing is pushed. One that is off may stay."""
    own, model, optimizer = alone(_with(strategy("sync"), options))
    rows = rows_of(model)
    ads, words, target = batches(1)[0]
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale((model(ads, words) - target).square().mean()).backward()
    if unscaled:
        scaler.unscale_(optimizer)
    with pytest.raises(UnsupportedOptionError, match="GradScaler.*enabled=False"):
        scaler.step(optimizer)
    assert torch.equal(rows_of(model), rows)
    optimizer.zero_grad()
    off = torch.amp.GradScaler("cpu", enabled=False)
    off.scale((model(ads, words) - target).square().mean()).backward()
    off.step(optimizer)
    assert not torch.equal(rows_of(model), rows)
    own.stop_worker()
    own.session.close()
