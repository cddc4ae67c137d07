"""``zero_grad`` of whatever a script calls it on forgets the gradients of rows, as in plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import fleet
from tests.fleet.ps.worker.test_fixed_rows import MODES, Job

RATE = 0.1
Clear = Callable[[Job], Any]


def by_hand(job: Job) -> None:
    for parameter in job.net.parameters():
        parameter.grad = None


CLEARS: dict[str, Clear] = {
    "net.zero_grad()": lambda job: job.net.zero_grad(),
    "net.zero_grad(set_to_none=False)": lambda job: job.net.zero_grad(set_to_none=False),
    "emb.zero_grad(), ads.zero_grad()": lambda job: (job.net.emb.zero_grad(), job.net.ads.zero_grad()),
    "model.zero_grad()": lambda job: job.model.zero_grad(),
    "torch's optimizer.zero_grad()": lambda job: job.plain.zero_grad(),
    "optimizer.zero_grad()": lambda job: job.optimizer.zero_grad(),
    "p.grad = None": by_hand,
}


def backward(job: Job, *ids: int) -> None:
    job.model(torch.tensor(ids)).sum().backward()


def trained(job: Job) -> torch.Tensor:
    """Returns what this worker's rows are after the steps so far are applied."""
    job.own.session.server_job.trainer.connection.flush()
    ads = job.net.ads.lookup_rows(torch.arange(4))
    return torch.stack([job.rows()[:4], ads])


FORMS = [("async", name) for name in CLEARS] + [(mode, "net.zero_grad()") for mode in MODES if mode != "async"]


@pytest.mark.parametrize(("mode", "form"), FORMS)
def test_gradients_that_a_script_cleared_train_no_row(mode: str, form: str) -> None:
    """Two backward passes and a penalty are forgotten; what comes after is trained, as by a job that had only that."""
    job, expected = Job(mode), Job(mode)
    if mode == "geo":
        for one in (job, expected):
            one.net.ads.lookup_rows(torch.arange(4))
    before = trained(job)
    backward(job, 1, 2)
    (job.model(torch.tensor([2, 3])).sum() + job.net.emb.weight.square().sum()).backward()
    assert job.optimizer.has_new_gradients()
    CLEARS[form](job)
    assert not job.optimizer.has_new_gradients()
    for one in (job, expected):
        backward(one, 1)
        one.optimizer.step()
    found = trained(job)
    assert torch.equal(found, trained(expected))
    assert torch.equal(found[:, 2:], before[:, 2:])
    assert not torch.equal(found[:, 1], before[:, 1])
    for one in (job, expected):
        one.own.stop_worker()
        one.own.session.close()


def test_the_loop_that_clears_the_scripts_own_module_is_that_of_plain_torch() -> None:
    """``net.zero_grad(); loss.backward(); optimizer.step()``."""
    job = Job("async")
    net = nn.Embedding(10, 4)
    net.load_state_dict(copy.deepcopy(job.net.emb.state_dict()))
    plain = SGD(net.parameters(), RATE)
    for step in range(4):
        ids = torch.tensor([step, 5])
        for module, optimizer in ((job.net.emb, job.optimizer), (net, plain)):
            module.zero_grad()
            module(ids).square().sum().backward()
            module.zero_grad()
            module(ids).square().sum().backward()
            optimizer.step()
        job.own.session.server_job.trainer.connection.flush()
    torch.testing.assert_close(job.rows(), net.weight.detach())
    job.own.stop_worker()
    job.own.session.close()


def test_reading_a_gradient_clears_none() -> None:
    job = Job("async")
    backward(job, 1)
    for parameter in job.net.parameters():
        assert parameter.grad is None or parameter.grad.numel()
    nn.utils.clip_grad_norm_(job.net.parameters(), 1.0)
    assert job.optimizer.has_new_gradients()
    job.own.stop_worker()
    job.own.session.close()


def test_a_forward_before_the_clearing_keeps_its_gradients() -> None:
    job = Job("sync")
    before = job.rows()
    loss = job.model(torch.tensor([4])).sum()
    job.net.zero_grad()
    loss.backward()
    job.optimizer.step()
    assert (job.rows() - before)[4].count_nonzero()
    job.own.stop_worker()
    job.own.session.close()


def test_a_module_outside_a_job_is_cleared_without_a_word() -> None:
    net = nn.Sequential(fleet.SparseEmbedding(4))
    net.zero_grad()
    net[0].weight.grad = None
    assert net[0](torch.tensor([1])).shape == (1, 4)
