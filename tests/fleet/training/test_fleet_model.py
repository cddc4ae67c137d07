"""FleetModel looks like the user's module and runs the wrapped one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fleet
from fleet.errors import CheckpointError, ConfigError
from fleet.training.fleet_model import FleetModel
from tests.helpers.workers import run_workers


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


def test_parts_in_evaluation_mode_keep_it() -> None:
    """Frozen batch norm stays frozen when the model around it, which trains, is wrapped."""
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    net[1].eval()
    model = FleetModel(net, net)
    assert (model.training, net.training, net[1].training) == (True, True, False)
    net.eval()
    model.rewrap(net)
    assert not model.training


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


@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:FutureWarning")  # from torch 2.14 on
def test_what_records_a_wrapped_model_is_refused(
    model: FleetModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """TorchScript took the module and failed at Fleet's annotations, on several workers export and trace at checks."""
    x = torch.randn(3, 4)
    torch.testing.assert_close(torch.jit.trace(model.eval(), x)(x), model(x))
    records: dict[str, Any] = {
        "script": lambda: torch.jit.script(model),
        "script of a module that holds it": lambda: torch.jit.script(nn.Sequential(model)),
        "trace": lambda: torch.jit.trace(model, x),
        "export": lambda: torch.export.export(model, (x,)),
    }
    monkeypatch.setattr(type(model._job), "world_size", 2)
    for record in records.values():
        with pytest.raises(ConfigError, match="cannot be a part of what is recorded.*model.module, in evaluation mode"):
            record()
    assert torch.jit.script(model.module.fc)(x).shape == model.module.fc(x).shape
    rows = nn.Sequential(fleet.SparseEmbedding(4, combiner="sum"), nn.Linear(4, 1))
    ids = torch.tensor([[7, 8], [9, 1]])
    assert fleet.ps.export(FleetModel(rows, rows), (ids,), tmp_path).is_dir(), "it takes the module itself"


class Keras(Net):
    """A module whose methods have names that every module or FleetModel has."""

    def compile(self, optimizer: str) -> str:  # type: ignore[override]
        return f"compiled for {optimizer}"

    def eval(self) -> Any:
        self.evaluated = True
        return super().eval()

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * 2

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.cleared = True

    def float(self, x: torch.Tensor | None = None) -> Any:
        return super().float() if x is None else self.fc(x)


def test_methods_of_the_users_come_first() -> None:
    """Issue: the user's own compile, eval, scale_loss and zero_grad are called, and guarded like the others."""
    net = Keras()
    model = FleetModel(net, Chain(net))
    assert model.compile("adam") == "compiled for adam"
    assert model.eval() is model
    assert (net.evaluated, net.training, model.training, model._chain.training) == (True, False, False, False)
    assert model.scale_loss(torch.ones(())) == 2
    model.zero_grad()
    assert net.cleared
    with pytest.raises(ConfigError, match=r"mark_forward_method\('float'\)"):
        model.float(torch.randn(3, 4))
    model.mark_forward_method("float")
    model.float(torch.randn(3, 4))
    assert model._chain.calls == 1
    twin = copy.deepcopy(FleetModel(net, net))
    assert twin.eval() is twin
    assert twin.module is not net


def test_compile_compiles_the_model_and_not_the_users_module(net: Net, model: FleetModel) -> None:
    """As with DistributedDataParallel, model.compile() compiles calls of the model itself, once."""
    model.compile(backend="eager")
    model(torch.randn(3, 4))
    assert model._chain.calls == 1
    assert net._compiled_call_impl is None
    assert bool(model)  # a module without a length


def net_of(seed: int, norm: bool = True) -> nn.Module:
    """Returns a small net with the weights of ``seed``."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4) if norm else nn.Tanh(), nn.Linear(4, 2))


def loss_of(model: Any, step: int, rank: int) -> torch.Tensor:
    """Returns the loss of one worker's batch."""
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))
    return model(x).square().mean()  # type: ignore[no-any-return]


def started(options: dict[str, Any], norm: bool = True) -> tuple[Any, Any]:
    """Returns a model and an optimizer in a new session with ``options``."""
    strategy = fleet.DistributedStrategy()
    for name, value in options.items():
        setattr(strategy, name, value)
    fleet.init(is_collective=True, strategy=strategy, log_level="ERROR")
    net = net_of(0, norm)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    return fleet.distributed_model(net), optimizer


