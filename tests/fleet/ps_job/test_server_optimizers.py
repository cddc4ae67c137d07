"""Optimizers of the script, served: groups, schedules, restored states, frozen rows; beside plain torch (D.3, D.5)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import fleet
from fleet.dataset import training as training
from fleet.errors import ConfigError, OptionWarning, UnsupportedOptionError
from fleet.facade import Fleet
from tests.fleet.ps_job.test_server_job import strategy
from tests.helpers.served import run_job

IDS, WORDS, BASE = 12, 10, 10**13
Batch = tuple[Tensor, Tensor, Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ads = fleet.SparseEmbedding(
            3, "ads", combiner="sum", initializer=fleet.ps.Initializer("uniform", -0.5, 0.5)
        )
        self.words = nn.Embedding(WORDS, 3, sparse=True)
        self.out = nn.Linear(6, 1)

    def forward(self, ads: Tensor, words: Tensor) -> Tensor:
        found: Tensor = self.out(torch.cat([self.ads(ads), self.words(words)], 1))
        return found


class Lazy(nn.Module):
    """The same in plain torch: each row is a parameter, so that it steps when one of its ids occurs, and only then."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        rows = net.ads.lookup_rows(torch.arange(IDS) * BASE - 5)
        self.ads = nn.ParameterList(row.clone() for row in rows)
        self.words = nn.ParameterList(row.clone() for row in net.words.weight.data)
        self.out = copy.deepcopy(net.out)

    def forward(self, ads: Tensor, words: Tensor) -> Tensor:
        bags = [torch.stack([self.ads[place] for place in bag]).sum(0) for bag in ((ads + 5) // BASE).tolist()]
        found = torch.stack([self.words[word] for word in words.tolist()])
        out: Tensor = self.out(torch.cat([torch.stack(bags), found], 1))
        return out


def groups(net: Net | Lazy) -> list[dict[str, Any]]:
    """Rows with a rate of their own, a group with the defaults, and one without decay."""
    return [
        {"params": list(net.ads.parameters()), "lr": 0.2},
        {"params": [*net.words.parameters(), net.out.weight]},
        {"params": [net.out.bias], "weight_decay": 0.0},
    ]


def batches(count: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(3)
    for _ in range(count):
        ads = torch.randint(0, IDS, (5, 4), generator=generator) * BASE - 5
        yield ads, torch.randint(0, WORDS, (5,), generator=generator), torch.randn(5, 1, generator=generator)


def train(model: Any, optimizer: Any, scheduler: Any, count: int = 12) -> list[float]:
    """Trains; in the middle the optimizer loads its own state, as a script does that goes on from a checkpoint."""
    losses = []
    for step, (ads, words, target) in enumerate(batches(count)):
        loss = ((model(ads, words) - target) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
        if step == count // 2:
            optimizer.load_state_dict(optimizer.state_dict())
    return losses


def start(net: Net, optimizer: Optimizer, own: Fleet, **options: Any) -> tuple[Any, Any]:
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = False
    for name, value in options.items():
        setattr(strategy, name, value)
    own.init(strategy=strategy, log_level="ERROR")
    wrapped = own.distributed_optimizer(optimizer, strategy)
    model = own.distributed_model(net)
    own.init_worker()
    return model, wrapped


@pytest.fixture
def own() -> Iterator[Fleet]:
    made = Fleet()
    yield made
    made.session.close()


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.7, nesterov=True, weight_decay=0.02),
        lambda p: torch.optim.Adagrad(p, 0.1, initial_accumulator_value=0.3, eps=1e-3, weight_decay=0.02),
        lambda p: torch.optim.Adam(p, 0.02, betas=(0.7, 0.9), eps=1e-3, weight_decay=0.05),
    ],
    ids=["nesterov", "adagrad", "adam"],
)
def test_groups_schedules_and_a_restored_state_are_those_of_torch(own: Fleet, make: Callable[[Any], Optimizer]) -> None:
    """001-10, D.3: each table has the hyper-parameters of its group, at each step the rate of the schedule."""
    torch.manual_seed(1)
    net = Net()
    plain = Lazy(net)
    reference, optimizer = make(groups(plain)), make(groups(net))
    expected = train(plain, reference, torch.optim.lr_scheduler.ExponentialLR(reference, 0.8))
    model, served = start(net, optimizer, own)
    losses = train(model, served, torch.optim.lr_scheduler.ExponentialLR(served, 0.8))
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), atol=2e-6, rtol=1e-5)
    rows = net.ads.lookup_rows(torch.arange(IDS) * BASE - 5)
    torch.testing.assert_close(rows, torch.stack(list(plain.ads)), atol=2e-6, rtol=1e-5)
    own.stop_worker()
    torch.testing.assert_close(net.words.weight, torch.stack(list(plain.words)), atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(net.out.state_dict(), plain.out.state_dict(), atol=2e-6, rtol=1e-5)


def test_frozen_rows_and_parameters(own: Fleet) -> None:
    """001-10: rows frozen before or during training stay; a parameter unfrozen too late is refused, not forgotten."""
    net = Net()
    net.out.bias.requires_grad_(False)
    model, optimizer = start(net, torch.optim.SGD(net.parameters(), 0.5), own)
    (ads, words, target), *_ = batches(1)

    def step() -> Tensor:
        ((model(ads, words) - target) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return net.ads.lookup_rows(ads[:, 0])

    first, second = step(), step()
    assert not torch.equal(first, second)
    net.ads.weight.requires_grad_(False)
    weight = net.out.weight.clone()
    assert torch.equal(step(), second)
    assert not torch.equal(net.out.weight, weight)
    net.ads.weight.requires_grad_(True)
    assert not torch.equal(step(), second)
    net.out.bias.requires_grad_(True)
    with pytest.raises(ConfigError, match="no table"):
        step()


def test_bounds_leave_the_schedule_in_force(own: Fleet) -> None:
    """D.4: a key of sparse_table_configs that is no rate leaves the optimizer's."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 1.0)
    model, served = start(net, optimizer, own, sparse_table_configs={"ads": {"weight_bounds": [-9, 9]}})
    ids = torch.tensor([[1, 2]])

    def moved() -> float:
        before = net.ads.lookup_rows(torch.tensor([1]))
        model.module.ads(ids)[0, 0].backward()
        served.step()
        served.zero_grad()
        return float((before - net.ads.lookup_rows(torch.tensor([1])))[0, 0])

    assert moved() == pytest.approx(1.0, abs=1e-6)
    served.param_groups[0]["lr"] = 0.25
    assert moved() == pytest.approx(0.25, abs=1e-6)


def test_a_model_state_loaded_while_servers_hold_the_parameters_is_warned_of() -> None:
    """B.2: it would be gone with the next step; before init_worker it is what training starts from."""
    torch.manual_seed(0)
    net, own = nn.Sequential(nn.Embedding(5, 1, sparse=True)), Fleet()
    own.init(strategy=strategy("sync"), log_level="WARNING")
    own.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1))
    model = own.distributed_model(net)
    state = {"0.weight": torch.arange(5.0)[:, None]}
    model.load_state_dict(state)
    own.init_worker()
    assert torch.equal(model.state_dict()["0.weight"], state["0.weight"])
    with pytest.warns(OptionWarning, match=r"before fleet.init_worker\(\), or .*fleet.load_model"):
        model.load_state_dict({"0.weight": torch.zeros(5, 1)})
    assert torch.equal(model.state_dict()["0.weight"], state["0.weight"])
    own.stop_worker()
    model.load_state_dict(state)  # nobody takes it back
    own.session.close()


@pytest.mark.parametrize("name", ["ads.weight", "words.weight"])
def test_rows_cannot_be_dumped_batch_by_batch(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B.7: the worker has no rows to write, or those of before training."""
    made, own, net = strategy("sync"), Fleet(), Net()
    made.trainer_desc_configs = {"dump_fields_path": str(tmp_path), "dump_param": [name]}
    own.init(strategy=made, log_level="WARNING")
    own.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1))
    own.distributed_model(net)
    own.init_worker()
    monkeypatch.setattr(training, "running_session", lambda: own.session)
    with pytest.raises(ConfigError, match=f"'{name}', whose rows are on the parameter servers"):
        fleet.train_from_dataset(lambda batch: None, [])
    own.stop_worker()
    own.session.close()


