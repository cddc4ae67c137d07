"""Waits of a job with servers: calls that only some make, servers that do not come, a secret that is missing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fleet.errors import ConfigError, PSError
from fleet.facade import Fleet
from fleet.ps.client.client import wait_for_servers
from fleet.ps.server import operations
from fleet.ps.wire.auth import check_secret
from fleet.ps.wire.transport import SocketTransport
from tests.fleet.ps_job.test_server_job import make_sgd, served, strategy
from tests.helpers.ready_python import run_python
from tests.helpers.served import batches, run_job, train


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_save_that_one_worker_calls_while_the_other_is_at_a_barrier(
    mode: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 9, 2: both get an error that says which call each is in, with its line, and what to do."""
    monkeypatch.setattr(operations, "BEAT_S", 0.2)
    monkeypatch.setattr(operations, "STUCK_S", 0.5)
    failures: dict[int, str] = {}

    def work(own: Fleet, rank: int) -> None:
        model, optimizer = served(own, strategy(mode), make_sgd)
        train(model, optimizer, batches(2, rank, 2))
        try:
            if rank == 0:
                own.save_persistables(tmp_path / "model")
            own.barrier_worker()
        except PSError as error:
            failures[rank] = str(error)
        own.stop_worker()

    run_job(work, num_workers=2, num_servers=2, strategy=strategy(mode))
    first = r"worker 0 waits in fleet.save_persistables\(\) at .*test_server_meetings.py:\d+"
    second = r"worker 1 waits in fleet.barrier_worker\(\) at .*test_server_meetings.py:\d+"
    for rank, call in enumerate(("save_persistables", "barrier_worker")):
        with pytest.raises(PSError, match=rf"fleet.{call}\(\).*{first}; {second}.*is_first_worker"):
            raise PSError(failures[rank])
    assert not (tmp_path / "model").exists()


def test_a_worker_that_trains_on_is_waited_for_and_named(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """D.7, issue 9, 2: it may have more batches; a line says what the first one waits in, and where the other is."""
    monkeypatch.setattr(operations, "BEAT_S", 0.1)
    monkeypatch.setattr(operations, "STUCK_S", 0.2)
    said: list[str] = []
    waits = threading.Event()

    def work(own: Fleet, rank: int) -> None:
        own.session.say = lambda line: (said.append(line), "waits for workers" in line and waits.set())
        model, optimizer = served(own, strategy("sync"), make_sgd)
        train(model, optimizer, batches(2, rank, 2))
        if rank:
            assert waits.wait(20)
            train(model, optimizer, batches(2, rank, 2))
        own.save_persistables(tmp_path / "model")
        own.stop_worker()

    run_job(work, num_workers=2, strategy=strategy("sync"))
    line = next(line for line in said if "waits for workers" in line)
    assert "waits for workers [1] at fleet.save_persistables() at " in line
    assert "worker 1 is elsewhere, 2 steps done" in line
    assert (tmp_path / "model" / "ads").exists()


def test_a_save_of_worker_0_alone_at_the_end(tmp_path: Any) -> None:
    """D.8, issue 9, 2: Fleet's scripts save on the first worker only; one that has stopped is not waited for."""

    def work(own: Fleet, rank: int) -> float:
        model, optimizer = served(own, strategy("sync"), make_sgd)
        train(model, optimizer, batches(2, rank, 2))
        began = time.monotonic()
        if own.is_first_worker():
            own.save_persistables(tmp_path / "model")
        own.stop_worker()
        return time.monotonic() - began

    assert max(run_job(work, num_workers=2, strategy=strategy("sync"))) < 15
    assert (tmp_path / "model" / "ads").exists()


NO_RUN_SERVER = """
import torch
from fleet import fleet
fleet.init()
model = torch.nn.Embedding(10, 4, sparse=True)
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1))
model = fleet.distributed_model(model)
if fleet.is_server():
    fleet.init_server()
    ENDS
"""


@pytest.mark.parametrize(
    ("ends", "text", "code"), [("", "did not call fleet.run_server()", 1), ("1 / 0", "division", 1)]
)
def test_a_server_that_ends_before_it_serves(ends: str, text: str, code: int, tmp_path: Path) -> None:
    """Issue 9, 2: it fails, so that the launcher ends the job, and one sentence names the cause."""
    script = tmp_path / "train.py"
    script.write_text(NO_RUN_SERVER.replace("ENDS", ends))
    variables = {
        "PADDLE_PSERVERS_IP_PORT_LIST": "127.0.0.1:36001",
        "PADDLE_TRAINERS_NUM": "1",
        "TRAINING_ROLE": "PSERVER",
        "POD_IP": "127.0.0.1",
        "PADDLE_PORT": "36001",
    }
    done = run_python(script, env={**os.environ, **variables}, timeout_s=100)
    assert done.returncode == code
    assert text in done.stderr
    assert ("did not call" in done.stderr) == (not ends)


def test_a_worker_without_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 9, 2: the variable that is missing is named."""
    for name, value in {"TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": "0", "PADDLE_TRAINERS_NUM": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="PADDLE_PSERVERS_IP_PORT_LIST is not set"):
        Fleet().init(is_collective=False)


def test_a_server_that_nobody_can_reach() -> None:
    """Issue 9, 2: what it may be is said once, after the first wait, beside Fleet's lines."""
    said: list[str] = []
    with pytest.raises(PSError, match="did not come within"):
        wait_for_servers(["127.0.0.1:1"], SocketTransport(), notify=said.append, timeout_s=0.5, interval_s=0.1)
    (line,) = (line for line in said if line.startswith("nobody listens on 127.0.0.1:1: "))
    assert "fleet.run_server()" in line
    assert "FLAGS_stop_check_timeout" in line


def test_a_server_off_loopback_says_how_to_make_a_secret() -> None:
    """Issue 9, 3: the line can be pasted."""
    with pytest.raises(ConfigError, match="FLEET_JOB_SECRET") as raised:
        check_secret("10.0.0.1:36001", None)
    line = next(line.strip() for line in str(raised.value).splitlines() if "export" in line)
    done = subprocess.run(
        ["bash", "-c", f"{line.replace('$(python', f'$({sys.executable}')}; echo ${{#FLEET_JOB_SECRET}}"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "64"
