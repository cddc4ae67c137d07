"""Geo training of ``nn.Embedding``: the weight itself holds the rows that this worker trains (D.7)."""

from __future__ import annotations

import copy
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fleet
from fleet.errors import ConfigError, NanInfError, NotInitializedError, OptionWarning
from fleet.facade import Fleet
from fleet.ps.table.ids import train_rows
from tests.helpers.served import RowSum, run_job

_SEEDING = threading.Lock()
RATE, STEPS, ROWS = 0.05, 7, 12


def made(k_steps: int = 3) -> fleet.DistributedStrategy:
    strategy = fleet.DistributedStrategy()
    strategy.a_sync, strategy.a_sync_configs = True, {"k_steps": k_steps}
    return strategy


def start(own: Fleet, seed: int = 0, k_steps: int = 3) -> tuple[Any, Any]:
    with _SEEDING:  # the generator belongs to the whole process
        torch.manual_seed(seed)
        net = RowSum(ROWS)
    optimizer = own.distributed_optimizer(torch.optim.SGD(net.parameters(), RATE), made(k_steps))
    model = own.distributed_model(net)
    own.init_worker()
    return model, optimizer


def alone(k_steps: int = 3) -> tuple[Fleet, Any, Any]:
    own = Fleet()
    own.init(strategy=made(k_steps), log_level="WARNING")
    return own, *start(own, k_steps=k_steps)


