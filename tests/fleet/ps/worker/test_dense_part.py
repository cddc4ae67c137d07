"""What a script writes into dense parameters that the servers hold is refused, unless it is taken back (L.1)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import fleet
from fleet.errors import ConfigError, OptionWarning, PSError, UnsupportedOptionError
from fleet.facade import Fleet
from fleet.ps.client.client import Client
from tests.helpers.fleets import own_fleet
from tests.helpers.served import ServedJob, run_job, strategy_of

SERVED = ("sync", "half_async", "async")  # modes in which the servers hold the dense parameters
_SEEDING = threading.Lock()


class Net(nn.Module):
    """A small table and two layers, the second of which has more elements than are probed."""

    def __init__(self) -> None:
        super().__init__()
        with _SEEDING:
            torch.manual_seed(0)
            self.emb = nn.Embedding(10, 4, sparse=True)
            self.hidden = nn.Linear(4, 40)
            self.out = nn.Linear(40, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.hidden(self.emb(ids)))


class Job(ServedJob):
    """Trains :class:`Net`."""

    def __init__(self, mode: str, own: Fleet | None = None) -> None:
        super().__init__(mode, Net, 0.001, own, k_steps=1)


@pytest.fixture(params=SERVED)
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    made = Job(request.param)
    yield made
    made.own.session.close()


def in_place(write: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
    return torch.no_grad()(write)


WRITES: dict[str, Callable[[Net], Any]] = {
    "data.clamp_": lambda net: [p.data.clamp_(-0.01, 0.01) for p in (net.hidden.weight, net.out.weight)],
    "mul_": in_place(lambda net: net.out.weight.mul_(0.5)),
    "init": lambda net: nn.init.zeros_(net.out.weight),
    "data = ...": lambda net: setattr(net.out.weight, "data", torch.zeros(1, 40)),
    "one element": in_place(lambda net: net.hidden.bias[7].fill_(3.0)),
    "load_state_dict of a layer": lambda net: net.out.load_state_dict(
        {k: v * 2 for k, v in net.out.state_dict().items()}
    ),
    "foreach": in_place(lambda net: torch._foreach_mul_([net.out.bias, net.out.weight], 0.9)),
    "double": lambda net: net.out.double(),
}


@pytest.mark.parametrize("steps", [0, 9])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_that_the_servers_would_undo_is_refused(job: Job, write: Callable[[Net], Any], steps: int) -> None:
    """Before the step changes anything; it names the parameter, and what to write instead."""
    for _ in range(steps):
        job.step()
    job.trainer.connection.flush()
    rows = job.net.emb.weight.detach().clone()
    write(job.net)
    for call in (job.step, job.trainer.connection.flush, job.own.barrier_worker, job.optimizer.state_dict):
        if write is WRITES["double"] and call == job.step:
            continue  # its forward fails in torch
        with pytest.raises(ConfigError, match=r"'(hidden|out)\.\w+' was changed after fleet.init_worker.*dp_degree"):
            call()
    assert torch.equal(job.net.emb.weight, rows)


@pytest.mark.parametrize("mode", SERVED)
def test_a_rare_write_through_data_is_seen_wherever_it_changes_most_elements(mode: str) -> None:
    made = Job(mode)
    for _ in range(20):
        made.step()
    made.net.hidden.weight.data.mul_(0.5)
    with pytest.raises(ConfigError, match=r"'hidden.weight' was changed"):
        made.step()
    made.own.session.close()


@pytest.mark.parametrize("mode", SERVED)
def test_a_loop_that_writes_single_elements_is_stopped_within_64_steps(mode: str) -> None:
    made = Job(mode)
    for _ in range(6):
        made.step()
    with pytest.raises(ConfigError, match=r"'hidden.weight' was changed.*element 1 is 5,"):  # noqa: PT012
        for _ in range(64):
            made.net.hidden.weight.data.view(-1)[1] = 5.0
            made.step()
    made.own.session.close()


def test_what_is_taken_back_before_the_step_is_no_write(job: Job) -> None:
    """An average of the weights that is evaluated, then training goes on; a deepcopy and its changes; moves."""
    average = AveragedModel(job.net)
    for number in range(8):
        job.step()
        job.trainer.connection.flush()
        average.update_parameters(job.net)
        own = [p.detach().clone() for p in (job.net.hidden.weight, job.net.out.weight)]
        with torch.no_grad():
            for parameter in (job.net.hidden.weight, job.net.out.weight):
                parameter.zero_()
            assert not job.net.hidden.weight.any()
            for parameter, value in zip((job.net.hidden.weight, job.net.out.weight), own, strict=True):
                parameter.data = value.clone() if number % 2 else parameter.data.copy_(value)
    job.net.float().cpu()
    job.step()
    job.end()


@pytest.mark.parametrize("radius", [0.05, 0.5])
def test_sharpness_aware_training_takes_its_perturbation_back(job: Job, radius: float) -> None:
    """Foret et al., 2021: up to rounding, which the servers' values undo; biases are smaller than their offsets."""
    with torch.no_grad():
        job.net.out.bias.zero_()
    job.trainer.connection.excuse_writes()
    for _ in range(8):
        job.optimizer.zero_grad()
        job.model(torch.arange(3)).square().sum().backward()
        dense = [p for p in (*job.net.hidden.parameters(), *job.net.out.parameters())]
        with torch.no_grad():
            offsets = [radius * p.grad / p.grad.norm() for p in dense if p.grad is not None]
            for parameter, offset in zip(dense, offsets, strict=True):
                parameter.add_(offset)
        job.optimizer.zero_grad()
        job.model(torch.arange(3)).square().sum().backward()
        with torch.no_grad():
            for parameter, offset in zip(dense, offsets, strict=True):
                parameter.sub_(offset)
        job.optimizer.step()
    job.end()


