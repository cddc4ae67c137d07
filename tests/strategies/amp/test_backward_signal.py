"""amp: every path from the loss to a parameter is scaled once, whatever the loss is made of (decision 7)."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fleet
from tests.strategies.amp.amp_steps import batches, flat, net_of, sgd, start, wrapped

FP16 = {"dtype": "float16", "init_loss_scaling": 1024.0}


class Telling(nn.Module):
    """A net that keeps an activation and a loss of its own on itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 4)
        self.seen: list[Tensor] = []
        self.extra: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x))
        self.seen = [hidden]
        self.extra = hidden.float().square().mean()
        return self.head(hidden)


def both(net_type: Any, loss_of: Any) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Returns gradients of ``loss_of(call, module)`` with amp and, from the same autocast forward, without a scale."""
    plain = net_type()

    def call(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return plain(x).float()

    loss_of(call, plain).backward()
    start(FP16)
    net = net_type()
    model, _ = wrapped(net, sgd(net))
    loss_of(model, net).backward()
    return [p.grad for p in net.parameters()], [p.grad for p in plain.parameters()]


X = next(batches(1))
LOSSES = {
    "output": lambda call, net: call(X).square().mean(),
    "parameters used directly": lambda call, net: (
        call(X).square().mean() + sum(p.square().sum() for p in net.parameters())
    ),
    "parameters alone": lambda call, net: sum(p.square().sum() for p in net.parameters()),
    "kept activation": lambda call, net: call(X).square().mean() + net.seen[0].float().abs().mean(),
    "kept activation alone": lambda call, net: (call(X), net.seen[0].float().abs().mean())[1],
    "loss made inside": lambda call, net: call(X).square().mean() + net.extra,
    "loss made inside, alone": lambda call, net: (call(X), net.extra)[1],
    "two calls": lambda call, net: call(X).square().mean() + call(X + 1).abs().mean() + net.extra,
    "output twice": lambda call, net: (lambda out: (out * out.detach() + out).mean())(call(X)),
}


@pytest.mark.parametrize("case", list(LOSSES))
def test_every_path_is_scaled_once(case: str) -> None:
    """Decision 7: outputs, parameters in the loss, activations that left by another way."""
    found, expected = both(Telling, LOSSES[case])
    assert any(g is not None for g in expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=2e-3)


def test_one_model_feeds_another() -> None:
    """Decision 7: generator and discriminator, both wrapped; the input's gradient is true, and nothing is squared."""
    start(FP16)
    nets = [net_of(1), nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))]
    plain = [net_of(1), nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))]
    plain[1].load_state_dict(nets[1].state_dict())
    optimizers = [fleet.distributed_optimizer(sgd(net)) for net in nets]
    models = [fleet.distributed_model(net) for net in nets]
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    made = models[0](x)
    terms = models[1](made).square().mean() + made.square().mean()  # both models, and the first one's result by itself
    (terms + nets[0][0].weight.square().sum()).backward()
    with torch.autocast("cpu", dtype=torch.float16):
        made = plain[0](y)
        out = plain[1](made)
    terms = out.float().square().mean() + made.float().square().mean()
    (terms + plain[0][0].weight.square().sum()).backward()
    torch.testing.assert_close(x.grad, y.grad, atol=1e-4, rtol=5e-3)
    for mine, theirs in zip([*nets[0].parameters(), *nets[1].parameters()],
                            [*plain[0].parameters(), *plain[1].parameters()], strict=True):  # fmt: skip
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-4, rtol=5e-3)
    before = flat(nets[1])
    optimizers[0].step()
    assert torch.equal(flat(nets[1]), before)
    optimizers[1].step()
    assert not torch.equal(flat(nets[1]), before)


