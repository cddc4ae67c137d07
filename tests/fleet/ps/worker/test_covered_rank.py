"""Partitions of a lost worker: another one reads them in its name until it is back, each event once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fleet.dataset.stream import StreamDataset
from fleet.errors import PSError
from fleet.ps.worker.covered_rank import LostRanks
from fleet.ps.worker.sender import SenderConfig
from fleet.ps.worker.stream_progress import Resumption, StreamProgress
from tests.fleet.ps.service import DENSE, SPARSE, gradient, rows, serving
from tests.helpers.hand_started import HandStarted

EVENTS = 600  # of each partition
TRAIN = """
import os, signal, sys
import torch
from fleet import fleet

EVENTS, PARTITIONS, DIES_AT = int(sys.argv[1]), 6, int(sys.argv[2])
fleet.init()


def events(partition, start):
    for offset in range(start, EVENTS):
        while sys.argv[3] == "back" and partition % 3 == 1 and offset >= EVENTS // 2 and not os.path.exists("back"):
            yield None
        held = sys.argv[3] == "coverer" and partition % 3 != 1 and offset >= EVENTS // 2
        while held and not os.path.exists("coverer"):
            yield None
        yield offset, 10_000 * partition + offset
    while not os.path.exists("over"):
        yield None


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = fleet.SparseEmbedding(1, combiner="sum", initializer=fleet.ps.Initializer("constant", 0.0))
        self.seen = torch.nn.Parameter(torch.zeros(3))

    def forward(self, ids):
        return self.rows(ids[:, None]).sum() + self.seen.sum() * len(ids)