def averaged(model: Any, optimizer: Any, rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns a moving average of the weights over three steps, and the gradients of a copy that is trained."""
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for step in range(3):
        loss_of(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    twin = copy.deepcopy(model)
    loss_of(twin, 3, rank).backward()
    assert all(p.grad is None for p in model.parameters())
    average.eval()(torch.randn(2, 3))
    return [p.detach() for p in average.parameters()], [p.grad for p in twin.parameters() if p.grad is not None]


SHARDED = {"sharding": True, "sharding_configs": {"sharding_degree": 2, "stage": 3}}
SCALED = {"amp": True, "amp_configs": {"dtype": "float16"}}
COPIED: list[dict[str, Any]] = [
    {},
    {"sharding": True, "sharding_configs": {"sharding_degree": 2}},
    {"recompute": True, "recompute_configs": {"checkpoints": ["0"]}},
]


def copies(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Returns what becomes of copies, beside DistributedDataParallel's."""
    found: dict[str, Any] = {"fleet": [averaged(*started(options), rank) for options in COPIED]}
    reducer = DistributedDataParallel(net_of(0))
    found["torch"] = averaged(reducer, torch.optim.SGD(reducer.parameters(), lr=0.1), rank)
    for name, options in (("amp", SCALED), ("gm", {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}),
                          ("nan", {"check_nan_inf": True}), ("sync", {"sync_batch_norm": True})):  # fmt: skip
        model, _ = started(options)
        twin = copy.deepcopy(model)
        x = torch.randn(4, 3)
        with torch.no_grad():
            found[f"{name} equal"] = torch.equal(twin.eval()(x), model.eval()(x))
        found[f"{name} error"] = error_of(twin(x).sum().backward)
        twin.requires_grad_(False)(x.requires_grad_()).sum().backward()
        found[f"{name} input"] = x.grad is not None
    model, _ = started({})
    path = f"{folder}/{rank}.pt"
    torch.save(model, path)
    loaded = torch.load(path, weights_only=False)
    found["loaded"] = torch.equal(loaded.eval()(x), model.eval()(x))
    found["loaded error"] = error_of(loaded(x).sum().backward)
    again = fleet.distributed_model(loaded.module)
    again(x).sum().backward()
    found["loaded trains"] = all(p.grad is not None for p in again.parameters())
    model, _ = started(SHARDED)
    found["sharded"] = [
        error_of(copy.deepcopy, model),
        error_of(AveragedModel, model),
        error_of(torch.save, model, path),
    ]
    return found


def error_of(call: Any, *args: Any) -> str:
    """Returns the ConfigError that a call raises, or an empty text."""
    try:
        call(*args)
    except ConfigError as error:
        return str(error)
    return ""


def test_copies(tmp_path: Path) -> None:
    """Issue: deepcopy, AveragedModel and torch.save as with DistributedDataParallel, or refused with what to do."""
    for found in run_workers(copies, 2, str(tmp_path), backend=None):
        for mine in found["fleet"]:
            torch.testing.assert_close(mine, found["torch"], atol=1e-7, rtol=0)
        for name, trains in (("amp", False), ("gm", False), ("nan", True), ("sync", True)):
            assert found[f"{name} equal"], name
            assert ("distributed_model(twin.module)" in found[f"{name} error"]) != trains, name
            assert found[f"{name} input"], name
        assert found["loaded"]
        assert "torch.load" in found["loaded error"]
        assert found["loaded trains"]
        assert all("full_state_dict()" in error for error in found["sharded"]), found["sharded"]


def uneven(rank: int, world_size: int) -> dict[str, Any]:
    """Returns the weights after 3 batches of worker 0 and 5 of worker 1, and what stepping together is told."""
    found: dict[str, Any] = {}
    for name, options in (("Join", {}), ("join", {}), ("half", {"fp16_allreduce": True})):
        model, optimizer = started(options, norm=False)
        with Join([model]) if name == "Join" else model.join():
            train(model, optimizer, rank)
        found[name] = [p.detach() for p in model.parameters()]
    reducer = DistributedDataParallel(net_of(0, norm=False))
    with Join([reducer]):
        train(reducer, torch.optim.SGD(reducer.parameters(), lr=0.1), rank)
    found["torch"] = [p.detach() for p in reducer.parameters()]
    for name, options in (("sharding", SHARDED), ("localsgd", {"localsgd": True})):
        model, _ = started(options)
        found[name] = [error_of(model.join), error_of(Join, [model])]
    return found


def train(model: Any, optimizer: Any, rank: int) -> None:
    """Trains on 3 or 5 batches."""
    for step in range(3 + 2 * rank):
        loss_of(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_uneven_batches() -> None:
    """Issue: Join([model]) and model.join() train as DistributedDataParallel; refused where all must step together."""
    for found in run_workers(uneven, 2, backend=None):
        for name in ("Join", "join"):
            torch.testing.assert_close(found[name], found["torch"], atol=1e-7, rtol=0)
        torch.testing.assert_close(found["half"], found["torch"], atol=1e-3, rtol=0)
        for name in ("sharding", "localsgd"):
            assert all(f"{name} needs every worker in every step" in error for error in found[name]), found[name]


def by_flag(rank: int, world_size: int) -> dict[str, Any]:
    """Returns gradients of two batches, of which the first is not exchanged because of the flag."""
    found: dict[str, Any] = {}
    for stage in (0, 1, 2, 3):
        sharding = {"sharding": True, "sharding_configs": {"sharding_degree": 2, "stage": stage}} if stage else {}
        model, _ = started(sharding, norm=False)
        flags = [model.require_backward_grad_sync]
        model.require_backward_grad_sync = False
        flags.append(model.require_backward_grad_sync)
        loss_of(model, 0, rank).backward()
        own = "require_backward_grad_sync" in model.module.__dict__
        model.require_backward_grad_sync = True
        with model.no_sync():
            flags.append(model.require_backward_grad_sync)
        loss_of(model, 1, rank).backward()
        gradients = [p.grad.full_tensor() if stage > 1 else p.grad for p in model.parameters()]
        found[str(stage)] = flags, own, gradients
    return found


def test_the_flag_of_data_parallel() -> None:
    """Issue: model.require_backward_grad_sync acts, and reads, as DistributedDataParallel's, in every stage."""
    plain = net_of(0, norm=False)
    for step, rank in ((0, 0), (0, 1), (1, 0), (1, 1)):
        (loss_of(plain, step, rank) / 2).backward()
    for found in run_workers(by_flag, 2, backend=None):
        for stage in "0123":
            flags, own, gradients = found[stage]
            assert (flags, own) == ([True, False, False], False), stage
            torch.testing.assert_close(gradients, [p.grad for p in plain.parameters()], atol=1e-6, rtol=0)
    net = net_of(0)
    model = FleetModel(net, net)
    model.require_backward_grad_sync = False
    assert model.require_backward_grad_sync is False
