"""FleetOptimizer is a torch optimizer with Fleet's calls beside torch's."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import fleet
from fleet.errors import ConfigError
from fleet.job.job import Job
from fleet.options import DistributedStrategy
from fleet.role_maker.record import RoleRecord
from fleet.training.fleet_model import FleetModel
from fleet.training.fleet_optimizer import FleetOptimizer
from tests.helpers.fleets import own_fleet
from tests.helpers.workers import run_workers


def job() -> Job:
    """Returns a job of one worker that no session holds."""
    return Job(record=RoleRecord(), device=torch.device("cpu"), options=DistributedStrategy(), say=print)


def made(net: nn.Module, **settings: Any) -> FleetOptimizer:
    """Returns SGD in a FleetOptimizer."""
    inner = torch.optim.SGD(net.parameters(), **{"lr": 0.1, **settings})
    return FleetOptimizer(inner, job(), inner)


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))


def loss_of(net: nn.Module) -> torch.Tensor:
    return net(torch.ones(2, 4)).square().mean()


def test_is_a_torch_optimizer_and_schedulers_drive_it(net: nn.Module) -> None:
    """isinstance holds; StepLR changes the rate that the inner optimizer uses."""
    optimizer = made(net)
    assert isinstance(optimizer, Optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    loss_of(net).backward()
    optimizer.step()
    scheduler.step()
    assert optimizer.optimizer.param_groups[0]["lr"] == 0.05
    assert optimizer.get_lr() == 0.05
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.3, total_steps=10),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda e: 0.9**e),
    ],
    ids=["cosine", "one-cycle", "plateau", "lambda"],
)
def test_schedulers_work_without_warning(net: nn.Module, make: Any) -> None:
    """Every kind of scheduler accepts the wrapped optimizer and sees its steps."""
    optimizer = made(net, momentum=0.9)
    scheduler = make(optimizer)
    loss_of(net).backward()
    optimizer.step()
    scheduler.step(*([1.0] if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) else []))


def test_both_loops_give_the_same_numbers(net: nn.Module) -> None:
    """003-32: step/zero_grad, minimize/clear_grad and the static idiom (no backward) end at the same weights."""
    start = {k: v.clone() for k, v in net.state_dict().items()}
    ends = []
    for loop in ("torch", "fleet", "static"):
        net.load_state_dict(start)
        optimizer = made(net, momentum=0.9)
        optimizer.zero_grad()
        for _ in range(3):
            loss = loss_of(net)
            if loop != "static":
                loss.backward()
            if loop == "torch":
                optimizer.step()
                optimizer.zero_grad()
            else:
                _, pairs = optimizer.minimize(loss)
                assert len(pairs) == 4
                optimizer.clear_gradients() if loop == "fleet" else optimizer.clear_grad()
        ends.append({k: v.clone() for k, v in net.state_dict().items()})
    for end in ends[1:]:
        for name, value in ends[0].items():
            torch.testing.assert_close(end[name], value, atol=0, rtol=0)


def test_minimize_never_runs_a_second_backward(net: nn.Module) -> None:
    """002-04: after the user's backward, minimize uses the gradients that are there (torch would raise otherwise)."""
    optimizer = made(net)
    loss = loss_of(net)
    loss.backward()
    before = net[0].weight.grad.clone()
    optimizer.minimize(loss)
    torch.testing.assert_close(net[0].weight.grad, before)


def test_minimize_runs_backward_after_gradients_were_zeroed_in_place(net: nn.Module) -> None:
    """G7: gradients that a clear filled with zeros are not new gradients."""
    optimizer = made(net)
    loss_of(net).backward()
    optimizer.clear_grad(set_to_zero=True)
    weight = net[0].weight.clone()
    optimizer.minimize(loss_of(net))
    assert not torch.equal(weight, net[0].weight)


def test_minimize_takes_a_parameter_as_the_loss() -> None:
    net = nn.ParameterList([torch.ones(())])
    optimizer = made(net)
    optimizer.minimize(net[0])
    assert net[0].item() == pytest.approx(0.9)
    optimizer.zero_grad()
    assert optimizer.minimize(torch.ones(())) == ([], [])  # nothing to differentiate, and no gradient


