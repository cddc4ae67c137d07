"""Waits of a job with servers: calls that only some make, servers that do not come, a secret that is missing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fleet.errors import ConfigError, PSError
from fleet.facade import Fleet
from fleet.ps.client.client import NothingLoaded
from fleet.ps.client.connecting import wait_for_servers
from fleet.ps.server import operations
from fleet.ps.wire.auth import check_secret
from fleet.ps.wire.transport import SocketTransport
from tests.fleet.ps_job.test_server_job import make_sgd, served, strategy
from tests.helpers.ready_python import run_python
from tests.helpers.served import batches, run_job, strategy_of, train
from tests.helpers.trainers import thread_trainers
from tests.launch.launcher import Launcher


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

    def is_of_save(line: str) -> bool:
        """Returns whether it is not of an earlier meeting, to which a busy machine may bring one worker late."""
        return "waits for workers" in line and "save_persistables" in line

    def work(own: Fleet, rank: int) -> None:
        own.session.job.say = lambda line: (said.append(line), is_of_save(line) and waits.set())
        model, optimizer = served(own, strategy("sync"), make_sgd)
        train(model, optimizer, batches(2, rank, 2))
        if rank:
            assert waits.wait(20)
            train(model, optimizer, batches(2, rank, 2))
        own.save_persistables(tmp_path / "model")
        own.stop_worker()

    run_job(work, num_workers=2, strategy=strategy("sync"))
    line = next(line for line in said if is_of_save(line))
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


DISAGREE = {
    "two folders to load": lambda own, rank, root: own.load_model(root / f"m{rank}"),
    "a load and a save": lambda own, rank, root: (own.save_persistables, own.load_model)[rank](root / f"m{rank}"),
    "two tables": lambda own, rank, root: own.load_one_table(rank, root / "m0"),
    "text and rows": lambda own, rank, root: own.save_persistables(root / "new", text=bool(rank)),
    "two modes": lambda own, rank, root: own.save_persistables(root / "new", mode=3 * rank),
    "a load and a shrink": lambda own, rank, root: own.shrink(1) if rank else own.load_model(root / "m0"),
}


def disagree(own: Fleet, rank: int, *, what: str, mode: str, root: Path) -> str:
    """Returns the text of the refusal, which has changed nothing, after a step, a load and a save."""
    model, optimizer = served(own, strategy_of(mode, 2), make_sgd)
    train(model, optimizer, batches(2, rank, 2))
    own.save_persistables(root / "m0")
    train(model, optimizer, batches(2, rank, 2))
    own.save_persistables(root / "m1")
    own.barrier_worker()  # takes what the other has pushed
    before = {name: value.clone() for name, value in model.state_dict().items()}
    there = sorted(path.name for path in root.rglob("*"))
    with pytest.raises(PSError) as caught:
        DISAGREE[what](own, rank, root)
    assert isinstance(caught.value, NothingLoaded) == str(caught.value).endswith("Nothing was loaded.")
    assert sorted(path.name for path in root.rglob("*")) == there
    after = model.state_dict()
    assert mode == "geo" or all(torch.equal(before[name], after[name]) for name in before)
    own.barrier_worker()  # the other trains on
    train(model, optimizer, batches(2, rank, 2))
    own.load_model(root / "m1")
    loaded = model.state_dict()
    assert mode == "geo" or all(torch.equal(before[name], loaded[name]) for name in before)
    own.save_persistables(root / "last")
    own.stop_worker()
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "mode"),
    [(what, "sync") for what in DISAGREE]
    + [(what, mode) for what in list(DISAGREE)[:2] for mode in ("async", "half_async", "geo", "hybrid")],
)
def test_workers_that_do_not_ask_for_the_same_are_all_told(
    what: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What this worker asked, what the others did, and that nothing was done; then the job trains, loads and saves."""
    trainers = thread_trainers(2)
    monkeypatch.setattr("fleet.ps_job.hybrid_job.meet_trainers", lambda job: trainers[job.global_rank])
    work = partial(disagree, what=what, mode=mode, root=tmp_path)
    texts = run_job(work, num_workers=2, num_servers=2, strategy=strategy_of(mode, 2))
    rule = r"this worker asks to (.+), but not all ask for the same: (worker 0 asks to .+; worker 1 asks to .+)\. Every"
    asked = [re.search(rule, text) for text in texts]
    assert all(asked)
    assert asked[0][2] == asked[1][2] == f"worker 0 asks to {asked[0][1]}; worker 1 asks to {asked[1][1]}"
    for rank, text in enumerate(texts):
        assert re.match(r"fleet\.\w+\(\) at .*test_server_meetings.py:\d+: ", text)
        end = {"load": "loaded", "save": "saved", "shrink": "deleted"}[asked[rank][1].split()[0]]
        assert text.endswith(f"Nothing was {end}.")
    if what == "two folders to load":
        assert f"worker 0 asks to load {tmp_path}/m0; worker 1 asks to load {tmp_path}/m1" in texts[0]


