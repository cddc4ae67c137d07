"""Training with parameter servers through the facade: modes, files, roles (D.1, D.7, D.8)."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import fleet
from fleet.errors import CheckpointError, ConfigError, NanInfError, NotInitializedError
from fleet.facade import Fleet
from tests.helpers.served import WideAndDeep, batches, run_job, train

Make = Any
_SEEDING = threading.Lock()


def strategy(mode: str, **configs: Any) -> fleet.DistributedStrategy:
    made = fleet.DistributedStrategy()
    made.a_sync = mode != "sync"
    made.a_sync_configs = {**({"k_steps": 3} if mode == "geo" else {}), **configs}
    return made


def served(own: Fleet, made: fleet.DistributedStrategy, make: Make, seed: int = 0) -> tuple[Any, Any]:
    """Returns model and optimizer after the worker has started."""
    with _SEEDING:  # the generator belongs to the whole process
        torch.manual_seed(seed)
        net = WideAndDeep()
    optimizer = own.distributed_optimizer(make(net.parameters()), made)
    model = own.distributed_model(net)
    own.init_worker()
    return model, optimizer


class Reference(nn.Module):
    """The same model in plain torch: every id it meets is a row of one matrix."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        net = WideAndDeep()
        with torch.no_grad():
            rows = net.ads.lookup_rows(torch.arange(40) * 10**12)
        self.ads = nn.Parameter(rows)
        self.words, self.out = net.words, net.out
        self.words.sparse = False

    def forward(self, ads: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        found = self.ads[ads // 10**12].sum(1)
        return self.out(torch.cat([found, self.words(words)], 1))


def make_adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, 0.1)


def test_sync_training_of_two_workers_equals_one_process_on_the_mean_gradient() -> None:
    """002-18, D.7, 001-10: two servers and two workers train as one process would, and twice with the same bits."""
    make = make_adagrad
    reference = Reference()
    expected = train(reference, make(reference.parameters()), batches(6))

    def work(own: Fleet, rank: int) -> Any:
        model, optimizer = served(own, strategy("sync"), make, seed=rank)
        losses = train(model, optimizer, batches(6, rank, 2))
        own.stop_worker()
        return losses, model.state_dict()

    first, again = (run_job(work, num_servers=2, num_workers=2, strategy=strategy("sync")) for _ in range(2))
    for rank in range(2):
        assert first[rank][0] == again[rank][0]
        assert all(torch.equal(first[rank][1][key], again[rank][1][key]) for key in first[0][1])
        torch.testing.assert_close(first[rank][1]["out.weight"], reference.out.weight.data, atol=1e-6, rtol=0)
        torch.testing.assert_close(first[rank][1]["words.weight"], reference.words.weight.data, atol=1e-6, rtol=0)
    mean = [(a + b) / 2 for a, b in zip(first[0][0], first[1][0], strict=True)]
    torch.testing.assert_close(torch.tensor(mean), torch.tensor(expected), atol=1e-6, rtol=0)


def make_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1)


def alone(made: fleet.DistributedStrategy, make: Make = make_sgd) -> tuple[Fleet, Any, Any]:
    """Returns a Fleet with the server inside this process, started."""
    own = Fleet()
    own.init(strategy=made, log_level="WARNING")
    return own, *served(own, made, make)


def rows_of(model: Any, count: int = 40) -> torch.Tensor:
    found: torch.Tensor = model.module.ads.lookup_rows(torch.arange(count) * 10**12)
    return found


@pytest.mark.parametrize("mode", ["sync", "half_async", "async", "geo"])
def test_one_process_with_the_server_inside_equals_plain_torch(mode: str) -> None:
    """D.7: with one worker and SGD every mode that waits for its own pushes is plain training."""
    reference = Reference()
    expected = train(reference, make_sgd(reference.parameters()), batches(6))
    made = fleet.StrategyFactory.create_half_async_strategy() if mode == "half_async" else strategy(mode)
    own, model, optimizer = alone(made)
    losses = []
    for batch in batches(6):
        losses += train(model, optimizer, [batch])
        own.session.server_job.trainer.connection.flush()  # async: what is queued is applied before the next batch
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), atol=2e-6, rtol=0)
    torch.testing.assert_close(model.state_dict()["words.weight"], reference.words.weight.data, atol=2e-6, rtol=0)
    torch.testing.assert_close(rows_of(model), reference.ads.data, atol=2e-6, rtol=0)
    own.stop_worker()
    with pytest.raises(NotInitializedError, match="stop_worker"):
        optimizer.step()
    own.session.close()


