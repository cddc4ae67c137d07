"""Every number of servers and workers trains the same model (D.7, D.8, G11)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fleet.facade import Fleet
from tests.fleet.ps_job.test_server_job import Reference, make_adagrad, rows_of, served, strategy
from tests.helpers.served import batches, run_job, train

pytestmark = pytest.mark.slow
Tables = dict[str, torch.Tensor]


def tables_of(model: Any) -> Tables:
    model.module.words.refresh()
    return {"ads": rows_of(model), **{name: value.clone() for name, value in model.state_dict().items()}}


@pytest.mark.parametrize("num_servers", [1, 2, 3])
@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_sync_training_is_repeatable_and_equals_one_process(num_workers: int, num_servers: int) -> None:
    """D.7, 002-18, 001-10: twice the same bits, and within 1e-6 of one process on the mean gradient."""
    reference = Reference()
    train(reference, make_adagrad(reference.parameters()), batches(6))

    def work(own: Fleet, rank: int) -> Tables:
        model, optimizer = served(own, strategy("sync"), make_adagrad, seed=rank)
        train(model, optimizer, batches(6, rank, num_workers))
        found = tables_of(model)
        own.stop_worker()
        return found

    sizes = {"num_servers": num_servers, "num_workers": num_workers}
    first, again = (run_job(work, **sizes, strategy=strategy("sync")) for _ in range(2))
    expected = {"ads": reference.ads, "words.weight": reference.words.weight, "out.weight": reference.out.weight}
    for one, other in zip(first, again, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
        for name, values in expected.items():
            torch.testing.assert_close(one[name], values.data, atol=1e-6, rtol=0)


def test_a_save_amid_training_on_3_servers_goes_on_on_2(tmp_path: Path) -> None:
    """D.8, 003-19: the tables are equal row for row, and so is all that is trained from there, state included."""
    folder = tmp_path / "model"

    def work(own: Fleet, rank: int) -> tuple[Tables, Tables]:
        model, optimizer = served(own, strategy("sync"), make_adagrad, seed=rank)
        data = batches(6, rank, 2)
        train(model, optimizer, data[:3])
        own.save_persistables(folder)
        saved = tables_of(model)  # no step is applied before this worker's next push
        train(model, optimizer, data[3:])
        last = tables_of(model)
        own.stop_worker()
        return saved, last

    def serve(own: Fleet, index: int) -> None:
        server_model(own)
        own.init_server(folder)
        own.run_server()

    def resume(own: Fleet, rank: int) -> tuple[Tables, Tables]:
        model, optimizer = served(own, strategy("sync"), make_adagrad, seed=7 + rank)
        loaded = tables_of(model)
        train(model, optimizer, batches(6, rank, 2)[3:])
        last = tables_of(model)
        own.stop_worker()
        return loaded, last

    before = run_job(work, num_servers=3, num_workers=2, strategy=strategy("sync"))
    after = run_job(resume, num_servers=2, num_workers=2, serve=serve, strategy=strategy("sync"))
    assert len(list((folder / "ads").glob("part-*.json"))) == 3
    for one, other in zip(before, after, strict=True):
        for moment in range(2):
            for name, values in one[moment].items():
                assert torch.equal(values, other[moment][name]), (moment, name)
        assert not torch.equal(one[0]["ads"], one[1]["ads"])


def server_model(own: Fleet) -> None:
    """Gives a server the model whose tables it loads."""
    from tests.helpers.served import WideAndDeep

    net = WideAndDeep()
    own.distributed_optimizer(make_adagrad(net.parameters()), strategy("sync"))
    own.distributed_model(net)


@pytest.mark.parametrize("num_servers", [1, 2, 3])
def test_a_worker_with_fewer_batches_is_waited_for_by_no_server(num_servers: int) -> None:
    """003-34, D.7: while it stands at a barrier the others go on, on all servers; then all go on together."""

    def work(own: Fleet, rank: int) -> Tables:
        model, optimizer = served(own, strategy("sync"), make_adagrad)
        train(model, optimizer, batches(4 if rank else 2, rank, 2))
        own.barrier_worker()
        train(model, optimizer, batches(1, rank, 2))
        found = tables_of(model)
        own.stop_worker()
        return found

    first, second = run_job(work, num_servers=num_servers, num_workers=2, strategy=strategy("sync"), limit_s=20)
    assert all(torch.equal(first[name], second[name]) for name in first)
