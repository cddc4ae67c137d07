"""Parameters that are frozen, thawed or added after distributed_model(): exchanged, or refused by name."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fleet import fleet
from tests.helpers.checked_training import OPTIONS, STEPS, batch, flat, job, message, network, step_once, weights
from tests.helpers.workers import run_workers

# Which of the layers 0 and 2 are frozen before the model is wrapped, and what requires_grad becomes before which step.
PLANS: dict[str, tuple[list[int], dict[int, dict[int, bool]]]] = {
    "thawed before the first step": ([0], {0: {0: True}}),
    "thawed later": ([0], {2: {0: True}}),
    "frozen": ([], {2: {0: False}}),
    "in turns": ([], {0: {0: False}, 2: {0: True, 2: False}, 4: {0: False, 2: True}}),
    "all frozen at first": ([0, 2], {0: {2: True}, 2: {0: True}, 4: {0: False}}),
}


def follow(net: nn.Sequential, plan: dict[int, dict[int, bool]], step: int) -> None:
    for layer, trains in plan.get(step, {}).items():
        net[layer].requires_grad_(trains)


def train_plans(rank: int, world_size: int) -> dict[str, Tensor]:
    warnings.simplefilter("ignore")
    found = {}
    for option, options in OPTIONS.items():
        for name, (frozen, plan) in PLANS.items():
            if option != "data_parallel" and name not in ("thawed later", "in turns"):
                continue
            net = network()
            for layer in frozen:
                net[layer].requires_grad_(False)
            net, _, optimizer, model = job(options, net)
            for step in range(STEPS):
                follow(net, plan, step)
                step_once(model, optimizer, step)
            found[f"{option}: {name}"] = weights(model)
    return found


def plain(frozen: list[int], plan: dict[int, dict[int, bool]], k_steps: int) -> Tensor:
    """Trains in one process on the data of both workers."""
    net = network()
    for layer in frozen:
        net[layer].requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for step in range(STEPS):
        follow(net, plan, step)
        (net(torch.cat([batch(step, 0), batch(step, 1)])).square().mean() / k_steps).backward()
        if (step + 1) % k_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
    return flat(net.state_dict())


def test_frozen_and_thawed_parameters_train_as_in_one_process() -> None:
    """Issue 9: gradual unfreezing, and layers that train in turns, under every strategy that trains."""
    results = run_workers(train_plans, 2, backend=None)
    for name, found in results[0].items():
        option, plan = name.split(": ")
        expected = plain(*PLANS[plan], 2 if option == "gradient_merge" else 1)
        near = 1e-3 if option in ("amp", "fp16_allreduce") else 1e-6
        torch.testing.assert_close(found, results[1][name], atol=0, rtol=0, msg=name)
        if option != "localsgd":  # whose momentum is local
            torch.testing.assert_close(
                found, expected, atol=near, rtol=0, msg=lambda text, name=name: f"{name}\n{text}"
            )


def add_parameters(rank: int, world_size: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    for option, options in {**OPTIONS, "pure": {"amp": True, "amp_configs": {"use_pure_bf16": True}}}.items():
        net, _, optimizer, model = job(options)

        def head(net: Any = net, optimizer: Any = optimizer, model: Any = model) -> None:
            for step in range(STEPS):
                if step == 2:
                    torch.manual_seed(7 + rank)
                    net[2] = nn.Linear(8, 1)
                    optimizer.add_param_group({"params": list(net[2].parameters())})
                step_once(model, optimizer, step)

        found[option] = message(head) or weights(model)
    return found


def test_a_head_that_is_replaced_is_exchanged_or_refused() -> None:
    """Issue 9: it starts as rank 0's; where the model was divided or converted it is refused by its name."""
    first, second = run_workers(add_parameters, 2, backend=None)
    for option in OPTIONS:
        if option in ("stage 2", "stage 3"):
            assert "'2.weight' was added to the model after distributed_model()" in first[option]
        else:
            torch.testing.assert_close(first[option], second[option], atol=0, rtol=0, msg=option)
    assert "pure 16-bit amp" in first["pure"]


def add_batch_norm(rank: int, world_size: int) -> list[str]:
    warnings.simplefilter("ignore")
    found = []
    for layer in (nn.Linear(8, 8), nn.BatchNorm1d(8)):
        net, _, optimizer, model = job({"sync_batch_norm": True})
        net[1] = layer
        found.append(message(partial(step_once, model, optimizer, 0)))
    return found


def test_a_batch_norm_that_comes_too_late_for_sync_batch_norm() -> None:
    for linear, norm in run_workers(add_batch_norm, 2, backend=None):
        assert linear == ""
        assert "'1.weight' was added to the model after distributed_model(), and sync_batch_norm" in norm


