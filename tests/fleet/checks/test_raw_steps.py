"""Loops beside the wrapped objects are refused with what to do, and what is right in plain torch trains."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fleet import fleet
from fleet.errors import ConfigError
from tests.helpers.checked_training import OPTIONS, batch, job, message, network, step_once, weights
from tests.helpers.workers import run_workers


class Fits(nn.Module):
    """A model that trains itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.a(x)
        return out

    def fit(self, optimizer: Any, x: Tensor) -> None:
        for _ in range(3):
            self(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def advance(self, optimizer: Any, x: Tensor) -> None:
        self(x)
        optimizer.step()

    def penalty(self, x: Tensor) -> Tensor:
        loss: Tensor = self(x).square().mean()
        (slope,) = torch.autograd.grad(loss, self.a.weight, create_graph=True)
        return loss + slope.square().sum()


def fit(rank: int, world_size: int) -> dict[str, Any]:
    torch.manual_seed(0)
    net, _, optimizer, model = job({}, Fits())
    x = batch(0, rank)
    found = {"unmarked": message(lambda: model.fit(optimizer, x))}
    for name in ("fit", "advance", "penalty"):
        model.mark_forward_method(name)
    original = torch.autograd.backward
    found["marked"] = message(lambda: model.fit(optimizer, x))
    found["step"] = message(lambda: model.advance(optimizer, x))
    found["undone"] = torch.autograd.backward is original
    model.penalty(x).backward()
    optimizer.step()
    optimizer.zero_grad()
    Fits.fit(model, optimizer, x)
    found["weights"] = weights(model)
    return found


def test_a_method_that_runs_backward_itself() -> None:
    """Issue 9: it is refused with what to do; what the message says works, and grad() in a marked method too."""
    first, second = run_workers(fit, 2, backend=None)
    assert "mark_forward_method('fit')" in first["unmarked"]
    assert "Fits.fit(model, ...)" in first["unmarked"]
    assert "calls backward() there" in first["marked"]
    assert "Fits.fit(model, ...)" in first["marked"]
    assert "calls optimizer.step() there" in first["step"]
    assert first["undone"]
    torch.testing.assert_close(first["weights"], second["weights"], atol=0, rtol=0)


def raw_step(rank: int) -> None:
    _, raw, _, model = job({})
    model(batch(0, rank)).sum().backward()
    raw.step()


def scaled_raw_step(rank: int) -> None:
    _, raw, _, model = job({})
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(batch(0, rank)).sum()).backward()
    scaler.step(raw)


def raw_model(rank: int) -> None:
    net, _, optimizer, model = job({})
    step_once(model, optimizer, 0)
    step_once(net, optimizer, 1)


def submodule(rank: int) -> None:
    net, _, optimizer, model = job({})
    model[0](batch(0, rank)).sum().backward()
    optimizer.step()


def raw_model_in_closure(rank: int) -> None:
    net, _, optimizer, _ = job({})

    def closure() -> Tensor:
        loss: Tensor = net(batch(0, rank)).sum()
        loss.backward()
        return loss

    optimizer.step(closure)


