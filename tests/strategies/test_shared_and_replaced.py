"""Issue 9: replaced gradients, optimizers in turns, shared bodies, outputs that hide tensors, sparse gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fleet import fleet
from tests.helpers.checked_training import batch, message, start, weights
from tests.helpers.workers import run_workers

MERGE = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}
STEPS = 6


def stage(number: int, **more: Any) -> dict[str, Any]:
    return {"sharding": True, "sharding_configs": {"sharding_degree": 2, "stage": number, **more}}


def batches(step: int) -> Tensor:
    """Returns the batches of all workers."""
    return batch(step, fleet.worker_index()) if fleet.worker_num() > 1 else torch.cat([batch(step, 0), batch(step, 1)])


def replaced() -> float:
    """Gradients 1 and 3, halved by assignment: their mean is 1, as when they are halved in place."""
    net = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(net.weight)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), 1.0))
    model = fleet.distributed_model(net)
    for value in (1.0, 3.0):
        model(torch.full((1, 1), value)).sum().backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad * 0.5
        optimizer.step()
        optimizer.zero_grad()
    return net.weight.item()


@pytest.mark.filterwarnings("ignore")
def test_gradients_that_are_replaced_keep_the_window() -> None:
    start(MERGE)
    assert replaced() == -1.0


class OnBody(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))  # type: ignore[no-any-return]


def in_turns(distributed: bool) -> Tensor:
    """Two optimizers of one model, the one stepping after even batches and the other after odd ones."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizers = [torch.optim.SGD(net[place].parameters(), 0.1) for place in (0, 2)]
    merged: list[list[list[Tensor]]] = [[], []]
    model = net
    if distributed:
        optimizers = [fleet.distributed_optimizer(optimizer) for optimizer in optimizers]
        model = fleet.distributed_model(net)
    for step in range(8):
        mine, held = step % 2, [p for group in optimizers[step % 2].param_groups for p in group["params"]]
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(batches(step)).square().mean().backward()
        if distributed:
            optimizers[mine].step()
            continue
        merged[mine].append([p.grad.clone() for p in held])
        if len(merged[mine]) == 2:
            for parameter, *gradients in zip(held, *merged[mine], strict=True):
                parameter.grad = torch.stack(gradients).mean(0)
            optimizers[mine].step()
            merged[mine] = []
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def one_of_two(distributed: bool) -> Tensor:
    """Trains one of two models that share a body, with an optimizer that holds both."""
    torch.manual_seed(0)
    body = nn.Linear(4, 5)
    nets: list[Any] = [OnBody(body), OnBody(body)]
    optimizer = torch.optim.SGD([*nets[0].parameters(), *nets[1].head.parameters()], 0.1)
    model = nets[1]
    if distributed:
        optimizer = fleet.distributed_optimizer(optimizer)
        _, model = (fleet.distributed_model(net) for net in nets)
    for step in range(4):
        (model(batches(step)).square().mean() * (1 if distributed else 0.5)).backward()
        if distributed or step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in nets[1].parameters()])


def shared(distributed: bool, together: bool) -> Tensor:
    torch.manual_seed(0)
    body = nn.Linear(4, 5)
    nets: list[Any] = [OnBody(body), OnBody(body)]
    if together:
        optimizers = [torch.optim.SGD([*nets[0].parameters(), *nets[1].head.parameters()], 0.1)]
    else:
        optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in nets]
    models = nets
    if distributed:
        optimizers = [fleet.distributed_optimizer(optimizer) for optimizer in optimizers]
        models = [fleet.distributed_model(net) for net in nets]
    for step in range(STEPS):
        for number, optimizer in enumerate(optimizers):
            optimizer.zero_grad()
            ran = models if together else [models[number]]
            torch.stack([model(batches(step)).square().mean() for model in ran]).sum().backward()
            optimizer.step()
    return torch.cat([p.detach().flatten() for net in nets for p in net.parameters()])


def embeddings(distributed: bool) -> Tensor:
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    model = net
    if distributed:
        optimizer, model = fleet.distributed_optimizer(optimizer), fleet.distributed_model(net)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batches(step).mul(20).long().abs() % 20).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in net.parameters()])


class Hides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> SimpleNamespace:
        return SimpleNamespace(y=self.layer(x))


def refusal(options: dict[str, Any], action: Callable[[], object]) -> str:
    """Returns the text of the ConfigError with which ``action`` ends in a job with ``options``, or ``""``."""
    start(options)
    return message(action)


def run_hidden() -> None:
    net = Hides()
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1))
    model = fleet.distributed_model(net)
    model(batches(0)).y.sum().backward()
    optimizer.step()


