"""Models of deepctr-torch and torch-rechub as their libraries write them: patterns put their embeddings on servers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from fleet import fleet
from fleet.facade import Fleet
from fleet.strategies._shared.module_names import find_modules
from tests.helpers.public_models import PATTERNS, RANDOM, RATE, STEPS, PublicModels, all_names, batch_of
from tests.helpers.served import run_job, strategy_of
from tests.helpers.trainers import thread_trainers
from tests.helpers.workers import run_workers

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor")  # of BST's own layers
QUICK = ("deepctr_DeepFM", "deepctr_DIN", "rechub_WideDeep", "rechub_SASRec", "rechub_STAMP")


def trained(
    mode: str, start: PublicModels, monkeypatch: pytest.MonkeyPatch, *, repeats: bool = False
) -> list[tuple[dict[str, torch.Tensor], list[float]]]:
    """Returns parameters and losses of two workers that trained ``start``; with ``repeats`` on one batch."""
    rate = RATE / 5 if repeats else RATE
    trainers = thread_trainers(2)
    monkeypatch.setattr("fleet.ps_job.hybrid_job.meet_trainers", lambda job: trainers[job.global_rank])
    nets = [copy.deepcopy(start) for _ in range(2)]
    patterns = [pattern for pattern in PATTERNS if find_modules(start, [pattern])]
    made = strategy_of(mode, 2, a_sync_configs={"sparse_modules": patterns, "k_steps": 2 if mode == "geo" else 0})

    def work(own: Fleet, rank: int) -> Any:
        optimizer = own.distributed_optimizer(torch.optim.SGD(nets[rank].parameters(), rate), made)
        model = own.distributed_model(nets[rank])
        own.init_worker()
        losses = []
        for step in range(2 * STEPS if repeats else STEPS):
            optimizer.zero_grad()
            loss = model(batch_of(0, 0) if repeats else batch_of(step, rank))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        own.barrier_worker()
        found = {name: p.detach().clone() for name, p in model.state_dict().items()}
        own.stop_worker()
        return found, losses

    return run_job(work, num_workers=2, strategy=made, limit_s=200)


def plain(start: PublicModels) -> PublicModels:
    """Returns a copy trained in one process on the mean of the workers' losses."""
    net = copy.deepcopy(start)
    optimizer = torch.optim.SGD(net.parameters(), RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        (sum(net(batch_of(step, rank)) for rank in range(2)) / 2).backward()
        optimizer.step()
    return net


def differing(found: dict[str, torch.Tensor], net: PublicModels, start: PublicModels) -> list[str]:
    """Returns the parameters of ``found`` that are not those of ``net``, within 1e-5 of their norm.

    Biases in front of a norm have no gradient but rounding errors, hence the 1e-6.
    """
    first = dict(start.named_parameters())
    moved = {name: p for name, p in net.named_parameters() if not torch.equal(p, first[name])}
    assert len({name.split(".")[1] for name in moved}) == len(start.models), "a model that learns nothing"
    return [
        f"{name} by {(found[name] - p).norm().item() / p.norm().item():.1e}"
        for name, p in net.named_parameters()
        if not (found[name] - p).norm() <= 1e-5 * p.norm() + 1e-6
    ]


def trained_divided(rank: int, world_size: int, stage: int, names: tuple[str, ...]) -> list[str]:
    """Returns which parameters sharding leaves elsewhere than one process does."""
    strategy = fleet.DistributedStrategy()
    strategy.sharding = True
    strategy.sharding_configs = {"stage": stage}
    found = []
    for name in names:
        fleet.init(is_collective=True, strategy=strategy)
        start = PublicModels([name])
        net = copy.deepcopy(start)
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), RATE))
        model = fleet.distributed_model(net)
        for step in range(STEPS):
            optimizer.zero_grad()
            model(batch_of(step, rank)).backward()
            optimizer.step()
        found += differing(model.full_state_dict(), plain(start), start)
    return found


@pytest.mark.parametrize("mode", ["sync", "hybrid"])
def test_some_public_models_equal_plain_torch(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One job trains them all: dictionaries of embeddings, penalties over whole weights, scores of all items."""
    start = PublicModels(QUICK)
    for found, _ in trained(mode, start, monkeypatch):
        assert differing(found, plain(start), start) == []


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "hybrid"])
def test_all_public_models_equal_plain_torch(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six steps of SGD on two workers and one server, a job for each model."""
    wrong = []
    for name in all_names():
        start = PublicModels([name])
        found = trained(mode, start, monkeypatch)
        wrong += differing(found[0][0], plain(start), start) if name not in RANDOM else []
    assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "geo"])
def test_all_public_models_learn(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a batch that stays the same for both workers the loss falls, though not in every step: pulls come late."""
    wrong = []
    for name in all_names():
        for _, losses in trained(mode, PublicModels([name]), monkeypatch, repeats=True):
            wrong += [(name, losses)] if not min(losses[1:]) < losses[0] else []
    assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_all_public_models_are_sharded(stage: int) -> None:
    """Collective training of the same models, embeddings included."""
    names = tuple(name for name in all_names() if name not in RANDOM)
    assert run_workers(trained_divided, 2, stage, names, backend=None, timeout_s=500) == [[], []]