def test_gradients_asked_for_by_name_and_a_gradient_penalty() -> None:
    """Decision 7: torch.autograd.grad gives true gradients, and a loss made of them trains with true ones."""

    class Smooth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):  # the reference is then exact to float32
                return self.layers(x.float())

    def penalty(call: Any) -> tuple[Tensor, Tensor]:
        x = X.clone().requires_grad_()
        out = call(x).square().sum()
        (gradient,) = torch.autograd.grad(outputs=out, inputs=x, create_graph=True)
        return out + (gradient.norm() - 1).square(), gradient

    plain = Smooth()
    loss, expected = penalty(plain)
    loss.backward()
    start(FP16)
    net = Smooth()
    model, _ = wrapped(net, sgd(net))
    loss, gradient = penalty(model)
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-4)
    loss.backward()
    for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-5, rtol=1e-4)
    first = torch.autograd.grad(model(X).sum(), net.layers[0].weight)[0]
    second = torch.autograd.grad(plain(X).sum(), plain.layers[0].weight)[0]
    torch.testing.assert_close(first, second, atol=1e-6, rtol=1e-4)


class Pair(NamedTuple):
    """A result with names."""

    logits: Tensor
    rest: Any


def test_outputs_in_containers() -> None:
    """Decision 7: tuples, named tuples, lists, dictionaries and dataclasses of tensors are scaled alike."""
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Result:
        value: Tensor
        name: str

    class Many(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return {"pair": Pair(y, [y + 1, 3]), "result": Result(y * 2, "r"), "none": None, "count": torch.tensor(2)}

    start(FP16)
    torch.manual_seed(0)
    net = Many(6, 4)
    model, _ = wrapped(net, sgd(net))
    out = model(X)
    assert isinstance(out["pair"], Pair)
    assert out["result"].name == "r"
    assert out["count"].dtype == torch.int64
    leaves = [out["pair"].logits, out["pair"].rest[0], out["result"].value]
    assert {leaf.dtype for leaf in leaves} == {torch.float32}
    sum(leaf.mean() for leaf in leaves).backward()
    torch.testing.assert_close(net.bias.grad, torch.full((4,), 1.0), atol=1e-3, rtol=1e-3)


def test_outputs_may_be_changed_in_place_and_watched() -> None:
    """Decision 7: the user's hooks and retain_grad see the true signal; in-place operations on the result work."""
    start(FP16)
    net = net_of()
    model, _ = wrapped(net, sgd(net))
    out = model(X)
    out.retain_grad()
    seen: list[Tensor] = []
    out.register_hook(lambda gradient: seen.append(gradient))
    out.mean().backward()
    torch.testing.assert_close(out.grad, torch.full((5, 4), 1 / 20))
    torch.testing.assert_close(seen[0], torch.full((5, 4), 1 / 20))
    true = net[3].bias.grad.clone()
    net.zero_grad()
    out = model(X)
    out += 1
    out.mean().backward()
    torch.testing.assert_close(net[3].bias.grad, true)


def test_thawed_parameters_are_unscaled() -> None:
    """Decision 7: a parameter that was frozen when the model was wrapped."""
    start(FP16)
    net = net_of()
    net[0].requires_grad_(False)
    model, _ = wrapped(net, sgd(net))
    model(X).mean().backward()
    assert net[0].weight.grad is None
    net[0].requires_grad_(True)
    model(X).mean().backward()
    first = net[0].bias.grad.abs().max().item()
    assert 0 < first < 1  # scaled it would be about a thousand times that


def test_the_end_of_a_session_takes_the_hooks_away() -> None:
    """A second fleet.init leaves torch.autograd and the old model as they were."""
    fleet.init(is_collective=True, log_level="ERROR")
    originals = torch.autograd.backward, torch.autograd.grad
    start(FP16)
    net = net_of()
    model, _ = wrapped(net, sgd(net))
    assert torch.autograd.backward is not originals[0]
    model(X).mean().backward()
    true = net[3].bias.grad.clone()
    fleet.init(is_collective=True, log_level="ERROR")
    assert (torch.autograd.backward, torch.autograd.grad) == originals
    net.zero_grad()
    model(X).mean().backward()
    torch.testing.assert_close(net[3].bias.grad, true, atol=1e-3, rtol=1e-3)