def test_async_workers_apply_one_update_each() -> None:
    """D.7: asynchronous updates are not averaged: two workers with the same gradient move twice as far."""

    def work(own: Fleet, rank: int) -> Any:
        model, optimizer = served(own, strategy("async"), make_sgd)
        before = model.out.bias.item()
        (model.out.bias.sum() * 1.0).backward()
        optimizer.step()
        own.session.server_job.trainer.connection.flush()
        own.barrier_worker()
        own.session.server_job.trainer.connection.flush()
        after = model.out.bias.item()
        own.stop_worker()
        return before - after

    for moved in run_job(work, num_workers=2, strategy=strategy("async")):
        assert moved == pytest.approx(0.2)


def test_geo_workers_exchange_differences() -> None:
    """002-16, D.7: after k_steps steps each worker has added its difference divided by the number of workers."""

    def work(own: Fleet, rank: int) -> Any:
        model, optimizer = served(own, strategy("geo", k_steps=2), make_sgd, seed=rank)
        start = model.out.bias.item()
        for _ in range(2):
            (model.out.bias.sum() * (rank + 1.0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        own.barrier_worker()
        trainer = own.session.server_job.trainer
        dense = trainer.plan.dense[0]
        values = trainer.connection.client.wait(trainer.connection.client.pull({dense.table_id: None}))[dense.table_id]
        own.barrier_worker()
        own.stop_worker()
        return start - values[-1]

    for moved in run_job(work, num_workers=2, strategy=strategy("geo", k_steps=2)):
        assert moved == pytest.approx(0.1 * 2 * (1 + 2) / 2, abs=1e-6)


def test_workers_start_from_worker_0_and_may_have_different_numbers_of_batches() -> None:
    """003-34: seeds differ and models are the same; a worker that has finished is not waited for."""

    def work(own: Fleet, rank: int) -> Any:
        model, optimizer = served(own, strategy("sync"), make_sgd, seed=rank)
        start = model.out.weight.clone()
        train(model, optimizer, batches(4 if rank else 2, rank, 2))
        own.barrier_worker()  # worker 0 stands here while worker 1 takes two more steps
        (model.out.bias.sum() * 0.0).backward()
        optimizer.step()  # from here on they are together again
        optimizer.zero_grad()
        middle = model.out.bias.item()
        (model.out.bias.sum() * (rank + 1.0)).backward()
        optimizer.step()
        moved = middle - model.out.bias.item()
        own.stop_worker()
        return start, moved, model.out.weight.clone()

    (start0, moved0, end0), (start1, moved1, end1) = run_job(work, num_workers=2, strategy=strategy("sync"))
    assert torch.equal(start0, start1)
    assert not torch.equal(start0, end0)
    assert torch.equal(end0, end1)
    assert moved0 == moved1 == pytest.approx(0.1 * (1 + 2) / 2, abs=1e-6)


def test_the_rate_of_a_scheduler_reaches_the_servers() -> None:
    """D.3: the rate in force is worker 0's; plain torch with the same schedule gives the same numbers."""

    def scheduled(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)

    reference = Reference()
    plain = make_sgd(reference.parameters())
    expected = train(reference, plain, batches(6), scheduled(plain))
    own, model, optimizer = alone(strategy("sync"))
    losses = train(model, optimizer, batches(6), scheduled(optimizer))
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), atol=2e-6, rtol=0)
    assert optimizer.get_lr() == pytest.approx(0.1 * 0.1**3)
    own.stop_worker()
    own.session.close()


def test_a_batch_without_backward_and_a_cleared_one_push_nothing() -> None:
    own, model, optimizer = alone(strategy("sync"))
    before = rows_of(model), model.out.weight.clone()
    ads, words, target = batches(1)[0]
    model(ads, words)
    optimizer.step()
    ((model(ads, words) - target) ** 2).mean().backward()
    model.zero_grad()
    optimizer.step()
    ((model(ads, words) - target) ** 2).mean().backward()
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(rows_of(model), before[0])
    assert torch.equal(model.out.weight, before[1])
    ((model(ads, words) - target) ** 2).mean().backward()
    optimizer.minimize(((model(ads, words) - target) ** 2).mean())  # gradients are there: no second backward
    assert not torch.equal(rows_of(model), before[0])
    own.stop_worker()
    own.session.close()


