"""Exchanges over an axis that a loop calls itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fleet import fleet
from fleet.errors import ConfigError, NotInitializedError, OptionWarning
from fleet.utils import hybrid_parallel_util as util
from tests.helpers import divided_training as training
from tests.helpers.workers import run_workers


def test_they_need_a_job_and_somebody_to_exchange_with() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1)
    assert util.obtain_optimizer_parameters_list(optimizer) == optimizer.param_groups[0]["params"]
    assert util.unwrap_optimizer(optimizer) is optimizer
    from fleet.job.running import RUNNING

    if RUNNING.session is None:
        with pytest.raises(NotInitializedError, match=r"fleet.init\(is_collective=True\)"):
            util.fused_allreduce_gradients([])


def test_exchanges_on_two_workers() -> None:
    """Surface section 9."""
    run_workers(_on_two, 2, timeout_s=60, backend=None)


def _on_two(rank: int, world_size: int) -> None:
    _gradients(rank)
    _parameters(rank)
    _inputs(rank)
    wrapped: Any = fleet.distributed_optimizer(torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1))
    assert util.unwrap_optimizer(wrapped) is wrapped.user_optimizer
    assert util.unwrap_optimizer(wrapped, type(wrapped)) is wrapped.optimizer


def _with_gradient(rank: int) -> nn.Linear:
    model = nn.Linear(2, 2)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float(rank + 1))
    return model


def _gradients(rank: int) -> None:
    """The sum over dp and sep, divided by dp alone."""
    for degrees, hcg, expected in (({"dp": 2}, True, 1.5), ({"sep": 2}, True, 3.0), ({"mp": 2}, False, 1.5)):
        training.start(**degrees)
        model = _with_gradient(rank)
        util.fused_allreduce_gradients(list(model.parameters()), fleet.get_hybrid_communicate_group() if hcg else None)
        assert all(bool((p.grad == expected).all()) for p in model.parameters() if p.grad is not None)
        if "sep" in degrees:
            with pytest.raises(ConfigError, match="exchanged these gradients already"):
                util.fused_allreduce_gradients(model.parameters(), fleet.get_hybrid_communicate_group())
    with pytest.raises(ConfigError, match="nothing to exchange"):
        util.fused_allreduce_gradients(model.parameters(), fleet.get_hybrid_communicate_group())
    group = fleet.get_hybrid_communicate_group().get_model_parallel_group()
    model = _with_gradient(rank)
    util.fused_allreduce_gradients_with_group(model.parameters(), group, bucket_size=8, scale=2.0)
    assert bool((model.weight.grad == 6).all())


def _parameters(rank: int) -> None:
    calls = {
        "mp": util.broadcast_mp_parameters,
        "dp": util.broadcast_dp_parameters,
        "sharding": util.broadcast_sharding_parameters,
        "sep": util.broadcast_sep_parameters,
    }
    for axis, call in calls.items():
        training.start(**{axis: 2})
        model = nn.Linear(2, 2)
        nn.init.constant_(model.weight, rank)
        nn.init.constant_(model.bias, rank)
        model.bias.no_sync = True  # type: ignore[attr-defined]
        call(model, fleet.get_hybrid_communicate_group())
        assert not model.weight.any(), axis
        assert float(model.bias[0]) == rank
        util.broadcast_moe_sharding_parameters(model)  # nobody shares experts


def _inputs(rank: int) -> None:
    training.start(mp=2)
    x = torch.full((2, 3), rank)
    if rank:
        with pytest.warns(OptionWarning, match="differed from those of the first"):
            (same, more), named = util.broadcast_input_data(None, x, [x.float()], flag=x > 0, n=3)
    else:
        (same, more), named = util.broadcast_input_data(None, x, [x.float()], flag=x > 0, n=3)
    assert same is x
    assert not x.any()
    assert not more[0].any()
    assert not named["flag"].any()
    assert named["n"] == 3
    with pytest.raises(ConfigError, match="or value between the workers"):
        util.broadcast_input_data(None, x, n=rank)
