"""Loops as users write them: the same bits on any number of processes, or refused with the next step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

import fleet
from fleet.elastic import ElasticSampler
from fleet.errors import ConfigError
from tests.helpers.workers import run_workers


def start(logical_workers: int = 3) -> None:
    """Begins a reproducible job."""
    strategy = fleet.DistributedStrategy()
    strategy.reproducible = True
    strategy.reproducible_configs = {"logical_workers": logical_workers}
    torch.manual_seed(5)
    fleet.init(is_collective=True, strategy=strategy)


class Training:
    """A small net, its optimizer, and a loader of two and a half updates of three logical workers."""

    def __init__(self, lr: float = 0.1) -> None:
        start()
        generator = torch.Generator().manual_seed(0)
        self.data = TensorDataset(torch.randn(30, 4, generator=generator), torch.randn(30, 1, generator=generator))
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = fleet.distributed_optimizer(torch.optim.SGD(self.net.parameters(), lr))
        self.model = fleet.distributed_model(self.net)
        self.sampler = ElasticSampler(self.data, batch_size=4, seed=1)
        self.loader = DataLoader(self.data, batch_size=4, sampler=self.sampler)

    def batch(self, x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.mse_loss(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss

    def result(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.net.parameters()]


def on_each_number(train: Any) -> list[Any]:
    """Returns the results of ``train`` on one and on two processes, worker by worker; they must be equal."""
    found = [train(0, 1), *run_workers(train, 2, backend=None)]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=0)
    return found


def _one_cycle(rank: int, world_size: int) -> Any:
    own = Training()
    assert len(own.loader) == 3
    scheduler = OneCycleLR(own.optimizer, 0.5, total_steps=2 * len(own.loader))
    rates = []
    for epoch in range(2):
        own.sampler.set_epoch(epoch)
        for x, y in own.sampler.batches(own.loader):
            loss = own.batch(x, y)
            rates += [own.optimizer.get_lr()] if fleet.update_loss(loss) is not None else []
            scheduler.step()
    return rates, own.result()


def test_a_schedule_over_the_loaders_length_ends_with_the_last_update() -> None:
    rates, _ = on_each_number(_one_cycle)[0]
    assert len(rates) == 6
    assert rates[-1] < 0.01 < max(rates)


def _log_and_update_loss(rank: int, world_size: int) -> Any:
    own = Training()
    found = []
    for x, y in own.sampler.batches(own.loader):
        loss = own.batch(x, y)
        logged = fleet.log({"loss": loss})
        first, second = fleet.update_loss(loss), fleet.update_loss(2 * loss)
        if first is not None and second is not None:
            found.append([logged["loss"], first, second])
    return torch.tensor(found, dtype=torch.float64)


def test_several_means_in_one_batch_do_not_mix() -> None:
    found = on_each_number(_log_and_update_loss)[0]
    torch.testing.assert_close(found[:, 0], found[:, 1], rtol=0, atol=0)
    torch.testing.assert_close(found[:, 2], 2 * found[:, 1], rtol=1e-12, atol=0)


def _stops_early(rank: int, world_size: int) -> Any:
    own = Training()
    for x, y in own.sampler.batches(own.loader):
        if fleet.update_loss(own.batch(x, y)) is not None:
            break
    drawn = torch.rand(3)
    for x, y in own.sampler.batches(own.loader):
        own.batch(x, y)
    return drawn, own.result()


def test_a_loop_that_is_left_at_an_update_goes_on_with_common_draws() -> None:
    on_each_number(_stops_early)


class Gan:
    """A generator and a critic, each with an optimizer."""

    def __init__(self) -> None:
        start()
        self.generator = nn.Linear(2, 4)
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        made = [
            fleet.distributed_optimizer(torch.optim.Adam(n.parameters(), 0.01)) for n in (self.generator, self.critic)
        ]
        self.of_generator, self.of_critic = made
        self.makes, self.judges = fleet.distributed_model(self.generator), fleet.distributed_model(self.critic)

    def clear(self) -> None:
        self.of_generator.zero_grad()
        self.of_critic.zero_grad()

    def losses(self, real: Tensor) -> tuple[Tensor, Tensor]:
        fake = self.makes(torch.randn(2, 2))
        apart = (self.judges(fake.detach()) - self.judges(real)).square().mean()
        return self.judges(fake).square().mean(), apart


def _gan(rank: int, world_size: int) -> Any:
    own = Gan()
    for update in range(3):
        for number in fleet.elastic.logical_ranks():
            own.clear()
            fooled, apart = own.losses(torch.full((2, 4), float(update + number)))
            fooled.backward(inputs=list(own.generator.parameters()))
            apart.backward(inputs=list(own.critic.parameters()))
            own.of_critic.step()
            own.of_generator.step()
    return [p.detach().clone() for net in (own.generator, own.critic) for p in net.parameters()]


def test_a_gan_that_steps_after_both_losses_trains() -> None:
    on_each_number(_gan)


@pytest.mark.parametrize("freezes", [False, True])
def test_a_gan_that_steps_between_its_losses_is_refused(freezes: bool) -> None:
    """The generator would be trained by the critic of this update in the last batch, and by the older one before it."""
    own = Gan()

    def train() -> None:
        for _ in fleet.elastic.logical_ranks():
            own.clear()
            fooled, apart = own.losses(torch.ones(2, 4))
            apart.backward()
            own.of_critic.step()
            if freezes:
                fooled = own.judges(own.makes(torch.randn(2, 2))).mean()
            fooled.backward()
            own.of_generator.step()

    with pytest.raises(
        ConfigError, match=r"after step\(\) on the batch.*With 'reproducible'.*before its first step\(\)"
    ):
        train()


def test_a_rate_that_counts_batches_is_refused() -> None:
    own = Training()

    def train() -> None:
        for number, (x, y) in enumerate(own.sampler.batches(own.loader)):
            own.optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
            own.batch(x, y)

    changed = r"param_groups\[0\]\['lr'\] is 0\.05 in batch 2 of an update, and was 0\.1 .*Count updates"
    with pytest.raises(ConfigError, match=changed):
        train()


def test_a_momentum_that_counts_batches_is_refused() -> None:
    own = Training()

    def train() -> None:
        for number, (x, y) in enumerate(own.sampler.batches(own.loader)):
            own.optimizer.param_groups[0]["momentum"] = 0.1 * number
            own.batch(x, y)

    with pytest.raises(ConfigError, match=r"param_groups\[0\]\['momentum'\] is 0\.1 in batch 2 of an update"):
        train()


@pytest.mark.parametrize("value", ["count", "loss"])
def test_a_scheduler_that_counts_batches_or_takes_the_loss_of_one_is_refused(value: str) -> None:
    own = Training()
    warm = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(own.optimizer, 2)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(own.optimizer)

    def train() -> None:
        for number, (x, y) in enumerate(own.sampler.batches(own.loader)):
            loss = own.batch(x, y)
            if value == "count":
                warm.step(number / len(own.loader))
            else:
                plateau.step(loss.item())

    with pytest.raises(
        ConfigError, match=r"step\(.*\) was called in a batch that completes no update.*count of updates"
    ):
        train()


def test_a_seed_in_a_batch_is_refused() -> None:
    own = Training()

    def train() -> None:
        for x, y in own.sampler.batches(own.loader):
            torch.manual_seed(3)
            own.batch(x, y)

    with pytest.raises(ConfigError, match=r"torch.manual_seed\(3\) was called in the batch of logical worker 0"):
        train()


def _seeds_by_logical_rank(rank: int, world_size: int) -> list[Tensor]:
    own = Training()
    for update in range(2):
        for logical_rank in fleet.elastic.logical_ranks():
            torch.manual_seed(100 * update + logical_rank)
            own.batch(torch.randn(4, 4), torch.randn(4, 1))
    return own.result()


def test_a_loop_over_logical_ranks_may_seed_by_them() -> None:
    on_each_number(_seeds_by_logical_rank)


def _draws_samples_after_an_update(rank: int, world_size: int) -> list[Tensor]:
    """A seed where an update is made, as for pictures that are comparable."""
    own = Training()
    drop = nn.Dropout(0.5)
    for x, y in own.sampler.batches(own.loader):
        loss = own.batch(drop(x), y)
        if fleet.update_loss(loss) is not None:
            torch.manual_seed(3)
    return own.result()


def test_a_seed_after_an_update_holds_until_the_next_batch() -> None:
    on_each_number(_draws_samples_after_an_update)


def test_the_loader_of_the_sampler_is_not_iterated_by_itself() -> None:
    own = Training()
    with pytest.raises(ConfigError, match=r"iterated by itself.*Train over sampler.batches\(loader\)"):
        next(iter(own.loader))


def _leaves_batches_out(rank: int, world_size: int) -> list[Tensor]:
    own = Training()
    for update in range(3):
        for logical_rank in fleet.elastic.logical_ranks():
            loss = nn.functional.mse_loss(own.model(own.data.tensors[0][:4]), own.data.tensors[1][:4])
            own.optimizer.zero_grad()
            if logical_rank != (1 + update) % 3:
                loss.backward()
            own.optimizer.step()
            fleet.update_loss(loss)
    return own.result()


def test_a_batch_is_left_out_by_its_backward_pass() -> None:
    """Its worker meets those that are inside their backward passes, also where the copies are compared."""
    alone = _leaves_batches_out(0, 1)
    for other in run_workers(_leaves_batches_out, 3, backend=None):
        torch.testing.assert_close(other, alone, rtol=0, atol=0)


def test_a_loss_that_reaches_another_optimizer_is_named() -> None:
    """As a generator's does, whose discriminator keeps gradients that nothing uses."""
    start(2)
    nets = [nn.Linear(4, 4), nn.Linear(4, 1)]
    optimizers = [fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1)) for net in nets]
    first, second = (fleet.distributed_model(net) for net in nets)

    def train(clears: bool) -> None:
        for _ in fleet.elastic.logical_ranks():
            optimizers[0].zero_grad()
            second(first(torch.randn(2, 4))).mean().backward()
            optimizers[0].step()
            if clears:
                optimizers[1].zero_grad()

    train(clears=True)
    with pytest.raises(ConfigError, match=r"parameters of optimizer 2 .*optimizer 1 did. Call zero_grad\(\) of opt"):
        train(clears=False)


