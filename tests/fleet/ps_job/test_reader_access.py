"""Readers of servers as users make them: the job's secret, and a real job whose server is killed under a reader."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from fleet.errors import ConfigError, PSError
from fleet.ps import Reader, Server, ServerConfig
from fleet.ps_job.reader_access import read_access
from tests.helpers.processes import die_with_parent

LIMIT_S = 120
TRAIN = """
import os, pathlib, sys, time
import torch
import fleet as package
from fleet import fleet

folder = pathlib.Path(sys.argv[1])
fleet.init()
start = package.ps.Initializer("constant", 0.0)
model = package.SparseEmbedding(2, combiner="sum", name="ads", initializer=start)
strategy = fleet.DistributedStrategy()
strategy.a_sync = True
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), 1.0), strategy)
model = fleet.distributed_model(model)
if fleet.is_server():
    name = "standby" if os.environ.get("FLEET_PS_STANDBY") else "server"
    (folder / (name + ".new")).write_text(f"{os.getpid()} {os.environ['POD_IP']}:{os.environ['PADDLE_PORT']}")
    os.replace(folder / (name + ".new"), folder / name)
    fleet.init_server()
    fleet.run_server()
else:
    fleet.init_worker()
    ids = torch.arange(100).view(-1, 1)
    while not (folder / "stop").exists():
        (-model(ids).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    fleet.stop_worker()
"""


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server(ServerConfig(secret=b"s" * 40, job="shop"), notify=lambda line: None)
    made.start()
    yield made
    made.stop()


def test_the_secret_of_the_environment(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    address = f"ps://{server.endpoint}"
    monkeypatch.setenv("FLEET_JOB_SECRET", "s" * 40)
    with Reader(address, job="shop") as reader:
        assert reader.tables == {}
        assert reader.position[0].watermark == 0
        assert reader.refresh() is False
        assert reader.follow() is reader
        with pytest.raises(ConfigError, match="no such table"):
            reader.lookup("ads", [1])
    with pytest.raises(ConfigError, match="is closed"):
        reader.lookup("ads", [1])
    with pytest.raises(ConfigError, match="a server of job 'shop'"):
        Reader(address, job="toys")
    with pytest.raises(ConfigError, match="wire is 'int4'; it is one of"):
        Reader(address, wire="int4")
    monkeypatch.setenv("FLEET_JOB_SECRET", "t" * 40)
    with pytest.raises(ConfigError, match="FLEET_JOB_SECRET"):
        Reader(address)


def test_the_secret_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As for workers: on one machine this user's, over the network the one that is given."""
    monkeypatch.delenv("FLEET_JOB_SECRET", raising=False)
    monkeypatch.setenv("FLEET_SECRET_FOLDER", str(tmp_path / "own"))
    made = read_access(["127.0.0.1:1"], None, "float32").secret
    assert made == (tmp_path / "own" / "job-secret").read_bytes().strip()
    with pytest.raises(ConfigError, match="10.0.0.7:1.* without a job secret"):
        read_access(["127.0.0.1:1", "10.0.0.7:1"], None, "float32")


def test_files_have_no_wire(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="form in which they were published"):
        Reader(tmp_path, wire="int8")


@contextmanager
def job(folder: Path) -> Iterator[dict[str, tuple[int, str]]]:
    """Yields process and endpoint of the server and of its standby, of a job that trains until ``stop`` is there."""
    (folder / "train.py").write_text(TRAIN)
    flags = ["--server_num=1", "--server_standby", "--worker_num=1", "--log_dir", "log"]
    own = {name: value for name, value in os.environ.items() if not name.startswith(("FLEET_", "PADDLE_", "FLAGS_"))}
    process = subprocess.Popen(
        [sys.executable, "-m", "fleet.launch", *flags, "train.py", str(folder)],
        cwd=folder,
        env={**own, "FLEET_JOB_SECRET": "ab" * 32, "OMP_NUM_THREADS": "1", "FLEET_PS_FOLDER": str(folder / "state")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=die_with_parent,
    )
    try:
        deadline = time.monotonic() + LIMIT_S
        while not all((folder / name).exists() for name in ("server", "standby")):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield {name: _place(folder / name) for name in ("server", "standby")}
        (folder / "stop").touch()
        said = process.communicate(timeout=LIMIT_S)[0]
        assert process.returncode == 0, said
    finally:
        (folder / "stop").touch()
        process.terminate()
        process.communicate(timeout=LIMIT_S)


def _place(path: Path) -> tuple[int, str]:
    pid, endpoint = path.read_text().split()
    return int(pid), endpoint


def _reader(endpoint: str) -> Reader:
    """Returns a reader once the server listens, which may take longer than a reader waits."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            return Reader(f"ps://{endpoint}")
        except PSError:
            if time.monotonic() > deadline:
                raise


@pytest.mark.slow
@pytest.mark.parametrize("listed", ["server", "standby"])
def test_a_server_is_killed_while_a_reader_looks_up(
    tmp_path: Path, listed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No lookup fails, and no value goes back."""
    monkeypatch.setenv("FLEET_JOB_SECRET", "ab" * 32)
    with job(tmp_path) as places:
        pid, _ = places["server"]
        with _reader(places[listed][1]) as reader:
            values: list[float] = []
            at_kill, after = 0.0, 0
            end = time.monotonic() + LIMIT_S
            while after < 300 and time.monotonic() < end:
                if "ads" not in reader.tables:
                    continue
                found_rows, found = reader.lookup("ads", np.arange(100), found=True)
                if not found.any():
                    continue
                values.append(float(found_rows[0, 0]))
                if not at_kill and len(values) > 200:
                    os.kill(pid, signal.SIGKILL)
                    at_kill = values[-1]
                elif at_kill and values[-1] > at_kill + 50:
                    after += 1
            position = reader.position[0]
        assert after == 300, (len(values), values[-5:], position)
        assert values == sorted(values)
        assert position.history == "epoch 3"
