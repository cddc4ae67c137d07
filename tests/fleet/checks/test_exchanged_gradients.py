"""Gradients that no backward pass of the wrapped model has exchanged, and steps that some workers leave out."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fleet import fleet
from fleet.errors import ConfigError, RendezvousError
from tests.helpers.checked_training import OPTIONS, STEPS, batch, flat, job, message, network, start, weights
from tests.helpers.workers import WorkerError, run_workers

MERGE = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}
Action = Callable[[int], object]


def stage(number: int, degree: int = 2, **configs: Any) -> dict[str, Any]:
    return {"sharding": True, "sharding_configs": {"stage": number, "sharding_degree": degree, **configs}}


def slopes(net: nn.Module, model: Any, x: Tensor, share: bool) -> None:
    """Writes what torch.autograd.grad returns into ``.grad``, the mean over workers with ``share``."""
    found = torch.autograd.grad(model(x).square().mean(), list(net.parameters()))
    for parameter, gradient in zip(net.parameters(), found, strict=True):
        if share:
            torch.distributed.all_reduce(gradient.div_(2))
        parameter.grad = gradient


def train_on_slopes(share: bool) -> Tensor:
    net, _, optimizer, model = job({})
    for step in range(STEPS):
        slopes(net, model, batch(step, fleet.worker_index()), share)
        optimizer.step()
    return weights(model)


def train_without_exchange(options: dict[str, Any]) -> Tensor:
    _, _, optimizer, model = job(options)
    for step in range(2):
        with model.no_sync():
            model(batch(step, fleet.worker_index())).square().mean().backward()
        optimizer.step()
    return weights(model)


def accumulate(options: dict[str, Any]) -> Tensor:
    """Two batches for a step, then one, in turns; and forwards without backward between them."""
    _, _, optimizer, model = job(options)
    for step in range(STEPS):
        optimizer.zero_grad()
        x = batch(step, fleet.worker_index())
        model(x)
        if step % 2:
            with model.no_sync():
                model(x).square().mean().backward()
        model(x).square().mean().backward()
        optimizer.step()
    return weights(model)


def plainly(double: bool) -> Tensor:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for step in range(STEPS):
        loss = net(torch.cat([batch(step, 0), batch(step, 1)])).square().mean()
        optimizer.zero_grad()
        (loss * (2 if double and step % 2 else 1)).backward()
        optimizer.step()
    return flat(net.state_dict())


def lbfgs(local: bool) -> Tensor:
    net = network()
    start({})
    optimizer: Any = fleet.distributed_optimizer(torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=4))
    model = fleet.distributed_model(net)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(batch(0, fleet.worker_index())).square().mean()
        loss.backward()
        mean = loss.detach() if local else loss.detach() / 2
        if not local:
            torch.distributed.all_reduce(mean)
        return mean  # type: ignore[no-any-return]

    for _ in range(3):
        optimizer.step(closure)
    return weights(model)


def merge_lbfgs() -> None:
    net = network()
    start(MERGE)
    fleet.distributed_optimizer(torch.optim.LBFGS(net.parameters()))


def step_in_backward(options: dict[str, Any]) -> Tensor:
    """Steps an optimizer for each parameter from a hook, as those do who keep no gradients."""
    net = network()
    start(options)
    model: Any = fleet.distributed_model(net)
    optimizers = {p: fleet.distributed_optimizer(torch.optim.SGD([p], 0.1)) for p in net.parameters()}

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for step in range(2):
        model(batch(step, fleet.worker_index())).square().mean().backward()
    return weights(model)


def loops(rank: int, world_size: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {
        "slopes": message(lambda: train_on_slopes(share=False)),
        "shared slopes": train_on_slopes(share=True),
        "lbfgs": message(lambda: lbfgs(local=True)),
        "lbfgs, mean": lbfgs(local=False),
        "lbfgs, merged": message(merge_lbfgs),
        "in backward": message(lambda: step_in_backward({})),
        "in backward, stage 2": step_in_backward(OPTIONS["stage 2"]),
    }
    for name in ("data_parallel", "stage 1", "stage 2", "stage 3"):
        found[f"no_sync, {name}"] = message(lambda options=OPTIONS[name]: train_without_exchange(options))  # type: ignore[misc]
        found[f"in turns, {name}"] = accumulate(OPTIONS[name])
    return found


def test_gradients_that_stay_local() -> None:
    """Issue 9, 15: gradients that nobody has exchanged end the job, unless the loop exchanges them itself."""
    both = run_workers(loops, 2, timeout_s=120)
    net = network()
    whole = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=4)

    def closure() -> Tensor:
        whole.zero_grad()
        loss = net(torch.cat([batch(0, 0), batch(0, 1)])).square().mean()
        loss.backward()
        return loss  # type: ignore[no-any-return]

    for _ in range(3):
        whole.step(closure)
    stepped = network()
    plain = torch.optim.SGD(stepped.parameters(), 0.1)
    for step in range(2):
        plain.zero_grad()
        stepped(torch.cat([batch(step, 0), batch(step, 1)])).square().mean().backward()
        plain.step()
    for found in both:
        assert (
            "those of backward() under no_sync() and those that come through the plain module stay local"
            in found["slopes"]
        )
        torch.testing.assert_close(found["shared slopes"], plainly(double=False), rtol=1e-5, atol=1e-6)
        assert "return the mean of all workers' losses" in found["lbfgs"]
        torch.testing.assert_close(found["lbfgs, mean"], flat(net.state_dict()), rtol=1e-4, atol=1e-5)
        assert "let the closure take the whole batch" in found["lbfgs, merged"]
        assert "step() ran inside backward(), as in a hook" in found["in backward"]
        assert "no_sync" not in found["in backward"]
        torch.testing.assert_close(found["in backward, stage 2"], flat(stepped.state_dict()), rtol=1e-5, atol=1e-6)
        for name in ("data_parallel", "stage 1", "stage 2", "stage 3"):
            wanted = "are still inside the sharded model" if name == "stage 3" else "differs between the workers"
            assert wanted in found[f"no_sync, {name}"], name
            torch.testing.assert_close(found[f"in turns, {name}"], plainly(double=True), rtol=1e-5, atol=1e-6)


def leave_out_a_step(rank: int, world_size: int, name: str) -> str:
    warnings.simplefilter("ignore")
    _, _, optimizer, model = job(OPTIONS[name])
    try:
        for step in range(STEPS):
            model(batch(step, rank)).square().mean().backward()
            if rank == 0 or step != 2:
                optimizer.step()
            optimizer.zero_grad()
    except (ConfigError, RendezvousError, RuntimeError) as error:  # rank 0 hears that the other one has ended
        if name == "stage 1":
            raise
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "data_parallel",
            "Worker 1 called step() after 2 backward passes that exchanged gradients, and worker 0 did not",
        ),
        ("stage 2", "Call backward() and step() on every worker alike"),
    ],
)
def test_a_step_that_one_worker_leaves_out(name: str, said: str) -> None:
    """Issue 9, section 2: the next update found the workers apart, and nobody said so."""
    found = run_workers(leave_out_a_step, 2, name, backend=None, environment={"FLEET_WAIT_LIMIT": "1"})
    assert said in found[1]


def test_a_step_that_one_worker_leaves_out_in_stage_1() -> None:
    """Issue 36: its workers hung: the exchange of step() did not count as waiting."""
    with pytest.raises(WorkerError, match=r"step\(\) that some workers have skipped|has ended|Connection closed"):
        run_workers(leave_out_a_step, 2, "stage 1", backend=None, timeout_s=60, environment={"FLEET_WAIT_LIMIT": "1"})


def step_by_another(rank: int, world_size: int) -> dict[str, str]:
    """Steps an optimizer that nobody has wrapped, after one that was."""
    warnings.simplefilter("ignore")
    found = {}
    for name in ("data_parallel", "stage 1", "stage 2", "gradient_merge", "localsgd"):
        _, _, optimizer, model = job(OPTIONS[name])
        for step in range(2):
            model(batch(step, rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        other, alone = torch.optim.SGD(model.parameters(), 0.1), nn.Linear(1, 1)
        torch.optim.SGD(alone.parameters(), 0.1).step()
        model(batch(2, rank)).square().mean().backward()
        found[name] = message(other.step)
    return found


def test_an_optimizer_beside_the_wrapped_one() -> None:
    """It left out what the options do at a step; with data parallel alone it is right."""
    for found in run_workers(step_by_another, 2):
        assert found.pop("data_parallel") == ""
        for name, text in found.items():
            assert "step() was called on an optimizer that distributed_optimizer() has not seen" in text, name


def begin_in_a_window(rank: int, world_size: int) -> dict[str, str]:
    """Makes a second optimizer, or writes gradients, after one batch of two."""
    warnings.simplefilter("ignore")
    found = {}
    for number in (2, 3):
        net, _, optimizer, model = job(stage(number, gradient_merge_acc_step=2))
        model(batch(0, rank)).square().mean().backward()
        optimizer.step()
        another = torch.optim.SGD(model.parameters(), 0.1)
        found[f"second, {number}"] = message(lambda another=another: fleet.distributed_optimizer(another))  # type: ignore[misc]
    for name, options in (("merge", MERGE), ("2", stage(2, gradient_merge_acc_step=2))):
        net, _, optimizer, model = job(options)
        model(batch(0, rank)).square().mean().backward()
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        found[f"written, {name}"] = message(optimizer.step)
    return found


def test_what_comes_in_the_middle_of_a_window() -> None:
    """Gradients that waited in a divided model were taken over by a new optimizer; written ones were dropped."""
    for found in run_workers(begin_in_a_window, 2):
        assert "1 of 2 batches wait for an update inside the sharded model" in found["second, 3"]
        assert found["second, 2"] == ""  # the batch is dropped, with a warning
        for name in ("merge", "2"):
            assert "in a batch that completes no update" in found[f"written, {name}"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", [1, 2, 3])
def test_one_worker_merges_batches_too(number: int) -> None:
    """sharding_configs['gradient_merge_acc_step'] did nothing with one worker."""
    _, _, optimizer, model = job(stage(number, degree=1, gradient_merge_acc_step=2))
    for step in range(STEPS):
        for rank in range(2):
            optimizer.zero_grad()
            model(batch(step, rank)).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(weights(model), plainly(double=False), rtol=1e-5, atol=1e-6)
