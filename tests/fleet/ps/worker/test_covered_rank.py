"""Partitions of a lost worker: another one reads them in its name until it is back, each event once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.served import _free_endpoints

TRAIN = """
import os, random, signal, sys, time
import torch
from fleet import fleet

EVENTS, PARTITIONS, DIES_AT = int(sys.argv[1]), 6, int(sys.argv[2])
fleet.init()


def events(partition, start):
    for offset in range(start, EVENTS):
        yield offset, 10_000 * partition + offset
    while True:
        yield None


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = fleet.SparseEmbedding(1, combiner="sum", initializer=fleet.ps.Initializer("constant", 0.0))
        self.seen = torch.nn.Parameter(torch.zeros(3))

    def forward(self, ids):
        return self.rows(ids[:, None]).sum() + self.seen.sum() * len(ids)


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
    rank, steps = fleet.worker_index(), 0
    dataset = fleet.StreamDataset(events, int, batch_size=16, partitions=PARTITIONS, name="clicks", timeout_s=12.0)
    for ids in dataset:
        (-model(ids)).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        with open(f"steps-{rank}", "a") as file:
            file.write(" ".join(str(p) for p in sorted({int(id) // 10_000 for id in ids})) + chr(10))
        time.sleep(0.02)
        if steps == DIES_AT:
            os.kill(os.getpid(), signal.SIGKILL)
    fleet.save_persistables("model")
    if rank == 0:
        optimizer.state_dict()
        ids = torch.tensor([10_000 * p + offset for p in range(PARTITIONS) for offset in range(EVENTS)])
        torch.save({"rows": model.module.rows.lookup_rows(ids), "seen": model.module.seen.detach()}, "after.pt")
    fleet.stop_worker()
"""


class HandStarted:
    """Two servers and three workers that nobody restarts."""

    def __init__(self, folder: Path, events: int) -> None:
        self.folder, self.events = folder, events
        (folder / "train.py").write_text(TRAIN)
        self.endpoints = _free_endpoints(2)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, dies_at: int = -1) -> None:
        kind, _, number = name.partition("-")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("PADDLE_", "FLEET_", "FLAGS_"))}
        own = {
            "PADDLE_PSERVERS_IP_PORT_LIST": ",".join(self.endpoints),
            "PADDLE_TRAINERS_NUM": "3",
            "FLEET_PS_FOLDER": str(self.folder / "state"),
            "FLEET_PS_LEASE": "3",
            "FLEET_JOB_SECRET": "ab" * 32,
            "OMP_NUM_THREADS": "1",
        }
        if kind == "server":
            host, _, port = self.endpoints[int(number)].partition(":")
            own |= {"TRAINING_ROLE": "PSERVER", "POD_IP": host, "PADDLE_PORT": port}
        else:
            own |= {"TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": number}
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "train.py", str(self.events), str(dies_at)],
                cwd=self.folder,
                env={**kept, **own},
                stdout=log,
                stderr=log,
            )

    def wait(self, name: str, limit_s: float = 240.0) -> int:
        return self.processes[name].wait(limit_s)

    def says(self, text: str) -> list[str]:
        """The workers whose logs hold the text."""
        return [path.stem for path in sorted(self.folder.glob("worker-*.log")) if text in path.read_text()]

    def logs(self) -> str:
        return "".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Any]:
    made: list[HandStarted] = []

    def make(events: int) -> HandStarted:
        made.append(HandStarted(tmp_path, events))
        return made[0]

    yield make
    for process in made[0].processes.values():
        process.kill()
        process.wait()


def until(found: Any, job: HandStarted) -> None:
    deadline = time.monotonic() + 200
    while not found():
        assert time.monotonic() < deadline, job.logs()
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("comes_back", [False, True])
def test_each_event_of_a_lost_worker_is_trained_once(job: Any, tmp_path: Path, comes_back: bool) -> None:
    """kill -9 of a worker at a random step; a row counts its event, so that a lost or repeated one shows."""
    ours = job(2500 if comes_back else 600)
    for name in ("server-0", "server-1", "worker-0", "worker-2"):
        ours.start(name)
    ours.start("worker-1", dies_at=3 + os.getpid() % 20)
    assert ours.wait("worker-1") == -signal.SIGKILL, ours.logs()
    if comes_back:
        until(lambda: ours.says("worker 1 is lost: this worker reads its streams"), ours)
        covering = ours.folder / f"steps-{ours.says('worker 1 is lost')[0][-1]}"
        until(lambda: covering.read_text().count("1 4") > 3, ours)
        ours.start("worker-1")
    for name, process in ours.processes.items():
        if comes_back or name != "worker-1":
            assert process.wait(240) == 0, ours.logs()
    assert bool(ours.says("no longer reads the streams of worker 1")) == comes_back
    found = torch.load(tmp_path / "after.pt")
    assert found["rows"].flatten().tolist() == [1.0] * (6 * ours.events)
    assert found["seen"].tolist() == [6.0 * ours.events] * 3
