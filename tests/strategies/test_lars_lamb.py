"""lars and lamb equal Paddle's recorded numbers and the formulas written out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fleet.errors import ConfigError
from fleet.strategies._shared.norm import norms
from fleet.strategies.lamb import Lamb, LambConfig
from fleet.strategies.lars import Lars, LarsConfig
from tests.fleet.test_recorded_results import recorded_net, weights

DATA = Path(__file__).parent.parent / "data" / "collective"


class OneModel:
    """A session of one worker that knows the names of one model."""

    world_size = 1

    def __init__(self, net: nn.Module) -> None:
        self._net = net

    def parameter_names(self) -> dict[Any, str]:
        return {p: name for name, p in self._net.named_parameters()}


def made(kind: str, net: nn.Module, config: Any, **settings: Any) -> Any:
    """Returns the user's optimizer with the strategy around it."""
    if kind == "lars":
        inner: Any = torch.optim.SGD(net.parameters(), **{"lr": 0.1, "momentum": 0.9, **settings})
        strategy: Any = Lars(config, OneModel(net))  # type: ignore[arg-type]
    else:
        inner = torch.optim.Adam(net.parameters(), **{"lr": 0.01, **settings})
        strategy = Lamb(config, OneModel(net))  # type: ignore[arg-type]
    strategy.check_optimizer(inner)
    return strategy.wrap_optimizer(inner)


@pytest.mark.parametrize(("kind", "config"), [("lars", LarsConfig()), ("lamb", LambConfig())])
def test_equals_paddle(kind: str, config: Any) -> None:
    """Issue 3, proof 2: recorded lars and lamb within 1e-6 over 12 steps."""
    recorded, inputs = np.load(DATA / f"{kind}.1rank.npz"), np.load(DATA / "inputs.npz")
    net = recorded_net()
    optimizer = made(kind, net, config)
    x, y = torch.from_numpy(inputs["x0"]), torch.from_numpy(inputs["y0"]).long().reshape(12, 8)
    for step in range(12):
        loss = nn.functional.cross_entropy(net(x[step]), y[step])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, value in weights(net).items():
            np.testing.assert_allclose(value, recorded[name][step], atol=1e-6, rtol=0, err_msg=f"{name} at {step}")


def reference_lars(p: np.ndarray, v: np.ndarray, g: np.ndarray, lr: float, c: dict[str, float]) -> None:
    """A.9, scalar by scalar in float64; changes p and v."""
    g = g + c["l2"] * p
    p_norm, g_norm = np.linalg.norm(p), np.linalg.norm(g)
    local = lr
    if c["wd"] > 0 and p_norm > 0 and g_norm > 0:
        local = lr * c["coeff"] * p_norm / (g_norm + c["wd"] * p_norm + c["eps"])
    v[...] = c["mu"] * v + local * (g + c["wd"] * p)
    p[...] = p - v


def reference_lamb(p: np.ndarray, m: np.ndarray, v: np.ndarray, t: int, g: np.ndarray, lr: float, wd: float) -> None:
    """A.9 with beta 0.8, 0.95 and eps 1e-5 in float64; changes p, m and v."""
    m[...] = 0.8 * m + 0.2 * g
    v[...] = 0.95 * v + 0.05 * g * g
    r = m / (1 - 0.8**t) / (np.sqrt(v / (1 - 0.95**t)) + 1e-5) + wd * p
    p_norm, r_norm = np.linalg.norm(p), np.linalg.norm(r)
    p[...] = p - lr * (p_norm / r_norm if p_norm > 0 and r_norm > 0 else 1.0) * r