def first(name):
    try:
        os.open(name, os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        return False
    return True


model = Model()
strategy = fleet.DistributedStrategy()
strategy.a_sync = True
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), strategy)
model = fleet.distributed_model(model)
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
else:
    fleet.init_worker()
    rank, steps, covered = fleet.worker_index(), 0, 0
    dataset = fleet.StreamDataset(events, int, batch_size=16, partitions=PARTITIONS, name="clicks")
    if rank == 1 and DIES_AT < 0:
        open("back", "w").close()
    for ids in dataset:
        (-model(ids)).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        with open(f"steps-{rank}", "a") as file:
            file.write(" ".join(map(str, ids.tolist())) + chr(10))
        covered += any(int(event) // 10_000 % 3 != rank for event in ids)
        if steps == DIES_AT or (sys.argv[3] == "coverer" and covered == 5 and first("coverer")):
            os.kill(os.getpid(), signal.SIGKILL)
    fleet.save_persistables("model")
    if rank == 0 or os.path.exists("coverer"):
        optimizer.state_dict()
        ids = torch.tensor([10_000 * p + offset for p in range(PARTITIONS) for offset in range(EVENTS)])
        torch.save({"rows": model.module.rows.lookup_rows(ids), "seen": model.module.seen.detach()}, "after.pt")
    fleet.stop_worker()
"""


def lose(service: Any, rank: int) -> None:
    for server in service.servers:
        server.state.job.workers[rank].state = "expired"


def lost_ranks(client: Any, said: list[str]) -> LostRanks:
    plan = SimpleNamespace(configs={0: SPARSE, 1: DENSE}, dense=[], sparse=[])
    found = LostRanks(client, plan, SenderConfig(), said.append)  # type: ignore[arg-type]
    found._every_s = 0.0
    return found


def test_a_rank_is_covered_only_after_its_lease_and_on_all_servers() -> None:
    said: list[str] = []
    with serving(2, num_workers=3) as service:
        clients = [service.client(rank) for rank in range(3)]
        looking = lost_ranks(clients[0], said)
        assert looking.look() == []
        service.servers[0].state.job.workers[1].state = "expired"
        assert looking.look() == []
        lose(service, 1)
        (covered,) = looking.look()
        assert covered.rank == 1
        assert {server.state.job.workers[1].state for server in service.servers} == {"covered"}
        assert [worker.rank for worker in service.servers[0].state.job.active()] == [0, 2]
        assert lost_ranks(clients[2], said).look() == []  # another worker is too late
        assert said == ["worker 1 is lost: this worker reads its streams from where it was, until it is back"]
        looking.end()


def test_steps_go_on_from_the_points_of_the_rank_until_its_worker_is_back() -> None:
    said: list[str] = []
    with serving(num_workers=2) as service:
        own, lost = service.client(0), service.client(1)
        lost.wait(lost.push({0: gradient([5])}, positions={"clicks": {"1": (0, 10)}}))
        lose(service, 1)
        looking = lost_ranks(own, said)
        (covered,) = looking.look()
        assert covered.progress.resumption.offsets == {"clicks": {"1": 10}}
        covered.progress.begin("clicks", {1: 10})
        covered.progress.give()
        covered.progress.note("clicks", 1, 20)
        covered.put({0: gradient([5])})
        covered.flush()
        assert rows(own, [5])[0, 0] == -2
        back = service.client(1)
        assert back.welcomes()[0]["points"]["-1"] == [2, {"clicks": {"1": 20}}]
        covered.progress.give()
        covered.put({0: gradient([5])})
        covered.flush()
        assert "a newer process has taken over this rank" in covered.ended
        covered.progress.give()
        covered.put({0: gradient([5])})
        assert not covered.progress.is_open
        assert rows(own, [5])[0, 0] == -2
        assert looking.look() == []
        assert "this worker no longer reads the streams of worker 1" in said[-1]
        assert service.servers[0].state.job.workers[1].state == "active"


def test_a_restarted_server_takes_a_deputy_only_as_a_new_one(tmp_path: Path) -> None:
    """It has forgotten who is newer: the worker, or who covered it."""
    with serving(num_workers=2, folder=tmp_path) as service:
        own, lost = service.client(0), service.client(1)
        lost.wait(lost.push({0: gradient([5])}))
        lose(service, 1)
        deputy = own.deputy(1, 0, 77)
        service.clients.append(deputy)
        deputy.open()
        deputy.create_tables({0: SPARSE, 1: DENSE})
        deputy.wait(deputy.push({0: gradient([5])}))
        service.servers[0].stop()
        service.start(0)
        lose(service, 1)
        with pytest.raises(PSError, match="worker 1 is expired: only the rank of a worker that was lost"):
            deputy.wait(deputy.push({0: gradient([5])}))
        assert rows(own, [5])[0, 0] == -2


def test_a_loop_that_makes_one_step_of_several_batches_covers_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost:
        current = None
        asked = 0

        def look(self) -> list[Any]:
            self.asked += 1
            return []

    lost = Lost()
    dataset = StreamDataset(lambda partition, start: enumerate(range(9)), int, batch_size=1)
    dataset._begin()
    dataset._lost, dataset._progress = lost, StreamProgress(Resumption())  # type: ignore[assignment]
    dataset._progress.begin("stream", {0: 0})
    batches = iter(dataset)
    next(batches)
    assert lost.asked == 1
    next(batches)
    dataset._progress.positions()
    next(batches)
    assert (lost.asked, dataset._progress.accumulates) == (1, True)


class StreamJob(HandStarted):
    """Two servers and three workers."""

    def __init__(self, folder: Path, kind: str) -> None:
        super().__init__(folder, TRAIN, servers=2, workers=3)
        self.kind = kind

    def begin(self, name: str, dies_at: int = -1) -> None:
        self.start(name, str(EVENTS), str(dies_at), self.kind)

    def trained(self, ranks: str = "012") -> set[int]:
        """The events of the steps of these workers, from their own files."""
        files = [self.folder / f"steps-{rank}" for rank in ranks]
        return {int(event) for path in files if path.exists() for event in path.read_text().rpartition("\n")[0].split()}

    def says(self, text: str) -> list[str]:
        """The workers whose logs hold the text."""
        return [path.stem for path in sorted(self.folder.glob("worker-*.log")) if text in path.read_text()]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Any]:
    made: list[StreamJob] = []

    def make(kind: str) -> StreamJob:
        made.append(StreamJob(tmp_path, kind))
        return made[0]

    yield make
    made[0].end()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lost", "back"])
def test_each_event_of_a_lost_worker_is_trained_once(job: Any, tmp_path: Path, kind: str) -> None:
    """kill -9 of a worker at a random step; a row counts its event, so that a lost or repeated one shows."""
    ours = job(kind)
    for name in ("server-0", "server-1", "worker-0", "worker-2"):
        ours.begin(name)
    ours.begin("worker-1", dies_at=3 + os.getpid() % 15)
    assert ours.wait("worker-1") == -signal.SIGKILL, ours.logs()
    own = {event for event in ours.trained("1")}
    ours.until(lambda: any(event // 10_000 % 3 == 1 for event in ours.trained("02") - own))
    assert len(ours.says("worker 1 is lost: this worker reads its streams from where it was")) == 1
    if kind == "back":
        ours.begin("worker-1")
    ours.until(lambda: len(ours.trained()) == 6 * EVENTS)
    (tmp_path / "over").touch()
    for name, process in ours.processes.items():
        if kind == "back" or name != "worker-1":
            assert process.wait(240) == 0, ours.logs()
    assert (ours.trained("1") > own) == (kind == "back")
    found = torch.load(tmp_path / "after.pt")
    assert found["rows"].flatten().tolist() == [1.0] * (6 * EVENTS)
    assert found["seen"].tolist() == [6.0 * EVENTS] * 3


@pytest.mark.slow
def test_the_worker_that_covers_another_is_lost_too(job: Any, tmp_path: Path) -> None:
    """The last one reads the partitions of both; each event is still trained once."""
    ours = job("coverer")
    for name in ("server-0", "server-1", "worker-0", "worker-2"):
        ours.begin(name)
    ours.begin("worker-1", dies_at=5)
    assert ours.wait("worker-1") == -signal.SIGKILL, ours.logs()
    ours.until(lambda: len(ours.trained()) == 6 * EVENTS)
    (tmp_path / "over").touch()
    codes = {name: process.wait(240) for name, process in ours.processes.items()}
    assert sorted(codes.values()) == [-signal.SIGKILL] * 2 + [0] * 3, ours.logs()
    found = torch.load(tmp_path / "after.pt")
    assert found["rows"].flatten().tolist() == [1.0] * (6 * EVENTS)
    assert found["seen"].tolist() == [6.0 * EVENTS] * 3