def test_saved_tables_start_a_server_again_and_predict_alone(tmp_path: Any) -> None:
    """003-07, 003-19, 003-08, D.8: incremental training from a save of another number of servers; local prediction."""
    folder, data = str(tmp_path / "model"), batches(8)

    def first(own: Fleet, rank: int) -> Any:
        model, optimizer = served(own, strategy("sync"), make_sgd)
        train(model, optimizer, data[:4])
        own.save_inference_model(folder)
        at_save = rows_of(model)
        losses = train(model, optimizer, data[4:])
        own.stop_worker()
        return at_save, losses

    def again(own: Fleet, rank: int) -> Any:
        model, optimizer = served(own, strategy("sync"), make_sgd, seed=77)
        losses = train(model, optimizer, data[4:])
        own.stop_worker()
        return losses

    def serve(own: Fleet, index: int) -> None:
        net = WideAndDeep()
        own.distributed_optimizer(make_sgd(net.parameters()))
        own.distributed_model(net)
        with pytest.raises(ConfigError, match="not a sparse table"):
            own.init_server(folder, ["out"])
        with pytest.raises(ConfigError, match="no such folder"):
            own.init_server(folder + "x")
        own.init_server(folder)
        own.run_server()

    at_save, losses = run_job(first, num_servers=2, strategy=strategy("sync"))[0]
    assert run_job(again, num_servers=1, serve=serve, strategy=strategy("sync"))[0] == losses
    net = WideAndDeep()
    assert net.ads.load(folder, "ads") > 0
    with pytest.raises(CheckpointError, match=r"'dense\.0' in .* is dense"):
        net.ads.load(folder, "dense.0")
    net.load_state_dict(fleet.load(f"{folder}/model.pt"))
    assert torch.equal(net.ads.lookup_rows(torch.arange(40) * 10**12), at_save)
    with torch.no_grad():
        assert net(*data[0][:2]).shape == (8, 1)


def test_only_the_named_tables_are_loaded(tmp_path: Any) -> None:
    """003-07: init_server(dirname, var_names) leaves the other tables to the new model."""
    folder = str(tmp_path / "model")
    own, model, optimizer = alone(strategy("sync"))
    train(model, optimizer, batches(3))
    own.save_persistables(dirname=folder)
    kept = rows_of(model)
    own.stop_worker()

    def serve(other: Fleet, index: int) -> None:
        net = WideAndDeep()
        other.distributed_optimizer(make_sgd(net.parameters()))
        other.distributed_model(net)
        other.init_server(folder, ["ads"])
        other.run_server()

    def work(other: Fleet, rank: int) -> Any:
        again, _ = served(other, strategy("sync"), make_sgd, seed=3)
        found = rows_of(again), again.words.weight.clone(), again.state_dict()["words.weight"].clone()
        other.load_model(folder)
        whole = again.state_dict()["words.weight"].clone()
        other.stop_worker()
        return *found, whole

    rows, own_words, served_words, whole = run_job(work, serve=serve, strategy=strategy("sync"))[0]
    assert torch.equal(rows, kept)
    assert torch.equal(own_words, served_words)
    assert torch.equal(whole, model.state_dict()["words.weight"])


def test_a_worker_that_resumes_repeats_no_step() -> None:
    """A checkpoint of step 2, four steps on the servers: what is trained again is recognised and not applied."""
    reference = Reference()
    train(reference, make_sgd(reference.parameters()), batches(6))
    states: dict[str, Any] = {}

    def work(own: Fleet, rank: int) -> Any:
        model, optimizer = served(own, strategy("sync"), make_sgd)
        train(model, optimizer, batches(2))
        states["saved"] = optimizer.state_dict()
        train(model, optimizer, batches(4)[2:])
        own.session.close()  # as if the process had died: no goodbye
        other = Fleet()
        other.init(own.session.role_maker, strategy=strategy("sync"), log_level="WARNING")
        with _SEEDING:
            torch.manual_seed(9)
            net = WideAndDeep()
        again = other.distributed_optimizer(make_sgd(net.parameters()))
        net2 = other.distributed_model(net)
        again.load_state_dict(states["saved"])
        other.init_worker()
        train(net2, again, batches(6)[2:])
        other.stop_worker()
        return net2.out.weight.clone(), net2.state_dict()["words.weight"]

    weight, words = run_job(work, strategy=strategy("sync"))[0]
    torch.testing.assert_close(weight, reference.out.weight.data, atol=2e-6, rtol=0)
    torch.testing.assert_close(words, reference.words.weight.data, atol=2e-6, rtol=0)


