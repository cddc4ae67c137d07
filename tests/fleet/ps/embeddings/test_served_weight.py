"""Uses of an embedding's weight outside its lookup: as plain torch has them, or refused (D.7, L.1)."""

from __future__ import annotations

import copy
import io
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fleet
from fleet.errors import ConfigError, OptionWarning, UnsupportedOptionError
from fleet.facade import Fleet
from fleet.ps.embeddings import served_weight as _served_weight
from tests.helpers.served import run_job

_SEEDING = threading.Lock()
Penalty = Callable[[Any, torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """A served embedding and a dense one, with a padding row that is not zero."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.Embedding(10, 4, sparse=True, padding_idx=3)
        nn.init.normal_(self.emb.weight)
        self.age = nn.Embedding(5, 4)
        self.out = nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(torch.cat([self.emb(ids), self.age(ids % 5)], 1))


PENALTIES: dict[str, Penalty] = {
    "square": lambda m, ids: 0.1 * m.emb.weight.square().sum(),
    "norm": lambda m, ids: 0.1 * m.emb.weight.norm(),
    "every parameter": lambda m, ids: 0.1 * sum(p.norm() for p in m.parameters()),
    "F.embedding": lambda m, ids: 0.1 * F.embedding(ids, m.emb.weight).square().sum(),
    "F.embedding(sparse)": lambda m, ids: 0.1 * F.embedding(ids, m.emb.weight, sparse=True).square().sum(),
    "indexed": lambda m, ids: 0.1 * m.emb.weight[ids].pow(2).mean() + m.emb.weight[3].sum(),
    "scores": lambda m, ids: F.linear(m.emb(ids), m.emb.weight).pow(2).mean(),
}


def data(rank: int = 0, num_workers: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    made = torch.Generator().manual_seed(1)
    found = [(torch.randint(0, 10, (4,), generator=made), torch.randn(4, 1, generator=made)) for _ in range(3)]
    return [(ids[rank::num_workers], target[rank::num_workers]) for ids, target in found]


def train(model: Any, optimizer: Any, penalty: Penalty, share: Any, after: Callable[[], Any] = int) -> list[float]:
    losses = []
    for ids, target in share:
        loss = (model(ids) - target).square().mean() + penalty(model, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after()
        losses.append(loss.item())
    return losses


def served(own: Fleet, mode: str, make: Any) -> tuple[Any, Any]:
    made = fleet.DistributedStrategy()
    made.a_sync = mode != "sync"
    if mode == "geo":
        made.a_sync_configs = {"k_steps": 2}
    if mode == "hybrid":
        made.a_sync, made.hybrid_configs = False, {"dp_degree": own.worker_num()}
    with _SEEDING:  # the generator belongs to the whole process
        net = Net()
    optimizer = own.distributed_optimizer(make(net.parameters()), made)
    return own.distributed_model(net), optimizer


def plainly(make: Any, penalty: Penalty, share: Any) -> tuple[list[float], Net]:
    net = Net()
    net.emb.sparse = False  # the gradient of a penalty is dense
    return train(net, make(net.parameters()), penalty, share), net


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1)


@pytest.mark.parametrize("penalty", PENALTIES.values(), ids=PENALTIES)
def test_a_use_of_the_weight_is_that_of_plain_torch(penalty: Penalty) -> None:
    """Issue 9, 1.12: losses, rows and dense parameters, with the server inside and Adam's state for each row."""
    make = torch.optim.Adagrad
    expected, net = plainly(make, penalty, data())
    own = Fleet()
    own.init(log_level="WARNING")
    model, optimizer = served(own, "sync", make)
    weight = model.emb.weight  # held by the script from before
    own.init_worker()
    losses = train(model, optimizer, penalty, data())
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), atol=2e-6, rtol=0)
    torch.testing.assert_close(weight.detach(), net.emb.weight.detach(), atol=2e-6, rtol=0)
    torch.testing.assert_close(model.out.weight.detach(), net.out.weight.detach(), atol=2e-6, rtol=0)
    own.stop_worker()
    torch.testing.assert_close(weight.norm(), net.emb.weight.norm(), atol=2e-6, rtol=0)  # as the servers left it
    own.session.close()


