"""AmpModel: it stands for the module inside, and calls inside calls add nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fleet
from fleet.strategies._gradients.gradient_exchange import data_parallel_in
from fleet.strategies.amp.amp import AmpConfig, user_module
from fleet.strategies.amp.amp_model import AmpModel, Region, guard
from fleet.strategies.amp.amp_optimizer import LossScale
from tests.strategies.amp.amp_steps import batches, net_of, sgd, start, wrapped


def around(module: nn.Module, region: Region | None = None, **keywords: bool) -> AmpModel:
    """Returns ``module`` under bfloat16 autocast."""
    region = region or Region("cpu", torch.bfloat16)
    scale = LossScale(AmpConfig(), enabled=False)
    return AmpModel(module, module, None, region, scale, None, **{"pure": False, "guarded": False, **keywords})


def test_it_stands_for_the_module_inside() -> None:
    """Attributes, training mode and what looks through torch.compile's module reach the module inside."""
    net = net_of()
    net.version = 3  # type: ignore[assignment]
    model = around(net)
    assert model.version == 3
    model.eval()
    assert not net.training
    with pytest.raises(AttributeError):
        _ = model.nothing_of_that_name
    assert user_module(around(around(net))) is net
    reducer = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(reducer)
    reducer.module = net
    assert data_parallel_in(around(reducer)) is reducer
    assert user_module(around(reducer)) is net


def test_results_are_float32_in_training_and_evaluation() -> None:
    """A.3: the loss is computed in float32."""
    model = around(net_of())
    x = next(batches(1))
    assert model(x).dtype == torch.float32
    with torch.no_grad():
        assert model(x).dtype == torch.float32
    with torch.inference_mode():
        assert model(x).dtype == torch.float32


def test_an_exception_leaves_no_trace() -> None:
    """After a forward that raised, the next one and code outside compute as before."""

    class Failing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] == 1:
                raise ValueError("one row")
            return super().forward(x)

    start({"use_pure_bf16": True})
    net = nn.Sequential(Failing(6, 2))
    model, _ = wrapped(net, sgd(net))
    x = next(batches(1))
    expected = model(x)
    with pytest.raises(ValueError, match="one row"):
        model(x[:1])
    assert not torch.is_autocast_enabled("cpu")
    assert torch.equal(model(x), expected)
    assert net(x).dtype == torch.float32
    assert [p.dtype for p in net.parameters()] == [torch.float32] * 2


def test_a_call_inside_a_call_adds_nothing() -> None:
    """A wrapped model that is a part of another one is scaled and converted once, by the outer one."""

    class Outer(nn.Module):
        def __init__(self, part: Any) -> None:
            super().__init__()
            self.__dict__["part"] = part
            self.seen: list[torch.dtype] = []

        def forward(self, x: Tensor) -> Tensor:
            out = self.part(x)
            self.seen.append(out.dtype)
            return out

    start({"dtype": "float16", "init_loss_scaling": 1024.0})
    net, alone = net_of(), net_of()
    inner, _ = wrapped(net, sgd(net))
    outer = fleet.distributed_model(Outer(inner))
    x = next(batches(1))
    outer(x).mean().backward()
    assert outer.module.seen == [torch.float16]
    with torch.autocast("cpu", dtype=torch.float16):
        out = alone(x)
    out.float().mean().backward()
    torch.testing.assert_close(net[3].bias.grad, alone[3].bias.grad, atol=1e-4, rtol=1e-3)


def test_the_guard_acts_only_where_it_is_asked_for() -> None:
    """A.2 use_fp16_guard: nothing without pure 16 bit, and nothing after the session."""
    region = Region("cpu", torch.float16)
    with guard(region, pure=False):
        assert not torch.is_autocast_enabled("cpu")
    with guard(region, pure=True):
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.float16
    region.off = True
    with guard(region, pure=True):
        assert not torch.is_autocast_enabled("cpu")
    fleet.init(is_collective=True, log_level="ERROR")
    with fleet.fp16_guard():
        assert not torch.is_autocast_enabled("cpu")
