"""``fleet.prefetch``: the rows of a batch in one message, and the same training as without it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import fleet
from fleet.errors import ConfigError, NotInitializedError, OptionWarning
from fleet.facade import Fleet
from fleet.ps.wire.messages import Op
from tests.helpers.served import run_job, strategy_of
from tests.helpers.trainers import thread_trainers

TABLES = 5
BATCHES = 8
START = fleet.ps.Initializer("uniform", -0.5, 0.5)


class ManyTables(nn.Module):
    """Tables of unbounded ids, columns of one tensor, a table for two of them, bags with padding, computed ids."""

    def __init__(self, computes: bool = False) -> None:
        super().__init__()
        self.fields = nn.ModuleList(fleet.SparseEmbedding(4, initializer=START) for _ in range(TABLES))
        self.pair = fleet.SparseEmbedding(4, initializer=START)
        self.words = fleet.SparseEmbedding(4, combiner="mean", padding_idx=0, initializer=START)
        self.crossed = fleet.SparseEmbedding(4, initializer=START) if computes else None
        self.out = nn.Linear(4 * (TABLES + 3 + computes), 1)

    def forward(self, x: dict[str, torch.Tensor]) -> torch.Tensor:
        found = [field(x["fields"][:, i]) for i, field in enumerate(self.fields)]
        found += [self.pair(x["user"]), self.pair(x["friend"]), self.words(x["words"])]
        if self.crossed is not None:
            found.append(self.crossed(x["user"] * 1009 + x["friend"]))
        return self.out(torch.cat(found, 1)).mean()


def batch_of(step: int, rank: int, size: int = 6) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(10 * step + rank)
    ids = torch.randint(-(2**62), 2**62, (40,), generator=torch.Generator().manual_seed(1))
    ids[0] = 0

    def pick(*shape: int) -> torch.Tensor:
        return ids[torch.randint(0, 40, shape, generator=draw)]

    return {"words": pick(size, 3), "fields": pick(size, TABLES), "user": pick(size), "friend": pick(size)}


def loader(rank: int, count: int = BATCHES) -> Iterator[dict[str, torch.Tensor]]:
    for step in range(count):
        yield batch_of(step, rank, size=6 if step != 4 else 5)


class Sent:
    """Counts what a worker's main client sends."""

    def __init__(self, own: Fleet) -> None:
        self.ops: list[Op] = []
        self.parts: list[int] = []
        for link in own.session.server_job.trainer.connection.client._links:
            self._watch(link)

    def _watch(self, link: Any) -> None:
        submit = link.submit

        def note(request: Any) -> Any:
            self.ops.append(request.op)
            self.parts.append(request.n_tables)
            return submit(request)

        link.submit = note

    def pulls(self) -> int:
        return self.ops.count(Op.PULL)


Trained = tuple[dict[str, torch.Tensor], list[float], list[int]]


