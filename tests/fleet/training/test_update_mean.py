"""fleet.mean: the update is that of one process, whatever workers and passes count."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fleet
from fleet.errors import FleetError
from tests.helpers.checked_training import flat, start, weights
from tests.helpers.mean_training import Case, batch, counted, draw, expected, net_of, off, optimizer_of, run
from tests.helpers.workers import run_workers

DRAWN = {1: 20, 2: 40, 3: 10, 4: 20}
QUICK = 10


def check(workers: int, numbers: range) -> None:
    """Compares drawn cases with one process."""
    cases = [draw(number, workers) for number in numbers]
    for found in run_workers(run, workers, cases, backend=None, timeout_s=900):
        for case, got in zip(cases, found, strict=True):
            assert not isinstance(got, str), (case, got)
            assert off(got, expected(case)) < 1e-6, case


@pytest.mark.parametrize("workers", DRAWN)
def test_drawn_loops_equal_one_process(workers: int) -> None:
    """Masks, empty micro-batches and workers; stages, forms of accumulation, clipping, scalers, two losses, weights."""
    check(workers, range(QUICK))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_more_drawn_loops_equal_one_process(workers: int) -> None:
    check(workers, range(QUICK, DRAWN[workers]))


@pytest.mark.long
@pytest.mark.parametrize("first", range(1000, 1500, 50))
@pytest.mark.parametrize("workers", DRAWN)
def test_many_drawn_loops_equal_one_process(workers: int, first: int) -> None:
    check(workers, range(first, first + 50))


# ---- loops ----------------------------------------------------------------------------------------------------------

MERGED = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}
TWO = Case(20, 2, 2, "plain", "one")
ONE = Case(21, 2, 1, "plain", "one")
THREE = Case(23, 2, 3, "plain", "one")


def begin(case: Case, **options: Any) -> tuple[Any, Any]:
    """Returns a model and its optimizer, as fleet returns them."""
    start(options)
    net = net_of(case)
    optimizer = fleet.distributed_optimizer(optimizer_of(case, net))
    return fleet.distributed_model(net), optimizer


def mean_of(case: Case, model: Any, update: int, micro: int) -> Tensor:
    """Returns the mean of this worker's micro-batch."""
    x, y, _ = batch(case, update, micro, fleet.data_rank())
    return fleet.mean(*counted(model(x), y))


def by_passes(case: Case, model: Any, optimizer: Any, before: Callable[[], None] = lambda: None) -> Tensor:
    """Trains a plain loop, with ``before`` ahead of every update; returns the parameters."""
    for update in range(3):
        before()
        for micro in range(case.passes):
            mean_of(case, model, update, micro).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def cleared(how: str, **options: Any) -> Tensor:
    """Trains after passes whose gradients were cleared."""
    model, optimizer = begin(TWO, **options)

    def drop() -> None:
        mean_of(TWO, model, 7, 0).backward()
        if how == "by hand":
            for parameter in model.parameters():
                parameter.grad = None
        elif how == "model":
            model.zero_grad()
        else:
            optimizer.zero_grad(set_to_none=how != "zeros")

    return by_passes(TWO, model, optimizer, drop)