def test_a_gradient_that_is_not_finite_names_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """003-35: FLAGS_check_nan_inf names the row, and nothing is pushed."""
    monkeypatch.setenv("FLAGS_check_nan_inf", "1")
    own, model, optimizer = alone(strategy("sync"))
    before = rows_of(model)
    weight = torch.tensor([[1.0], [float("nan")]])
    (model.ads(torch.tensor([[10**12], [2 * 10**12]])) * weight).sum().backward()
    with pytest.raises(NanInfError, match=r"rank 0.* key 2000000000000 of table 'ads'"):
        optimizer.step()
    assert torch.equal(rows_of(model), before)
    own.stop_worker()
    own.session.close()


def plain_losses(mode: str, wrapped: bool, embedding: nn.Embedding | None = None) -> list[float]:
    """Losses of a model without rows on one worker, with and without ``distributed_model``."""
    own, made = Fleet(), strategy(mode)
    own.init(strategy=made, log_level="ERROR")
    torch.manual_seed(0)
    net = nn.Sequential(embedding, nn.Linear(4, 1)) if embedding is not None else nn.Linear(4, 1)
    optimizer = own.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1))
    model = own.distributed_model(net) if wrapped else net
    own.init_worker()
    losses = []
    try:
        for _ in range(5):
            x = torch.randint(0, 10, (4,)) if embedding is not None else torch.randn(4, 4)
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        own.stop_worker()
    finally:
        own.session.close()
    return losses


@pytest.mark.parametrize("mode", ["sync", "geo"])
def test_an_optimizer_trains_a_model_without_rows_that_nobody_wrapped(mode: str) -> None:
    """001-01: Fleet 1.x has no distributed_model; it trains as the wrapped one, and nothing is said."""
    assert plain_losses(mode, False) == plain_losses(mode, True)


def test_rows_need_their_model() -> None:
    with pytest.raises(NotInitializedError, match="nn.Embedding.sparse=True.*distributed_model"):
        plain_losses("sync", False, nn.Embedding(10, 4, sparse=True))
    dense = nn.Embedding(10, 4)
    state = {name: value.clone() for name, value in dense.state_dict().items()}
    first = plain_losses("sync", False, dense)
    dense.load_state_dict(state)
    assert first == plain_losses("sync", True, dense)


def test_what_cannot_be_served_is_refused_where_it_is_said() -> None:
    """002-17, 001-10: the refusal names what works, and nothing was changed."""
    weight = [nn.Parameter(torch.zeros(2))]
    own = Fleet()
    servers = fleet.UserDefinedRoleMaker(current_id=0, worker_num=1, server_endpoints=["127.0.0.1:1"])
    own.init(servers, log_level="WARNING", strategy=strategy("geo"))
    with pytest.raises(ConfigError, match="SGD only"):
        own.distributed_optimizer(torch.optim.Adam(weight))
    with pytest.raises(ConfigError, match="momentum=0.9"):
        own.distributed_optimizer(torch.optim.SGD(weight, 0.1, momentum=0.9))
    own.init(servers, log_level="WARNING", strategy=strategy("sync"))
    with pytest.raises(ConfigError, match=r"no rule for it. Use torch.optim.SGD .* Adagrad"):
        own.distributed_optimizer(torch.optim.RMSprop(weight))
    with pytest.raises(NotInitializedError, match="distributed_optimizer"):
        own.init_worker()
    clipped = fleet.optimizer.SGD(0.1, WideAndDeep().parameters(), grad_clip=fleet.ClipGradByGlobalNorm(1.0))
    with pytest.raises(ConfigError, match="rows on the servers would be missed"):
        own.distributed_optimizer(clipped)
    optimizer = own.distributed_optimizer(torch.optim.SGD(WideAndDeep().parameters(), 0.1))
    with pytest.raises(NotInitializedError, match="distributed_model"):
        own.init_worker()
    with pytest.raises(NotInitializedError, match="init_worker"):
        optimizer.step()
    with pytest.raises(ConfigError, match="for servers; this process is a worker"):
        own.run_server()
    with pytest.raises(ConfigError, match="mode is 4"):
        own.save_persistables("x", mode=4)
    own.session.close()
