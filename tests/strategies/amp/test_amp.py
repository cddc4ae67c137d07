"""amp: the user's loop is plain torch, and gradients, clipping, steps and states are those of torch's recipe."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fleet
from fleet.errors import ConfigError
from fleet.strategies._shared.casts import narrow_type
from fleet.strategies.amp.amp import AmpConfig
from tests.strategies.amp.amp_steps import (
    batches,
    fast_sgd,
    flat,
    hand_written,
    net_of,
    sgd,
    small_loss,
    start,
    wrapped,
)

FP16 = {"dtype": "float16"}


@pytest.mark.parametrize("optimizer_first", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_equals_autocast_and_gradscaler_by_hand(dtype: torch.dtype, optimizer_first: bool) -> None:
    """A.3, decision 7: the same weights, gradients and steps as torch's recipe, from a plain loop."""
    start({"dtype": str(dtype).removeprefix("torch.")})
    reference, net = net_of(), net_of()
    expected = hand_written(reference, fast_sgd(reference), 6, small_loss, dtype)
    model, optimizer = wrapped(net, fast_sgd(net), optimizer_first)
    for x, gradient in zip(batches(6), expected, strict=True):
        out = model(x)
        assert out.dtype == torch.float32
        loss = small_loss(out)
        assert loss.item() < 1e-5  # the loss is not scaled
        loss.backward()
        # A power of two leaves no rounding behind: the same bits.
        torch.testing.assert_close(net[0].weight.grad, gradient, atol=0, rtol=0)
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(flat(net), flat(reference), atol=0, rtol=0)


def test_float16_needs_the_scale_here() -> None:
    """A.3: the loss of these tests loses its gradient in unscaled float16, so the comparison can fail."""
    start({"dtype": "float16", "init_loss_scaling": 1.0, "use_dynamic_loss_scaling": False})
    net = net_of()
    model, _ = wrapped(net, sgd(net))
    small_loss(model(next(batches(1)))).backward()
    unscaled = net[0].weight.grad.clone()
    start(FP16)
    net = net_of()
    model, _ = wrapped(net, sgd(net))
    small_loss(model(next(batches(1)))).backward()
    assert (unscaled == 0).sum() > (net[0].weight.grad == 0).sum()


def test_clipping_between_backward_and_step() -> None:
    """A.3 item 6: clip_grad_norm_ without an unscale call sees true gradients."""
    start(FP16)
    reference, net = net_of(), net_of()
    scaler, update = torch.amp.GradScaler("cpu", init_scale=32768.0), sgd(reference)
    model, optimizer = wrapped(net, sgd(net))
    for x in batches(4):
        with torch.autocast("cpu", dtype=torch.float16):
            out = reference(x)
        scaler.scale(out.float().square().mean()).backward()
        scaler.unscale_(update)
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
        scaler.step(update)
        scaler.update()
        update.zero_grad()
        model(x).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        torch.testing.assert_close(norm, expected, atol=0, rtol=0)
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(flat(net), flat(reference), atol=0, rtol=0)


@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_])
def test_clipping_cannot_hide_an_inf(clip: Any) -> None:
    """A.3: the gradients are looked at before the user's loop clips them, so an overflow is skipped in any case."""
    start(FP16)
    net = nn.Linear(6, 4)
    model, optimizer = wrapped(net, sgd(net))
    before = flat(net)
    model(torch.ones(3, 6)).sum().mul(float("inf")).backward()
    assert net.weight.grad is not None
    assert net.weight.grad.isinf().all()  # and nowhere a nan, which clipping would leave
    clip(model.parameters(), 1.0)
    optimizer.step()
    assert torch.equal(flat(net), before)
    assert optimizer.state_dict()["amp"] == {"scale": 32768.0, "good": 0, "bad": 1}


def test_several_backward_passes_make_one_step() -> None:
    """A.3: gradients add up unscaled, also when the scale changes in between."""
    start({"dtype": "float16", "incr_every_n_steps": 1})
    reference, net = net_of(), net_of()
    model, optimizer = wrapped(net, sgd(net))
    update = sgd(reference)
    for first in (0, 1):
        for x in list(batches(4))[first * 2 : first * 2 + 2]:
            model(x).square().mean().backward()
            with torch.autocast("cpu", dtype=torch.float16):
                out = reference(x)
            # The reference is scaled by hand, one pass at a time, and unscaled in float32.
            kept = [p.grad.clone() if p.grad is not None else None for p in reference.parameters()]
            reference.zero_grad()
            (out.float().square().mean() * 32768.0).backward()
            for p, before in zip(reference.parameters(), kept, strict=True):
                p.grad = p.grad / 32768.0 if before is None else before + p.grad / 32768.0  # type: ignore[operator]
        for p, q in zip(net.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, atol=0 if first == 0 else 1e-6, rtol=0 if first == 0 else 1e-3)
        optimizer.step()
        optimizer.zero_grad()
        update.step()
        update.zero_grad()
        assert optimizer.get_loss_scaling() == 32768.0 * 2 ** (first + 1)


def test_an_overflow_skips_the_step_and_moves_the_scale() -> None:
    """A.2: every step with an inf is skipped; the second one in a row shrinks the scale; schedulers go on."""
    start({"dtype": "float16", "decr_every_n_nan_or_inf": 2, "decr_ratio": 0.5})
    net = net_of()
    model, optimizer = wrapped(net, sgd(net))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    before = flat(net)
    scales = []
    for x in batches(3):
        model(x * float("nan")).sum().backward()
        optimizer.step()  # under the test run's settings a scheduler that missed a step would raise
        optimizer.zero_grad()
        scheduler.step()
        scales.append(optimizer.get_loss_scaling())
    assert torch.equal(flat(net), before)
    assert scales == [32768.0, 16384.0, 16384.0]
    assert fleet.get_loss_scaling() == 16384.0
    model(next(batches(1))).mean().backward()
    optimizer.step()
    assert not torch.equal(flat(net), before)
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**3