def wrap_twice() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    fleet.distributed_model(net)
    net[1] = nn.Linear(4, 3)
    fleet.distributed_model(net)


def train(net: nn.Module, between: Callable[[Any], object] = lambda model: None) -> None:
    """Takes four steps; ``between`` runs before each forward and after each backward."""
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1))
    model = fleet.distributed_model(net)
    for step in range(4):
        between(model)
        optimizer.zero_grad()
        model(batches(step).to(next(net.parameters()).dtype)).square().mean().backward()
        between(model)
        optimizer.step()


def halve_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.data = parameter.grad.data * 0.5


def one_memory() -> nn.Module:
    net: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight.data = net[0].weight.data
    return net  # type: ignore[no-any-return]


def another_head() -> None:
    """A second phase with another head, and a third with another type, whose wrapped models are others."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    train(net)
    net[1] = nn.Linear(4, 3)
    train(net)
    net.double()
    train(net)


def add_one_memory() -> None:
    net = nn.Linear(4, 4)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1))
    fleet.distributed_model(net)
    optimizer.add_param_group({"params": list(one_memory().parameters())})


def frozen_between(distributed: bool) -> Tensor:
    """Gradients of one batch wait in a model that another one's loss then passes through, frozen."""
    torch.manual_seed(0)
    nets: list[Any] = [nn.Linear(4, 4), nn.Linear(4, 1)]
    optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in nets]
    models = nets
    if distributed:
        optimizers = [fleet.distributed_optimizer(optimizer) for optimizer in optimizers]
        models = [fleet.distributed_model(net) for net in nets]
    share = 1 if distributed else 0.5
    for step in range(4):
        for place in (1, 0):
            nets[1].requires_grad_(place == 1)
            if distributed or step % 2 == 0:
                optimizers[place].zero_grad()
            inputs = batches(step) if place else models[0](batches(step))
            (models[1](inputs).tanh().mean() * share).backward()
            if distributed or step % 2:
                optimizers[place].step()
    states = [model.full_state_dict() if distributed else model.state_dict() for model in models]
    return torch.cat([value.flatten() for state in states for value in state.values()])


