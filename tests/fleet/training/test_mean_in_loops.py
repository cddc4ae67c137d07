"""fleet.mean in loops that people write: a loss inside the model, errors that are caught, torch's own optimizer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fleet
from fleet.errors import ConfigError
from tests.helpers.checked_training import flat, message, start
from tests.helpers.mean_training import Case, batch, counted, expected, net_of, optimizer_of
from tests.helpers.workers import run_workers

CASE = Case(24, 2, 2, "plain", "one")
STAGES: list[dict[str, Any]] = [{}, *({"sharding": True, "sharding_configs": {"stage": stage}} for stage in (1, 2, 3))]


class WithLoss(nn.Module):
    """A model whose forward returns its loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return fleet.mean(*counted(self.net(x), y))


class Fails(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise ValueError("no memory")


def rows(update: int, micro: int) -> tuple[Tensor, Tensor]:
    x, y, _ = batch(CASE, update, micro, fleet.data_rank())
    return x, y


def train(
    loss_of: Callable[[Any, Tensor, Tensor], Tensor],
    before: Callable[[Any], object] = lambda model: None,
    held: bool = False,
    in_model: bool = False,
    own: bool = False,
    **options: Any,
) -> Tensor:
    """Returns the parameters after updates of two passes.

    ``before`` runs ahead of each pass; the first pass is ``held`` back by no_sync(); the loss is computed ``in_model``;
    torch's ``own`` optimizer steps, and the module clears gradients with zeros.
    """
    start(options)
    net: nn.Module = net_of(CASE)
    net = WithLoss(net) if in_model else net
    optimizer = optimizer_of(CASE, net)
    if not own:
        optimizer = fleet.distributed_optimizer(optimizer)
    model = fleet.distributed_model(net)
    for update in range(3):
        for micro in range(2):
            before(model)
            with model.no_sync() if held and micro == 0 else nullcontext():
                loss_of(model, *rows(update, micro)).backward()
        optimizer.step()
        if own:
            net.zero_grad(set_to_none=False)
        else:
            optimizer.zero_grad()
    return flat(model.full_state_dict())


def mean(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return fleet.mean(*counted(model(x), y))


def exchanged_after_all(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Returns a loss whose backward exchanges although its forward was to keep it local, as Lightning's does."""
    with model.no_sync():
        found: Tensor = model.watch_loss(mean(model, x, y), exchanges=True)
    return found


def broken(model: Any) -> None:
    """Makes a pass that fails before a gradient has arrived, and is left out."""
    x, y = rows(8, 1)
    with pytest.raises(ValueError, match="no memory"):
        fleet.mean(*counted(Fails.apply(model(x)), y)).backward()  # type: ignore[no-untyped-call]


def recomputed(model: Any, x: Tensor, y: Tensor, use_reentrant: bool = False) -> Tensor:
    out = model(x)
    found: Tensor = checkpoint(lambda out: fleet.mean(*counted(out, y)), out, use_reentrant=use_reentrant)
    return found


def taught(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Returns the loss of a model beside which another one, that may exchange, has run."""
    fleet.distributed_model(net_of(CASE))(x)
    found: Tensor = model(x, y)
    return found


def with_a_plain_pass(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Returns a mean after another loss had a backward pass of its own."""
    (0.1 * model(x).square().mean()).backward()
    return mean(model, x, y)


def with_a_plain_penalty(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Returns nothing to differentiate, after a mean and a penalty on parameters had backward passes of their own."""
    mean(model, x, y).backward()
    (0.1 * sum(p.square().sum() for p in model.parameters())).backward()
    return torch.zeros((), requires_grad=True)


def dropped(model: Any) -> None:
    """Makes a pass ahead of an update, and clears its gradients with zeros by hand."""
    if all(p.grad is None for p in model.parameters()):
        mean(model, *rows(8, 1)).backward()
        for p in model.parameters():
            p.grad.zero_()


def with_own_count(model: Any, x: Tensor, y: Tensor) -> Tensor:
    total, count = counted(model(x), y)
    return fleet.mean(total, count, update_count=count)


def in_a_transform() -> None:
    net = net_of(CASE)
    x, y = rows(0, 0)
    given = {name: p.detach() for name, p in net.named_parameters()}
    torch.func.grad(lambda p: fleet.mean(*counted(torch.func.functional_call(net, p, (x,)), y)))(given)


def joined() -> None:
    start({})
    model = fleet.distributed_model(net_of(CASE))
    with model.join():
        mean(model, *rows(0, 0))


def ahead_on_one() -> None:
    start({})
    model = fleet.distributed_model(net_of(CASE))
    x, y = rows(0, 0)
    fleet.mean(*counted(model(x), y), update_count=None if fleet.worker_index() else 1000)


def of_a_parameter() -> float:
    """Returns the gradient of a parameter that is the total itself, of one of two optimizers."""
    start({})
    net = nn.ParameterList([torch.ones(()), torch.ones(())])
    for p in net:
        fleet.distributed_optimizer(torch.optim.SGD([p], 0.5))
    fleet.distributed_model(net)
    fleet.mean(net[0], 1).backward()
    return float(net[0].grad.item())


def loops(rank: int, world_size: int) -> tuple[dict[str, Tensor], dict[str, str], list[float]]:
    found = {}
    for stage, options in enumerate(STAGES):
        for held in (False, True):
            name = f"loss in the model, stage {stage}, held {held}"
            found[name] = train(lambda model, x, y: model(x, y), held=held, in_model=True, **options)
    found["loss in the model, a teacher beside it"] = train(taught, held=True, in_model=True)
    found["a pass that fails"] = train(mean, before=broken)
    found["torch's optimizer"] = train(mean, own=True)
    for stage, options in enumerate(STAGES):
        found[f"cleared with zeros, stage {stage}"] = train(mean, before=dropped, **options)
    found["recomputed"] = train(recomputed)
    found["exchanged after all"] = train(exchanged_after_all)
    errors = {"reentrant": message(lambda: train(lambda model, x, y: recomputed(model, x, y, use_reentrant=True)))}
    for name, loss_of in (("pass", with_a_plain_pass), ("penalty", with_a_plain_penalty), ("own", with_own_count)):
        errors[name] = message(lambda loss_of=loss_of: train(loss_of))
    errors["join"] = message(joined)
    errors["ahead"] = message(ahead_on_one)
    of_leaf = of_a_parameter()
    start({})
    errors["torch.func"] = message(in_a_transform)
    hits = torch.tensor(3 * rank)
    return found, errors, [fleet.mean(hits, 4).item(), fleet.mean(hits > 0, 1).item(), of_leaf]


def test_loops_equal_one_process_or_are_refused() -> None:
    """A loss that forward returns, under no_sync() too; a failed pass; zeroed gradients; a recomputed loss."""
    right = expected(CASE)
    for found, errors, shares in run_workers(loops, 2, backend=None):
        for name, got in found.items():
            assert float((got - right).abs().max() / right.abs().max()) < 1e-6, name
        assert "Give use_reentrant=False" in errors["reentrant"]
        for name in ("pass", "penalty"):
            assert "gradients that fleet.mean() did not bring" in errors[name]
        assert "gave its own count in each call as update_count; nothing was updated" in errors["own"]
        assert "inside model.join()" in errors["join"]
        assert "torch.func" in errors["torch.func"]
        assert "1 of 2 workers gave update_count" in errors["ahead"]
        assert shares == [3 / 8, 1 / 2, 1.0]  # whole numbers have a mean that is none


@pytest.mark.parametrize("count", [-1, float("nan"), float("inf"), "3", None, [3], 1j, torch.tensor(-2.0)])
def test_a_count_counts(count: Any) -> None:
    with pytest.raises(ConfigError, match="finite and at least 0"):
        fleet.mean(torch.ones(()), count)


def test_an_update_counts_as_much_as_each_call() -> None:
    with pytest.raises(ConfigError, match="this call alone counts 4, and its update 3"):
        fleet.mean(torch.ones(()), 4, update_count=3)
    assert fleet.mean(torch.ones(()), 4, update_count=4).item() == 0.25
    with pytest.raises(ConfigError, match="update_count is a number, and has the shape"):
        fleet.mean(torch.ones(()), 1, update_count=torch.ones(3))


def test_a_total_is_real() -> None:
    with pytest.raises(ConfigError, match="total.real"):
        fleet.mean(torch.ones((), dtype=torch.complex64), 2)


def test_a_count_has_no_gradient() -> None:
    weights = torch.ones(3, requires_grad=True)
    with pytest.raises(ConfigError, match=r"count has a gradient.*count.detach\(\)"):
        fleet.mean((weights * 2).sum(), weights.sum())
    assert fleet.mean((weights * 2).sum(), weights.sum().detach()).item() == 2