@pytest.mark.parametrize("mode", ["async", "geo", "hybrid"])
def test_in_every_mode(mode: str) -> None:
    """Issue 9, 1.12, D.7: with one worker that waits for its pushes each mode is plain training."""
    penalty = PENALTIES["every parameter"]
    expected, net = plainly(sgd, penalty, data())
    own = Fleet()
    own.init(log_level="WARNING")
    model, optimizer = served(own, mode, sgd)
    own.init_worker()
    losses = train(model, optimizer, penalty, data(), own.session.server_job.trainer.connection.flush)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), atol=2e-6, rtol=0)
    torch.testing.assert_close(model.state_dict()["emb.weight"], net.emb.weight.detach(), atol=2e-6, rtol=0)
    own.stop_worker()
    own.session.close()


def test_two_workers_equal_one_process_on_all_data() -> None:
    """Issue 9, 1.12, 002-18: the servers average the penalty's gradient as they do the others."""
    penalty = PENALTIES["square"]
    expected, net = plainly(sgd, penalty, data())
    made = fleet.DistributedStrategy()
    made.a_sync = False

    def work(own: Fleet, rank: int) -> Any:
        model, optimizer = served(own, "sync", sgd)
        own.init_worker()
        losses = train(model, optimizer, penalty, data(rank, 2))
        own.stop_worker()
        return torch.tensor(losses), model.state_dict()

    (first, state), (second, _) = run_job(work, num_servers=2, num_workers=2, strategy=made)
    torch.testing.assert_close((first + second) / 2, torch.tensor(expected), atol=2e-6, rtol=0)
    for name, value in net.state_dict().items():
        torch.testing.assert_close(state[name], value, atol=2e-6, rtol=0)