def merged(drops: bool) -> Tensor:
    """Trains windows of two batches; with ``drops`` each batch comes after one whose gradients are cleared."""
    model, optimizer = begin(TWO, **MERGED)
    for update in range(3):
        for micro in range(2):
            if drops:
                mean_of(TWO, model, 8, micro).backward()
                optimizer.zero_grad()
            mean_of(TWO, model, update, micro).backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def resumed() -> Tensor:
    """Trains, and goes on in the middle of a window from what was saved there."""
    model, optimizer = begin(TWO, **MERGED)
    for update in range(3):
        mean_of(TWO, model, update, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        states = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
        model, optimizer = begin(TWO, **MERGED)
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
        mean_of(TWO, model, update, 1).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def retained() -> Tensor:
    """Trains with two backward passes through one loss."""
    model, optimizer = begin(ONE)
    for update in range(3):
        loss = mean_of(ONE, model, update, 0)
        (0.3 * loss).backward(retain_graph=True)
        (0.7 * loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def forwards_first(skips: bool) -> Tensor:
    """Trains with all forwards of an update before its backward passes, or with one that has none."""
    model, optimizer = begin(TWO)
    for update in range(3):
        if skips:
            mean_of(TWO, model, 9, 0)
        losses = [mean_of(TWO, model, update, micro) for micro in range(2)]
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def by_closure() -> Tensor:
    """Trains with a closure."""
    model, optimizer = begin(ONE)
    for update in range(3):

        def closure(update: int = update) -> Tensor:
            optimizer.zero_grad()
            loss = mean_of(ONE, model, update, 0)
            loss.backward()
            return loss

        optimizer.step(closure)
    return weights(model)


def with_gradients_of_inputs() -> Tensor:
    """Trains with a gradient of the loss that fills no ``.grad``."""
    model, optimizer = begin(ONE)
    for update in range(3):
        x, y, _ = batch(ONE, update, 0, fleet.data_rank())
        loss = fleet.mean(*counted(model(x.requires_grad_()), y))
        torch.autograd.grad(loss, x, retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def two_optimizers() -> Tensor:
    """Trains one model with two optimizers."""
    start({})
    net = net_of(TWO)
    optimizers = [fleet.distributed_optimizer(torch.optim.SGD(net[at].parameters(), 0.1)) for at in (0, 2)]
    model = fleet.distributed_model(net)
    for update in range(3):
        for micro in range(2):
            mean_of(TWO, model, update, micro).backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return weights(model)


def two_models() -> Tensor:
    """Trains two models whose losses have backward passes before both steps; returns the first."""
    start({})
    nets = [net_of(ONE), net_of(TWO)]
    optimizers = [fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1)) for net in nets]
    models = [fleet.distributed_model(net) for net in nets]
    for update in range(3):
        mean_of(ONE, models[0], update, 0).backward()
        mean_of(ONE, models[1], update + 5, 0).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return weights(models[0])


def one_loss_of_two_models(held: bool) -> Tensor:
    """Trains two models by the sum of their losses, with ``held`` under no_sync() of both; returns the first."""
    start({})
    nets = [net_of(THREE), net_of(ONE)]
    optimizers = [fleet.distributed_optimizer(optimizer_of(THREE, net)) for net in nets]
    models = [fleet.distributed_model(net) for net in nets]
    for update in range(3):
        for micro in range(THREE.passes):
            x, y, _ = batch(THREE, update, micro, fleet.data_rank())
            is_local = held and micro + 1 < THREE.passes
            with ExitStack() as contexts:
                for model in models if is_local else ():
                    contexts.enter_context(model.no_sync())
                totals = [counted(model(x), y)[0] for model in models]
                fleet.mean(totals[0] + totals[1], (y != -100).sum()).backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return weights(models[0])


RIGHT: dict[str, tuple[Case, Callable[[], Tensor]]] = {
    **{f"cleared {how}": (TWO, lambda how=how: cleared(how)) for how in ("by hand", "model", "optimizer", "zeros")},
    "cleared in stage 3": (TWO, lambda: cleared("model", sharding=True, sharding_configs={"stage": 3})),
    "merged": (TWO, lambda: merged(drops=False)),
    "merged after a dropped batch": (TWO, lambda: merged(drops=True)),
    "resumed in a window": (TWO, resumed),
    "two backward passes of one loss": (ONE, retained),
    "forwards first": (TWO, lambda: forwards_first(skips=False)),
    "a forward alone": (TWO, lambda: forwards_first(skips=True)),
    "closure": (ONE, by_closure),
    "gradients of inputs": (ONE, with_gradients_of_inputs),
    "two optimizers": (TWO, two_optimizers),
    "two models": (ONE, two_models),
    "one loss of two models": (THREE, lambda: one_loss_of_two_models(held=False)),
    "one loss of two models, no_sync": (THREE, lambda: one_loss_of_two_models(held=True)),
}
NARROW = {
    "float16": {"amp": True, "amp_configs": {"dtype": "float16", "init_loss_scaling": 1024.0}},
    "bfloat16": {"amp": True, "amp_configs": {"dtype": "bfloat16"}},
}


def loops(rank: int, world_size: int) -> dict[str, Tensor]:
    warnings.simplefilter("error")
    found = {name: train() for name, (_, train) in RIGHT.items()}
    for name, options in NARROW.items():
        found[name] = by_passes(TWO, *begin(TWO, **options))
    return found


def test_every_loop_is_one_process() -> None:
    """Clearing in every way, windows and their resume, repeated passes, closures, several optimizers; amp, nearly."""
    for found in run_workers(loops, 2, backend=None):
        for name, (case, _) in RIGHT.items():
            assert off(found[name], expected(case)) < 1e-6, name
        for name in NARROW:
            assert off(found[name], expected(TWO)) < 2e-3, name


def alone(rank: int, world_size: int) -> Tensor:
    return by_passes(TWO, *begin(TWO, localsgd=True, localsgd_configs={"k_steps": 1}))


def test_inner_steps_of_localsgd_take_the_mean_of_their_worker() -> None:
    """Each worker's update is that of its own rows; then the parameters are averaged."""
    nets = [net_of(TWO), net_of(TWO)]
    for update in range(3):
        for rank, net in enumerate(nets):
            sums = [counted(net(x), y) for x, y, _ in (batch(TWO, update, micro, rank) for micro in range(2))]
            loss = sum(total for total, _ in sums) / max(1, sum(int(count) for _, count in sums))
            gradients = torch.autograd.grad(loss, list(net.parameters()))
            with torch.no_grad():
                for p, gradient in zip(net.parameters(), gradients, strict=True):
                    p.sub_(0.1 * gradient)
        with torch.no_grad():
            for first, second in zip(*(net.parameters() for net in nets), strict=True):
                first.copy_((first + second) / 2)
                second.copy_(first)
    for found in run_workers(alone, 2, backend=None):
        assert off(found, flat(nets[0].state_dict())) < 1e-6


def values(rank: int, world_size: int) -> list[float]:
    """Returns the values of an evaluation, of two local passes, and of the pass that ends the update."""
    model, _ = begin(Case(22, 2, 3, "no_sync", "one", empty=0.0))
    case = Case(22, 2, 3, "no_sync", "one", empty=0.0)
    with torch.no_grad():
        found = [mean_of(case, model, 0, 0).item()]
    for micro in range(3):
        with model.no_sync() if micro < 2 else nullcontext():
            loss = mean_of(case, model, 0, micro)
            loss.backward()
        found.append(loss.item())
    return found


def test_the_value_is_the_mean_so_far() -> None:
    """Of all workers where gradients are exchanged and in evaluation; of this worker alone under no_sync()."""
    case = Case(22, 2, 3, "no_sync", "one", empty=0.0)
    net = net_of(case)
    sums = [[counted(net(x), y) for x, y, _ in (batch(case, 0, m, rank) for m in range(3))] for rank in range(2)]

    def mean(ranks: tuple[int, ...], micros: int) -> float:
        chosen = [sums[rank][micro] for rank in ranks for micro in range(micros)]
        return float(sum(float(total.detach()) for total, _ in chosen) / sum(int(count) for _, count in chosen))

    for rank, found in enumerate(run_workers(values, 2, backend=None)):
        assert found == pytest.approx([mean((0, 1), 1), mean((rank,), 1), mean((rank,), 2), mean((0, 1), 3)], rel=1e-6)


# ---- what is refused ------------------------------------------------------------------------------------------------


def penalised(passes: int, penalty_in: tuple[int, ...], divides_by: int = 1, counts: bool = False) -> None:
    """Trains an update whose loss has a penalty beside the mean."""
    case = Case(23, 2, passes, "plain", "one", empty=0.0)
    model, optimizer = begin(case)
    for micro in range(passes):
        loss = mean_of(case, model, 0, micro)
        if micro in penalty_in:
            penalty = sum(p.square().sum() for p in model.parameters())
            loss = loss + (fleet.mean(penalty, 1) if counts else penalty)
        (loss / divides_by).backward()
    optimizer.step()


def said(action: Callable[[], object]) -> str:
    """Returns the warning or error of ``action``."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            action()
    except (FleetError, UserWarning) as error:
        return str(error)
    return ""


def refused(rank: int, world_size: int) -> dict[str, str]:
    found = {
        "one pass": said(lambda: penalised(1, (0,))),
        "the last pass": said(lambda: penalised(2, (1,))),
        "every pass": said(lambda: penalised(2, (0, 1))),
        "counts": said(lambda: penalised(1, (0,), counts=True)),
        "counts in every pass": said(lambda: penalised(2, (0, 1), counts=True)),
        "divided": said(lambda: penalised(4, (), divides_by=4)),
        "not divided": said(lambda: penalised(4, ())),
    }
    model, _ = begin(ONE)
    x, y, _ = batch(ONE, 0, 0, rank)
    losses = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none")
    found["no sum"] = said(lambda: fleet.mean(losses, 3))
    found["a mask"] = said(lambda: fleet.mean(counted(model(x), y)[0], y != -100))
    found["a number"] = said(lambda: fleet.mean(3.0, 2))  # type: ignore[arg-type]
    return found


def test_what_has_no_divisor_is_refused() -> None:
    """A term beside the means, or means that count differently, where another pass follows; a loss divided twice."""
    for found in run_workers(refused, 2, backend=None):
        for name in ("one pass", "the last pass", "counts", "not divided"):
            assert found[name] == "", name
        assert "and another backward pass follows before step()" in found["every pass"]
        assert "fleet.mean(penalty, 1)" in found["every pass"]
        assert "update_count=" in found["counts in every pass"]
        assert "leave the division out" in found["divided"]
        assert "got the shape [10]" in found["no sum"]
        assert "Write mask.sum()" in found["a mask"]
        assert "got a float" in found["a number"]


def test_without_a_job_it_is_a_quotient() -> None:
    weight = torch.ones((), requires_grad=True)
    loss = fleet.mean(6.0 * weight, 4)
    loss.backward()
    assert (loss.item(), weight.grad.item()) == (1.5, 1.5)  # type: ignore[union-attr]
    assert fleet.mean(torch.zeros(()), 0).item() == 0.0


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_gradients_keep_the_size_of_a_mean_in_16_bits(scale: float) -> None:
    """A sum over 80,000 tokens would leave float16's range; a loss scale keeps small ones exact, as for any mean."""
    start({})
    net = nn.Linear(1, 1, bias=False).half()
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1))
    model = fleet.distributed_model(net)
    for number in (60_000, 20_000):
        x = torch.full((number, 1), 2.0, dtype=torch.float16)
        (fleet.mean(model(x).float().sum(), number) * scale).backward()
    gradient = float(net.weight.grad) / scale  # type: ignore[arg-type]
    assert gradient == pytest.approx(2.0, rel=5e-3 if scale == 1 else 2e-3)
    optimizer.zero_grad()
