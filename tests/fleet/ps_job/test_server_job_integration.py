"""Parameter-server jobs of real processes: the launcher, hand-set variables, failures (F.2, F.3, F.4)."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fleet.ps_job.test_server_job import Reference, make_adagrad
from tests.helpers.served import _free_endpoints, batches, train

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = str(ROOT / "tests" / "helpers" / "ps_training.py")
LIMIT_S = 55
# Proxies must play no part in the traffic (001-08).
BASE = {
    **{name: value for name, value in os.environ.items() if not name.startswith(("PADDLE_", "FLEET_", "FLAGS_"))},
    "PYTHONPATH": str(ROOT),
    "http_proxy": "http://127.0.0.1:9",
    "https_proxy": "http://127.0.0.1:9",
    "OMP_NUM_THREADS": "1",
}
pytestmark = pytest.mark.slow


def start(arguments: list[str], extra: dict[str, str] | None = None, log: Path | None = None) -> subprocess.Popen[str]:
    with contextlib.ExitStack() as stack:  # the process has its own copy of the file
        return subprocess.Popen(
            [sys.executable, *arguments],
            env={**BASE, **(extra or {})},
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE if log is None else stack.enter_context(log.open("w")),
            stderr=subprocess.STDOUT,
        )


def end(*processes: subprocess.Popen[str]) -> None:
    """Leaves none of them behind."""
    for process in processes:
        process.kill()
        process.communicate()


def finish(process: subprocess.Popen[str], limit_s: float = LIMIT_S) -> tuple[int, str]:
    try:
        text, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.terminate()
        text, _ = process.communicate(timeout=15)
        raise AssertionError(f"not done after {limit_s} s: {(text or '')[-2000:]}") from None
    return process.returncode, text or ""


def launched(tmp_path: Path, name: str, module: str, *arguments: str) -> list[dict[str, Any]]:
    out = tmp_path / name
    flags = ["--server_num=2", "--worker_num=2", f"--log_dir={tmp_path / 'log' / name}"]
    code, text = finish(start(["-m", module, *flags, SCRIPT, "sync", str(out), *arguments]))
    assert code == 0, text
    return [torch.load(f"{out}.{rank}.pt", weights_only=True) for rank in range(2)]


def test_two_servers_and_two_workers_train_as_one_process_twice_with_the_same_bits(tmp_path: Path) -> None:
    """001-01, 001-07, 002-18, 002-23, 003-08, 003-17, 003-34: fleet.launch and fleet.launch_ps."""
    reference = Reference()
    expected = train(reference, make_adagrad(reference.parameters()), batches(6))
    first = launched(tmp_path, "first", "fleet.launch")
    again = launched(tmp_path, "again", "fleet.launch_ps")
    for one, other in zip(first, again, strict=True):
        assert one["losses"] == other["losses"]
        assert one["total"] == 1.0
        assert all(torch.equal(one["model"][key], other["model"][key]) for key in one["model"])
        torch.testing.assert_close(one["model"]["out.weight"], reference.out.weight.data, atol=1e-6, rtol=0)
        torch.testing.assert_close(one["model"]["words.weight"], reference.words.weight.data, atol=1e-6, rtol=0)
    mean = [(a + b) / 2 for a, b in zip(first[0]["losses"], first[1]["losses"], strict=True)]
    torch.testing.assert_close(torch.tensor(mean), torch.tensor(expected), atol=1e-6, rtol=0)
    saved = tmp_path / "first.tables"
    assert sorted(path.name for path in (saved / "ads").glob("part-*.json")) == ["part-000.json", "part-001.json"]
    log = (tmp_path / "log" / "first" / "workerlog.1").read_text()
    assert "Communicator start" in log
    assert "init rpc client with trainer_id 1" in log
    assert "is listening on 127.0.0.1:" in (tmp_path / "log" / "first" / "serverlog.1").read_text()


SEED = """
import torch
from fleet.base import role_maker
from fleet import StrategyFactory, fleet
role = role_maker.PaddleCloudRoleMaker()
fleet.init(role)
model = torch.nn.Linear(8, 1); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
strategy = StrategyFactory.create_sync_strategy()
optimizer = fleet.distributed_optimizer(optimizer, strategy)
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
if fleet.is_worker():
    fleet.init_worker()
    for step in range(3):
        data = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step + fleet.worker_index()))
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    print("weights", model.weight.tolist(), flush=True)
    fleet.stop_worker()
