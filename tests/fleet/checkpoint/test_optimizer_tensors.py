"""The state of an optimizer: every kind of torch's comes back and goes on with the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from fleet import checkpoint, fleet
from fleet.errors import CheckpointError, ConfigError
from tests.helpers.workers import run_workers

RULES: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
    "Adafactor": torch.optim.Adafactor,
    "Muon": lambda p: fleet.optimizer.Muon(p, lr=0.01),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}
X = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))


def net() -> nn.Module:
    """Returns a small network, always the same."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def losses(model: nn.Module, optimizer: Any, steps: int) -> Iterator[float]:
    """Trains and yields the losses."""
    for _ in range(steps):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(X).square().mean()
            loss.backward()
            return loss

        yield float(optimizer.step(closure).detach())


@pytest.mark.parametrize("rule", RULES)
def test_every_optimizer_goes_on(tmp_path: Path, rule: str) -> None:
    model = net()
    optimizer = RULES[rule](model.parameters())
    list(losses(model, optimizer, 3))
    checkpoint.save(tmp_path, {"model": model, "optimizer": optimizer})
    expected = list(losses(model, optimizer, 3))
    other = net()
    second = RULES[rule](other.parameters())
    checkpoint.load(tmp_path, {"model": other, "optimizer": second})
    assert list(losses(other, second, 3)) == expected


def test_a_state_is_loaded_into_its_own_memory(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    list(losses(model, optimizer, 2))
    checkpoint.save(tmp_path, {"model": model, "optimizer": optimizer})
    saved = {name: value.clone() for name, value in optimizer.state[model[0].weight].items()}
    list(losses(model, optimizer, 2))
    shared = optimizer.state[model[0].bias]["exp_avg"]  # two states in one memory cannot both be filled there
    optimizer.state[model[0].bias]["exp_avg_sq"] = shared
    places = {name: value.data_ptr() for name, value in optimizer.state[model[0].weight].items() if value.dim()}
    checkpoint.load(tmp_path, {"model": model, "optimizer": optimizer})
    found = optimizer.state[model[0].weight]
    assert {name: found[name].data_ptr() for name in places} == places
    assert all(torch.equal(found[name], value) for name, value in saved.items())
    bias = optimizer.state[model[0].bias]
    assert not torch.equal(bias["exp_avg"], bias["exp_avg_sq"])


def test_groups_have_their_settings_and_names_their_places(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.AdamW(
        [{"params": model[0].parameters(), "lr": 0.3, "name": "first"}, {"params": model[2].parameters()}], lr=0.1
    )
    list(losses(model, optimizer, 2))
    checkpoint.save(tmp_path, {"model": model, "optimizer": optimizer})
    other = net()
    second = torch.optim.AdamW(
        [{"params": [other[0].bias, other[0].weight], "lr": 9.0, "name": ""}, {"params": other[2].parameters()}], lr=9.0
    )
    checkpoint.load(tmp_path, {"model": other, "optimizer": second})
    assert [group["lr"] for group in second.param_groups] == [0.3, 0.1]
    assert second.param_groups[0]["name"] == "first"
    found = second.state[other[0].weight]["exp_avg"]
    assert torch.equal(found, optimizer.state[model[0].weight]["exp_avg"]), "by name, not by place"


def test_without_modules_parameters_go_by_place(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    list(losses(model, optimizer, 2))
    checkpoint.save(tmp_path, {"optimizer": optimizer})
    other = net()
    second = torch.optim.Adam(other.parameters())
    checkpoint.load(tmp_path, {"optimizer": second})
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[one]["exp_avg"], second.state[two]["exp_avg"])


def test_two_models_and_two_optimizers(tmp_path: Path) -> None:
    def made(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        g, d = nn.Linear(3, 3), nn.Linear(3, 3)
        return {"g": g, "d": d, "og": torch.optim.Adam(g.parameters()), "od": torch.optim.Adam(d.parameters())}

    one, two = made(1), made(2)
    for name in "gd":
        list(losses(one[name], one[f"o{name}"], 3))
    checkpoint.save(tmp_path, one)
    checkpoint.load(tmp_path, two)
    for name in "gd":
        assert torch.equal(one[name].weight, two[name].weight)
        first, second = one[f"o{name}"].state[one[name].weight], two[f"o{name}"].state[two[name].weight]
        assert torch.equal(first["exp_avg"], second["exp_avg"])
    assert not torch.equal(two["g"].weight, two["d"].weight)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda m: torch.optim.SGD(m.parameters(), lr=0.1), "saved from a Adam and is a SGD here"),
        (lambda m: torch.optim.Adam([{"params": [p]} for p in m.parameters()]), "1 parameter groups are in the check"),
        (lambda m: torch.optim.Adam(list(m.parameters())[:2]), r"saved group 0 has \['2.weight', '2.bias'\], which"),
    ],
)
def test_another_optimizer_is_refused(tmp_path: Path, make: Any, said: str) -> None:
    model = net()
    checkpoint.save(tmp_path, {"model": model, "optimizer": torch.optim.Adam(model.parameters())})
    other = net()
    with torch.no_grad():
        other[0].weight.zero_()
    with pytest.raises(CheckpointError, match=said):
        checkpoint.load(tmp_path, {"model": other, "optimizer": make(other)})
    assert not other[0].weight.any(), "nothing was changed"


def load_before_the_plan(rank: int, world_size: int, path: str) -> list[str]:
    """Loads an optimizer before a plan divides its parameters, in both orders; then after it."""
    found = []
    for order in ("optimizer first", "model first", "after"):
        strategy = fleet.DistributedStrategy()
        strategy.hybrid_configs = {"mp_degree": 2}
        strategy.tensor_parallel_configs = {"plan": {"0": "column", "1": "row"}}
        fleet.init(is_collective=True, strategy=strategy)
        model: Any = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.1)
        try:
            if order != "after":
                checkpoint.load(path, {"model": model, "optimizer": optimizer})
            if order == "model first":
                model = fleet.distributed_model(model)
            optimizer = fleet.distributed_optimizer(optimizer)
            if order != "model first":
                model = fleet.distributed_model(model)
            checkpoint.load(path, {"model": model, "optimizer": optimizer})
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            found.append("trained")
        except ConfigError as error:
            found.append(f"{error}")
        fleet.stop_worker()
    return found


def test_an_optimizer_loaded_before_a_plan_divides_it_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path, {"model": model, "optimizer": optimizer})
    for first, second, third in run_workers(load_before_the_plan, 2, f"{tmp_path}", backend=None):
        for text in (first, second):
            assert "the Adam has a state (exp_avg, exp_avg_sq) of whole parameters" in text
            assert "Load the optimizer after distributed_model() and distributed_optimizer()" in text
        assert third == "trained"
