"""Two ranks under fleet equal what PaddlePaddle recorded, and the big batch in one process (002-05)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fleet
from tests.helpers.workers import run_workers

DATA = Path(__file__).parent.parent / "data" / "collective"
TOLERANCE = 1e-6  # what float32 allows on parameters over 12 steps

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": 0.1}),
    "sgd_wd": ("SGD", {"lr": 0.1, "weight_decay": 0.01}),
    "momentum": ("SGD", {"lr": 0.1, "momentum": 0.9}),
    "momentum_nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "momentum_wd": ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "adam": ("Adam", {"lr": 0.01}),
    "adam_wd": ("Adam", {"lr": 0.01, "weight_decay": 0.01}),
    "adamw": ("AdamW", {"lr": 0.01, "weight_decay": 0.05}),
}


def recorded_net() -> nn.Sequential:
    """Returns the recorded net with its recorded start weights (Paddle stores [in, out], torch [out, in])."""
    inputs = np.load(DATA / "inputs.npz")
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    with torch.no_grad():
        net[0].weight.copy_(torch.from_numpy(inputs["w1"].T))
        net[0].bias.copy_(torch.from_numpy(inputs["b1"]))
        net[2].weight.copy_(torch.from_numpy(inputs["w2"].T))
        net[2].bias.copy_(torch.from_numpy(inputs["b2"]))
    return net


def weights(net: Any) -> dict[str, np.ndarray]:
    """Returns copies of the parameters under Paddle's names and layout."""
    names = {"w1": "0.weight", "b1": "0.bias", "w2": "2.weight", "b2": "2.bias"}
    state = net.state_dict()
    return {name: state[key].numpy().T.copy() for name, key in names.items()}


def train_recorded(rank: int, world_size: int, name: str, fleet_loop: bool) -> dict[str, Any]:
    """Trains 12 steps on this rank's recorded data; returns losses and the weights after each step."""
    fleet.init(is_collective=True)
    kind, settings = OPTIMIZERS[name]
    net = recorded_net()
    if rank:
        for parameter in net.parameters():
            parameter.data.zero_()  # the wrapper must bring rank 0's
    optimizer = fleet.distributed_optimizer(getattr(torch.optim, kind)(net.parameters(), **settings))
    model = fleet.distributed_model(net)
    inputs = np.load(DATA / "inputs.npz")
    x, y = torch.from_numpy(inputs[f"x{rank}"]), torch.from_numpy(inputs[f"y{rank}"]).long().reshape(12, 8)
    losses, history = [], []
    for step in range(12):
        loss = nn.functional.cross_entropy(model(x[step]), y[step])
        loss.backward()
        if fleet_loop:
            optimizer.minimize(loss)
            model.clear_gradients()
        else:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        history.append(weights(model))
    return {"losses": losses, **{key: np.stack([h[key] for h in history]) for key in history[0]}}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_ranks_equal_paddle(name: str) -> None:
    """002-05, 002-03: gradients are averaged; SGD, momentum, Adam and AdamW give Paddle's numbers."""
    recorded = np.load(DATA / f"{name}.2ranks.npz")
    results = run_workers(train_recorded, 2, name, name == "momentum", backend=None)
    np.testing.assert_allclose(results[0]["losses"], recorded["losses"], atol=2e-6, rtol=0)
    for key in ("w1", "b1", "w2", "b2"):
        np.testing.assert_allclose(results[0][key], recorded[key], atol=TOLERANCE, rtol=0, err_msg=key)
        np.testing.assert_array_equal(results[0][key], results[1][key], err_msg=f"{key}: ranks differ")


def train_batch(rank: int, world_size: int, rows: int) -> dict[str, Any]:
    """Trains 5 steps; the ranks share 64 rows a step between them."""
    fleet.init(is_collective=True)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 3))
    data, labels = torch.randn(5, 64, 20), torch.randint(0, 3, (5, 64))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    model = fleet.distributed_model(net)
    mine = slice(rank * rows, (rank + 1) * rows)
    for step in range(5):
        nn.functional.cross_entropy(model(data[step, mine]), labels[step, mine]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def test_two_half_batches_equal_one_batch() -> None:
    """002-05: 2 processes of 32 rows equal 1 process of 64 rows."""
    one = run_workers(train_batch, 1, 64, backend=None)[0]
    two = run_workers(train_batch, 2, 32, backend=None)
    for name, value in one.items():
        torch.testing.assert_close(two[0][name], value, atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(two[1][name], two[0][name], atol=0, rtol=0)