def test_minimize_restricts_the_update(net: nn.Module) -> None:
    """B.4: parameter_list and no_grad_set restrict the update; the other gradients stay."""
    optimizer = made(net)
    loss_of(net).backward()
    first, second = net[0].weight.clone(), net[1].weight.clone()
    optimizer.minimize(loss_of(net), parameter_list=net[1].parameters(), no_grad_set=[net[1].bias])
    assert torch.equal(net[0].weight, first)
    assert not torch.equal(net[1].weight, second)
    assert net[0].weight.grad is not None
    with pytest.raises(ConfigError, match="takes the loss tensor"):
        optimizer.minimize("loss")  # type: ignore[arg-type]


def test_state_pickles_and_round_trips(net: nn.Module) -> None:
    """The state pickles; another wrapped or plain optimizer continues from it exactly; 'epoch' is left alone."""
    optimizer = made(net, momentum=0.9)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loss_of(net).backward()
    optimizer.step()
    state = pickle.loads(pickle.dumps(optimizer.state_dict()))
    other = made(net, momentum=0.9)
    other.set_state_dict({**state, "epoch": 4})
    buffer = other.state[net[0].weight]["momentum_buffer"]
    torch.testing.assert_close(buffer, optimizer.state[net[0].weight]["momentum_buffer"])
    torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9).load_state_dict(state)
    copied = pickle.loads(pickle.dumps(optimizer))
    assert copied.get_lr() == optimizer.get_lr()


def test_learning_rate_calls(net: nn.Module) -> None:
    """set_lr sets every group; a wrong value raises and changes nothing."""
    optimizer = made(net)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "lr": 0.7})
    optimizer.set_lr(0.25)
    assert [g["lr"] for g in optimizer.optimizer.param_groups] == [0.25, 0.25]
    for wrong in (-1, "0.1", True):
        with pytest.raises(ConfigError, match="at least 0"):
            optimizer.set_lr(wrong)  # type: ignore[arg-type]
    assert optimizer.get_lr() == 0.25


def test_hooks_and_closures_reach_the_inner_optimizer(net: nn.Module) -> None:
    """A step hook runs at each step; a closure is evaluated by the inner optimizer."""
    optimizer = made(net)
    seen: list[int] = []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))

    def closure() -> float:
        optimizer.zero_grad()
        loss = loss_of(net)
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    assert seen == [1]