def on_two(rank: int, world_size: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    for name, options in (("merge", MERGE), ("stage 1", stage(1, gradient_merge_acc_step=2))):
        start(options)
        found[f"in turns, {name}"] = in_turns(distributed=True)
        start(options)
        found[f"one of two, {name}"] = one_of_two(distributed=True)
        start(options)
        found[f"replaced, {name}"] = replaced()
    start({})
    found["together"] = shared(distributed=True, together=True)
    found["apart"] = shared(distributed=True, together=False)
    found["type"] = refusal({}, lambda: train(nn.Linear(4, 1), lambda model: model.double()))
    found["data"] = refusal({}, lambda: train(nn.Linear(4, 1), halve_data))
    found["head"] = refusal({}, another_head)
    found["memory, 1"] = refusal(stage(1), lambda: train(one_memory()))
    found["memory, added"] = refusal(stage(1), add_one_memory)
    start({"fp16_allreduce": True})
    found["sparse"] = embeddings(distributed=True)
    for number in (2, 3):
        found[f"sparse, {number}"] = refusal(stage(number), lambda: embeddings(distributed=True))
        found[f"hidden, {number}"] = refusal(stage(number), run_hidden)
        found[f"twice, {number}"] = refusal(stage(number), wrap_twice)
        found[f"memory, {number}"] = refusal(stage(number), lambda: train(one_memory()))
        found[f"drawn, {number}"] = refusal(
            stage(number), lambda: train(nn.Linear(4, 4), lambda model: nn.init.xavier_uniform_(model.weight))
        )
        start(stage(number, gradient_merge_acc_step=2))
        found[f"frozen, {number}"] = frozen_between(distributed=True)
        found[f"script, {number}"] = refusal(
            stage(number), lambda: fleet.distributed_model(nn.Sequential(torch.jit.script(nn.Linear(4, 1))))
        )
    found["shared, 3"] = refusal(stage(3), lambda: shared(distributed=True, together=True))
    for kind, together in (("together", True), ("apart", False)):
        start(stage(2))
        found[f"{kind}, 2"] = shared(distributed=True, together=together)
    found["twice, merge"] = refusal(MERGE, wrap_twice)
    return found


def test_two_workers_equal_one_process_or_refuse() -> None:
    """What is right equals plain torch on the data of both; what is not is refused on both."""
    both = run_workers(on_two, 2, timeout_s=120)
    start({})
    for found in both:
        for name in ("merge", "stage 1"):
            torch.testing.assert_close(found[f"in turns, {name}"], in_turns(distributed=False), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(found[f"one of two, {name}"], one_of_two(False), rtol=1e-5, atol=1e-6)
            assert found[f"replaced, {name}"] == -1.0
        torch.testing.assert_close(found["together"], shared(False, together=True), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found["apart"], shared(False, together=False), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found["sparse"], embeddings(False), rtol=1e-2, atol=1e-4)
        assert "'weight' is torch.float64 on cpu and was torch.float32" in found["type"]
        assert "The .data of a gradient of shape [1, 4] was assigned" in found["data"]
        assert found["head"] == ""
        assert "two parameters in the same memory" in found["memory, 1"]
        assert "two parameters in the same memory" in found["memory, added"]
        for number in (2, 3):
            torch.testing.assert_close(found[f"frozen, {number}"], frozen_between(False), rtol=1e-5, atol=1e-6)
            assert "two parameters in the same memory" in found[f"memory, {number}"]
            assert found[f"drawn, {number}"] == ""
            assert "'0' has sparse=True" in found[f"sparse, {number}"]
            assert "distributed_model() was already called for this module" in found[f"twice, {number}"]
        assert "forward() returned SimpleNamespace" in found["hidden, 3"]
        assert "'0' is a compiled script" in found["script, 3"]
        assert "belongs to a model that was divided before" in found["shared, 3"]
        assert found["hidden, 2"] == found["script, 2"] == ""
        for kind, together in (("together", True), ("apart", False)):
            torch.testing.assert_close(found[f"{kind}, 2"], shared(False, together=together), rtol=1e-5, atol=1e-6)
        assert "gradient_merge acts in it" in found["twice, merge"]


PHASES: dict[str, dict[str, Any]] = {
    "gradient_merge": MERGE,
    "stage 1": stage(1, gradient_merge_acc_step=2),
    "stage 2": stage(2, gradient_merge_acc_step=2),
    "stage 3": stage(3, gradient_merge_acc_step=2),
    "amp": {"amp": True, "amp_configs": {"dtype": "float16"}},
    "dgc": {"dgc": True, "dgc_configs": {"sparsity": [0.9]}},
    "localsgd": {"localsgd": True, "localsgd_configs": {"k_steps": 1}},
}


def train_phase(model: Any, net: nn.Module, first: int) -> Any:
    """Takes four steps with an optimizer of its own, which it returns."""
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1, momentum=0.9))
    for step in range(first, first + 4):
        optimizer.zero_grad()
        model(batches(step)).square().mean().backward()
        optimizer.step()
    return optimizer


def phases(rank: int, world_size: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    for name, options in PHASES.items():
        torch.manual_seed(0)
        net: Any = nn.Sequential(nn.Linear(4, 128), nn.Tanh(), nn.Linear(128, 128), nn.Linear(128, 1))
        start(options)
        model = fleet.distributed_model(net)
        earlier = train_phase(model, net, 0)
        state = model.full_state_dict()
        train_phase(model, net, 4)
        after = weights(model)
        found[name] = "" if name in ("amp", "localsgd") else message(earlier.step)
        start(options)
        net = nn.Sequential(nn.Linear(4, 128), nn.Tanh(), nn.Linear(128, 128), nn.Linear(128, 1))
        net.load_state_dict(state)
        model = fleet.distributed_model(net)
        train_phase(model, net, 4)
        found[f"{name}, off by"] = float((after - weights(model)).abs().max())
    return found


def test_a_second_optimizer_for_the_same_parameters_starts_anew() -> None:
    """A second phase of training equals a job that begins with it; the first phase's optimizer is refused then."""
    for found in run_workers(phases, 2):
        for name in PHASES:
            assert found[f"{name}, off by"] < 1e-6, (name, found)
            if name not in ("amp", "localsgd"):
                assert "step the later one" in found[name], (name, found)


@pytest.mark.filterwarnings("ignore")
def test_masks_of_attention_are_no_alarm() -> None:
    """The -inf of a float mask is meant; every loss and gradient is finite."""
    start({"check_nan_inf": True})
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    net = nn.TransformerEncoder(layer, 1)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1))
    model = fleet.distributed_model(net)
    x = torch.randn(2, 5, 8)
    before = net.layers[0].linear1.weight.detach().clone()
    model(x, mask=nn.Transformer.generate_square_subsequent_mask(5)).square().mean().backward()
    optimizer.step()
    assert not torch.equal(net.layers[0].linear1.weight, before)
