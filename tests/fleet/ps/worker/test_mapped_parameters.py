"""Dense parameters that lie in the server's memory: as plain torch, whatever scripts, servers and workers do (L.1)."""

from __future__ import annotations

import copy
import io
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fleet.errors import ConfigError
from fleet.facade import Fleet
from fleet.ps.server.answers import Answers
from fleet.ps.worker.exchange_modes import SyncExchange
from tests.helpers.mapped_job import RATE, Job, Net, differs, ids_of, loss_of, mapped_of, plain, run_workers, train
from tests.helpers.served import ServedJob, run_job, strategy_of


@pytest.fixture
def job() -> Any:
    made = Job()
    yield made
    made.own.session.close()


# -- what scripts see ------------------------------------------------------------------------------------------------


def test_two_workers_read_the_servers_memory_and_train_as_plain_torch() -> None:
    def work(own: Fleet, rank: int, net: Net, model: Any, optimizer: Any) -> Any:
        mapped = mapped_of(own)
        assert mapped.holds()
        taken: list[int] = []
        exchange = own.session.server_job.trainer._exchange
        assert isinstance(exchange, SyncExchange)
        take = exchange._take
        exchange._take = lambda *given, **start: (taken.append(1), take(*given, **start))  # type: ignore[method-assign]
        train(model, optimizer, range(20), rank)
        assert mapped.holds()
        assert not taken  # no answer brought values
        return copy.deepcopy(net)

    first, second = run_workers(work)
    assert differs(first, second) == 0.0
    assert differs(first, plain(20, 0, 1)) < 1e-6


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.Adagrad])
def test_rules_with_a_state_change_values_alone(optimizer: Any) -> None:
    def work(own: Fleet, rank: int) -> Any:
        net = Net()
        net.emb.weight.requires_grad_(False)
        trained = own.distributed_optimizer(optimizer(net.dense(), RATE), strategy_of("sync"))
        model = own.distributed_model(net)
        own.init_worker()
        train(model, trained, range(6), rank)
        assert mapped_of(own).holds()
        own.stop_worker()
        return net

    nets = run_job(work, num_workers=2, strategy=strategy_of("sync"))
    wanted = Net()
    wanted.emb.weight.requires_grad_(False)
    made = optimizer(wanted.dense(), RATE)
    for step in range(6):
        made.zero_grad()
        (sum(loss_of(wanted, ids_of(step, rank)) for rank in range(2)) / 2).backward()
        made.step()
    assert max(differs(net, wanted) for net in nets) < 1e-5


def test_views_and_arrays_of_parameters_follow(job: Job) -> None:
    view, array = job.net.middle.weight.data, job.net.out.weight.detach().numpy()
    job.step()
    assert torch.equal(view, job.net.middle.weight)
    assert np.array_equal(array, job.net.out.weight.detach().numpy())
    assert job.is_right()


def test_what_holds_a_parameter_from_before_keeps_following() -> None:
    """Its memory cannot move then, so values are copied into it."""
    net = Net()
    view = net.middle.weight.data
    job = ServedJob("sync", lambda: net, RATE)
    assert not mapped_of(job.own).is_attached
    train(job.model, job.optimizer, range(20), 0)  # longer than it tries
    assert torch.equal(view, net.middle.weight)
    assert differs(net, plain(20)) < 1e-6
    job.end()


def of_an_array(weight: nn.Parameter) -> Any:
    array = weight.detach().numpy().copy()
    weight.data = torch.from_numpy(array)
    return array


def in_shared_memory(weight: nn.Parameter) -> Any:
    weight.share_memory_()
    return weight  # another process may have it


@pytest.mark.parametrize(
    "hold",
    [of_an_array, in_shared_memory, lambda w: w.untyped_storage(), lambda w: w.detach().numpy(), lambda w: w.t()],
    ids=["array", "shared", "storage", "array of it", "graph"],
)
def test_memory_that_is_held_elsewhere_keeps_following(hold: Callable[[nn.Parameter], Any]) -> None:
    net = Net()
    held = hold(net.middle.weight)
    place = net.middle.weight.data_ptr()
    job = ServedJob("sync", lambda: net, RATE)
    train(job.model, job.optimizer, range(4), 0)
    assert not mapped_of(job.own).is_attached
    assert net.middle.weight.data_ptr() == place
    assert held is not None
    assert differs(net, plain(4)) < 1e-6
    job.end()