def test_hooks_are_refused_beside_rows_of_an_embedding_too() -> None:
    """B.3: grad_clip would see the dense half alone; whether nn.Embedding is served is known when training starts."""
    net, own = nn.Sequential(nn.Embedding(5, 1, sparse=True)), Fleet()
    own.init(strategy=strategy("sync"), log_level="WARNING")
    clip = fleet.ClipGradByGlobalNorm(1.0)
    own.distributed_optimizer(fleet.optimizer.SGD(0.1, net.parameters(), grad_clip=clip))
    own.distributed_model(net)
    with pytest.raises(UnsupportedOptionError, match="grad_clip"):
        own.init_worker()
    own.session.close()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_schedule_counts_before_the_first_step_of_worker_0(mode: str) -> None:
    """A warm-up from 0: what worker 1 pushed first was applied with the rate below the schedule."""

    def work(own: Fleet, rank: int) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Linear(3, 1, bias=False)
        optimizer = own.distributed_optimizer(torch.optim.SGD(net.parameters(), 50.0), made)
        model = own.distributed_model(net)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.01 * min(step, 2))
        own.init_worker()
        before = net.weight.detach().clone()
        for _ in range(2 if rank else 0):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        own.barrier_worker()
        after = net.weight.detach().clone()
        assert schedule.get_last_lr() == [0.0]
        own.stop_worker()
        return [before, after]

    made = strategy(mode)
    for before, after in run_job(work, num_workers=2, strategy=made):
        torch.testing.assert_close(after, before, atol=0, rtol=0)