@pytest.fixture
def pair() -> Any:
    """A served model of both kinds of embedding that has taken a step, and its optimizer."""
    own = Fleet()
    own.init(log_level="WARNING")
    torch.manual_seed(0)
    net = nn.ModuleDict({"words": nn.Embedding(10, 4, sparse=True), "ads": fleet.SparseEmbedding(4)})
    made = fleet.StrategyFactory.create_half_async_strategy()  # sync keeps the rows in the weight
    optimizer = own.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1), made)
    model = own.distributed_model(net)
    own.init_worker()
    ids = torch.arange(3)
    (model["words"](ids).sum() + model["ads"](ids).sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
    own.session.server_job.trainer.connection.flush()
    yield model, optimizer
    own.stop_worker()
    own.session.close()


def make_old(module: Any) -> None:
    """Leaves other values in the weight than the servers have."""
    with _served_weight.as_plain():
        module.weight.data.zero_()


def test_reading_shows_the_servers_rows(pair: Any) -> None:
    """Issue 9, 1.12: printing, detach, no_grad, a frozen weight, copies: never the rows of the start."""
    model, _ = pair
    words = model["words"]
    rows = words(torch.arange(10)).detach()
    assert torch.equal(words.weight.detach(), rows)
    with torch.no_grad():
        assert torch.equal(words.weight * 1, rows)
    assert f"{rows[0, 0].item():.4f}" in str(words.weight)
    make_old(words)
    copied = copy.deepcopy(words)
    assert torch.equal(copied.weight.detach(), rows)
    make_old(words)
    file = io.BytesIO()
    torch.save({"weight": words.weight, "state": model.state_dict()}, file)
    file.seek(0)
    read = torch.load(file, weights_only=True)
    assert torch.equal(read["weight"].detach(), rows)
    assert torch.equal(read["state"]["words.weight"], rows)


def test_a_loss_with_the_weight_of_unbounded_ids_is_refused(pair: Any) -> None:
    """Issue 9, 1.12: the weight of a SparseEmbedding is empty, so a penalty on it would be 0 without a word."""
    model, optimizer = pair
    ads = model["ads"]
    for use in (lambda: ads.weight.square(), lambda: [p.norm() for p in model.parameters()], lambda: ads.weight.sum()):
        with pytest.raises(ConfigError, match=r"'ads': \w+ uses its weight, which is empty.*rows = embedding\(ids\)"):
            use()
        with torch.no_grad(), pytest.raises(ConfigError, match="weight_decay"):
            use()
    assert not ads.weight.numel()
    assert ads.weight.requires_grad
    assert "size=(0, 4)" in str(ads.weight)
    before = ads.lookup_rows(torch.arange(5))
    (0.5 * ads(torch.tensor([1, 2])).square().sum()).backward()  # what the message says to write
    optimizer.step()
    expected = before * torch.tensor([1, 0.9, 0.9, 1, 1])[:, None]
    torch.testing.assert_close(ads.lookup_rows(torch.arange(5)), expected)


def test_what_cannot_reach_the_servers_is_refused(pair: Any) -> None:
    """Issue 9, 1.12: writes into the copy here, and gradients that would leave the lookups out."""
    model, _ = pair
    weight = model["words"].weight
    for write in (
        lambda: nn.init.normal_(weight),
        lambda: weight.mul_(2),
        lambda: weight.__setitem__(0, 1.0),
        lambda: torch.add(weight, 1, out=weight),
        lambda: setattr(weight, "data", torch.zeros(10, 4)),
    ):
        with torch.no_grad(), pytest.raises(ConfigError, match=r"before fleet.init_worker\(\)"):
            write()
    with pytest.raises(ConfigError, match="Differentiate with respect to the rows"):
        torch.autograd.grad(weight.sum(), weight)
    model.float().to("cpu")  # moves nothing
    other = torch.zeros(10, 4)
    other.copy_(weight.detach())
    with pytest.warns(OptionWarning, match="does not change what is trained"):
        model.load_state_dict(model.state_dict())


def test_a_gradient_that_was_cleared_is_not_pushed(pair: Any) -> None:
    """Issue 9, 1.12: by the optimizer, by the model, or by hand."""
    model, optimizer = pair
    weight = model["words"].weight
    before = weight.detach().clone()
    for clear in (optimizer.zero_grad, model.zero_grad, lambda: setattr(weight, "grad", None)):
        weight.sum().backward()
        assert optimizer.has_new_gradients()
        clear()
        optimizer.step()
    assert torch.equal(weight.detach(), before)
    weight.sum().backward()
    weight.sum().backward()  # accumulated
    optimizer.step()
    optimizer.step()  # used up
    torch.testing.assert_close(weight.detach(), before - 0.2)


def test_a_large_table_says_what_it_costs(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 9, 1.12: once, and not for reading."""
    model, _ = pair
    monkeypatch.setattr(_served_weight, "MANY_ROWS", 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            model["words"].weight.norm()
    with pytest.warns(OptionWarning, match="reads all 10 rows.*weight_decay"):
        model["words"].weight.norm()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model["words"].weight.norm()


def test_weight_decay_penalises_the_rows_of_the_batch_once() -> None:
    """Issue 9, 1.12: what the refusal offers; rows that do not occur stay, repeated ones count once."""
    own = Fleet()
    own.init(log_level="WARNING")
    net = nn.Sequential(fleet.SparseEmbedding(4, initializer=fleet.ps.Initializer("constant", 1.0, 1.0)))
    made = fleet.DistributedStrategy()
    made.a_sync = False
    optimizer = own.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1, weight_decay=2 * 0.5), made)
    model = own.distributed_model(net)
    own.init_worker()
    (0 * model(torch.tensor([1, 2, 2])).sum()).backward()
    optimizer.step()
    rows = net[0].lookup_rows(torch.tensor([1, 2, 3]))[:, 0]
    torch.testing.assert_close(rows / rows[2], torch.tensor([0.9, 0.9, 1.0]))
    own.stop_worker()
    own.session.close()


@pytest.mark.parametrize("name", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_the_gradient_of_rows_is_refused(name: str) -> None:
    """It would never be called: nothing that a lookup gets reaches the weight's gradient."""

    def hooked(net: Net, where: str) -> Net:
        getattr(net.get_parameter(where), name)(lambda gradient: gradient)
        return net

    def job(own: Fleet, net: Net) -> tuple[Any, Any]:
        strategy = fleet.DistributedStrategy()
        strategy.a_sync = False
        optimizer = own.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1), strategy)
        model = own.distributed_model(net)
        own.init_worker()
        return model, optimizer

    own = Fleet()
    own.init(log_level="ERROR")
    with pytest.raises(UnsupportedOptionError, match="hook on its weight"):
        job(own, hooked(Net(), "emb.weight"))
    own.session.close()
    own = Fleet()
    own.init(log_level="ERROR")
    net = hooked(Net(), "age.weight")
    model, optimizer = job(own, net)
    with pytest.raises(ConfigError, match="hook on its weight"):
        hooked(net, "emb.weight")
    ids, target = data()[0]
    F.mse_loss(model(ids), target).backward()
    optimizer.step()  # Fleet's own hooks are not the script's
    own.stop_worker()
    own.session.close()