def train(
    own: Fleet,
    start: nn.Module,
    strategy: Any,
    batches: Iterable[Any],
    probe: Any,
    *,
    prefetches: bool,
    ops: Sequence[Op],
    begun: Callable[[Fleet], None] = lambda own: None,
) -> Trained:
    """Trains a copy of ``start`` on one worker; returns the parameters with the output for ``probe``, the losses, and
    the messages of ``ops`` in each step. ``begun`` is called once the worker is connected."""
    net = copy.deepcopy(start)
    optimizer = own.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.5), strategy)
    model = own.distributed_model(net)
    own.init_worker()
    begun(own)
    sent = Sent(own)
    losses: list[float] = []
    messages: list[int] = []
    for batch in own.prefetch(batches) if prefetches else batches:
        loss = model(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        messages.append(sum(op in ops for op in sent.ops) - sum(messages))
    own.barrier_worker()
    found = {name: p.detach().clone() for name, p in net.named_parameters() if p.numel()}
    with torch.no_grad():
        found["out"] = model(probe).reshape(1)
    own.stop_worker()
    return found, losses, messages


def trained(
    mode: str,
    prefetches: bool,
    monkeypatch: pytest.MonkeyPatch,
    *,
    computes: bool = False,
    workers: int = 2,
    said: list[str] | None = None,
) -> list[Trained]:
    """Returns by worker the parameters, losses, and the pulls of each step."""
    trainers = thread_trainers(workers)
    monkeypatch.setattr("fleet.ps_job.hybrid_job.meet_trainers", lambda job: trainers[job.global_rank])
    made = strategy_of(mode, workers, k_steps=100)
    torch.manual_seed(3)
    start = ManyTables(computes)

    def hear(own: Fleet) -> None:
        if said is not None:
            monkeypatch.setattr(own.session.job, "say", said.append)

    def work(own: Fleet, rank: int) -> Trained:
        probe = batch_of(0, 0)
        return train(own, start, made, loader(rank), probe, prefetches=prefetches, ops=(Op.PULL,), begun=hear)

    return run_job(work, num_workers=workers, strategy=made, limit_s=100)


@pytest.mark.parametrize("mode", ["sync", "hybrid"])
def test_steps_see_the_same_rows_in_one_message(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = trained(mode, False, monkeypatch)
    for (found, losses, pulls), (expected, expected_losses, expected_pulls) in zip(
        trained(mode, True, monkeypatch), plain, strict=True
    ):
        assert losses == expected_losses
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert set(expected_pulls) == {TABLES + 3}
        # The first batch shows which ids are whose.
        assert pulls == [TABLES + 3, *[1] * (BATCHES - 1)]


@pytest.mark.parametrize("mode", ["async", "half_async", "geo"])
def test_modes_that_read_ahead_ask_once_a_batch(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for _, losses, pulls in trained(mode, True, monkeypatch, workers=1):
        assert len(losses) == BATCHES
        assert sum(pulls[2:]) <= (BATCHES - 2) * (2 if mode == "half_async" else 1)


def test_ids_that_the_model_computes_are_asked_for_apart_and_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    plain = trained("sync", False, monkeypatch, computes=True, workers=1)
    ((found, losses, pulls),) = trained("sync", True, monkeypatch, computes=True, workers=1, said=said)
    assert losses == plain[0][1]
    assert all(torch.equal(found[name], expected) for name, expected in plain[0][0].items())
    assert pulls[1:] == [2] * (BATCHES - 1)
    lines = [line for line in said if "computed in the model" in line]
    assert len(lines) == 1
    assert "SparseEmbedding 'crossed'" in lines[0]


def with_worker(mode: str, loop: Any, **options: Any) -> Any:
    made = strategy_of(mode, 1, **options)

    def work(own: Fleet, rank: int) -> Any:
        torch.manual_seed(3)
        net = ManyTables()
        optimizer = own.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.5), made)
        model = own.distributed_model(net)
        found = loop(own, model, optimizer)
        own.stop_worker()
        return found

    return run_job(work, strategy=made)[0]


def test_a_loop_before_init_worker_is_refused() -> None:
    def loop(own: Fleet, model: Any, optimizer: Any) -> None:
        with pytest.raises(NotInitializedError, match="fleet.init_worker"):
            next(iter(own.prefetch(loader(0))))
        own.init_worker()

    with_worker("async", loop)


def test_a_loader_that_reuses_its_memory_is_refused_where_a_batch_is_read_ahead() -> None:
    def reusing() -> Iterator[dict[str, torch.Tensor]]:
        memory = batch_of(0, 0)
        for step in range(3):
            for name, values in batch_of(step, 0).items():
                memory[name].copy_(values)
            yield memory

    def loop(own: Fleet, model: Any, optimizer: Any) -> None:
        own.init_worker()
        with pytest.raises(ConfigError, match="memory of one batch to the next"):
            next(iter(own.prefetch(reusing())))

    with_worker("async", loop)


def test_a_batch_that_the_loop_changes_is_looked_up_as_it_is_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """The requested rows are those of other ids: the lookup asks for its own."""

    def loop(prefetches: bool) -> Any:
        def run(own: Fleet, model: Any, optimizer: Any) -> list[float]:
            own.init_worker()
            losses = []
            for number, batch in enumerate(own.prefetch(loader(0)) if prefetches else loader(0)):
                if number % 3 == 2:
                    batch["user"][::2] = 17
                    batch["fields"] = batch["fields"].flip(1)
                loss = model(batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            return losses

        return run

    assert with_worker("sync", loop(True)) == with_worker("sync", loop(False))


def test_a_load_makes_requested_rows_old(tmp_path: Any) -> None:
    def loop(own: Fleet, model: Any, optimizer: Any) -> None:
        own.init_worker()
        batch = batch_of(0, 0)
        model(batch).backward()  # a load resets the rows of its save, and they begin with a push
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            before = model(batch).item()
        own.save_persistables(str(tmp_path / "first"))
        for number, same in enumerate(own.prefetch([batch] * 6)):
            if number == 4:  # the rows of this batch were requested when it was handed out
                own.load_model(str(tmp_path / "first"))
                assert model(same).item() == before
                break
            model(same).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert number == 0 or model(same).item() != before

    with_worker("sync", loop)


class OneRow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = fleet.SparseEmbedding(1, initializer=fleet.ps.Initializer("constant", 0.0))
        self.out = nn.Linear(1, 1)


@pytest.mark.parametrize("mode", ["sync", "hybrid", "async", "max_staleness", "half_async"])
def test_a_barrier_makes_requested_rows_old(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a barrier, the rows hold every step of both workers."""
    trainers = thread_trainers(2)
    monkeypatch.setattr("fleet.ps_job.hybrid_job.meet_trainers", lambda job: trainers[job.global_rank])
    monkeypatch.setenv("CPU_NUM", "1")
    bounded = {"a_sync_configs": {"max_staleness": 2}} if mode == "max_staleness" else {}
    made = strategy_of("async" if bounded else mode, 2, **bounded)

    def work(own: Fleet, rank: int) -> tuple[list[float], list[float]]:
        net = OneRow()
        optimizer = own.distributed_optimizer(torch.optim.SGD(net.parameters(), 1.0), made)
        model = own.distributed_model(net)
        own.init_worker()
        found: list[float] = []
        for number, batch in enumerate(own.prefetch([torch.tensor([7]) for _ in range(6)])):
            if number == 3:  # in the modes that read ahead, the rows of this batch were requested before a step
                own.barrier_worker()
            loss = model.rows(batch).sum()
            if number == 3:
                found.append(loss.item())
                own.barrier_worker()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        own.barrier_worker()
        if mode not in ("sync", "hybrid"):
            model.rows.prefetch(torch.tensor([7]))
            model.rows(torch.tensor([7])).sum().backward()
            model.rows.prefetch(torch.tensor([7]))
            optimizer.step()
            own.barrier_worker()
            found.append(model.rows(torch.tensor([7])).item())
        own.stop_worker()
        return found

    steps = 1 if mode in ("sync", "hybrid") else 2  # the mean of two workers, or their sum
    expected = [-3.0 * steps] if steps == 1 else [-6.0, -14.0]
    assert run_job(work, num_workers=2, strategy=made, limit_s=100) == [expected, expected]


def test_a_module_that_was_made_after_the_start_is_named_by_backward() -> None:
    def loop(own: Fleet, model: Any, optimizer: Any) -> None:
        own.init_worker()
        added = fleet.SparseEmbeddings({"late": 4})
        with pytest.raises(NotInitializedError, match=r"'late'.*made after it.*before fleet.distributed_model"):
            added({"late": torch.tensor([1])})["late"].sum().backward()

    with_worker("sync", loop)


@pytest.mark.parametrize("given", [None, 5, nn.ModuleList([nn.Linear(1, 1)])])
def test_what_gives_no_batches_is_refused_at_the_call(given: Any) -> None:
    def loop(own: Fleet, model: Any, optimizer: Any) -> None:
        with pytest.raises(
            ConfigError, match=rf"(?s)fleet.prefetch\(.*{type(given).__name__[:4]}.*iterable of batches"
        ):
            own.prefetch(given)
        own.init_worker()

    with_worker("async", loop)


def test_the_batches_of_a_loop_are_not_pickled() -> None:
    def loop(own: Fleet, model: Any, optimizer: Any) -> None:
        own.init_worker()
        with pytest.raises(ConfigError, match="the connection of this worker.*its loader"):
            pickle.dumps(own.prefetch([1]))

    with_worker("async", loop)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("how", ["trace", "vmap"])
def test_programs_that_would_keep_the_rows_of_one_call_are_refused(how: str) -> None:
    def loop(own: Fleet, model: Any, optimizer: Any) -> None:
        own.init_worker()
        ids = torch.tensor([[1, 2], [3, 4]])
        for module in (model.pair, fleet.SparseEmbeddings({"pair": 4})["pair"]):
            with pytest.raises(ConfigError, match="torch.jit.trace" if how == "trace" else "torch.func.vmap"):
                torch.jit.trace(module, ids) if how == "trace" else torch.func.vmap(module)(ids)

    with_worker("sync", loop)


def test_evaluation_inside_the_loop_disturbs_nothing() -> None:
    def loop(own: Fleet, model: Any, optimizer: Any) -> list[int]:
        own.init_worker()
        sent = Sent(own)
        pulls = []
        for number, batch in enumerate(own.prefetch(loader(0))):
            begun = sent.pulls()
            if number % 2:
                with torch.no_grad():
                    for held_out in own.prefetch(loader(7, 3)):
                        model(held_out)
                begun = sent.pulls()
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            pulls.append(sent.pulls() - begun)
        return pulls

    assert with_worker("sync", loop)[2:] == [1] * (BATCHES - 2)


def test_a_save_in_the_loop_holds_no_rows_of_the_batch_at_hand(tmp_path: Any) -> None:
    """Rows that were requested early would be in the save, and a load of it would set them back."""

    def loop(prefetches: bool) -> Any:
        folder = str(tmp_path / str(prefetches))

        def run(own: Fleet, model: Any, optimizer: Any) -> list[float]:
            own.init_worker()
            losses = []
            for number, batch in enumerate(own.prefetch(loader(0)) if prefetches else loader(0)):
                if number == 3:
                    own.save_persistables(folder)
                if number == 6:
                    own.load_model(folder)
                loss = model(batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            return losses

        return run

    assert with_worker("sync", loop(True)) == with_worker("sync", loop(False))


def test_a_job_without_servers_passes_batches_through() -> None:
    own = Fleet()
    own.init(is_collective=True)
    batches = [1, 2]
    with pytest.warns(OptionWarning, match="no parameter servers"):
        assert own.prefetch(batches) is batches


def test_a_wrapped_loader_has_its_length_and_attributes() -> None:
    def loop(own: Fleet, model: Any, optimizer: Any) -> None:
        own.init_worker()
        data = torch.utils.data.DataLoader(torch.arange(10), batch_size=2)
        wrapped = own.prefetch(data)
        assert len(wrapped) == 5
        assert wrapped.batch_size == 2
        assert [batch.tolist() for batch in wrapped] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]

    with_worker("async", loop)
