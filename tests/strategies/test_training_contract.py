"""What every strategy promises, tried on every strategy that exists: names, state, resume, on 1, 2 and 4 workers.

A strategy comes under these tests by being registered: its ``guide.example`` is the job that is trained.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import nn

import fleet
from fleet.errors import ConfigError, OptionWarning
from fleet.strategies import REGISTRY
from fleet.strategies._declare.strategy import JobKind
from fleet.strategies._declare.strategy_plan import foreign
from tests.helpers.workers import run_workers

EXPLAINED = [name for name, s in REGISTRY.items() if s.refused is None]
# The jobs here are collective; those with servers are in test_a_sync.py and tests/fleet/test_server_job*.py.
IMPLEMENTED = [name for name in EXPLAINED if foreign(REGISTRY[name], collective=True) is None]
# The compiler takes half a minute for each job, and has tests of its own.
SLOW = {"to_static"}
# What a worker keeps to itself while it trains alone (A.8), or draws from other rows (batch norm without sync).
LOCAL = {"localsgd", "adaptive_localsgd"}

# torch lays its buckets out anew after the first step; with more than two workers a sum then has another order. The
# last digit shows more where the wire is narrow, and where Adam divides a gradient by its own size.
LAST_DIGIT = {"fp16_allreduce": 1e-4, "lamb": 5e-3}


class Net(nn.Module):
    """A large weight (dgc), small ones, a norm, dropout, and a named block (recompute)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(nn.Linear(16, 1024), nn.BatchNorm1d(1024), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(1024, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer1(x))


def examples(name: str) -> Mapping[str, Any]:
    """Returns the options of the guide's example."""
    guide = REGISTRY[name].guide
    assert guide is not None
    return guide.example


def job(options: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns a wrapped model and optimizer under ``options``; Adam where lamb wants it, else SGD with momentum."""
    strategy = fleet.DistributedStrategy()
    strategy.update(options)
    fleet.init(is_collective=True, strategy=strategy, log_level="ERROR")
    torch.manual_seed(0)
    net: nn.Module = Net()
    if "pipeline" in options:  # the optimizer gets the parameters of this worker's stage
        net = fleet.distributed_model(net, nn.functional.cross_entropy)
    adam = options.get("lamb")
    inner: Any = torch.optim.Adam(net.parameters()) if adam else torch.optim.SGD(net.parameters(), 0.05, 0.9)
    optimizer = fleet.distributed_optimizer(inner)
    return net if "pipeline" in options else fleet.distributed_model(net), optimizer


def train(model: Any, optimizer: Any, rank: int, steps: range) -> float:
    """Runs the plain loop, or a pipeline's; returns the last loss. Workers of one copy train on the same rows."""
    loss = torch.zeros(())
    # Without 'reproducible' the only logical rank is fleet.data_rank().
    for step, row in ((step, row) for step in steps for row in fleet.elastic.logical_ranks()):
        torch.manual_seed(1000 * step + row)
        x, labels = torch.randn(8, 16), torch.randint(0, 4, (8,))
        if hasattr(model, "train_batch"):
            loss = model.train_batch([x, labels], optimizer)
            continue
        loss = nn.functional.cross_entropy(model(x).float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


def local_parameters(model: Any) -> dict[str, torch.Tensor]:
    """Returns this worker's parameters, whole or its part of them."""
    found = {}
    for name, p in model.named_parameters():
        found[name] = (p.to_local() if hasattr(p, "to_local") else p).detach().clone()
    return found


def keep_promises(rank: int, world_size: int, jobs: dict[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Trains each job straight through, and again with a save and a load in the middle."""
    warnings.simplefilter("ignore", OptionWarning)
    found: dict[str, Any] = {}
    names = [name for name, _ in Net().named_parameters()]
    for name, options in jobs.items():
        model, optimizer = job(options)
        held = [n for n, _ in model.named_parameters()]
        kept = held == ([n for n in names if n in held] if "pipeline" in options else names)
        train(model, optimizer, rank, range(3))
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        loss = train(model, optimizer, rank, range(3, 6))
        straight = local_parameters(model)
        again, second = job(options)
        again.load_state_dict(saved[0])
        second.load_state_dict(saved[1])
        train(again, second, rank, range(3, 6))
        resumed = local_parameters(again)
        off = max(float((straight[n].float() - resumed[n].float()).abs().max()) for n in held if straight[n].numel())
        whole = [v.shape for v in straight.values()] == [p.shape for p in Net().parameters()]
        found[name] = {"names": kept, "off": off, "loss": loss, "own": straight if whole else {}}
    return found


def jobs_for(world_size: int) -> dict[str, Mapping[str, Any]]:
    """Returns the jobs that run on ``world_size`` workers."""
    return {name: fitted(examples(name), world_size) for name in IMPLEMENTED if name not in SLOW}


def fitted(options: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    """Returns ``options`` with degrees and group sizes that fit the number of workers."""
    made = copy.deepcopy(dict(options))
    if "hierarchical_allreduce_inter_nranks" in made:
        made["hierarchical_allreduce_inter_nranks"] = min(2, world_size)
    for axis in {"mp_degree", "pp_degree"} & made.get("hybrid_configs", {}).keys():
        made["hybrid_configs"][axis] = min(2, world_size)
    if "sharding_degree" in made.get("sharding_configs", {}):
        made["sharding_configs"] = {**made["sharding_configs"], "sharding_degree": world_size}
    return made


def test_every_strategy_has_a_guide() -> None:
    """Issue 3, proof 1: every option that is not refused explains itself, and has an example that turns it on."""
    for name in EXPLAINED:
        guide = REGISTRY[name].guide
        assert guide is not None, name
        assert guide.when, name
        assert guide.cost, name
        assert REGISTRY[name].default is None or guide.example[name] is True, name


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_promises(world_size: int) -> None:
    """Issue 3, proof 1: parameter names stay; state saved in the middle resumes exactly; workers end equal."""
    results = run_workers(keep_promises, world_size, jobs_for(world_size), backend=None, timeout_s=170)
    for name in results[0]:
        for result in results:
            assert result[name]["names"], name
            assert result[name]["off"] <= (0 if world_size < 3 else LAST_DIGIT.get(name, 1e-6)), name
            assert result[name]["loss"] == result[name]["loss"], name
            if name not in LOCAL:
                for parameter, value in result[name]["own"].items():
                    torch.testing.assert_close(value, results[0][name]["own"][parameter], atol=0, rtol=0, msg=name)


def pairs() -> Iterator[tuple[str, str]]:
    """Yields every pair of switches that are implemented and quick."""
    yield from combinations([n for n in IMPLEMENTED if n not in SLOW and not issubclass(REGISTRY[n], JobKind)], 2)


def train_pairs(rank: int, world_size: int, chosen: list[tuple[str, str]]) -> dict[str, str]:
    """Trains two steps under each pair; returns what became of it."""
    warnings.simplefilter("ignore", OptionWarning)
    found = {}
    for first, second in chosen:
        options = fitted({**examples(first), **examples(second)}, world_size)
        try:
            model, optimizer = job(options)
        except ConfigError as error:
            found[f"{first} + {second}"] = f"refused: {error}"
            continue
        loss = train(model, optimizer, rank, range(2))
        parts = local_parameters(model).values()
        bad = [p for p in parts if p.numel() and not bool(p.float().isfinite().all())]
        found[f"{first} + {second}"] = "not finite" if bad or loss != loss else "trained"
    return found


def check_pairs(chosen: list[tuple[str, str]]) -> None:
    """Fails unless each pair trains or is refused with a reason."""
    results = run_workers(train_pairs, 2, chosen, backend=None, timeout_s=170)
    assert results[0] == results[1]
    for pair, outcome in results[0].items():
        assert outcome == "trained" or outcome.startswith("refused: "), (pair, outcome)
        if outcome.startswith("refused: "):
            reasons = (
                "cannot both be on",
                "needs",
                "has no",
                "lamb",
                "lars",
                "several stages",
                "were started",
                "is on and",
            )
            assert any(word in outcome for word in reasons), outcome
    trained = [pair for pair, outcome in results[0].items() if outcome == "trained"]
    assert len(trained) > len(chosen) / 2


def test_every_fourth_pair_trains_or_is_refused() -> None:
    """Issue 3: everything A.5 allows together works together; the rest shows its conflict, with a reason."""
    check_pairs(list(pairs())[::4])


@pytest.mark.slow
def test_the_other_pairs_train_or_are_refused() -> None:
    """As the fourth ones."""
    check_pairs([pair for place, pair in enumerate(pairs()) if place % 4])