USES: list[Callable[[Any], Any]] = [
    lambda weight: 0.1 * weight,
    lambda weight: weight + 1,
    lambda weight: 1 - weight,
    lambda weight: torch.ones(1) + weight,
    lambda weight: weight**2,
    lambda weight: weight / 2,
    lambda weight: weight < 1,
    lambda weight: weight.square(),
]


@pytest.mark.parametrize("is_made_before", [True, False])
@pytest.mark.parametrize("options", [{"multi_avg_fn": get_ema_multi_avg_fn(0.5)}, {}], ids=["ema", "swa"])
def test_an_average_of_a_model_with_unbounded_ids(options: Any, is_made_before: bool) -> None:
    """Parameters are averaged as in plain torch; the empty weight has nothing to average, and stays protected here."""
    own = Fleet()
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = False
    own.init(strategy=strategy, log_level="WARNING")
    net = nn.Sequential(fleet.SparseEmbedding(4, combiner="sum"), nn.Linear(4, 1))
    optimizer = own.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1), strategy)
    model = own.distributed_model(net)
    average, own_average = (AveragedModel(net, **options), copy.deepcopy(net)) if is_made_before else (None, None)
    own.init_worker()
    average, own_average = average or AveragedModel(net, **options), own_average or copy.deepcopy(net)
    plain, by_hand = AveragedModel(nn.Linear(4, 1), **options), net[1].weight.detach().clone()
    for step in range(3):
        model(torch.tensor([[step, 5]])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(net)
        plain.update_parameters(net[1])
        with torch.no_grad():
            by_hand.mul_(0.9).add_(net[1].weight, alpha=0.1)
            for mean, parameter in zip(own_average.parameters(), net.parameters(), strict=True):
                mean.mul_(0.9).add_(parameter, alpha=0.1)
    torch.testing.assert_close(average.module[1].weight, plain.module.weight, atol=0, rtol=0)
    torch.testing.assert_close(own_average[1].weight, by_hand, atol=0, rtol=0)
    with pytest.raises(ConfigError, match="mul_ would change its weight here"), torch.no_grad():
        net[0].weight.mul_(0.9)
    for use in USES:
        with pytest.raises(ConfigError, match="which is empty: it stands for rows"):
            use(net[0].weight)
    own.stop_worker()
    own.session.close()