def test_grad_scaler_accepts_it(net: nn.Module) -> None:
    """An explicit GradScaler unscales and steps the wrapped optimizer, and skips on an infinite gradient."""
    optimizer = made(net)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = net[0].weight.clone()
    scaler.scale(loss_of(net)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(before, net[0].weight)
    before = net[0].weight.clone()
    optimizer.zero_grad()
    (scaler.scale(loss_of(net)) * float("inf")).backward()
    scaler.step(optimizer)
    assert torch.equal(before, net[0].weight)


def wrapped(net: nn.Module) -> FleetModel:
    """Returns the net as distributed_model does in one process."""
    return FleetModel(net, net)


def plain_updates(make: Any, losses: int, **settings: Any) -> list[torch.Tensor]:
    """Returns the parameters after plain SGD has cleared, differentiated and stepped for each loss."""
    net = make()
    optimizer = torch.optim.SGD(net.parameters(), **{"lr": 0.1, **settings})
    for _ in range(losses):
        optimizer.zero_grad()
        loss_of(net).backward()
        optimizer.step()
    return [p.detach() for p in net.parameters()]


def small_net() -> nn.Module:
    """Returns the net of the fixture."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))


@pytest.mark.parametrize("wrap", [wrapped, lambda net: net], ids=["wrapped", "not wrapped"])
@pytest.mark.parametrize("form", ["static", "eager", "both", "cleared before", "cleared to zeros"])
def test_minimize_starts_from_cleared_gradients(wrap: Any, form: str) -> None:
    """Issue 9, 1.13: updates are those of SGD and do not pile up, whoever calls backward and whatever is cleared."""
    net = small_net()
    model, optimizer = wrap(net), made(net)
    for step in range(4):
        if form == "cleared before":
            optimizer.clear_grad()
        loss = loss_of(model)
        if form == "eager" or (form == "both" and step % 2):
            loss.backward()
        optimizer.minimize(loss)
        if form in ("eager", "both"):
            optimizer.clear_grad()
        if form == "cleared to zeros":
            optimizer.clear_grad(set_to_zero=True)
    torch.testing.assert_close([p.detach() for p in net.parameters()], plain_updates(small_net, 4), atol=0, rtol=0)


def test_minimize_looks_at_its_loss_and_not_at_other_passes() -> None:
    """Issue 9, 1.13: another loss has passed through the model, or torch.autograd.grad has; this one was not run."""
    net = small_net()
    model, optimizer = wrapped(net), made(net)
    loss_of(model).mul(100).backward()  # a generator's loss, say, that nobody cleared here
    optimizer.minimize(loss_of(model))
    torch.testing.assert_close([p.detach() for p in net.parameters()], plain_updates(small_net, 1), atol=0, rtol=0)
    x = torch.ones(2, 4, requires_grad=True)
    before = [p.detach().clone() for p in net.parameters()]
    slope = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
    optimizer.minimize(slope.square().mean() + loss_of(model))
    assert any(not torch.equal(p, old) for p, old in zip(net.parameters(), before, strict=True))


def test_minimize_of_two_optimizers() -> None:
    """Issue 9, 1.5: one backward() serves two optimizers; two minimize() of one loss without it are refused."""
    net = small_net()
    model = wrapped(net)
    first, second = made(net[0]), made(net[1])
    loss = loss_of(model)
    loss.backward()
    first.minimize(loss)
    second.minimize(loss)
    torch.testing.assert_close([p.detach() for p in net.parameters()], plain_updates(small_net, 1), atol=0, rtol=0)
    loss = loss_of(model)
    first.minimize(loss)
    with pytest.raises(ConfigError, match=r"Call loss\.backward\(\) once"):
        second.minimize(loss)


def static_loops(rank: int, world_size: int, names: list[str]) -> dict[str, list[torch.Tensor]]:
    """Runs four calls of minimize() and nothing else, under one option after the other."""
    found = {}
    for name in names:
        strategy = fleet.DistributedStrategy()
        if name == "amp":
            strategy.amp = True
            strategy.amp_configs = {"dtype": "float16", "use_pure_fp16": False}
        elif name == "localsgd":
            strategy.localsgd = True
        elif name:
            strategy.sharding = True
            strategy.sharding_configs = {"sharding_degree": 2, "stage": int(name)}
        fleet.init(is_collective=True, strategy=strategy)
        net = small_net()
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        model = fleet.distributed_model(net)
        for _ in range(4):
            optimizer.minimize(loss_of(model))
        found[name] = list(model.full_state_dict().values())
    return found


def test_the_static_loop_on_two_workers() -> None:
    """Issue 9, 1.13: the same updates as SGD under each option, and no worker that waits for another."""
    expected = plain_updates(small_net, 4)
    for found in run_workers(static_loops, 2, ["", "localsgd", "1", "2", "3", "amp"], backend=None):
        for name, values in found.items():
            loose = 2e-3 if name == "amp" else 1e-6
            torch.testing.assert_close(values, expected, atol=loose, rtol=loose, msg=lambda m, name=name: f"{name} {m}")


def test_a_part_of_a_merged_update_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """B.4: parameter_list restricts one update; with gradient_merge an update takes several calls."""
    own = own_fleet(monkeypatch)
    strategy = fleet.DistributedStrategy()
    strategy.gradient_merge = True
    strategy.gradient_merge_configs = {"k_steps": 2}
    fleet.init(is_collective=True, strategy=strategy)
    net = small_net()
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    model = fleet.distributed_model(net)
    optimizer.minimize(loss_of(model), parameter_list=net.parameters())
    with pytest.raises(ConfigError, match="several batches"):
        optimizer.minimize(loss_of(model), parameter_list=net[1].parameters())
    own.session.close()
