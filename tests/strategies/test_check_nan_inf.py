"""check_nan_inf names the first module, rank and step with a NaN or Inf, and stops every worker (003-35, 003-37)."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fleet
from fleet.env import Environment
from fleet.errors import NanInfError, StrategyConflictError
from fleet.strategies import plan
from tests.helpers.workers import run_workers

NAN, INF = float("nan"), float("inf")


class BadGradient(torch.autograd.Function):
    """Passes forward on; in backward puts a NaN into the gradient while ``Breaking.backward`` says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * NAN if Breaking.backward else gradient


class Breaking(nn.Module):
    """``how`` is '', or where the NaN arises: 'between' two modules, in its own 'output', or in 'backward'."""

    backward = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.how = ""

    def forward(self, x: Tensor) -> Tensor:
        Breaking.backward = self.how == "backward"
        x = BadGradient.apply(self.first(x))  # type: ignore[no-untyped-call]
        if self.how == "between":
            x = torch.log(x - x - 1)
        x = self.second(x)
        return x / (x - x) if self.how == "output" else x


def net() -> Any:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), Breaking(), nn.Linear(6, 2))


def start(**options: Any) -> tuple[Any, Any]:
    """Returns the wrapped model and optimizer, with check_nan_inf and ``options`` on."""
    strategy = fleet.DistributedStrategy()
    strategy.update({"check_nan_inf": True, **options})
    fleet.init(is_collective=True, strategy=strategy)
    module = net()
    model = fleet.distributed_model(module)
    return model, fleet.distributed_optimizer(torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))


def batch(step: int, rank: int = 0) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(97 * step + rank))


def train(model: Any, optimizer: Any, x: Tensor) -> None:
    F.mse_loss(model(x), torch.ones(len(x), 2)).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("between", r"NaN first appears in input 0 of module '2.second' \(Linear\): it was computed between modules"),
        ("output", r"in forward, in output 0 of module '2' \(Breaking\): its inputs and its own weights were finite"),
        ("backward", r"NaN first appears in backward, in the gradient that flows into output 0 of module '2.first'"),
    ],
)
def test_names_the_module(how: str, message: str) -> None:
    """003-35: forward, between modules and backward; nothing is updated, and the step number is the user's."""
    model, optimizer = start()
    train(model, optimizer, batch(0))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model[2].how = how
    with pytest.raises(NanInfError, match=message) as caught:
        train(model, optimizer, batch(1))
    assert str(caught.value).startswith("step 2, rank 0: ")
    assert (caught.value.rank, caught.value.step) == (0, 2)
    torch.testing.assert_close(model.state_dict(), before, atol=0, rtol=0)
    optimizer.zero_grad()
    model[2].how = ""
    train(model, optimizer, batch(2))  # what was seen is forgotten


def test_names_batch_weight_and_parameter() -> None:
    """003-35: the batch, a weight that is bad already, and a gradient that overflows on its own."""
    model, optimizer = start()
    with pytest.raises(NanInfError, match=r"Inf first appears in input 0 of the model: it came with the batch"):
        train(model, optimizer, torch.full((5, 4), INF))
    optimizer.zero_grad()
    with torch.no_grad():
        model[2].second.bias[1] = NAN
    with pytest.raises(NanInfError, match=r"output 0 of module '2.second' \(Linear\): its parameter 'bias' holds one"):
        train(model, optimizer, batch(0))
    with torch.no_grad():
        model[2].second.bias[1] = 0.0
    optimizer.zero_grad()
    x = torch.zeros(5, 4)
    x[0, 0] = 1e30
    with torch.no_grad():
        model[0].weight.fill_(1e-30)
    (model(x) * 1e20).sum().backward()
    with pytest.raises(NanInfError, match="Inf first appears in the gradient of parameter '0.weight'"):
        optimizer.step()


def test_evaluation_raises_by_itself() -> None:
    """003-35: without gradients no step() follows, so the forward itself raises."""
    model, _ = start()
    with torch.no_grad():
        model(batch(0))
        with pytest.raises(NanInfError, match="came with the batch"):
            model(batch(0) * NAN)
        model(batch(0))


def test_a_closure_is_checked_before_the_update() -> None:
    """003-35: optimizers that take a closure."""
    model, optimizer = start()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(batch(0) * NAN).sum()
        loss.backward()
        return loss

    with pytest.raises(NanInfError, match="step 1, rank 0"):
        optimizer.step(closure)
    torch.testing.assert_close(model.state_dict(), before, atol=0, rtol=0)


@pytest.mark.parametrize(
    "options",
    [
        {"recompute": True, "recompute_configs": {"checkpoints": ["2"]}},
        {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 3}},
        {"lars": True},
        {"amp": True},
        {"amp": True, "amp_configs": {"dtype": "float16"}},
    ],
)
def test_works_with(options: dict[str, Any]) -> None:
    """003-35: numbers are those without the option, and an error is found in any batch of a window."""
    states = []
    for on in (False, True):
        model, optimizer = start(**options, check_nan_inf=on)
        for step in range(3):
            train(model, optimizer, batch(step))
        states.append({name: value.clone() for name, value in model.state_dict().items()})
    torch.testing.assert_close(states[0], states[1], atol=0, rtol=0)
    model[2].how = "between"
    with pytest.raises(NanInfError, match="step 4, rank 0: NaN .* input 0 of module '2.second'"):
        train(model, optimizer, batch(4))
    if options == {"amp": True, "amp_configs": {"dtype": "float16"}}:
        return
    optimizer.zero_grad()
    model[2].how = "backward"
    with pytest.raises(NanInfError, match="step 5, rank 0: NaN .* gradient .* output 0 of module '2.first'"):
        train(model, optimizer, batch(5))