"""


def test_the_ten_lines_without_distributed_model(tmp_path: Path) -> None:
    """001-01: both roles end well, and the workers, which drew other weights, hold the same ones."""
    script = tmp_path / "train.py"
    script.write_text(SEED)
    flags = ["--server_num=1", "--worker_num=2", f"--log_dir={tmp_path / 'log'}"]
    code, text = finish(start(["-m", "fleet.launch", *flags, str(script)]))
    assert code == 0, text
    logs = [(tmp_path / "log" / f"workerlog.{rank}").read_text() for rank in range(2)]
    weights = [re.search(r"weights .*", log) for log in logs]
    assert weights[0] is not None
    assert weights[1] is not None
    assert weights[0][0] == weights[1][0]
    assert "Warning" not in "".join(logs)


def test_a_worker_that_leaves_its_servers_waiting_is_said(tmp_path: Path) -> None:
    """The launcher says it while the others train; one that has called stop_worker() may leave early."""
    for leave, is_said in (("raise SystemExit", True), ("break", False)):
        script = tmp_path / "train.py"
        text = SEED.replace("create_sync_strategy", "create_async_strategy").replace("range(3)", "range(30)")
        early = f"        if fleet.worker_index() == 1 and step == 1:\n            {leave}\n"
        script.write_text(text.replace("    print(", f"{early}        __import__('time').sleep(0.1)\n    print("))
        flags = ["--server_num=1", "--worker_num=2", f"--log_dir={tmp_path / 'log'}"]
        code, text = finish(start(["-m", "fleet.launch", *flags, str(script)]))
        assert code == 0, text
        assert ("worker 1 ended without fleet.stop_worker(), with exit code 0, while worker 0 of" in text) == is_said


def test_processes_started_by_hand_in_any_order(tmp_path: Path) -> None:
    """001-02 to 001-06, 001-08: workers first, without POD_IP and PADDLE_PORT; the absent servers are listed."""
    endpoints = _free_endpoints(2)
    shared = {"PADDLE_PSERVERS_IP_PORT_LIST": ",".join(endpoints), "PADDLE_TRAINERS_NUM": "2"}
    out, logs = tmp_path / "hand", [tmp_path / f"worker{rank}.log" for rank in range(2)]
    arguments = [SCRIPT, "async", str(out)]
    workers = [
        start(arguments, {**shared, "TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": f"{rank}"}, logs[rank])
        for rank in range(2)
    ]
    servers = []
    try:
        deadline = time.monotonic() + 30
        while f"not ready endpoints:{endpoints}" not in logs[0].read_text():
            assert time.monotonic() < deadline, logs[0].read_text()
            time.sleep(0.1)
        assert "server not ready, wait 3 sec to retry..." in logs[0].read_text()
        for endpoint in endpoints:
            host, _, port = endpoint.partition(":")
            role = {"TRAINING_ROLE": "PSERVER", "POD_IP": host, "PADDLE_PORT": port}
            servers.append(start(arguments, {**shared, **role}))
        assert [finish(process)[0] for process in workers] == [0, 0], logs[0].read_text()
        for endpoint, server in zip(endpoints, servers, strict=True):
            code, text = finish(server)
            assert (code, f"is listening on {endpoint}" in text) == (0, True), text
        assert "Communicator start" in logs[1].read_text()
    finally:
        end(*workers, *servers)


def test_a_failed_worker_ends_the_job_with_its_code(tmp_path: Path) -> None:
    """Decision 10: the launcher exits with the code of the process that failed."""
    flags = ["--server_num=1", "--worker_num=2", f"--log_dir={tmp_path / 'log'}"]
    arguments = ["-m", "fleet.launch", *flags, SCRIPT, "async", str(tmp_path / "out"), "--fail=worker"]
    code, text = finish(start(arguments))
    assert code == 7, text


def test_a_killed_server_ends_the_job(tmp_path: Path) -> None:
    """001-12: a server that dies takes the job down, with its signal as the code."""
    flags = ["--server_num=1", "--worker_num=1", f"--log_dir={tmp_path / 'log'}"]
    job = start(["-m", "fleet.launch", *flags, SCRIPT, "async", str(tmp_path / "out"), "--fail=never"])
    log = tmp_path / "log" / "serverlog.0"
    worker_log = tmp_path / "log" / "workerlog.0"
    deadline = time.monotonic() + 40
    while not (worker_log.exists() and "Communicator start" in worker_log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert "is listening" in log.read_text()
    found = re.search(r"^(\d+)$", _server_pid(job.pid), re.M)
    assert found
    os.kill(int(found[1]), signal.SIGKILL)
    code, text = finish(job)
    assert code == 128 + signal.SIGKILL, text


def test_a_killed_server_comes_back_with_every_push_applied_once(tmp_path: Path) -> None:
    """D.7, 003-37: with FLEET_PS_FOLDER a server that is started again goes on, and so does the worker."""
    reference = Reference()
    expected = train(reference, make_adagrad(reference.parameters()), batches(6))
    endpoint = _free_endpoints(1)[0]
    shared = {"PADDLE_PSERVERS_IP_PORT_LIST": endpoint, "PADDLE_TRAINERS_NUM": "1"}
    host, _, port = endpoint.partition(":")
    role = {"TRAINING_ROLE": "PSERVER", "POD_IP": host, "PADDLE_PORT": port, "FLEET_PS_FOLDER": str(tmp_path / "state")}
    arguments, log = [SCRIPT, "sync", str(tmp_path / "out"), "--fail=slow"], tmp_path / "worker.log"
    server = start(arguments, {**shared, **role})
    worker = start(arguments, {**shared, "TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": "0"}, log)
    try:
        deadline = time.monotonic() + 30
        while "Communicator start" not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        time.sleep(1.0)
        server.kill()
        server.communicate()
        server = start(arguments, {**shared, **role})
        assert finish(worker)[0] == 0, log.read_text()
        code, text = finish(server)
        assert code == 0, text
    finally:
        end(worker, server)
    found = torch.load(tmp_path / "out.0.pt", weights_only=True)
    torch.testing.assert_close(torch.tensor(found["losses"]), torch.tensor(expected), atol=2e-6, rtol=0)
    assert not list((tmp_path / "state").glob("*/journal"))  # the job is over


def _server_pid(launcher: int) -> str:
    """Returns the process id of the server that ``launcher`` started."""
    for folder in Path("/proc").iterdir():
        try:
            is_child = folder.name.isdigit() and f"PPid:\t{launcher}\n" in (folder / "status").read_text()
            if is_child and b"TRAINING_ROLE=PSERVER" in (folder / "environ").read_bytes():
                return folder.name
        except OSError:
            continue
    raise AssertionError("no server")
