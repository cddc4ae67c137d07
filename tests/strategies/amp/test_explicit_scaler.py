"""An explicit GradScaler beside amp, amp_init and the reported loss scale (003-20, B.2, B.4)."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import fleet
from fleet.errors import ConfigError, OptionWarning
from tests.helpers.workers import run_workers
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


def explicit(model: Any, optimizer: Any, scaler: Any, count: int, unscale: bool = False) -> list[torch.Tensor]:
    """Trains by torch's recipe with ``scaler``; returns the largest gradient at each step, as the scaler left it."""
    seen = []
    for x in batches(count):
        loss = small_loss(model(x))
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
        seen.append(max(p.grad.abs().max() for p in model.parameters() if p.grad is not None))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("inner", ["sgd", "fused"])
@pytest.mark.parametrize("told", [True, False])
def test_an_explicit_scaler_never_doubles(told: bool, inner: str, unscale: bool) -> None:
    """Decision 7: with distributed_scaler the built-in scale is off at once; a scaler nobody told of is recognised at
    its first step. The weights are those of torch's recipe without fleet, fused optimizers included.
    """
    start({"dtype": "float16", "init_loss_scaling": 64.0})
    net, reference = net_of(), net_of()
    kind = fast_sgd if inner == "sgd" else lambda n: torch.optim.Adam(n.parameters(), lr=0.01, fused=True)
    model, optimizer = wrapped(net, kind(net))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    if told:
        assert fleet.distributed_scaler(scaler) is scaler
        assert fleet.distributed_scaler(scaler) is scaler  # twice is once
        assert optimizer.get_loss_scaling() == 1024.0
    signals: list[float] = []
    net[3].register_full_backward_hook(lambda m, gi, go: signals.append(go[0].abs().max().item()))
    explicit(model, optimizer, scaler, 4, unscale)
    hand_written(reference, kind(reference), 4, small_loss, init_scale=1024.0)
    # The first step of an unknown scaler had a larger factor in float16, so other values were rounded to zero.
    loose = 0.0 if told else 5e-3
    torch.testing.assert_close(flat(net), flat(reference), atol=loose, rtol=loose)
    plain = signals[1]
    assert (signals[0] > 10 * plain) == (not told)  # only the first signal of an unknown scaler was scaled twice
    assert "amp" not in optimizer.state_dict()


def test_bfloat16_with_an_explicit_scaler() -> None:
    """Decision 7: a script written for float16 runs as it is where amp chooses bfloat16."""
    start({})
    net, reference = net_of(), net_of()
    model, optimizer = wrapped(net, fast_sgd(net))
    explicit(model, optimizer, fleet.distributed_scaler(torch.amp.GradScaler("cpu", init_scale=1024.0)), 3)
    hand_written(reference, fast_sgd(reference), 3, small_loss, torch.bfloat16)
    torch.testing.assert_close(flat(net), flat(reference), atol=0, rtol=0)


def test_a_scaler_without_amp_unscales_fused_optimizers() -> None:
    """B.2: wrappers know nothing of scaled gradients, so the scaler unscales them itself."""
    fleet.init(is_collective=True, log_level="ERROR")
    net, reference = net_of(), net_of()
    adam: Any = lambda n: torch.optim.Adam(n.parameters(), lr=0.01, fused=True)  # noqa: E731
    model, optimizer = wrapped(net, adam(net))
    explicit(model, optimizer, fleet.distributed_scaler(torch.amp.GradScaler("cpu", init_scale=1024.0)), 3)
    explicit(reference, adam(reference), torch.amp.GradScaler("cpu", init_scale=1024.0), 3)
    torch.testing.assert_close(flat(net), flat(reference), atol=0, rtol=0)


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("overflow", [None, 1, 4])
def test_a_scaler_with_gradient_merge(overflow: int | None, told: bool) -> None:
    """A.7: batches inside a window are counted and leave the scale alone; an inf skips its window, which ends."""
    start({"dtype": "float16"}, gradient_merge=True, gradient_merge_configs={"k_steps": 3})
    net = net_of()
    model, optimizer = wrapped(net, fast_sgd(net))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    if told:
        fleet.distributed_scaler(scaler)
    moved, scales = [], []
    for batch, x in enumerate(batches(9)):
        before = flat(net)
        loss = small_loss(model(x)) * (float("inf") if batch == overflow else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved.append(not torch.equal(flat(net), before))
        scales.append(scaler.get_scale())
    bad = None if overflow is None else overflow // 3
    assert [b for b, m in enumerate(moved) if m] == [w * 3 + 2 for w in range(3) if w != bad]
    after, expected = 1024.0, []
    for window in range(3):
        expected += [after, after]
        after *= 0.5 if window == bad else 2.0
        expected.append(after)
    assert scales == expected


def test_what_distributed_scaler_refuses() -> None:
    """B.4: something that is no scaler."""
    start({})
    with pytest.raises(ConfigError, match=r"takes a torch.amp.GradScaler, got 3"):
        fleet.distributed_scaler(3)


def begin(**options: Any) -> None:
    """Starts a job with ``options``."""
    strategy = fleet.DistributedStrategy()
    strategy.update(options)
    fleet.init(is_collective=True, strategy=strategy, log_level="ERROR")


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}, "with gradient_merge on and amp off"),
        (
            {"sharding": True, "sharding_configs": {"stage": 1, "gradient_merge_acc_step": 2}},
            "with sharding on and amp off",
        ),
        ({"dgc": True}, "with dgc on: dgc keeps unsent gradients"),
    ],
)
def test_where_a_skipped_step_or_a_new_scale_would_be_wrong(told: bool, options: dict[str, Any], text: str) -> None:
    """A.7: a skipped step is not counted without amp; a scaler is refused, whether fleet was told of it or not."""
    begin(**options)
    net = net_of()
    model, optimizer = wrapped(net, torch.optim.SGD(net.parameters(), 0.01, momentum=0.9))
    scaler = torch.amp.GradScaler("cpu")
    before = flat(net)
    act = (lambda: fleet.distributed_scaler(scaler)) if told else (lambda: explicit(model, optimizer, scaler, 1))
    with pytest.raises(ConfigError, match=f"A GradScaler scales the loss {text}"):
        act()
    assert torch.equal(flat(net), before)


