"""Hybrid training through the facade, trainers as threads: dense parameters here, rows on the servers (D.7, D.9)."""

from __future__ import annotations

import re
import time
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import fleet
from fleet.errors import CheckpointError, FleetError, NanInfError, PSError, UnsupportedOptionError
from fleet.facade import Fleet
from fleet.ps.client.client import Client, NothingLoaded
from fleet.ps.server import server_files
from fleet.ps.worker.hybrid_model import HybridModel
from tests.fleet.ps_job.test_server_job import Reference, make_adagrad, rows_of, served, strategy
from tests.helpers.served import Batch, WideAndDeep, batches, run_job, train
from tests.helpers.trainers import thread_trainers

Tables = dict[str, torch.Tensor]


def hybrid(mode: str = "sync", num_workers: int = 2) -> fleet.DistributedStrategy:
    made = strategy(mode)
    made.hybrid_configs = {"dp_degree": num_workers}
    return made


def job(monkeypatch: pytest.MonkeyPatch, work: Any, *, num_workers: int = 2, **settings: Any) -> list[Any]:
    """Runs ``work`` on trainers that meet as threads."""
    trainers = thread_trainers(num_workers)
    monkeypatch.setattr("fleet.ps_job.hybrid_job.meet_trainers", lambda job: trainers[job.global_rank])
    made = settings.pop("strategy", hybrid(num_workers=num_workers))
    return run_job(work, num_workers=num_workers, strategy=made, **settings)


def tables_of(model: Any) -> Tables:
    model.module.words.refresh()
    return {"ads": rows_of(model), **{name: value.clone() for name, value in model.state_dict().items()}}


def check_equal(found: Tables, reference: Reference, atol: float = 1e-6) -> None:
    for name, values in {"ads": reference.ads, "words.weight": reference.words.weight}.items():
        torch.testing.assert_close(found[name], values.data, atol=atol, rtol=0)
    torch.testing.assert_close(found["out.weight"], reference.out.weight.data, atol=atol, rtol=0)


def test_two_trainers_equal_one_process_on_the_mean_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """D.7, D.9, 002-18: two servers, two trainers from different seeds; twice the same bits on both, 1e-6 of one."""
    reference = Reference()
    train(reference, make_adagrad(reference.parameters()), batches(6))

    def work(own: Fleet, rank: int) -> Any:
        model, optimizer = served(own, hybrid(), make_adagrad, seed=rank)
        train(model, optimizer, batches(6, rank, 2))
        found = tables_of(model)
        assert optimizer.user_optimizer.state[model.module.out.weight]["step"] == 6  # trained here
        own.stop_worker()
        return found

    first, again = (job(monkeypatch, work, num_servers=2) for _ in range(2))
    for tables in (*first, *again):
        assert all(torch.equal(tables[name], first[0][name]) for name in tables)
    check_equal(first[0], reference)


def test_different_numbers_of_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """003-34, D.7: trainer 1 has 4 batches of 6 and waits; then they train on; the mean is over those that step."""
    data = batches(8)
    halves = [[tuple(part[rank::2] for part in batch) for batch in data] for rank in range(2)]
    whole: list[Batch] = [*data[:4], *halves[0][4:6], *data[6:]]
    reference = Reference()
    train(reference, make_adagrad(reference.parameters()), whole)

    def work(own: Fleet, rank: int) -> Any:
        model, optimizer = served(own, hybrid(), make_adagrad, seed=rank)
        train(model, optimizer, halves[rank][: 4 if rank else 6])
        own.barrier_worker()
        train(model, optimizer, halves[rank][6:])
        own.barrier_worker()
        found = tables_of(model)
        own.stop_worker()
        return found

    for tables in job(monkeypatch, work):
        check_equal(tables, reference)


def test_one_leaves_first_and_worker_0_has_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """B.3, 003-34: trainer 1 stops after 3 of 6 batches and ends with the same parameters; it has no scheduler."""
    data = [batches(6, rank, 2) for rank in range(2)]
    whole: list[Batch] = [*batches(6)[:3], *data[0][3:]]
    reference = Reference()
    optimizer = make_adagrad(reference.parameters())
    train(reference, optimizer, whole, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))

    def work(own: Fleet, rank: int) -> Any:
        model, optimizer = served(own, hybrid(), make_adagrad, seed=rank)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if rank == 0 else None
        train(model, optimizer, data[rank][: 6 - 3 * rank], scheduler)
        found = tables_of(model) if rank == 0 else {}
        own.stop_worker()
        return {**found, "out.weight": model.module.out.weight.detach().clone()}

    first, second = job(monkeypatch, work)
    check_equal(first, reference)
    assert torch.equal(first["out.weight"], second["out.weight"])


