"""amp: looking for an inf or nan, and the way in which torch's GradScaler speaks to an optimizer (A.2, A.3)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fleet.job.axes import Axes
from fleet.strategies._shared.norm import any_nonfinite
from fleet.strategies._shared.optimizer_wrapper import OptimizerWrapper
from fleet.strategies.amp.amp import AmpConfig
from fleet.strategies.amp.amp_optimizer import AmpOptimizer, LossScale, agreed

CPU = torch.device("cpu")
ALONE: Any = SimpleNamespace(device=CPU, process_group=None, collective=True, axes=Axes({}, 0))


def parameters(values: list[list[float]], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Returns parameters whose gradients are ``values``."""
    made = []
    for row in values:
        parameter = nn.Parameter(torch.zeros(len(row), dtype=dtype))
        parameter.grad = torch.tensor(row, dtype=dtype)
        made.append(parameter)
    return made


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.floats(width=16), max_size=5), max_size=4),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_non_finite_finds_each_inf_and_nan(values: list[list[float]], dtype: torch.dtype) -> None:
    """A.2: one element is enough, wherever it stands; empty gradients and none at all are finite."""
    found = any_nonfinite(parameters(values, dtype), CPU)
    assert found.shape == ()
    assert bool(found) == any(not torch.tensor(row, dtype=dtype).isfinite().all() for row in values)


def test_non_finite_of_large_mixed_missing_and_sparse_gradients() -> None:
    """A.2: a norm over large gradients overflows and must not count; types and layouts may be mixed."""
    large = parameters([[3e38, 3e38]]) + parameters([[6e4]], torch.float16)
    assert not any_nonfinite(large, CPU)
    bad = parameters([[float("nan")]], torch.float16)
    assert any_nonfinite([*large, *bad], CPU)
    without = nn.Parameter(torch.zeros(2))
    sparse = nn.Parameter(torch.zeros(3))
    for value, expected in ((1.0, False), (float("inf"), True)):
        sparse.grad = torch.sparse_coo_tensor([[1]], [value], (3,), check_invariants=False)
        assert bool(any_nonfinite([without, sparse], CPU)) == expected


def test_agreed_sends_nothing_without_need() -> None:
    """A.2: no process group, servers in the job, or gradients that data parallel has made equal: no message."""

    def refuse(*args: object, **kwargs: object) -> bool:
        raise AssertionError("asked")

    found = torch.ones(())
    assert agreed(found, [], ALONE) is found
    group = object()
    servers: Any = SimpleNamespace(process_group=group, collective=False, has_equal_gradients=refuse)
    assert agreed(found, [], servers) is found
    equal: Any = SimpleNamespace(
        process_group=group, collective=True, axes=Axes({}, 0), has_equal_gradients=lambda parameters: True
    )
    assert agreed(found, [], equal) is found


def scaled_step(wrappers: int, grad: float, *, unscale: bool = False) -> tuple[float, AmpOptimizer]:
    """Steps through GradScaler and ``wrappers`` wrappers around amp; returns the parameter and amp's optimizer."""
    parameter = nn.Parameter(torch.zeros(1))
    inner = AmpOptimizer(torch.optim.SGD([parameter], lr=1.0), LossScale(AmpConfig(), enabled=True), ALONE)
    outer: Any = inner
    for _ in range(wrappers):
        outer = OptimizerWrapper(outer)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale((parameter * grad).sum()).backward()
    if unscale:
        scaler.unscale_(outer)
    scaler.step(outer)
    scaler.update()
    for name in ("grad_scale", "found_inf"):
        assert not hasattr(outer, name)  # the scaler has taken its words back
    return parameter.item(), inner


@pytest.mark.parametrize("wrappers", [0, 1, 2])
@pytest.mark.parametrize("unscale", [False, True])
def test_the_words_of_a_scaler_reach_amp(wrappers: int, unscale: bool) -> None:
    """Decision 7: grad_scale and found_inf pass through every wrapper; the gradient is divided once."""
    value, inner = scaled_step(wrappers, 3.0, unscale=unscale)
    assert value == -3.0
    assert not inner._scale.in_use
    value, inner = scaled_step(wrappers, float("inf"), unscale=unscale)
    assert value == 0.0


def test_other_wrappers_let_the_scaler_unscale() -> None:
    """B.2: without amp a wrapper says no, even around a fused optimizer, which alone would have said yes."""
    parameter = nn.Parameter(torch.zeros(1))
    fused = torch.optim.SGD([parameter], lr=1.0, fused=True)
    assert fused._step_supports_amp_scaling
    outer = OptimizerWrapper(OptimizerWrapper(fused))
    assert not outer._step_supports_amp_scaling
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale((parameter * 3.0).sum()).backward()
    scaler.step(outer)
    assert parameter.item() == -3.0


def test_a_step_without_a_backward_pass_looks_itself() -> None:
    """A.2: gradients that somebody put there by hand are looked at too; a skipped step counts as called."""
    parameter = nn.Parameter(torch.zeros(1))
    scale = LossScale(AmpConfig(decr_every_n_nan_or_inf=1, decr_ratio=0.5), enabled=True)
    sgd = torch.optim.SGD([parameter], lr=1.0)
    optimizer = AmpOptimizer(sgd, scale, ALONE)
    scheduler = torch.optim.lr_scheduler.StepLR(sgd, 1)
    parameter.grad = torch.tensor([float("nan")])
    optimizer.step()
    scheduler.step()  # would warn, and so fail, had the optimizer not been told of the step
    assert parameter.item() == 0.0
    assert scale.scale == 16384.0
    parameter.grad = torch.tensor([1.0])
    optimizer.step()
    assert parameter.item() < 0.0
    assert scale.good == 1