def test_recomputed_values_are_looked_at_once() -> None:
    """003-35: recompute runs modules again in backward, with the same values; their gradients are looked at."""
    found = []
    for options in ({}, {"recompute": True, "recompute_configs": {"checkpoints": ["2"]}}):
        model, _ = start(**options)
        (strategy,) = fleet.session.strategies[-1:]
        model(batch(0)).sum().backward()
        found.append(sorted((place.kind, place.name) for place in strategy.watch.sightings._places))
    assert found[0] == found[1]
    assert ("gradient", "2.first") in found[1]


def test_overflow_of_scaled_gradients_is_left_to_amp() -> None:
    """003-35: a float16 step that overflows is skipped by amp; it is not an error."""
    model, optimizer = start(amp=True, amp_configs={"dtype": "float16", "init_loss_scaling": 2.0**40})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    train(model, optimizer, batch(0))
    torch.testing.assert_close(model.state_dict(), before, atol=0, rtol=0)  # skipped


def test_scaler_of_the_user_is_left_alone() -> None:
    """003-35: the same with a GradScaler of the user's loop."""
    model, optimizer = start()
    scaler = fleet.distributed_scaler(torch.amp.GradScaler("cpu", init_scale=3e38))
    scales = []
    for step in range(4):
        scaler.scale(model(batch(step)).square().sum() * 1e3).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    assert scales[1] < scales[0] < 3e38


def test_state_counts_the_steps() -> None:
    """003-35: after a resume the message names the step of the whole training; a plain optimizer loads the state."""
    model, optimizer = start()
    train(model, optimizer, batch(0))
    state = optimizer.state_dict()
    torch.optim.SGD(net().parameters(), lr=0.1, momentum=0.9).load_state_dict(state)
    model, optimizer = start()
    optimizer.load_state_dict(state)
    with pytest.raises(NanInfError, match="step 2, rank 0"):
        train(model, optimizer, batch(1) * NAN)


@pytest.mark.parametrize("flag", ["FLAGS_check_nan_inf", "FLAGS_pp_check_naninf"])
def test_the_environment_switches_it_on(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """003-35: the flags of the environment, read at fleet.init."""
    assert "check_nan_inf" not in str(plan(fleet.DistributedStrategy(), 1))
    monkeypatch.setenv(flag, "1")
    assert Environment().bool(flag)
    fleet.init(is_collective=True)
    module = net()
    model = fleet.distributed_model(module)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(module.parameters(), lr=0.1))
    with pytest.raises(NanInfError, match="came with the batch"):
        train(model, optimizer, batch(0) * NAN)
    monkeypatch.setenv(flag, "0")
    assert "check_nan_inf" not in str(plan(fleet.DistributedStrategy(), 1))


def test_compiled_models_are_refused() -> None:
    """003-35: no module could be named, so the pair is refused with that reason."""
    strategy = fleet.DistributedStrategy()
    strategy.update({"check_nan_inf": True, "to_static": True})
    with pytest.raises(StrategyConflictError, match="does not call its modules one by one"):
        plan(strategy, 1)


# ---- several workers -------------------------------------------------------------------------------------------------


def stop_together(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Trains with a checkpoint, breaks on rank 1 alone, goes back to the checkpoint and ends the training."""
    model, optimizer = start()
    messages = []
    for step in range(6):
        if step == 3:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/{rank}.pt")
            for how in ("between", "backward"):
                model[2].how = how if rank == 1 else ""
                begun = time.monotonic()
                try:
                    train(model, optimizer, batch(step, rank))
                except NanInfError as error:
                    messages.append((str(error), error.rank, time.monotonic() - begun))
                optimizer.zero_grad()
            model[2].how = ""
            saved = torch.load(f"{folder}/{rank}.pt", weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        train(model, optimizer, batch(step, rank))
    return {"messages": messages, "state": dict(model.state_dict())}


def straight(rank: int, world_size: int) -> dict[str, Any]:
    """The same training with nothing broken and nothing checked."""
    model, optimizer = start(check_nan_inf=False)
    for step in range(6):
        train(model, optimizer, batch(step, rank))
    return dict(model.state_dict())


def test_all_workers_stop_and_resume(tmp_path: Path) -> None:
    """003-35, 003-37: both raise in the same step and name rank 1; from the checkpoint training goes on exactly."""
    results = run_workers(stop_together, 2, str(tmp_path), backend=None)
    expected = run_workers(straight, 2, backend=None)
    for result in results:
        (forward, forward_rank, forward_s), (backward, backward_rank, backward_s) = result["messages"]
        assert forward.startswith("step 4, rank 1: NaN first appears in input 0 of module '2.second'")
        assert backward.startswith("step 5, rank 1: NaN first appears in backward, in the gradient that flows into ou")
        assert (forward_rank, backward_rank) == (1, 1)
        assert max(forward_s, backward_s) < 10
        torch.testing.assert_close(result["state"], expected[0], atol=0, rtol=0)
    assert results[0]["messages"][0][0] == results[1]["messages"][0][0]


@pytest.mark.gpu
def test_no_wait_before_the_step() -> None:
    """003-35: on a GPU neither forward nor backward waits for the device."""
    model, optimizer = start()
    x = batch(0).cuda()
    train_cuda(model, optimizer, x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode is a prototype, as torch says
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(x).square().mean().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    optimizer.step()
    optimizer.zero_grad()
    model[2].how = "between"
    with pytest.raises(NanInfError, match=r"input 0 of module '2.second'"):
        train_cuda(model, optimizer, x)


def train_cuda(model: Any, optimizer: Any, x: Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
