"""qat rounds as a quantized model would, or is refused with the install line where torchao is absent."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fleet
from fleet.errors import ConfigError, UnsupportedOptionError
from fleet.strategies import plan, qat
from fleet.strategies._declare.strategy_plan import problems

with_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao (the extra qat)")


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 2))


def start(module: nn.Module, **configs: Any) -> Any:
    strategy = fleet.DistributedStrategy()
    strategy.update({"qat": True, "qat_configs": configs})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torchao, when it is loaded
        fleet.init(is_collective=True, strategy=strategy)
        return fleet.distributed_model(module)


def rounded_weight(weight: Tensor, bits: int, whole: bool) -> Tensor:
    """Returns the weight rounded symmetrically, one scale per row or one for all.

    The largest entry lies half way between two numbers, so the reciprocal of the scale matters, which torchao takes.
    """
    largest = weight.abs().max() if whole else weight.abs().amax(1, keepdim=True)
    scale = largest / (2 ** (bits - 1) - 0.5)
    return (weight * (1 / scale)).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) * scale


def rounded_rows(x: Tensor, bits: int) -> Tensor:
    """Returns each row rounded asymmetrically over its range, which holds 0."""
    low, high = x.amin(1, keepdim=True).clamp(max=0), x.amax(1, keepdim=True).clamp(min=0)
    scale = (high - low) / (2**bits - 1)
    lowest = -(2 ** (bits - 1))
    zero = lowest - (low / scale).round()
    return ((x / scale + zero).round().clamp(lowest, lowest + 2**bits - 1) - zero) * scale


def test_refused_without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    """A.1 qat: refused by init, with what to install."""
    monkeypatch.setattr(qat, "find_spec", lambda name: None)
    strategy = fleet.DistributedStrategy()
    strategy.qat = True
    with pytest.raises(UnsupportedOptionError, match=r"'qat' cannot be honoured: .*pip install '\.\[qat\]'"):
        plan(strategy, 1)
    with pytest.raises(UnsupportedOptionError, match="torchao"):
        fleet.init(is_collective=True, strategy=strategy)
    monkeypatch.setattr(qat, "find_spec", lambda name: "found")
    assert problems(strategy, 1) == []


@pytest.mark.parametrize(
    ("configs", "message"),
    [
        ({"weight_bits": 9}, "weight_bits.* is 9; torchao rounds to 2 to 8 bits"),
        ({"activation_bits": 16}, "activation_bits.* is 16; torchao"),
        ({"algo": "ema"}, "algo.* = 'ema' cannot be honoured: torchao takes the range"),
    ],
)
def test_what_torchao_lacks_is_refused(configs: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A.2 qat_configs: no key is ignored."""
    monkeypatch.setattr(qat, "find_spec", lambda name: "found")
    strategy = fleet.DistributedStrategy()
    strategy.update({"qat": True, "qat_configs": configs})
    with pytest.raises(ConfigError, match=message):
        plan(strategy, 1)


def test_models_without_linear_layers_are_refused() -> None:
    """A.1 qat: nothing is ignored; subclasses of Linear, left-out layers, and a pattern that fits nothing."""
    strategy = qat.Qat(qat.QatConfig(), None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"finds no nn\.Linear in Conv2d"):
        strategy.check_model(nn.Conv2d(3, 3, 1))
    with pytest.raises(ConfigError, match=r"finds no nn\.Linear in MultiheadAttention"):
        strategy.check_model(nn.MultiheadAttention(4, 2))
    strategy = qat.Qat(qat.QatConfig(not_quant_pattern=("skip",)), None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'skip', which is part of no module's name"):
        strategy.check_model(net())
    assert len(qat.linear_modules(net(), ())) == 3
    assert len(qat.linear_modules(net(), ("2.",))) == 2


@with_torchao
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("weight_bits", "activation_bits"), [(8, 8), (4, 8), (2, 5)])
def test_rounds_like_the_formula(whole: bool, weight_bits: int, activation_bits: int) -> None:
    """A.2 qat_configs: widths and the number of scales, against the formula written out."""
    module = nn.Linear(6, 8)
    configs = {"channel_wise_abs_max": not whole, "weight_bits": weight_bits, "activation_bits": activation_bits}
    model = start(module, **configs)
    x = torch.randn(16, 6)
    weight = rounded_weight(module.weight.detach(), weight_bits, whole)
    expected = nn.functional.linear(rounded_rows(x, activation_bits), weight, module.bias)
    torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-5)
    plain = nn.functional.linear(x, module.weight, module.bias)
    assert not torch.allclose(model(x), plain, atol=1e-5)


@with_torchao
def test_trains_in_place_and_keeps_names() -> None:
    """A.1 qat: the same modules, names and hooks; what is left out is not rounded; gradients pass the rounding."""
    module = net()
    inner, calls = module[2][0], []
    inner.register_forward_hook(lambda *_: calls.append(1))
    names = list(module.state_dict())
    model = start(module, not_quant_pattern=["3"], weight_bits=4)
    assert list(model.state_dict()) == names
    assert module[2][0] is inner
    assert isinstance(inner, nn.Linear)
    assert [type(module[i]).__name__ for i in (0, 3)] == ["FakeQuantizedLinear", "Linear"]
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(module.parameters(), lr=0.3))
    x = torch.randn(32, 6)
    losses = []
    for _ in range(40):
        loss = (model(x) - x[:, :2]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    assert len(calls) == 40


@with_torchao
def test_torchao_converts_the_result() -> None:
    """A.1 qat: torchao's own step makes it an integer model of nearly the same outputs."""
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
    from torchao.quantization.granularity import PerAxis
    from torchao.quantization.qat import QATConfig

    module = net()
    model = start(module)
    x = torch.randn(16, 6)
    before = model(x).detach()
    base = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int8, weight_granularity=PerAxis(0))
    quantize_(module, QATConfig(base, step="convert"))
    assert type(module[0]) is nn.Linear
    torch.testing.assert_close(module(x), before, atol=0.05, rtol=0.05)