def plain() -> tuple[RowSum, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = RowSum(ROWS)
    return net, torch.optim.SGD(net.parameters(), RATE)


def batch(step: int, rank: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(100 * rank + step)
    return torch.randint(0, ROWS, (4, 3), generator=drawn), torch.randn(4, 1, generator=drawn)


def train(model: Any, optimizer: Any, step: int, rank: int = 0) -> None:
    ids, target = batch(step, rank)
    optimizer.zero_grad()
    (model(ids) - target).square().mean().backward()
    optimizer.step()


def test_the_weight_is_trained_in_its_own_memory_as_by_plain_torch() -> None:
    own, model, optimizer = alone()
    net, plain_optimizer = plain()
    weight = model.emb.weight  # the script's own
    place = weight.data_ptr()
    for step in range(STEPS):
        train(model, optimizer, step)
        train(net, plain_optimizer, step)
        assert model.emb.weight.grad is None  # clip_grad_norm_ over the parameters sees no rows, as in the other modes
        assert torch.equal(model.emb.weight.detach(), weight.detach())
        torch.testing.assert_close(weight.detach(), net.emb.weight.detach(), atol=1e-6, rtol=0)
    assert weight.data_ptr() == place
    own.session.server_job.trainer.connection.flush()
    client = own.session.server_job.trainer.connection.client
    served = client.wait(client.pull({0: np.arange(ROWS)}))[0]
    torch.testing.assert_close(torch.from_numpy(served), net.emb.weight.detach(), atol=1e-6, rtol=0)
    own.stop_worker()
    torch.testing.assert_close(model.state_dict()["emb.weight"], net.emb.weight.detach(), atol=1e-6, rtol=0)
    own.session.close()


def by_formula() -> tuple[list[np.ndarray], np.ndarray]:
    """Returns the weights of two workers and the servers after an exchange every 2 of 4 steps, worker 0 first.

    Of the rows, those are sent that were trained since the last exchange.
    """
    nets = [plain() for _ in range(2)]
    server = nets[0][0].emb.weight.detach().numpy().copy()
    old = [server.copy() for _ in nets]
    dense = [[p for p in net.out.parameters()] for net, _ in nets]
    dense_server = [p.detach().clone() for p in dense[0]]
    dense_old = [[p.detach().clone() for p in own] for own in dense]
    for step in range(4):
        for rank, (net, optimizer) in enumerate(nets):
            train(net, optimizer, step, rank)
            if step % 2 == 0:
                continue
            local = net.emb.weight.detach().numpy()
            trained = np.unique(np.concatenate([batch(at, rank)[0].flatten() for at in (step - 1, step)]))
            delta = np.zeros_like(server)
            delta[trained] = (local[trained] - old[rank][trained]) / 2
            old[rank] += delta
            server += delta
            local += server - old[rank]
            old[rank] = server.copy()
            for p, before, total in zip(dense[rank], dense_old[rank], dense_server, strict=True):
                difference = (p.detach() - before) / 2
                before += difference
                total += difference
                p.data += total - before
                before.copy_(total)
    return [net.emb.weight.detach().numpy() for net, _ in nets], server


def test_two_workers_are_those_of_the_formula() -> None:
    """D.7: also rows that only the other worker has, and a worker whose own start was another one."""
    turns = [threading.Event() for _ in range(5)]
    turns[0].set()

    def work(own: Fleet, rank: int) -> Any:
        model, optimizer = start(own, seed=rank, k_steps=2)
        own.barrier_worker()  # a worker that starts later would begin with what the other has exchanged already
        for half in range(2):
            turns[2 * half + rank].wait(30)
            for step in (2 * half, 2 * half + 1):
                train(model, optimizer, step, rank)
            turns[2 * half + rank + 1].set()
        own.barrier_worker()
        client = own.session.server_job.trainer.connection.client
        served = client.wait(client.pull({0: np.arange(ROWS)}))[0]
        own.barrier_worker()  # stop_worker() sends what is left
        found = model.emb.weight.detach().clone().numpy()
        own.stop_worker()
        return found, served

    expected, server = by_formula()
    for (found, served), mine in zip(run_job(work, num_workers=2, strategy=made(2)), expected, strict=True):
        np.testing.assert_allclose(found, mine, atol=2e-6)
        np.testing.assert_allclose(served, server, atol=2e-6)


def test_a_state_that_is_loaded_while_the_servers_hold_the_rows_changes_none() -> None:
    own, model, optimizer = alone()
    before, place = model.emb.weight.detach().clone(), model.emb.weight.data_ptr()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state["emb.weight"] += 1
    with pytest.warns(OptionWarning, match="does not change what is trained"):
        model.load_state_dict(state)
    assert torch.equal(model.emb.weight.detach(), before)
    assert torch.equal(model.emb(torch.arange(ROWS)), before)
    train(model, optimizer, 0)
    with pytest.raises(RuntimeError, match="size mismatch"), pytest.warns(OptionWarning):
        model.load_state_dict({**state, "emb.weight": torch.zeros(2, 3)})
    assert model.emb.weight.data_ptr() == place
    own.stop_worker()
    own.session.close()


def test_what_a_lookup_refuses() -> None:
    own, model, _ = alone()
    with pytest.raises(IndexError, match="embedding ids range from 1 to 12; there are 12 rows"):
        model.emb(torch.tensor([1, 12]))
    with pytest.raises(IndexError, match="range from -1 to 1"):
        model.emb(torch.tensor([1, -1]))
    own.stop_worker()
    with pytest.raises(NotInitializedError, match="stop_worker"):
        model.emb(torch.tensor([1]))
    own.session.close()


def test_frozen_rows_stay_and_thawed_ones_train_again() -> None:
    own, model, optimizer = alone()
    before = model.emb.weight.detach().clone()
    model.emb.weight.requires_grad_(False)
    train(model, optimizer, 0)
    assert torch.equal(model.emb.weight.detach(), before)
    model.emb.weight.requires_grad_(True)
    train(model, optimizer, 1)
    assert not torch.equal(model.emb.weight.detach(), before)
    assert torch.equal(model.emb.weight[3].detach(), before[3])  # the padding
    own.stop_worker()
    own.session.close()


def test_gradients_add_up_until_the_step_and_are_dropped_by_zero_grad() -> None:
    own, model, optimizer = alone()
    net, plain_optimizer = plain()
    for of, by in ((model, optimizer), (net, plain_optimizer)):
        of(batch(5)[0]).sum().backward()
        by.zero_grad()
        for step in range(2):
            of(batch(step)[0]).square().mean().backward()
        by.step()
        by.step()  # the gradients of dense parameters are still there; those of rows are used up, as in other modes
    again = nn.Embedding.from_pretrained(model.emb.weight.detach().clone())
    assert torch.equal(again.weight, model.emb.weight.detach())
    once, once_optimizer = plain()
    for step in range(2):
        once(batch(step)[0]).square().mean().backward()
    once_optimizer.step()
    torch.testing.assert_close(model.emb.weight.detach(), once.emb.weight.detach(), atol=1e-6, rtol=0)
    own.stop_worker()
    own.session.close()


def test_a_copy_of_the_model_keeps_its_rows_and_can_be_averaged() -> None:
    own, model, optimizer = alone()
    net, plain_optimizer = plain()
    train(model, optimizer, 0)
    train(net, plain_optimizer, 0)
    averages = [AveragedModel(one, multi_avg_fn=get_ema_multi_avg_fn(0.5)) for one in (model, net)]
    twins = [copy.deepcopy(model.module), copy.deepcopy(net)]
    for step in (1, 2):
        train(model, optimizer, step)
        train(net, plain_optimizer, step)
        for average, one in zip(averages, (model, net), strict=True):
            average.update_parameters(one)
    with torch.no_grad():
        twins[0].emb.weight[1] = 7.0
        twins[1].emb.weight[1] = 7.0
    for found, wanted in (twins, [average.module for average in averages]):
        rows = [getattr(one, "module", one).emb(torch.arange(ROWS)).detach() for one in (found, wanted)]
        torch.testing.assert_close(rows[0], rows[1], atol=1e-6, rtol=0)
    torch.testing.assert_close(model.emb.weight.detach(), net.emb.weight.detach(), atol=1e-6, rtol=0)
    own.stop_worker()
    own.session.close()


def test_a_gradient_that_is_not_finite_is_named_and_trains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLAGS_check_nan_inf", "1")
    own, model, optimizer = alone()
    before = model.emb.weight.detach().clone()
    model.out.weight.requires_grad_(False)
    (model.emb(torch.tensor([5])).sum() * float("inf")).backward()
    with pytest.raises(NanInfError, match="key 5 of table 'emb'"):
        optimizer.step()
    assert torch.equal(model.emb.weight.detach(), before)
    own.stop_worker()
    own.session.close()


def test_a_save_that_is_loaded_replaces_the_rows(tmp_path: Any) -> None:
    own, model, optimizer = alone()
    train(model, optimizer, 0)
    own.save_persistables(dirname=str(tmp_path / "save"))
    saved = model.emb.weight.detach().clone()
    for step in range(4):
        train(model, optimizer, step)
    assert not torch.equal(model.emb.weight.detach(), saved)
    own.load_model(str(tmp_path / "save"))
    assert torch.equal(model.emb.weight.detach(), saved)
    train(model, optimizer, 1)
    assert not torch.equal(model.emb.weight.detach(), saved)
    own.stop_worker()
    own.session.close()


def test_train_rows_in_the_order_of_the_places() -> None:
    weight, touched = np.zeros((4, 2), np.float32), np.zeros(4, np.bool_)
    places = np.array([2, 0, 2])
    train_rows(weight, places, np.array([[1, 2], [4, 8], [16, 32]], np.float32), 0.5, touched)
    assert weight.tolist() == [[-2, -4], [0, 0], [-8.5, -17], [0, 0]]
    assert touched.tolist() == [True, False, True, False]


@pytest.mark.parametrize(
    ("places", "gradients", "touched", "match"),
    [
        ([4], (1, 2), 4, "places range from 4 to 4; there are 4 rows"),
        ([-1], (1, 2), 4, "places range from -1"),
        ([0], (2, 2), 4, "gradients are float32"),
        ([0], (1, 3), 4, "gradients are float32"),
        ([0], (1, 2), 3, "touched is bool"),
    ],
)
def test_rows_that_do_not_fit_are_refused(places: Any, gradients: Any, touched: int, match: str) -> None:
    weight = np.zeros((4, 2), np.float32)
    with pytest.raises(ConfigError, match=match):
        train_rows(weight, np.array(places), np.ones(gradients, np.float32), 1.0, np.zeros(touched, np.bool_))
    assert not weight.any()