def test_a_scaler_that_is_off_is_taken() -> None:
    begin(gradient_merge=True, gradient_merge_configs={"k_steps": 2})
    net = net_of()
    model, optimizer = wrapped(net, sgd(net))
    explicit(model, optimizer, fleet.distributed_scaler(torch.amp.GradScaler("cpu", enabled=False)), 2)


def test_a_scaler_follows_its_optimizer_to_a_later_job() -> None:
    """In the second job, not the first, batches are merged."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    for options, scales in (
        ({}, 2.0**13),
        ({"gradient_merge": True, "gradient_merge_configs": {"k_steps": 3}}, 2.0**14),
    ):
        begin(amp=True, amp_configs={"dtype": "float16"}, **options)
        net = net_of()
        model, optimizer = wrapped(net, sgd(net))
        explicit(model, optimizer, scaler, 3)
        assert scaler.get_scale() == scales


def test_parameters_outside_of_the_job_stay_torchs() -> None:
    start({})
    net = net_of()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    explicit(net, sgd(net), scaler, 2)
    assert not hasattr(scaler, "fleet_job")


def test_a_job_gives_torch_its_look_back() -> None:
    for _ in range(3):
        start({})
    look = vars(torch.amp.GradScaler)["_unscale_grads_"]
    assert hasattr(look, "__wrapped__")
    assert not hasattr(look.__wrapped__, "__wrapped__")


def explicit_on_two(rank: int, world_size: int, amp: bool, told: bool) -> dict[str, Any]:
    """Trains localsgd with an explicit scaler; the second worker overflows at the third step."""
    strategy = fleet.DistributedStrategy()
    strategy.localsgd = True
    strategy.localsgd_configs = {"k_steps": 2}
    if amp:
        strategy.amp = True
        strategy.amp_configs = {"dtype": "float16"}
    fleet.init(is_collective=True, strategy=strategy, log_level="ERROR")
    net = net_of()
    model, optimizer = wrapped(net, fast_sgd(net))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    if told:
        fleet.distributed_scaler(scaler)
    scales = []
    for step, x in enumerate(batches(6, rank)):
        loss = small_loss(model(x)) * (float("inf") if (step, rank) == (2, 1) else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    optimizer.average()
    return {"scales": scales, "weights": flat(net)}


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("amp", [True, False])
def test_workers_agree_through_the_explicit_scaler(amp: bool, told: bool) -> None:
    """A.2: found_inf is the maximum over the workers, so no worker waits for one that skipped."""
    first, second = run_workers(explicit_on_two, 2, amp, told, backend=None)
    assert first["scales"] == second["scales"] == [1024.0, 1024.0, *[512.0] * 4]
    torch.testing.assert_close(first["weights"], second["weights"], atol=0, rtol=0)


@pytest.mark.parametrize("key", ["use_pure_fp16", "use_pure_bf16"])
def test_amp_init_with_pure_16_bit(key: str) -> None:
    """003-20: optimizer.amp_init(place) on what distributed_optimizer returned, before or after the model."""
    start({key: True})
    net = net_of()
    optimizer = fleet.distributed_optimizer(sgd(net))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.amp_init("cpu", scope=None, test_program=None, use_fp16_test=True)
        model = fleet.distributed_model(net)
        optimizer.amp_init(torch.device("cpu"))
        fleet.amp_init()
    seen: list[torch.dtype] = []
    net[2].register_forward_hook(lambda m, args, out: seen.append(out.dtype))
    for x in batches(2):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model.eval()(next(batches(1)))
    assert seen == [torch.float16 if key == "use_pure_fp16" else torch.bfloat16] * 3
    assert fleet.get_loss_scaling() == optimizer.get_loss_scaling() == (32768.0 if key == "use_pure_fp16" else 1.0)


def test_amp_init_says_what_is_wrong() -> None:
    """B.2: without amp it raises; without pure 16 bit it notes that there is nothing to do; a wrong place is named."""
    fleet.init(is_collective=True, log_level="ERROR")
    optimizer = fleet.distributed_optimizer(sgd(net_of()))
    for call in (optimizer.amp_init, optimizer.get_loss_scaling, fleet.amp_init, fleet.get_loss_scaling):
        with pytest.raises(ConfigError, match=r"needs mixed precision, and amp is off\. Set strategy\.amp = True"):
            call()
    start({})
    optimizer = fleet.distributed_optimizer(sgd(net_of()))
    with pytest.warns(OptionWarning, match="nothing to do"):
        optimizer.amp_init()
    start({"use_pure_bf16": True})
    optimizer = fleet.distributed_optimizer(sgd(net_of()))
    for wrong in ("cuda:0", torch.device("cuda"), 0, nn.Linear):
        with pytest.raises(ConfigError, match="this worker computes on 'cpu'"):
            optimizer.amp_init(wrong)