@pytest.mark.parametrize("batches", [2, 3])
def test_a_training_that_ends_amid_an_update_says_so(batches: int, caplog: pytest.LogCaptureFixture) -> None:
    own = Training()
    loop = iter(own.sampler.batches(own.loader))
    for _ in range(batches):
        own.batch(*next(loop))
    fleet.init(is_collective=True)
    said = [record.getMessage() for record in caplog.records if "The training has ended" in record.getMessage()]
    assert len(said) == (batches == 2)
    assert not said or "after 2 of 3 batches of an update" in said[0]


def _schedules_before_the_step(rank: int, world_size: int) -> Any:
    own = Training()
    scheduler = ExponentialLR(own.optimizer, 0.5)
    for x, y in own.sampler.batches(own.loader):
        scheduler.step()
        own.batch(x, y)
    return own.optimizer.get_lr(), own.result()


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_scheduler_before_the_step_acts_once_an_update() -> None:
    assert on_each_number(_schedules_before_the_step)[0][0] == 0.1 * 0.5**3


def _rates_of_own_losses(rank: int, world_size: int) -> str:
    own = Training()
    try:
        for epoch in range(2):
            for x, y in own.sampler.batches(own.loader):
                own.batch(x, y)
            own.optimizer.param_groups[0]["lr"] = 0.1 / (1 + rank)
            own.sampler.set_epoch(epoch + 1)
    except ConfigError as error:
        return f"{error}"
    return "trained"