def out_of_step(own: Fleet, rank: int, *, mode: str, root: Path) -> None:
    """Saves to a folder for each epoch; worker 1 repeats the save of epoch 1, as after a kill in it."""
    model, optimizer = served(own, strategy_of(mode, 2), make_sgd)
    for epoch in range(4):
        train(model, optimizer, batches(1, rank, 2))
        own.save_persistables(root / f"m{epoch - (rank if epoch > 1 else 0)}")
    own.save_persistables(root / "link" if rank else root / "real")
    own.load_model(root / "link" if rank else root / "real")
    own.stop_worker()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_workers_that_are_a_save_apart_go_on(mode: str, tmp_path: Path) -> None:
    """One that was killed in a save repeats it, while the others have finished it; a link is the folder it leads to."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    work = partial(out_of_step, mode=mode, root=tmp_path)
    run_job(work, num_workers=2, num_servers=2, strategy=strategy_of(mode, 2))
    assert all((tmp_path / f"m{epoch}" / "ads" / "part-001.json").exists() for epoch in range(4))


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


UNEVEN = """
import os, sys
import torch
from fleet import fleet
fleet.init()
strategy = fleet.DistributedStrategy()
strategy.a_sync = False
module = torch.nn.Linear(3, 1)
optimizer = fleet.distributed_optimizer(torch.optim.SGD(module.parameters(), lr=0.1), strategy)
model = fleet.distributed_model(module)
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
    sys.exit(0)
how, rank = os.environ["HOW"], fleet.worker_index()
checkpoint = fleet.elastic.Checkpoint("checkpoint", model, optimizer)
if how == "save":
    checkpoint.resume()
fleet.init_worker()
if how == "joined":
    fleet.all_reduce(1.0)
for _ in range(2 if rank == int(os.environ["SHORT"]) else 3):
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
if how == "barrier":
    fleet.barrier_worker()
if how == "save":
    checkpoint.save(epoch=1)
else:
    fleet.metrics.acc(3, 4)
fleet.stop_worker()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "short"), [("save", 1), ("joined", 0), ("barrier", 1)])
def test_uneven_batches_before_a_call_of_all(how: str, short: int, tmp_path: Path) -> None:
    """Both waited for 900 s: the step for the other's step, the other for this one's call; the barrier is the way."""
    with Launcher(tmp_path, UNEVEN, "--server_num=1", "--worker_num=2", env={"HOW": how, "SHORT": f"{short}"}) as job:
        code = job.wait(60)
        steps, waits = job.log(f"workerlog.{1 - short}"), job.log(f"workerlog.{short}")
        assert (code == 0) == (how == "barrier"), steps + waits
    if how != "barrier":
        call = "checkpoint.save(epoch=1)" if how == "save" else "fleet.metrics.acc(3, 4)"
        assert re.search(r"RendezvousError: \[rank \d of 2\] train.py:\d+ `optimizer.step\(\)` waits at the", steps)
        assert re.search(rf"rank {short}: waits in .* at train.py:\d+ `{re.escape(call)}`", steps)
        assert "Call fleet.barrier_worker() after the last batch" in steps
        assert re.search(rf"RendezvousError: \[rank {short} of 2\] .*`{re.escape(call)}`.* cannot finish", waits)