def test_a_shape_or_strides_of_its_own_at_the_same_place_is_refused() -> None:
    net = Net()
    net.middle = nn.Linear(200, 200)
    net.out = nn.Linear(200, 1)
    job = ServedJob("sync", lambda: net, RATE)
    train(job.model, job.optimizer, range(2), 0)
    assert mapped_of(job.own).holds()
    for change in (lambda w: w.t(), lambda w: w.as_strided((200, 200), (1, 200))):
        kept = net.middle.weight.data
        net.middle.weight.data = change(kept)
        with pytest.raises(ConfigError, match=r"middle\.weight.*was changed"):
            job.optimizer.step()
        net.middle.weight.data = kept
    job.end()


def test_parameters_that_move_in_inference_mode_are_trained() -> None:
    net = Net()
    views = [net.middle.weight.data]
    job = ServedJob("sync", lambda: net, RATE)
    train(job.model, job.optimizer, range(2), 0)
    views.clear()
    with torch.inference_mode():
        job.trainer.flush()
    assert mapped_of(job.own).holds()
    train(job.model, job.optimizer, range(2, 4), 0)
    assert differs(net, plain(4)) < 1e-6
    job.end()


def test_memory_moves_once_nothing_holds_it() -> None:
    net = Net()
    views = [net.middle.weight.data]
    job = ServedJob("sync", lambda: net, RATE)
    train(job.model, job.optimizer, range(2), 0)
    assert not mapped_of(job.own).is_attached
    views.clear()
    train(job.model, job.optimizer, range(2, 6), 0)
    assert mapped_of(job.own).holds()
    assert differs(net, plain(6)) < 1e-6
    job.end()


def test_parameters_stay_when_training_ends(job: Job) -> None:
    for _ in range(3):
        job.step()
    job.own.stop_worker()
    assert not job.mapped.is_attached
    assert job.is_right()
    with torch.no_grad():
        job.net.out.weight.zero_()  # they are the script's again
    assert float(job.net.out.weight.detach().abs().max()) == 0.0


def test_each_parameter_is_saved_for_itself(job: Job) -> None:
    job.step()
    file = io.BytesIO()
    torch.save(job.net.out.weight.detach(), file)
    assert len(file.getvalue()) < 4000
    pointers = {p.untyped_storage().data_ptr() for p in job.net.dense()}
    assert len(pointers) == len(job.net.dense())  # safetensors refuses parameters that share their memory


def test_a_graph_from_before_a_step_is_refused_as_in_plain_torch(job: Job) -> None:
    loss = loss_of(job.model, ids_of(0))
    job.step()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|changed"):
        loss.backward()


# -- writes ----------------------------------------------------------------------------------------------------------


def test_every_write_is_found(job: Job) -> None:
    """Also one of a single element through ``.data``, which torch does not count."""
    for place in (0, 7, 12_345):
        job.step()
        was = float(job.net.middle.weight.data.view(-1)[place])
        job.net.middle.weight.data.view(-1)[place] = 5.0
        with pytest.raises(ConfigError, match=rf"middle\.weight.*element {place} is 5"):
            job.step()
        job.net.middle.weight.data.view(-1)[place] = was
    job.optimizer.zero_grad()
    job.count = 3
    job.step()
    assert job.is_right()


def test_what_is_taken_back_passes_and_others_do_not_see_it() -> None:
    """Sharpness-aware steps of one worker; the other one computes with the servers' values meanwhile."""
    both = threading.Barrier(2)

    def work(own: Fleet, rank: int, net: Net, model: Any, optimizer: Any) -> Any:
        for step in range(8):
            optimizer.zero_grad()
            both.wait(30)
            if rank == 0 and step % 2:
                for parameter in net.dense():
                    parameter.data.add_(1.0)
            both.wait(30)
            if rank == 1:
                loss_of(model, ids_of(step, rank)).backward()
            both.wait(30)
            if rank == 0 and step % 2:
                for parameter in net.dense():
                    parameter.data.sub_(1.0)
            if rank == 0:
                loss_of(model, ids_of(step, rank)).backward()
            optimizer.step()
        return copy.deepcopy(net), mapped_of(own).holds()

    (first, _), (second, is_mapped) = run_workers(work)
    assert is_mapped
    assert differs(first, second) == 0.0
    assert differs(second, plain(8, 0, 1)) < 1e-5  # worker 0's gradients have rounding errors of its numbers