@pytest.mark.parametrize("kind", ["lars", "lamb"])
def test_equals_the_formula_with_other_numbers(kind: str) -> None:
    """A.9: other coefficients, exclusion by name, the optimizer's own decay, a zero bias, a changing rate."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    nn.init.zeros_(net[2].bias)
    config: Any
    if kind == "lars":
        numbers = {"lars_coeff": 0.02, "lars_weight_decay": 0.03, "epsilon": 1e-3}
        config = LarsConfig(**numbers, exclude_from_weight_decay=("0.bias",))
        optimizer = made(kind, net, config, momentum=0.7, weight_decay=0.004)
    else:
        config = LambConfig(lamb_weight_decay=0.05, exclude_from_weight_decay=("bias",))
        optimizer = made(kind, net, config, betas=(0.8, 0.95), eps=1e-5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 2, gamma=0.5)
    mine = {n: p.detach().double().numpy().copy() for n, p in net.named_parameters()}
    first = {n: np.zeros_like(p) for n, p in mine.items()}
    second = {n: np.zeros_like(p) for n, p in mine.items()}
    for t in range(1, 7):
        rate = scheduler.get_last_lr()[0]
        net(torch.randn(8, 5)).square().mean().backward()
        for name, p in net.named_parameters():
            g = p.grad.double().numpy()
            if kind == "lars":
                wd = 0.0 if "0.bias" in name else 0.03
                c = {"l2": 0.004, "wd": wd, "coeff": 0.02, "eps": 1e-3, "mu": 0.7}
                reference_lars(mine[name], first[name], g, rate, c)
            else:
                wd = 0.0 if name.endswith("bias") else 0.05
                reference_lamb(mine[name], first[name], second[name], t, g, rate, wd)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        for name, p in net.named_parameters():
            np.testing.assert_allclose(p.detach().numpy(), mine[name], atol=1e-6, rtol=1e-5, err_msg=f"{name} at {t}")


@pytest.mark.parametrize(("kind", "config"), [("lars", LarsConfig()), ("lamb", LambConfig())])
def test_state_round_trips_exactly(kind: str, config: Any) -> None:
    """Issue 3: state is in state_dict() and resumes exactly."""
    torch.manual_seed(0)
    data = torch.randn(6, 8, 5)
    straight, resumed = nn.Linear(5, 2), nn.Linear(5, 2)
    resumed.load_state_dict(straight.state_dict())
    optimizer, other = made(kind, straight, config), made(kind, resumed, config)
    for step in range(6):
        for net, update in ((straight, optimizer), (resumed, other)):
            net(data[step]).square().mean().backward()
            update.step()
            update.zero_grad()
        if step == 2:
            weights_then, state = resumed.state_dict(), other.state_dict()
            twin = nn.Linear(5, 2)
            twin.load_state_dict(weights_then)
            resumed, other = twin, made(kind, twin, config)
            other.load_state_dict(state)
    torch.testing.assert_close(straight.state_dict(), resumed.state_dict(), atol=0, rtol=0)


def test_wrong_optimizers_are_refused() -> None:
    """A.5: lars with another optimizer than Momentum, lamb with another than Adam; settings the rule lacks."""
    net = nn.Linear(2, 2)
    for kind, inner, message in (
        ("lars", torch.optim.Adam(net.parameters()), "torch.optim.SGD with momentum"),
        ("lars", torch.optim.SGD(net.parameters(), lr=0.1), "momentum"),
        ("lars", torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True), "nesterov"),
        ("lamb", torch.optim.AdamW(net.parameters()), "torch.optim.Adam"),
        ("lamb", torch.optim.Adam(net.parameters(), weight_decay=0.1), "weight_decay"),
        ("lamb", torch.optim.Adam(net.parameters(), amsgrad=True), "amsgrad"),
    ):
        strategy: Any = Lars(LarsConfig(), OneModel(net)) if kind == "lars" else Lamb(LambConfig(), OneModel(net))
        with pytest.raises(ConfigError, match=message):
            strategy.check_optimizer(inner)


def test_names_are_needed_for_exclusion() -> None:
    """An exclusion list and no wrapped model: an error that names the call, not a list that matches nothing."""
    net = nn.Linear(2, 2)
    optimizer = made("lars", net, LarsConfig(exclude_from_weight_decay=("bias",)))
    optimizer._job = OneModel(nn.Linear(1, 1))
    net(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ConfigError, match=r"fleet.distributed_model\(model\)"):
        optimizer.step()


def test_norms_are_float32() -> None:
    """A norm of float16 weights is taken in float32, where it does not overflow."""
    found = norms([torch.full((4,), 300.0, dtype=torch.float16), torch.tensor([3.0, 4.0])])
    torch.testing.assert_close(found, torch.tensor([600.0, 5.0]))
