"""Which parameters a backward pass reaches: what the exchange carries, and what it refuses before an update."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fleet import fleet
from tests.helpers.checked_training import OPTIONS, message, start
from tests.helpers.workers import run_workers

FIND = {"find_unused_parameters": True}
SMALL = {"sharding": True, "sharding_configs": {"stage": 3, "segment_broadcast_MB": 1e-5}}


class Net(nn.Module):
    """Two branches behind one body; each layer has room for each way to use it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor, branches: str = "ab") -> Tensor:
        """Returns the sum of some branches, or the hidden states."""
        hidden = torch.tanh(self.body(x))
        return sum((getattr(self, name)(hidden) for name in branches), torch.zeros(())) if branches else hidden


class Twice(nn.Module):
    """Runs a layer several times, each time computed again in backward."""

    def __init__(self, times: int, reentrant: bool) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.times, self.reentrant = times, reentrant

    def forward(self, x: Tensor) -> Tensor:
        """Returns the last layer's result."""
        x = self.first(x)
        for _ in range(self.times):
            x = checkpoint(lambda t: torch.tanh(self.shared(t)), x, use_reentrant=self.reentrant)
        return self.last(x)  # type: ignore[no-any-return]


Loss = Callable[[Any, Any, Tensor, Tensor, Callable[[], AbstractContextManager[None]]], None]


def two_forwards(net: Any, model: Any, x: Tensor, y: Tensor, hold: Any) -> None:
    """One backward pass of two forwards with different branches."""
    (F.mse_loss(model(x, "a"), y) + F.mse_loss(model(x, "b"), y)).backward()


def outside(net: Any, model: Any, x: Tensor, y: Tensor, hold: Any) -> None:
    """A parameter that forward does not use."""
    F.mse_loss(F.linear(model(x, ""), net.a.weight), y).backward()


def chunked(net: Any, model: Any, x: Tensor, y: Tensor, hold: Any) -> None:
    """A head that backward reaches chunk by chunk, and a body that the last pass reaches."""
    hidden = model(x, "")
    cut = hidden.detach().requires_grad_()
    for part, target in zip(cut.split(2), y.split(2), strict=True):
        with hold():
            ((net.a(part) + net.b(part) - target).square().sum() / y.numel()).backward()
    hidden.backward(cut.grad)


def in_two_passes(net: Any, model: Any, x: Tensor, y: Tensor, hold: Any) -> None:
    """Each pass reaches one branch; the last one exchanges both."""
    with hold():
        F.mse_loss(model(x, "a"), y).backward()
    F.mse_loss(model(x, "b"), y).backward()


def whole(net: Any, model: Any, x: Tensor, y: Tensor, hold: Any) -> None:
    F.mse_loss(model(x), y).backward()


def without_a_branch(net: Any, model: Any, x: Tensor, y: Tensor, hold: Any) -> None:
    F.mse_loss(model(x, "a"), y).backward()


def freeze(module: nn.Module) -> None:
    module.requires_grad_(False)


def in_turns(net: Any, model: Any, x: Tensor, y: Tensor, hold: Any) -> None:
    """One branch is frozen inside forward and has a gradient, the other one between forward and backward."""
    F.mse_loss(model(x), y).backward()
    handle = net.body.register_forward_hook(lambda *_: freeze(net.b))
    loss = F.mse_loss(model(x), y)
    handle.remove()
    net.a.requires_grad_(False)
    loss.backward()
    net.requires_grad_(True)


def without_holding(net: Any, model: Any, x: Tensor, y: Tensor, hold: Any) -> None:
    chunked(net, model, x, y, nullcontext)


def train(
    options: dict[str, Any], loss: Loss, made: Callable[[], nn.Module] = Net, before: Any = None, hooked: bool = False
) -> float:
    """Returns how far three steps of both workers are from those of one process."""
    start(options)
    rank, size = fleet.worker_index(), fleet.worker_num()
    torch.manual_seed(0)
    plain, net = made(), made()
    net.load_state_dict(plain.state_dict())
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1))
    model: Any = fleet.distributed_model(net)
    reference = torch.optim.SGD(plain.parameters(), 0.1)
    for module in (plain, net) if hooked else ():
        for parameter in module.parameters():
            parameter.register_hook(lambda gradient: gradient * 1.5)
    if before is not None:
        before(net, model)
    draws = torch.Generator().manual_seed(0)  # alike on both, on purpose
    for _ in range(3):
        x, y = torch.randn(8, 4, generator=draws), torch.randn(8, 3, generator=draws)
        loss(net, model, x[rank::size], y[rank::size], model.no_sync)
        loss(plain, plain, x, y, nullcontext)
        for one in (optimizer, reference):
            one.step()
            one.zero_grad()
    state = model.full_state_dict()
    return max((state[name] - value).abs().max().item() for name, value in plain.state_dict().items())


