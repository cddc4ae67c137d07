"""amp with several workers and with the other strategies: one decision for all, one window, no factor too many."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fleet
from fleet.errors import ConfigError
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

FP16 = {"dtype": "float16", "decr_every_n_nan_or_inf": 1, "decr_ratio": 0.5}


def train_with_overflow(rank: int, world_size: int, option: str, bad_rank: int) -> dict[str, Any]:
    """Trains six steps; at the third one worker's loss is inf. Returns what happened to scale and weights."""
    options: dict[str, Any] = {option: True} if option else {}
    if option == "localsgd":
        options["localsgd_configs"] = {"k_steps": 100, "begin_step": 0}
    start(FP16, **options)
    net = net_of()
    model, optimizer = wrapped(net, fast_sgd(net), optimizer_first=rank == 0)
    sent = count_messages()
    scales, moved = [], []
    for step, x in enumerate(batches(6, rank)):
        before = flat(net)
        loss = small_loss(model(x))
        (loss * float("inf") if step == 2 and rank == bad_rank else loss).backward()
        sent.clear()
        optimizer.step()
        optimizer.zero_grad()
        scales.append(optimizer.get_loss_scaling())
        moved.append(not torch.equal(flat(net), before))
    return {"scales": scales, "moved": moved, "weights": flat(net), "messages": len(sent)}


def count_messages() -> list[str]:
    """Returns a list to which every all_reduce that Python starts adds an entry."""
    sent: list[str] = []
    original = torch.distributed.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        sent.append("all_reduce")
        return original(*args, **kwargs)

    torch.distributed.all_reduce = counted
    return sent


@pytest.mark.parametrize(("option", "messages"), [("", 0), ("localsgd", 1), ("fp16_allreduce", 0)])
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_all_workers_skip_the_same_step(option: str, messages: int, bad_rank: int) -> None:
    """A.2, issue: an overflow on one worker skips the step on all. Data parallel needs no message for that: its sum
    has carried the inf to every worker; where gradients stay local one number is exchanged at each step.
    """
    results = run_workers(train_with_overflow, 2, option, bad_rank, backend=None)
    for result in results:
        assert result["scales"] == [32768.0, 32768.0, *[16384.0] * 4]
        assert result["moved"] == [True, True, False, True, True, True]
        assert result["messages"] == messages
    same = torch.equal(results[0]["weights"], results[1]["weights"])
    assert same == (option != "localsgd")