@pytest.mark.parametrize("factor", [1 - 1e-6, 1 + 1e-6])
def test_a_decay_of_a_millionth_is_a_write(factor: float) -> None:
    made = Job("sync")
    made.net.out.weight.data.mul_(factor)
    with pytest.raises(ConfigError, match=r"'out.weight' was changed"):
        made.step()
    made.own.session.close()


def test_a_state_that_was_loaded_with_a_warning_lets_training_go_on(job: Job) -> None:
    job.step()
    state = {name: value * 2 for name, value in job.net.state_dict().items() if "emb" not in name}
    with pytest.warns(OptionWarning, match="does not change what is trained"):
        job.model.load_state_dict(state, strict=False)
    for _ in range(6):
        job.step()
    job.end()


def test_stop_worker_says_what_it_replaces(job: Job) -> None:
    """The job has ended well otherwise: a warning, and the servers' parameters."""
    job.step()
    job.trainer.connection.flush()
    expected = job.net.out.weight.detach().clone()
    job.net.out.weight.data.zero_()
    with pytest.warns(OptionWarning, match=r"fleet.stop_worker\(\): 'out.weight' was changed"):
        job.own.stop_worker()
    assert torch.equal(job.net.out.weight, expected)


@pytest.mark.parametrize("mode", ["geo", "hybrid"])
def test_workers_that_train_the_parameters_may_write_them(mode: str) -> None:
    """As a loop of plain torch that clips its weights."""
    made, net = Job(mode), Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.001)
    for _ in range(5):
        made.step()
        optimizer.zero_grad()
        net(torch.arange(3)).square().sum().backward()
        optimizer.step()
        for one in (net, made.net):
            one.out.weight.data.clamp_(-0.05, 0.05)
    torch.testing.assert_close(made.net.out.weight, net.out.weight)
    torch.testing.assert_close(made.net.hidden.weight, net.hidden.weight)
    made.end()


WRITES_BESIDE_MASKS: dict[str, tuple[str, Callable[[nn.Module], Any]]] = {
    "kept weights": ("1.weight", lambda net: net[1].weight.data.add_(1)),
    "all of a weight": ("1.weight", lambda net: net[1].weight.data.zero_()),
    "a layer without masks": ("2.bias", lambda net: net[2].bias.data.zero_()),
}


@pytest.mark.parametrize(("name", "write"), WRITES_BESIDE_MASKS.values(), ids=WRITES_BESIDE_MASKS)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_asp_masks_are_no_writes(mode: str, name: str, write: Callable[[nn.Module], Any]) -> None:
    own = Fleet()
    made = strategy_of(mode, asp=True)
    own.init(strategy=made, log_level="ERROR")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 1))
    optimizer = own.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1), made)
    model = own.distributed_model(net)
    own.init_worker()
    for _ in range(8):
        optimizer.zero_grad()
        model(torch.ones(2, 16)).square().sum().backward()
        optimizer.step()
    assert (net[1].weight == 0).sum() == 512
    write(net)
    with pytest.raises(ConfigError, match=f"'{name}' was changed"):
        own.barrier_worker()
    own.session.close()