def last_stays(options: dict[str, Any], how: str) -> float:
    """Two micro-batches of a step, of which the last is exchanged, or the first alone."""

    def loss(net: Any, model: Any, x: Tensor, y: Tensor, hold: Any) -> None:
        for number, (part, target) in enumerate(zip(x.split(len(x) // 2), y.split(len(y) // 2), strict=True)):
            held = how.startswith("no_sync") and number == (how == "no_sync in the last")
            with hold() if held else nullcontext():
                run = net if how.endswith("plain module") and number else model
                result = F.mse_loss(run(part), target) / 2
                if how == "flag":
                    model.require_backward_grad_sync = bool(number)
                result.backward()

    return train(options, loss)


def to_double_and_back(net: Any, model: Any) -> None:
    model.double().float()


def one_layer(net: Any, model: Any) -> None:
    net.b.half().float()


def data(net: Any, model: Any) -> None:
    net.a.weight.data = net.a.weight.data.double()
    net.a.weight.data = net.a.weight.data.float()


def other_objects(net: Any, model: Any) -> None:
    net.a._parameters["weight"] = nn.Parameter(net.a.weight.detach().clone())


def same_kind(net: Any, model: Any) -> None:
    model.float().to("cpu").train()
    net.a.weight.data = net.a.weight.data.clone()


def right(rank: int, world_size: int) -> dict[str, float]:
    warnings.simplefilter("error", UserWarning)
    warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
    found = {}
    for name in ("data_parallel", "stage 1"):
        options = OPTIONS[name]
        for loss in (two_forwards, outside):
            found[f"{loss.__name__}, {name}"] = train({**options, **FIND}, loss)
        for loss in (chunked, in_two_passes):
            for more in ({}, FIND):
                found[f"{loss.__name__}, {name}, {more}"] = train({**options, **more}, loss)
        found[f"hooks, {name}"] = train(options, chunked, hooked=True)
        found[f"in turns, {name}"] = train({**options, **FIND}, in_turns)
        found[f"unused, {name}"] = train({**options, **FIND}, without_a_branch)
        found[f"kept kind, {name}"] = train(options, whole, before=same_kind)
        found[f"reentrant once, {name}"] = train(options, whole, lambda: Twice(1, True))
    for name in ("data_parallel", "stage 1", "stage 2", "stage 3"):
        found[f"last exchanged, {name}"] = last_stays(OPTIONS[name], "no_sync in the first")
        if name in ("stage 2", "stage 3"):
            found[f"plain module, {name}"] = last_stays(OPTIONS[name], "plain module")
            found[f"both, {name}"] = last_stays(OPTIONS[name], "no_sync in the first, then the plain module")
    for name in ("stage 2", "stage 3"):  # whose flag counts in backward
        found[f"flag, {name}"] = last_stays(OPTIONS[name], "flag")
    for name, options in (("data_parallel", {}), ("small units", SMALL)):
        found[f"twice, {name}"] = train(options, whole, lambda: Twice(2, False))
    return found


def test_a_pass_carries_what_earlier_ones_have_added() -> None:
    """Issue 36: two forwards, uses outside of forward and chunked heads end as in one process, without a warning."""
    for found in run_workers(right, 2, backend=None):
        assert {name: worst for name, worst in found.items() if worst > 1e-6} == {}


UNUSED = "'b.weight', 'b.bias' took no part in the loss of this backward pass"
PAST = "past the exchange: after distributed_model()"
CASES: dict[str, tuple[Callable[[], object], str]] = {
    "unused": (lambda: train({}, without_a_branch), UNUSED),
    "unused, stage 1": (lambda: train(OPTIONS["stage 1"], without_a_branch), UNUSED),
    "chunks that exchange": (lambda: train({}, without_holding), "run all but the last under model.no_sync()"),
    "to double and back": (lambda: train({}, whole, before=to_double_and_back), PAST),
    "stage 1, to double and back": (lambda: train(OPTIONS["stage 1"], whole, before=to_double_and_back), PAST),
    "one layer": (lambda: train({}, whole, before=one_layer), f"'b.weight', 'b.bias' came {PAST}"),
    "one layer, with the option": (lambda: train(FIND, whole, before=one_layer), PAST),
    "data": (lambda: train({}, whole, before=data), f"'a.weight' came {PAST}"),
    "other objects": (lambda: train({}, whole, before=other_objects), PAST),
    "twice": (lambda: train({}, whole, lambda: Twice(2, True)), "cannot be recomputed with use_reentrant=True"),
    "twice, small units": (lambda: train(SMALL, whole, lambda: Twice(2, True)), "pass use_reentrant=False"),
    "hidden": (lambda: train(FIND, whole, lambda: Twice(1, True)), "turn find_unused_parameters off"),
    **{
        f"{how}, {name}": (
            lambda how=how, name=name: last_stays(OPTIONS[name], how),  # type: ignore[misc]
            "still inside the sharded model" if name == "stage 3" else "has exchanged what was added",
        )
        for how in ("no_sync in the last", "flag", "plain module")
        for name in ("data_parallel", "stage 1", "stage 2", "stage 3")
        if how == "no_sync in the last" or not name.endswith(("2", "3"))
    },
}


def refused(rank: int, world_size: int) -> dict[str, str]:
    warnings.simplefilter("ignore")
    return {name: message(case) for name, (case, _) in CASES.items()}


def test_what_no_exchange_carries_is_refused_before_the_update() -> None:
    """Issue 36: it came one forward too late, never in the last step, or ended with torch's text."""
    for found in run_workers(refused, 2, backend=None):
        for name, (_, wanted) in CASES.items():
            assert wanted in found[name], name


def test_one_process_runs_all_of_them() -> None:
    """Nothing is exchanged, so nothing is missing."""
    assert train({}, without_a_branch, before=to_double_and_back) < 1e-6