def order_of_saving(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list to which trainer 0's values and each trainer's wish to save are noted."""
    order: list[str] = []
    give, ask = HybridModel._give_own, Client.save

    def slow(*arguments: Any) -> None:
        time.sleep(0.05)
        give(*arguments)
        order.append("given")

    def noted(*arguments: Any, **settings: Any) -> int:
        order.append("asked")
        return ask(*arguments, **settings)

    monkeypatch.setattr(HybridModel, "_give_own", slow)
    monkeypatch.setattr(Client, "save", noted)
    return order


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_rows_of_a_loaded_save_are_in_the_next_step(mode: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """D.8: also those of nn.Embedding that no push has changed since, which are kept here."""

    def work(own: Fleet, rank: int) -> Any:
        model, optimizer = served(own, hybrid(mode), make_adagrad, seed=rank)
        train(model, optimizer, batches(3, rank, 2))
        own.save_persistables(tmp_path / "model")
        saved = model.module.words(torch.arange(20)).detach().clone()
        train(model, optimizer, batches(6, rank, 2)[3:])
        own.load_model(tmp_path / "model")
        loaded = model.module.words(torch.arange(20)).detach().clone()
        own.stop_worker()
        return saved, loaded

    for saved, loaded in job(monkeypatch, work, strategy=hybrid(mode)):
        assert torch.equal(saved, loaded)


def test_a_save_goes_on_with_its_optimizer_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """D.8, 003-19: save on two servers, load on one: the same bits as without; nobody saves before trainer 0 gave."""
    folder = tmp_path / "model"
    order = order_of_saving(monkeypatch)

    def work(own: Fleet, rank: int) -> Any:
        model, optimizer = served(own, hybrid(), make_adagrad, seed=rank)
        train(model, optimizer, batches(6, rank, 2)[:3])
        own.save_persistables(folder)
        saved = tables_of(model)
        train(model, optimizer, batches(6, rank, 2)[3:])
        last = tables_of(model)
        own.stop_worker()
        return saved, last

    def load(own: Fleet, rank: int) -> Any:
        model, optimizer = served(own, hybrid(), make_adagrad, seed=7 + rank)
        own.load_model(folder)
        loaded = tables_of(model)
        train(model, optimizer, batches(6, rank, 2)[3:])
        last = tables_of(model)
        own.stop_worker()
        return loaded, last

    before = job(monkeypatch, work, num_servers=2)
    assert order == ["given", "asked", "asked"]
    assert (folder / "trainer.pt").exists()
    after = job(monkeypatch, load)
    for rank in range(2):
        for moment in range(2):
            for name, values in before[rank][moment].items():
                assert torch.equal(values, after[rank][moment][name]), (moment, name)
    assert not torch.equal(before[0][0]["out.weight"], before[0][1]["out.weight"])


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def spoil(folder: Path, what: str) -> None:
    state = folder / "trainer.pt"
    if what == "a link":
        state.rename(folder / "real.pt")
        state.symlink_to(folder / "real.pt")
    elif what == "another object":
        torch.save([1], state)
    elif what == "no dicts":
        torch.save({0: 1}, state)
    elif what == "zeros":
        state.write_bytes(bytes(state.stat().st_size))
    elif what == "empty":
        state.write_bytes(b"")
    elif what == "another shape":
        kept = torch.load(state, weights_only=True)
        kept[2]["sum"] = kept[2]["sum"].T.clone()
        torch.save(kept, state)
    elif what == "trainer.pt":
        state.write_bytes(state.read_bytes()[:-100])
    elif what == "a bit":
        content = bytearray(state.read_bytes())
        with zipfile.ZipFile(state) as archive:
            place = next(part for part in archive.infolist() if part.filename.endswith("data/0")).header_offset
        lengths = (int.from_bytes(content[place + at : place + at + 2], "little") for at in (26, 28))
        content[place + 30 + sum(lengths)] ^= 64
        state.write_bytes(content)
    elif what != "a long name":
        damage(next(folder.glob(what)))


def train_and_load(own: Fleet, rank: int, folder: Path, what: str) -> Any:
    """Returns the text of the refusal where ``what`` is spoiled, and the last values."""
    model, optimizer = served(own, hybrid(), make_adagrad, seed=rank)
    data = batches(8, rank, 2)
    text = ""
    train(model, optimizer, data[:2])
    own.save_persistables(folder)
    train(model, optimizer, data[2:4])
    before = tables_of(model)
    own.barrier_worker()
    if what:
        if rank == 0:
            spoil(folder, what)
        own.barrier_worker()
        with pytest.raises(FleetError, match=r"Nothing was loaded\.$") as caught:
            own.load_model(folder / ("n" * 300 if what == "a long name" else ""))
        assert "\0" not in str(caught.value)
        assert isinstance(caught.value, NothingLoaded if "part" in what else CheckpointError)
        text = str(caught.value)
    found = tables_of(model)
    assert all(torch.equal(found[name], before[name]) for name in before)
    train(model, optimizer, data[4 : 6 + 2 * rank])
    own.save_persistables(folder / "last")
    train(model, optimizer, data[:2])
    own.load_model(folder / "last")
    train(model, optimizer, data[2:4])
    last = tables_of(model)
    own.stop_worker()
    return text, last


_undisturbed: list[Any] = []  # what trainers return that load no spoiled save; made once


@pytest.mark.parametrize(
    "what",
    [
        "ads/part-001-*",
        "dense*/part-000-*",
        "trainer.pt",
        "a link",
        "another object",
        "no dicts",
        "another shape",
        "zeros",
        "a bit",
        "empty",
        "a long name",
    ],
)
def test_a_refused_load_is_as_if_it_had_not_been_called(
    what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Both trainers are told the same; then one with fewer batches stands at a save, and takes part from there."""
    if not _undisturbed:
        _undisturbed.extend(job(monkeypatch, partial(train_and_load, folder=tmp_path / "0", what=""), num_servers=2))
    other = job(monkeypatch, partial(train_and_load, folder=tmp_path / "1", what=what), num_servers=2)
    assert other[0][0] == other[1][0] != ""
    if what == "another shape":
        rule = r"trainer.pt: 'sum' of parameter 2, 'out.weight', has the shape \[8, 1\]; Adagrad keeps \[1, 8\] for it"
        assert re.search(rule, other[0][0])
    for (_, one), (_, two) in zip(_undisturbed, other, strict=True):
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_an_absent_optimizer_state_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The rest of the save is loaded, and gradients from before it are gone."""
    lines: list[str] = []

    def work(own: Fleet, rank: int) -> Any:
        model, optimizer = served(own, hybrid(), make_adagrad, seed=rank)
        train(model, optimizer, batches(4, rank, 2))
        own.save_persistables(tmp_path)
        saved = tables_of(model)
        train(model, optimizer, batches(4, rank, 2))
        own.barrier_worker()
        (tmp_path / "trainer.pt").unlink(missing_ok=True)
        own.barrier_worker()
        ads, words, _ = batches(1, rank, 2)[0]
        model(ads, words).sum().backward()
        monkeypatch.setattr(own.session.server_job.trainer.connection.client, "notify", lines.append)
        own.load_model(tmp_path)
        assert all(p.grad is None for p in model.parameters())
        loaded = tables_of(model)
        own.stop_worker()
        return all(torch.equal(saved[name], loaded[name]) for name in saved), len(optimizer.state)

    assert job(monkeypatch, work) == [(True, 0)] * 2
    assert lines == [f"{tmp_path}/trainer.pt is absent: the optimizer of the dense parameters starts afresh"]


def test_trainers_stay_equal_when_a_server_fails_to_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rows kept here are looked up anew; dense parameters and the optimizer's state are as before on both."""
    load, broken = server_files._load, []

    def load_or_fail(state: Any, config: Any, *args: Any) -> int:
        if config.index == 1 and not broken:
            broken.append(1)
            raise CheckpointError("the disk is gone.")
        return load(state, config, *args)

    monkeypatch.setattr(server_files, "_load", load_or_fail)

    def work(own: Fleet, rank: int) -> Any:
        model, optimizer = served(own, hybrid(), make_adagrad, seed=rank)
        train(model, optimizer, batches(2, rank, 2))
        own.save_persistables(tmp_path)
        train(model, optimizer, batches(4, rank, 2)[2:])
        before = model.module.out.weight.detach().clone()
        with pytest.raises(PSError, match=r"the disk is gone\. Tables may be partly loaded"):
            own.load_model(tmp_path)
        assert torch.equal(model.module.out.weight, before)
        words = model.module.words(torch.arange(20)).detach().clone()
        model.module.words.refresh()
        assert torch.equal(model.module.words.weight, words)
        train(model, optimizer, batches(6, rank, 2)[4:])
        last = model.module.out.weight.detach().clone()
        own.load_model(tmp_path)
        own.stop_worker()
        return last

    one, two = job(monkeypatch, work, num_servers=2)
    assert torch.equal(one, two)


def test_servers_that_start_from_a_save_give_the_parameters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """D.8: init_server(dirname): every trainer begins with the parameters of the save, whatever its model had."""

    def work(own: Fleet, rank: int) -> Tables:
        model, optimizer = served(own, hybrid(), make_adagrad, seed=rank)
        train(model, optimizer, batches(2, rank, 2))
        own.save_persistables(tmp_path)
        own.stop_worker()
        return {"out.weight": model.module.out.weight.detach().clone()}

    def serve(own: Fleet, index: int) -> None:
        net = WideAndDeep()
        own.distributed_optimizer(make_adagrad(net.parameters()), hybrid())
        own.distributed_model(net)
        own.init_server(tmp_path)
        own.run_server()

    def begin(own: Fleet, rank: int) -> torch.Tensor:
        model, _ = served(own, hybrid(), make_adagrad, seed=9 + rank)
        own.stop_worker()
        return model.module.out.weight.detach().clone()

    (saved, _) = job(monkeypatch, work)
    for weight in job(monkeypatch, begin, serve=serve):
        assert torch.equal(weight, saved["out.weight"])


def test_a_bad_row_stops_both_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLAGS_check_nan_inf: one trainer's rows get a NaN; nothing is updated on either, and both can go on."""
    monkeypatch.setenv("FLAGS_check_nan_inf", "1")

    def work(own: Fleet, rank: int) -> Any:
        model, optimizer = served(own, hybrid(), make_adagrad, seed=rank)
        before = tables_of(model)
        ads, words, target = batches(1, rank, 2)[0]
        loss = ((model(ads, words) - target) ** 2).mean()
        (loss * float("nan") if rank else loss).backward()
        with pytest.raises(NanInfError) as caught:
            optimizer.step()
        optimizer.zero_grad()
        after = tables_of(model)
        assert all(torch.equal(values, after[name]) for name, values in before.items())
        train(model, optimizer, batches(1, rank, 2))
        weight = model.module.out.weight.detach().clone()
        own.stop_worker()
        return str(caught.value), weight

    (other, weight0), (own_message, weight1) = job(monkeypatch, work)
    assert "1 other trainer" in other
    assert "rank 1" in own_message
    assert torch.equal(weight0, weight1)


def test_amp_computes_in_bfloat16_and_exchanges_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decision 5: strategies of the model that act with servers act here; both trainers stay equal to the bit."""
    made = hybrid("async")
    made.amp, made.amp_configs = True, {"dtype": "bfloat16"}

    def work(own: Fleet, rank: int) -> Any:
        model, optimizer = served(own, made, make_adagrad, seed=rank)
        losses = train(model, optimizer, batches(4, rank, 2) * 4)
        out = model(*batches(1)[0][:2])
        assert torch.equal(out, out.bfloat16().float())
        own.stop_worker()
        return losses, model.module.out.weight.detach().clone()

    (losses, weight0), (_, weight1) = job(monkeypatch, work, strategy=made)
    assert sum(losses[-4:]) < sum(losses[:4])
    assert torch.equal(weight0, weight1)


def test_alone_any_optimizer_trains_the_dense_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """D.9: the servers have no rule for AdamW's decay, and need none for parameters that stay here; async rows."""

    def make(net: Any) -> torch.optim.Optimizer:
        rows = [net.ads.weight, net.words.weight]
        groups = [{"params": rows, "weight_decay": 0.0}, {"params": net.out.parameters(), "weight_decay": 0.1}]
        return torch.optim.AdamW(groups, 0.01)

    def start(made: fleet.DistributedStrategy) -> tuple[Fleet, Any, Any]:
        torch.manual_seed(0)
        own, net = Fleet(), WideAndDeep()
        own.init(strategy=made, log_level="WARNING")
        optimizer = own.distributed_optimizer(make(net), made)
        model = own.distributed_model(net)
        own.init_worker()
        return own, model, optimizer

    own, model, optimizer = start(hybrid("async", 1))
    before = tables_of(model)
    losses = train(model, optimizer, batches(4) * 10)
    own.barrier_worker()
    after = tables_of(model)
    own.stop_worker()
    assert sum(losses[-4:]) < sum(losses[:4])
    assert not any(torch.equal(before[name], after[name]) for name in ("ads", "words.weight", "out.weight", "out.bias"))
    with pytest.raises(UnsupportedOptionError, match="weight_decay"):
        start(strategy("async"))