@pytest.mark.parametrize("mode", ["sync", "async", "geo", "hybrid"])
def test_a_hook_that_would_miss_the_rows_is_refused_in_the_step(mode: str) -> None:
    """It was added after init_worker(): it sees the dense half of the gradients."""
    job = Job(mode)
    job.step()
    for optimizer in (job.plain, job.optimizer):
        handle = optimizer.register_step_pre_hook(lambda *_: None)
        with pytest.raises(UnsupportedOptionError, match="gradients of rows on the servers would be missed"):
            job.step()
        handle.remove()
    job.step()
    job.end()


@pytest.mark.parametrize("mode", ["sync", "async", "geo", "hybrid"])
def test_a_graph_of_the_rows_does_not_outlive_a_step(mode: str) -> None:
    """As in plain torch, whose step changes what backward needs."""
    job = Job(mode)
    job.step()
    penalty = job.net.emb.weight.pow(2).sum()
    job.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        penalty.backward()
    penalty = job.net.emb.weight.pow(2).sum()
    loss = job.model(torch.arange(3)).square().sum()
    (loss + penalty).backward()
    job.optimizer.step()
    job.end()


def test_a_load_replaces_what_was_written(job: Job, tmp_path: Path) -> None:
    job.step()
    job.own.save_persistables(str(tmp_path))
    saved = job.net.out.weight.detach().clone()
    job.step()
    job.net.out.weight.data.zero_()
    job.own.load_model(str(tmp_path))
    assert torch.equal(job.net.out.weight, saved)
    job.step()
    job.end()


def test_a_second_optimizer_that_is_refused_leaves_the_first_one_training(job: Job) -> None:
    for options in ((), (job.strategy,)):
        with pytest.raises(ConfigError, match="one optimizer|called twice"):
            job.own.distributed_optimizer(torch.optim.SGD(job.net.out.parameters(), 0.1), *options)
    job.step()
    job.end()


@pytest.mark.parametrize("mode", ["sync", "async", "geo"])
def test_a_checkpoint_is_resumed_before_the_worker_starts(
    mode: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Afterwards the servers hold what is trained, and a worker that waits for the others would wait for itself."""
    job = Job(mode, own_fleet(monkeypatch))
    job.step()
    checkpoint = fleet.elastic.Checkpoint(tmp_path, job.model, job.optimizer)
    with pytest.raises(ConfigError, match=r"resume\(\) before fleet.init_worker\(\)"):
        checkpoint.resume()
    job.step()
    job.end()


def test_a_step_that_failed_half_way_is_no_write_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """One server's values have been taken when another one is lost; the script catches the error and goes on."""
    job = Job("sync")
    for _ in range(6):
        job.step()
    wait, before = Client.wait, job.net.out.weight.detach().clone()

    def lose(client: Client, ticket: Any) -> Any:
        wait(client, ticket)
        job.net.out.weight.data.copy_(before)  # as if its part had not come
        raise PSError("a server is lost")

    monkeypatch.setattr(Client, "wait", lose)
    with pytest.raises(PSError, match="lost"):
        job.step()
    monkeypatch.undo()
    job.step()
    job.end()


@pytest.mark.parametrize("num_servers", [1, 2])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_two_workers_step_without_a_word(mode: str, num_servers: int) -> None:
    """Also behind barriers, with steps that a worker takes alone."""

    def work(own: Fleet, rank: int) -> Any:
        made = strategy_of(mode)
        net = Net()
        optimizer = own.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.01), made)
        model = own.distributed_model(net)
        own.init_worker()
        for round_ in range(3):
            for _ in range(5 + 3 * rank * round_):
                optimizer.zero_grad()
                model(torch.arange(3)).square().sum().backward()
                optimizer.step()
            own.barrier_worker()
        found = [p.detach().clone() for p in (net.hidden.weight, net.out.weight)]
        own.stop_worker()
        return found

    one, other = run_job(work, num_workers=2, num_servers=num_servers, strategy=strategy_of(mode))
    for mine, theirs in zip(one, other, strict=True):  # barrier_worker() sends what waits and takes what there is
        assert torch.equal(mine, theirs)