class Lora(nn.Module):
    """A frozen layer and a small one beside it, as adapters are put into a model."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, inner.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(inner.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) + x @ self.down.T @ self.up.T
        return out


def add_adapters(rank: int, world_size: int) -> Tensor:
    net, _, _, model = job({})
    net[0] = Lora(net[0])
    optimizer = fleet.distributed_optimizer(torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.1))
    for step in range(3):
        step_once(model, optimizer, step)
    return weights(model)


def test_adapters_that_are_added_after_wrapping() -> None:
    first, second = run_workers(add_adapters, 2, backend=None)
    torch.testing.assert_close(first, second, atol=0, rtol=0)


def frozen_between_passes(model: Any, steps: Any, held: Callable[[], Any], rows: Sequence[int]) -> None:
    """The layer 2 has a gradient of the first pass, is frozen in the second one and thawed before the step."""
    for step in range(0, STEPS, 2):
        for rank in rows:
            with held():
                (model(batch(step, rank)).square().mean() / len(rows)).backward()
        net = getattr(model, "module", model)
        net[2].requires_grad_(False)
        for rank in rows:
            (model(batch(step + 1, rank)).square().mean() / len(rows)).backward()
        net[2].requires_grad_(True)
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        steps.step()
        steps.zero_grad()


def freeze_between_passes(rank: int, world_size: int) -> list[Any]:
    found: list[Any] = []
    for option in ("data_parallel", "stage 1"):
        for is_held in (False, True):
            _, _, optimizer, model = job(OPTIONS[option])
            held = model.no_sync if is_held else nullcontext
            said = message(partial(frozen_between_passes, model, optimizer, held, [rank]))
            found.append(said if is_held else said or weights(model))
    return found


def test_a_gradient_of_a_parameter_that_was_frozen_meanwhile() -> None:
    """It is used where it was exchanged before, and refused where it stayed local."""
    net = network()
    frozen_between_passes(net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), nullcontext, range(2))
    for found in run_workers(freeze_between_passes, 2, backend=None):
        for exchanged, local in zip(found[::2], found[1::2], strict=True):
            torch.testing.assert_close(exchanged, flat(net.state_dict()), atol=1e-6, rtol=0)
            assert "'2.weight'" in local


def thaw_alone(rank: int, world_size: int) -> str:
    net = network()
    net[0].requires_grad_(False)
    net, _, optimizer, model = job({}, net)
    step_once(model, optimizer, 0)
    if rank == 0:
        net[0].requires_grad_(True)
    else:
        net[2].bias.requires_grad_(False)
    return message(lambda: step_once(model, optimizer, 1))


def test_workers_that_thaw_different_parameters() -> None:
    for found in run_workers(thaw_alone, 2, backend=None):
        assert "'0.bias' trains on worker 0" in found or "'0.weight' trains on worker 0" in found


def gan(rank: int, world_size: int) -> float:
    """Freezes the critic while the generator trains, as many scripts do; returns a step's time."""
    _, _, to_make, maker = job({}, nn.Linear(4, 4))
    critic_net = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 1))
    critic = fleet.distributed_model(critic_net)
    to_judge = fleet.distributed_optimizer(torch.optim.SGD(critic_net.parameters(), 0.1))
    reducer = critic._chain.reducer
    for step in range(4):
        critic.requires_grad_(False)
        critic(maker(batch(step, rank))).mean().backward()
        to_make.step()
        to_make.zero_grad()
        critic.requires_grad_(True)
        (critic(maker(batch(step, rank)).detach()) - critic(batch(step, rank))).mean().backward()
        to_judge.step()
        to_judge.zero_grad()
    assert critic._chain.reducer is reducer
    return float(torch.cat([weights(maker), weights(critic)]).double().sum())


def test_a_critic_that_is_frozen_in_turns() -> None:
    first, second = run_workers(gan, 2, backend=None)
    assert first == second


def release_gradients(rank: int, world_size: int) -> list[str]:
    held = []
    for option, options in OPTIONS.items():
        _, _, optimizer, model = job(options, nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
        model(batch(0, rank)).square().mean().backward()
        gradients = [weakref.ref(p.grad) for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        model(batch(1, rank))  # in which torch takes new buckets
        held += [option for gradient in gradients if gradient() is not None][:1]
    return held


def test_no_gradient_outlives_its_step() -> None:
    """A gradient is often a view of a whole bucket: one that is kept doubles the memory of all gradients."""
    assert run_workers(release_gradients, 2) == [[], []]