def test_a_script_that_writes_before_each_step_has_copies(job: Job) -> None:
    for step in range(6):
        kept = [p.detach().clone() for p in job.net.dense()]
        for parameter in job.net.dense():
            parameter.data.mul_(2.0)
        for parameter, value in zip(job.net.dense(), kept, strict=True):
            parameter.data.copy_(value)
        job.step()
        assert job.mapped.is_attached == (step < 1)
    assert job.is_right()


def test_another_tensor_in_a_parameter_gets_the_next_values(job: Job) -> None:
    job.step()
    job.net.middle.weight.data = job.net.middle.weight.data.clone()
    for _ in range(3):
        job.step()
    assert job.is_right()
    assert not job.mapped.holds()


# -- who reads while values change -----------------------------------------------------------------------------------


def test_a_worker_at_a_barrier_keeps_its_values_while_others_step() -> None:
    stood, done, looked = threading.Event(), threading.Event(), threading.Event()

    def work(own: Fleet, rank: int, net: Net, model: Any, optimizer: Any) -> Any:
        train(model, optimizer, range(2), rank)
        seen = []
        if rank == 0:  # has fewer batches

            def look() -> None:
                stood.wait(30)
                while not done.is_set():
                    seen.append([p.detach().clone() for p in net.dense()])
                looked.set()

            thread = threading.Thread(target=look)
            thread.start()
            stood.set()
            own.barrier_worker()
            thread.join()
        else:
            stood.wait(30)
            train(model, optimizer, range(2, 12), rank)
            alone = copy.deepcopy(net)
            done.set()
            assert looked.wait(30)
            own.barrier_worker()
        after = copy.deepcopy(net)
        train(model, optimizer, range(12, 15), rank)
        return seen if rank == 0 else alone, after, copy.deepcopy(net), mapped_of(own).holds()

    (seen, first, first_end, _), (alone, second, second_end, is_mapped) = run_workers(work)
    before = [p.detach() for p in plain(2, 0, 1).dense()]
    assert len(seen) > 3
    for values in seen:
        for value, wanted in zip(values, before, strict=True):
            assert float((value - wanted).abs().max()) < 1e-6
    assert differs(first, second) == differs(first_end, second_end) == 0.0
    assert differs(alone, plain(2, 0, 1, then=[(10, [1])])) < 1e-6
    assert differs(first_end, plain(2, 0, 1, then=[(10, [1]), (3, [0, 1])])) < 1e-6
    assert is_mapped


@pytest.mark.parametrize("leaves", [True, False])
def test_values_that_left_with_a_step_come_with_its_answer(leaves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever thread answers: beside a standby it is the worker's own, which waits for the step then."""
    if not leaves:
        monkeypatch.setattr(Answers, "_leave", lambda *_: False)
    pushes = threading.Event()

    def work(own: Fleet, rank: int, net: Net, model: Any, optimizer: Any) -> Any:
        train(model, optimizer, range(3), rank)
        if rank == 2:
            own.barrier_worker()
            return None
        if rank == 1:
            assert pushes.wait(30)
            time.sleep(0.3)  # worker 0 waits in its step now
        pushes.set()
        train(model, optimizer, range(3, 4), rank)
        after = copy.deepcopy(net)
        own.barrier_worker()
        return after

    first, second, _ = run_workers(work, num_workers=3)
    assert differs(first, second) == 0.0
    assert differs(first, plain(3, 0, 1, 2, then=[(1, [0, 1])])) < 1e-6


def test_a_worker_that_has_ended_keeps_its_values_while_others_step() -> None:
    ended, done = threading.Event(), threading.Event()
    kept: list[bool] = []

    def run(own: Fleet, rank: int) -> None:
        net = Net()
        optimizer = own.distributed_optimizer(torch.optim.SGD(net.parameters(), RATE), strategy_of("sync"))
        model = own.distributed_model(net)
        own.init_worker()
        train(model, optimizer, range(3), rank)
        if rank == 0:
            own.stop_worker()
            ended.set()
            assert done.wait(30)
            kept.append(differs(net, plain(3, 0, 1)) < 1e-6)
        else:
            assert ended.wait(30)
            train(model, optimizer, range(3, 8), rank)
            done.set()
            own.stop_worker()

    run_job(run, num_workers=2, strategy=strategy_of("sync"))
    assert kept == [True]
