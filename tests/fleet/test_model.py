"""FleetModel looks like the user's module and runs the wrapped one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fleet._model import FleetModel
from fleet.errors import CheckpointError, ConfigError


class Net(nn.Module):
    """A module with an attribute, a property, a method that runs submodules and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)
        self.scale = 1.0
        self.register_buffer("seen", torch.zeros(()))

    @property
    def width(self) -> int:
        return self.fc.out_features

    def describe(self) -> str:
        return f"width {self.width}"

    def loss(self, x: torch.Tensor, power: int = 2) -> torch.Tensor:
        return self.fc(x).pow(power).mean()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) * self.scale


class Chain(nn.Module):
    """Stands for DistributedDataParallel: counts its calls."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.calls = module, 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.module(*args, **kwargs)

    def extra(self) -> str:
        return "from the chain"


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def model(net: Net) -> FleetModel:
    return FleetModel(net, Chain(net))


def test_calls_run_the_chain(net: Net, model: FleetModel) -> None:
    """A call goes through the wrapped module and gives its result."""
    x = torch.randn(3, 4)
    torch.testing.assert_close(model(x), net(x))
    assert model._chain.calls == 1


def test_names_are_the_users(net: Net, model: FleetModel) -> None:
    """State, parameters, buffers and modules carry the user's names; the state loads into a plain module."""
    assert sorted(model.state_dict()) == ["fc.bias", "fc.weight", "seen"]
    assert [n for n, _ in model.named_parameters()] == ["fc.weight", "fc.bias"]
    assert [n for n, _ in model.named_buffers()] == ["seen"]
    assert [n for n, _ in model.named_modules()] == ["", "fc"]
    assert list(model.parameters())[0] is net.fc.weight
    Net().load_state_dict(model.state_dict())


def test_set_state_dict_ignores_entries_that_are_not_the_modules(net: Net, model: FleetModel) -> None:
    """004-08: a checkpoint that holds 'epoch' loads; a missing entry still raises."""
    state = {**Net().state_dict(), "epoch": 3}
    model.set_state_dict(state)
    torch.testing.assert_close(net.fc.weight, state["fc.weight"])
    with pytest.raises(RuntimeError, match="fc.bias"):
        model.set_state_dict({"fc.weight": state["fc.weight"], "epoch": 1})
    with pytest.raises(CheckpointError, match="fd.weight"):
        model.set_state_dict({**state, "fd.weight": torch.zeros(1)})
    with pytest.raises(RuntimeError, match="epoch"):
        model.load_state_dict(state)


def test_a_module_around_it_loads_what_it_saved(net: Net, model: FleetModel) -> None:
    """004-08: the state of a ModuleDict of it has the user's names, and they are found again."""
    outer = nn.ModuleDict({"a": model, "b": nn.Linear(2, 2)})
    state = {name: torch.full_like(value, 2.0) for name, value in outer.state_dict().items()}
    assert "a.fc.weight" in state
    outer.load_state_dict(state)
    assert net.fc.weight.eq(2.0).all()
    with pytest.raises(RuntimeError, match="fd"):
        outer.load_state_dict({**state, "a.fd.weight": torch.zeros(1)})


def test_attributes_reach_the_users_module(net: Net, model: FleetModel) -> None:
    """Reading, assigning, deleting attributes and calling methods act on the user's module."""
    assert model.width == 2
    assert model.describe() == "width 2"
    model.scale = 3.0
    assert net.scale == 3.0
    model.extra_layer = nn.Linear(1, 1)
    assert "extra_layer" in dict(net.named_children())
    del model.scale
    assert not hasattr(net, "scale")
    assert model.extra() == "from the chain"
    with pytest.raises(AttributeError, match="'Net' has no attribute 'nothing'"):
        model.nothing  # noqa: B018


def test_train_and_eval_reach_both(net: Net, model: FleetModel) -> None:
    """eval() and train() set the user's module and the wrapped one."""
    model.eval()
    assert not any((net.training, model.training, model._chain.training))
    model.train()
    assert net.training
    assert model.training
    assert model._chain.training


def test_method_that_bypasses_the_exchange_raises(model: FleetModel) -> None:
    """A method that runs submodules outside the wrapped forward would lose gradients, so it raises."""
    x = torch.randn(3, 4)
    with pytest.raises(ConfigError, match=r"mark_forward_method\('loss'\)"):
        model.loss(x)
    with torch.no_grad():
        model.loss(x)


def test_marked_method_runs_through_the_chain(net: Net, model: FleetModel) -> None:
    """A marked method runs inside the wrapped forward, with its own arguments, and forward is itself again after."""
    model.mark_forward_method("loss")
    x = torch.randn(3, 4)
    torch.testing.assert_close(model.loss(x, power=4), net.loss(x, power=4))
    assert model._chain.calls == 1
    torch.testing.assert_close(model(x), net(x))
    with pytest.raises(ConfigError, match="no such method"):
        model.mark_forward_method("lose")


def test_without_a_chain_methods_are_free(net: Net) -> None:
    """In a single process nothing is exchanged, so every method may run."""
    FleetModel(net, net).loss(torch.randn(3, 4)).backward()
    assert net.fc.weight.grad is not None


def test_clear_gradients_and_older_calls(net: Net, model: FleetModel) -> None:
    """003-27: scale_loss is the identity, apply_collective_grads does nothing; clear_gradients forgets gradients."""
    loss = model(torch.randn(3, 4)).sum()
    assert model.scale_loss(loss) is loss
    loss.backward()
    model.apply_collective_grads()
    assert net.fc.weight.grad is not None
    model.clear_gradients()
    assert net.fc.weight.grad is None
    with model.no_sync():
        pass


def test_deepcopy_and_apply(net: Net, model: FleetModel) -> None:
    """apply() reaches every user module; a deep copy is independent."""
    touched: list[nn.Module] = []
    model.apply(touched.append)
    assert net in touched
    assert net.fc in touched
    twin = copy.deepcopy(model)
    twin.fc.weight.data.zero_()
    assert bool(net.fc.weight.abs().sum() > 0)


def test_eval_does_not_stop_the_graph(model: FleetModel) -> None:
    """003-28: eval() still records the graph; no_grad() does not."""
    model.eval()
    x = torch.randn(2, 4)
    assert model(x).requires_grad
    with torch.no_grad():
        assert not model(x).requires_grad


def test_exported_module_is_the_users(net: Net, model: FleetModel, tmp_path: Path) -> None:
    """003-31: what is exported and loaded again computes what the wrapped model does, without this package in it."""
    x = torch.randn(3, 4)
    path = tmp_path / "model.pt2"
    torch.export.save(torch.export.export(model.module.eval(), (x,)), path)
    torch.testing.assert_close(torch.export.load(path).module()(x), net(x))