def thawed_raw_model(rank: int) -> None:
    net = network()
    net[0].requires_grad_(False)
    net, _, optimizer, _ = job({"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}, net)
    net[0].requires_grad_(True)
    net(batch(0, rank)).sum().backward()
    optimizer.step()


def other_model(rank: int) -> None:
    _, _, _, model = job({})
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(network().parameters(), 0.1))
    step_once(model, optimizer, 0)


def unwrapped_criterion(rank: int) -> None:
    criterion = nn.Linear(1, 1)
    net, _, _, model = job({})
    optimizer = fleet.distributed_optimizer(torch.optim.SGD([*net.parameters(), *criterion.parameters()], 0.1))
    criterion(model(batch(0, rank))).sum().backward()
    optimizer.step()


WRONG = (
    raw_step, scaled_raw_step, raw_model, submodule, raw_model_in_closure, thawed_raw_model, other_model,
    unwrapped_criterion,
)  # fmt: skip


def wrong_loops(rank: int, world_size: int) -> dict[str, str]:
    return {loop.__name__: message(partial(loop, rank)) for loop in WRONG}


def test_loops_beside_the_wrapped_objects_are_refused() -> None:
    """Issue 9: the first step says what the loop calls and what it should call."""
    found = run_workers(wrong_loops, 2, backend=None)[0]
    for name in ("raw_step", "scaled_raw_step"):
        assert "step() was called on the optimizer that was passed to distributed_optimizer()" in found[name], name
    assert "test_raw_steps.py:" in found["raw_step"]
    for name in ("raw_model", "submodule", "raw_model_in_closure", "thawed_raw_model"):
        assert "call the model that distributed_model() returned" in found[name], name
    assert "'0.weight', which did not train when" in found["thawed_raw_model"]
    assert "holds no parameter of a model" in found["other_model"]
    assert "(1, 1) (group 0), which is not a parameter of any model" in found["unwrapped_criterion"]


def evaluates_plain_module(rank: int) -> Any:
    net, _, optimizer, model = job({})
    for step in range(2):
        step_once(model, optimizer, step)
        with torch.no_grad():
            net(batch(9, 0))
    return model


def scheduler_on_raw(rank: int) -> Any:
    _, raw, optimizer, model = job({})
    scheduler = torch.optim.lr_scheduler.StepLR(raw, 1)
    for step in range(2):
        step_once(model, optimizer, step)
        scheduler.step()
    return model


def moving_average(rank: int) -> Any:
    net, _, optimizer, model = job({})
    step_once(model, optimizer, 0)
    average = copy.deepcopy(net)
    swa = torch.optim.swa_utils.AveragedModel(net)
    for step in range(2):
        step_once(model, optimizer, step)
        swa.update_parameters(net)
        average.load_state_dict(net.state_dict())
    average(batch(0, rank)).sum().backward()
    pickle.loads(pickle.dumps(net))  # noqa: S301 - written a moment ago
    return model


def swaps_on_rank_0(rank: int) -> Any:
    net, _, optimizer, model = job({})
    step_once(model, optimizer, 0)
    if rank == 0:
        kept = copy.deepcopy(model.state_dict())
        model.load_state_dict({name: torch.zeros_like(value) for name, value in kept.items()})
        with torch.no_grad():
            model(batch(0, 0))
        model.load_state_dict(kept)
    step_once(model, optimizer, 1)
    return model


def one_optimizer_two_models(rank: int) -> Any:
    net, _, _, model = job({})
    other = nn.Linear(1, 1)
    head = fleet.distributed_model(other)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD([*net.parameters(), *other.parameters()], 0.1))
    for step in range(2):
        head(model(batch(step, rank))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def two_optimizers_one_model(rank: int) -> Any:
    net, _, _, model = job({})
    both = [fleet.distributed_optimizer(torch.optim.SGD(net[i].parameters(), 0.1)) for i in (0, 2)]
    for step in range(2):
        model(batch(step, rank)).square().mean().backward()
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
    return model


def optimizer_of_each_epoch(rank: int) -> Any:
    net, _, _, model = job({})
    for step in range(3):
        step_once(model, fleet.distributed_optimizer(torch.optim.Adam(net.parameters())), step)
    return model


def parts_of_a_dictionary(rank: int) -> Any:
    parts = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Linear(2, 1)})

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = parts

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.parts["b"](self.parts["a"](x))
            return out

    _, _, optimizer, model = job({}, Both())
    step_once(model, optimizer, 0)
    return model


def steps_twice(rank: int) -> Any:
    _, _, optimizer, model = job({})
    model(batch(0, rank)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    return model


def line_search(rank: int) -> Any:
    net, _, _, model = job({})
    optimizer = fleet.distributed_optimizer(torch.optim.LBFGS(net.parameters(), max_iter=2))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(batch(0, 0)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    return model


RIGHT = (
    evaluates_plain_module, scheduler_on_raw, moving_average, swaps_on_rank_0, one_optimizer_two_models,
    two_optimizers_one_model, optimizer_of_each_epoch, parts_of_a_dictionary, steps_twice, line_search,
)  # fmt: skip


def right_loops(rank: int, world_size: int) -> dict[str, Tensor]:
    """Trains in ways that are right in plain torch, and must not be refused."""
    warnings.simplefilter("ignore")
    found = {}
    for loop in RIGHT:
        try:
            found[loop.__name__] = weights(loop(rank))
        except Exception as error:
            raise AssertionError(f"{loop.__name__}: {error}") from error
    return found


def test_loops_that_are_right_in_plain_torch_train() -> None:
    first, second = run_workers(right_loops, 2, backend=None)
    for name in first:
        torch.testing.assert_close(first[name], second[name], atol=0, rtol=0, msg=name)


@pytest.fixture
def alone() -> Iterator[None]:
    """A session of one process, which ends with the test."""
    yield
    fleet.init(is_collective=True, log_level="ERROR")


@pytest.mark.usefixtures("alone")
def test_one_process_without_options_trains_in_every_way() -> None:
    """Nothing acts, so nothing is missed: what works in plain torch works."""
    net, raw, _, model = job({})
    net(batch(0, 0)).sum().backward()
    raw.step()
    other = fleet.distributed_optimizer(torch.optim.SGD(network().parameters(), 0.1))
    step_once(model, other, 0)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("option", ["amp", "gradient_merge"])
def test_one_process_in_which_an_option_acts(option: str) -> None:
    _, raw, _, model = job(OPTIONS[option])
    model(batch(0, 0)).sum().backward()
    with pytest.raises(
        ConfigError, match="step\\(\\) was called on the optimizer that was passed to distributed_optimizer"
    ):
        raw.step()