def data_parallel_gradients(rank: int, world_size: int, configs: dict[str, Any]) -> list[torch.Tensor]:
    """Returns the weights after each of four steps of data parallel with amp."""
    start(configs)
    net = net_of(rank)
    model, optimizer = wrapped(net, fast_sgd(net))
    history = []
    for x in batches(4, rank):
        small_loss(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(flat(net))
    return history


@pytest.mark.parametrize("configs", [{"dtype": "float16"}, {"use_pure_fp16": True}, {"use_pure_bf16": True}])
def test_data_parallel_exchanges_true_gradients(configs: dict[str, Any]) -> None:
    """A.3 item 3: the mean over workers of gradients that were unscaled first, in float32."""
    results = run_workers(data_parallel_gradients, 2, configs, backend=None)
    start(configs)
    net = net_of(0)
    model, optimizer = wrapped(net, fast_sgd(net))
    for step, inputs in enumerate(zip(batches(4, 0), batches(4, 1), strict=True)):
        for x in inputs:
            (small_loss(model(x)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        for result in results:
            torch.testing.assert_close(result[step], flat(net), atol=2e-4, rtol=1e-3)


def train_without_masters(rank: int, world_size: int, configs: dict[str, Any]) -> tuple[torch.Tensor, list[str]]:
    """Trains data parallel with 16-bit parameters; returns weights and types."""
    start({**configs, "use_optimizer_fp16": True})
    net = net_of(rank)
    model, optimizer = wrapped(net, sgd(net))
    for x in batches(4, rank):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat(net), [str(p.dtype) for p in net.parameters()]


@pytest.mark.parametrize("key", ["use_pure_fp16", "use_pure_bf16"])
def test_data_parallel_without_masters(key: str) -> None:
    """A.2 use_optimizer_fp16 with several workers: data parallel is built on the 16-bit parameters."""
    (first, types), (second, _) = run_workers(train_without_masters, 2, {key: True}, backend=None)
    assert torch.equal(first, second)
    assert types.count("torch.float32") == 2
    assert not torch.equal(first, flat(net_of(0)))


class TestGradientMerge:
    """A.7 loss scaling: the check is made at the end of a window, on the merged gradient."""

    K = 3

    def run(self, overflows: set[int], clip: bool = False) -> tuple[list[bool], list[float], nn.Module]:
        """Trains four windows; returns at which batches weights moved, the scale after each, and the net."""
        start(FP16, gradient_merge=True, gradient_merge_configs={"k_steps": self.K})
        net = net_of()
        model, optimizer = wrapped(net, fast_sgd(net))
        moved, scales = [], []
        for batch, x in enumerate(batches(4 * self.K)):
            before = flat(net)
            (small_loss(model(x)) * (float("inf") if batch in overflows else 1.0)).backward()
            if clip and net[0].weight.grad is not None:  # torch's function needs a gradient to clip
                nn.utils.clip_grad_value_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            moved.append(not torch.equal(flat(net), before))
            scales.append(optimizer.get_loss_scaling())
        return moved, scales, net

    @pytest.mark.parametrize("clip", [False, True])
    @pytest.mark.parametrize("batch", [3, 4, 5])
    def test_an_inf_poisons_its_window_only(self, batch: int, clip: bool) -> None:
        """An inf in any batch of the second window: that window is skipped whole, and counts once."""
        moved, scales, _ = self.run({batch}, clip)
        assert [place for place, value in enumerate(moved) if value] == [2, 8, 11]
        assert scales == [32768.0] * 5 + [16384.0] * 7

    def test_two_overflows_in_a_window_count_once(self) -> None:
        """The state machine sees windows, not batches."""
        assert self.run({3, 4, 5})[1][-1] == 16384.0

    def test_equals_merging_by_hand(self) -> None:
        """The merged gradient is the mean of true gradients."""
        moved, _, net = self.run(set())
        assert sum(moved) == 4
        start({"dtype": "float16"})
        other = net_of()
        model, optimizer = wrapped(other, fast_sgd(other))
        for batch, x in enumerate(batches(4 * self.K)):
            (small_loss(model(x)) / self.K).backward()
            if batch % self.K == self.K - 1:
                optimizer.step()
                optimizer.zero_grad()
        torch.testing.assert_close(flat(net), flat(other), atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("configs", [{"dtype": "float16"}, {"use_pure_bf16": True}, {"use_pure_fp16": True},
                                     {"custom_black_list": ["0"], "custom_white_list": ["3"]}])  # fmt: skip
@pytest.mark.parametrize("names", [["0", "1"], ["3"]])
def test_recompute_gives_the_same_gradients(configs: dict[str, Any], names: list[str]) -> None:
    """A.2 recompute: types are entered again when a module is computed a second time."""
    found = []
    for options in ({}, {"recompute": True, "recompute_configs": {"checkpoints": names}}):
        start(configs, **options)
        net = net_of()
        model, _ = wrapped(net, sgd(net))
        model(next(batches(1))).square().mean().backward()
        found.append([p.grad for p in net.parameters()])
    for plain, recomputed in zip(*found, strict=True):
        torch.testing.assert_close(plain, recomputed, atol=0, rtol=0)


@pytest.mark.parametrize("rule", ["lars", "lamb"])
def test_rules_get_true_gradients(rule: str) -> None:
    """A.5: lars and lamb under amp update like lars and lamb with the gradients of torch's recipe."""
    weights = []
    for options in ({rule: True}, {}):
        start({"dtype": "float16", "init_loss_scaling": 1024.0 if options else 1.0}, **{rule: True})
        net = net_of()
        update = sgd(net) if rule == "lars" else torch.optim.Adam(net.parameters(), lr=0.01)
        model, optimizer = wrapped(net, update)
        for x in batches(3):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(flat(net))
    torch.testing.assert_close(weights[0], weights[1], atol=2e-4, rtol=2e-3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "configs",
    [{"dtype": "float16"}, {"dtype": "bfloat16"}, {"use_pure_fp16": True}, {"use_pure_bf16": True},
     {"custom_black_list": ["LayerNorm"], "custom_white_list": ["3"]}],
)  # fmt: skip
def test_compiled(configs: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """to_static under amp: one graph, and the gradients of the plain model."""
    left_behind = "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"  # by the compiler; undone because it was set here first
    monkeypatch.setenv(left_behind, "")
    monkeypatch.delenv(left_behind)
    found = []
    for options in ({}, {"to_static": True, "to_static_configs": {"fullgraph": True}}):
        start(configs, **options)
        net = net_of()
        model, optimizer = wrapped(net, fast_sgd(net))
        for x in batches(3):
            small_loss(model(x)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(flat(net))
    torch.testing.assert_close(found[0], found[1], atol=2e-3, rtol=1e-2)
    assert not torch.equal(found[0], flat(net_of()))


@pytest.mark.gpu
@pytest.mark.parametrize("configs", [{}, {"use_pure_fp16": True}, {"dtype": "bfloat16"}])
def test_on_a_gpu(configs: dict[str, Any]) -> None:
    """A.3 on CUDA: float16 by default, scaled, and the weights of torch's recipe for the default."""
    start(configs)
    net, reference = net_of(), net_of().cuda()
    model, optimizer = wrapped(net, fast_sgd(net), optimizer_first=False)
    losses = []
    for x in batches(6):
        loss = small_loss(model(x.cuda()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] != losses[0]
    if not configs:
        scaler, update = torch.amp.GradScaler("cuda", init_scale=32768.0), fast_sgd(reference)
        for x in batches(6):
            with torch.autocast("cuda", dtype=torch.float16):
                out = reference(x.cuda())
            scaler.scale(small_loss(out.float())).backward()
            scaler.step(update)
            scaler.update()
            update.zero_grad()
        torch.testing.assert_close(flat(net), flat(reference), atol=1e-7, rtol=1e-5)


def test_the_reference_by_hand_does_something() -> None:
    """The hand-written loop moves the weights, so that comparing with it means something."""
    net = net_of()
    gradients = hand_written(net, fast_sgd(net), 2, small_loss)
    assert all(g.abs().max() > 0 for g in gradients)
    assert not torch.equal(flat(net), flat(net_of()))


class Gathered(nn.Module):
    """A net with parameters of its own beside its layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.ones(6))
        self.layers = net_of(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x * self.scale)


def train_sharded(rank: int, world_size: int, configs: dict[str, Any], stage: int) -> dict[str, Any]:
    """Trains with sharding (stage 0: data parallel); the second worker overflows at the third step."""
    options = {"sharding": True, "sharding_configs": {"sharding_degree": 2, "stage": stage}} if stage else {}
    start({**configs, "decr_every_n_nan_or_inf": 1, "decr_ratio": 0.5}, **options)
    net = Gathered()
    model, optimizer = wrapped(net, fast_sgd(net), optimizer_first=False)
    scales = []
    for step, x in enumerate(batches(5, rank)):
        for _ in range(2):  # two backward passes for each step
            loss = small_loss(model(x)) / 2
            (loss * float("inf") if (step, rank) == (2, 1) else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        scales.append(optimizer.get_loss_scaling())
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters()]
    return {"scales": scales, "weights": torch.cat([p.detach().flatten() for p in whole])}


@pytest.mark.slow
@pytest.mark.parametrize("configs", [{"dtype": "float16"}, {"use_pure_fp16": True}])
def test_sharding_gets_true_gradients_and_agrees(configs: dict[str, Any]) -> None:
    """A.3 item 5: parts of gradients are unscaled once, and an overflow on one worker is skipped by all."""
    plain = run_workers(train_sharded, 2, configs, 0, backend=None)
    for stage in (1, 2, 3):
        for result in run_workers(train_sharded, 2, configs, stage, backend=None):
            assert result["scales"] == plain[0]["scales"] == [32768.0, 32768.0, *[16384.0] * 3]
            torch.testing.assert_close(result["weights"], plain[0]["weights"], atol=1e-5, rtol=1e-4)


def test_sharding_needs_parameters_of_one_type() -> None:
    """A.2 use_optimizer_fp16: refused when the plan is made, with stages that divide the parameters."""
    strategy = fleet.DistributedStrategy()
    strategy.amp = strategy.sharding = True
    strategy.amp_configs = {"use_pure_bf16": True, "use_optimizer_fp16": True}
    strategy.sharding_configs = {"sharding_degree": 2, "stage": 3}
    with pytest.raises(ConfigError, match=r"'use_optimizer_fp16'\].*of one type only"):
        fleet.strategies.plan(strategy, 2)
    strategy.sharding_configs = {"stage": 1}
    assert fleet.strategies.plan(strategy, 2).steps