def test_a_scale_that_is_too_large_finds_its_way_down() -> None:
    """A.2: training starts although the first scale overflows every gradient."""
    start({"dtype": "float16", "init_loss_scaling": 2.0**40, "decr_every_n_nan_or_inf": 1, "decr_ratio": 0.01})
    net = net_of()
    model, optimizer = wrapped(net, sgd(net))
    losses = []
    for _ in range(20):
        loss = model(next(batches(1))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == losses[1]
    assert losses[-1] < 0.1 * losses[0]


def test_state_resumes_exactly() -> None:
    """A.2: scale and counters are part of the optimizer's state; a plain optimizer reads the same state."""
    configs = {"dtype": "float16", "incr_every_n_steps": 3, "decr_every_n_nan_or_inf": 2}
    steps = [1.0, 1.0, float("inf"), 1.0, 1.0, 1.0, float("inf"), float("inf"), 1.0]

    def run(model: Any, optimizer: Any, which: slice) -> None:
        for x, factor in list(zip(batches(len(steps)), steps, strict=True))[which]:
            (model(x).square().mean() * factor).backward()
            optimizer.step()
            optimizer.zero_grad()

    start(configs)
    straight = net_of()
    model, optimizer = wrapped(straight, sgd(straight))
    run(model, optimizer, slice(0, 5))
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    run(model, optimizer, slice(5, None))
    expected = optimizer.state_dict()["amp"]
    start(configs)
    again = net_of(7)
    model, optimizer = wrapped(again, sgd(again))
    model.load_state_dict(saved[0])
    optimizer.set_state_dict({**saved[1], "epoch": 3})
    run(model, optimizer, slice(5, None))
    assert torch.equal(flat(again), flat(straight))
    assert optimizer.state_dict()["amp"] == expected
    plain = sgd(again)
    plain.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(plain.state_dict())  # and a state without a scale leaves the scale
    assert optimizer.state_dict()["amp"] == expected


def test_closures_minimize_and_sparse_gradients() -> None:
    """A.3: the other forms of a step: step(closure), minimize(loss), embeddings with sparse gradients."""
    start(FP16)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Flatten(), nn.Linear(8, 1))
    model, optimizer = wrapped(net, torch.optim.SGD(net.parameters(), lr=0.1))
    words = torch.tensor([[1, 2], [2, 3]])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(words).square().mean()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert net[0].weight.grad.is_sparse
    optimizer.zero_grad()
    loss = model(words).square().mean()
    assert loss < first
    optimizer.minimize(loss)
    optimizer.clear_grad()
    before = flat(net)
    (model(words).sum() * float("inf")).backward()
    optimizer.step()
    assert torch.equal(flat(net), before)
    assert optimizer.state_dict()["amp"]["bad"] == 1


def test_which_type() -> None:
    """A.2, A.3: float16 on a GPU, bfloat16 on the CPU, and what the keys ask for above that."""
    assert narrow_type(AmpConfig(), "cuda") is torch.float16
    assert narrow_type(AmpConfig(), "cpu") is torch.bfloat16
    assert narrow_type(AmpConfig(dtype="float16"), "cpu") is torch.float16
    assert narrow_type(AmpConfig(dtype="bfloat16"), "cuda") is torch.bfloat16
    assert narrow_type(AmpConfig(use_pure_fp16=True), "cpu") is torch.float16
    assert narrow_type(AmpConfig(use_pure_bf16=True), "cuda") is torch.bfloat16
    for wrong in ({"use_pure_fp16": True, "dtype": "bfloat16"}, {"use_pure_bf16": True, "dtype": "float16"},
                  {"use_pure_bf16": True, "use_pure_fp16": True}, {"dtype": "int8"}):  # fmt: skip
        with pytest.raises(ConfigError, match="amp_configs"):
            AmpConfig(**wrong)  # type: ignore[arg-type]


def test_keys_without_effect_are_remarked() -> None:
    """003-10: a key that the other keys leave without effect is named in the plan's notes."""
    strategy = fleet.DistributedStrategy()
    strategy.amp = True
    strategy.amp_configs = {"dtype": "bfloat16", "init_loss_scaling": 8.0, "use_optimizer_fp16": True}
    text = " ".join(fleet.strategies.plan(strategy, 1).notes)
    assert "'init_loss_scaling'] changes nothing: bfloat16" in text
    assert "'use_optimizer_fp16'] changes nothing: the parameters are in float32" in text
    strategy.amp_configs = {"dtype": "float16", "use_dynamic_loss_scaling": False, "incr_ratio": 3.0}
    assert "'incr_ratio'] changes nothing: use_dynamic_loss_scaling is False" in " ".join(
        fleet.strategies.plan(strategy, 1).notes
    )


def test_lbfgs_is_refused_with_float16_only() -> None:
    """A.3: an optimizer that runs backward many times for one step cannot be skipped."""
    start(FP16)
    with pytest.raises(ConfigError, match="LBFGS"):
        fleet.distributed_optimizer(torch.optim.LBFGS(net_of().parameters()))
    start({})
    fleet.distributed_optimizer(torch.optim.LBFGS(net_of().parameters()))