def test_rates_that_differ_between_the_workers_are_refused_at_once() -> None:
    for said in run_workers(_rates_of_own_losses, 2, backend=None):
        assert "with different learning rates" in said


def test_complex_parameters_train() -> None:
    start(2)
    weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    net = nn.ParameterList([weight])
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.5))
    for rank in fleet.elastic.logical_ranks():
        ((1 + rank) * weight).abs().sum().backward()
        optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((3,), 0.25, dtype=torch.complex64))


class Noisy(torch.optim.SGD):
    """Adds noise to the weights in each update."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=0.01)
        return loss


def _noisy_update(rank: int, world_size: int) -> Any:
    own = Training()
    own.optimizer = fleet.distributed_optimizer(Noisy(own.net.parameters(), 0.1))
    for x, y in own.sampler.batches(own.loader):
        own.batch(x, y)
    return own.result()


def test_an_update_rule_draws_the_same_noise_on_all_workers() -> None:
    on_each_number(_noisy_update)


def test_a_seed_after_init_holds_for_the_first_batches_of_a_loader() -> None:
    own = Training()
    torch.manual_seed(9)
    own.sampler.batches(own.loader)
    assert {seed for seed, *_ in own.sampler._numbers()} == {9}


class Late(nn.Module):
    """Registers a buffer in its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "mean"):
            self.register_buffer("mean", torch.zeros(4))
        self.mean += x.mean(0)
        return self.linear(x - self.mean)


def _other_orders(rank: int, world_size: int) -> str:
    own = Training()
    own.sampler = ElasticSampler(own.data, batch_size=4, seed=rank)
    own.loader = DataLoader(own.data, batch_size=4, sampler=own.sampler)
    try:
        for x, y in own.sampler.batches(own.loader):
            own.batch(x, y)
    except ConfigError as error:
        return f"{error}"
    return "trained"


def test_samplers_of_different_seeds_are_refused() -> None:
    for said in run_workers(_other_orders, 2, backend=None):
        assert "ElasticSamplers of different seeds" in said


class Growing(nn.Module):
    """Keeps one more row in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("rows", torch.zeros(1, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.rows = torch.cat([self.rows, x[:1]])
        return self.linear(x - self.rows.mean(0))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Late, r"1 buffers were registered since the round began.*__init__\(\)"),
        (Growing, r"buffer of shape \[1, 4\] has the shape \[2, 4\].*keep their shapes"),
    ],
)
def test_buffers_that_a_forward_makes_or_grows_are_refused(kind: type[nn.Module], said: str) -> None:
    start()
    net = kind()
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1))
    model = fleet.distributed_model(net)

    def train() -> None:
        for _ in fleet.elastic.logical_ranks():
            model(torch.ones(2, 4)).mean().backward()
            optimizer.step()

    with pytest.raises(ConfigError, match=said):
        train()


def test_a_loss_after_the_loop_belongs_to_no_update() -> None:
    own = Training()
    for x, y in own.sampler.batches(own.loader):
        loss = own.batch(x, y)
    with pytest.raises(ConfigError, match=r"update_loss\(\) was called between two updates.*fleet\.log"):
        fleet.update_loss(loss)
