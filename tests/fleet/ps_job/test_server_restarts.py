"""Jobs of real processes in which a process dies at the worst moment and is started again (D.1, D.7, D.8)."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

import fleet
from tests.fleet.ps_job.test_server_job import Reference, make_adagrad
from tests.fleet.ps_job.test_server_job_integration import SCRIPT, end, finish, start
from tests.helpers.served import _free_endpoints, batches, train
from tests.launch.launcher import Launcher

pytestmark = pytest.mark.slow
CAP_S = 110.0  # each wait ends here, on a machine that others use too; alone it takes a tenth of it

# Ends this process as kill -9 does, once the first piece of the initial rows is on its way to one of the servers.
DIES_WHILE_GIVING = """
import os, runpy, signal, sys
from fleet.ps.client.link import Link
from fleet.ps.wire.messages import Op
transmit = Link._transmit
def dying(self, request):
    transmit(self, request)
    if request.op is Op.ADD:
        os.kill(os.getpid(), signal.SIGKILL)
Link._transmit = dying
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_worker_0_killed_between_two_servers_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """D.1, 003-34: the second process gives the other server its rows; training equals that without the kill."""
    reference = Reference()
    expected = train(reference, make_adagrad(reference.parameters()), batches(6))
    endpoints = _free_endpoints(2)
    shared = {"PADDLE_PSERVERS_IP_PORT_LIST": ",".join(endpoints), "PADDLE_TRAINERS_NUM": "1"}
    role = {**shared, "TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": "0"}
    arguments = [SCRIPT, "sync", str(tmp_path / "out")]
    processes: list[subprocess.Popen[str]] = []
    try:
        for endpoint in endpoints:
            host, _, port = endpoint.partition(":")
            processes.append(
                start(arguments, {**shared, "TRAINING_ROLE": "PSERVER", "POD_IP": host, "PADDLE_PORT": port})
            )
        processes.append(start(["-c", DIES_WHILE_GIVING, *arguments], role))
        code, text = finish(processes[-1], CAP_S)
        assert code == -signal.SIGKILL, text
        processes.append(start(arguments, role))
        code, text = finish(processes[-1], CAP_S)
        assert code == 0, text
        assert [finish(process, CAP_S)[0] for process in processes[:2]] == [0, 0]
    finally:
        end(*processes)
    found = torch.load(tmp_path / "out.0.pt", weights_only=True)
    torch.testing.assert_close(torch.tensor(found["losses"]), torch.tensor(expected), atol=2e-6, rtol=0)
    torch.testing.assert_close(found["model"]["words.weight"], reference.words.weight.data, atol=2e-6, rtol=0)


# Every push subtracts 1 from one row. A worker whose file is there comes back after a failure, without a checkpoint.
TRAIN = """
import os, pathlib, sys, time
import torch
from fleet import fleet
fleet.init()
class Rows(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.ads = fleet.SparseEmbedding(1, initializer=fleet.ps.Initializer("constant", 0.0, 0.0))
    def forward(self, ids):
        return self.ads(ids)
model = Rows()
strategy = fleet.DistributedStrategy()
strategy.a_sync = True
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), strategy)
model = fleet.distributed_model(model)
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
    sys.exit(0)
def push(key):
    model(torch.tensor([key])).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
rank = fleet.worker_index()
seen = pathlib.Path(f"seen{rank}")
comes_back = seen.exists()
fleet.init_worker()
if not comes_back:
    push(rank)
    fleet.save_persistables("one")
    seen.touch()
    if os.environ.get("FAILS") == str(rank):
        os._exit(3)
    while os.environ.get("FAILS") == "all":
        time.sleep(0.1)
time.sleep(rank)  # worker 0 comes to the second save first
push(10 + rank)
fleet.save_persistables("two")
assert len(list(pathlib.Path("two").glob("*/part-*.json"))) == fleet.server_num()
fleet.stop_worker()
"""


def rows_of(folder: Path) -> list[float]:
    """The rows that the pushes of :data:`TRAIN` have made, and one that nobody has pushed."""
    rows = fleet.SparseEmbedding(1, initializer=fleet.ps.Initializer("constant", 0.0, 0.0))
    rows.load(folder, "ads")
    return rows.lookup_rows(torch.tensor([0, 1, 10, 11, 5])).flatten().tolist()


def test_a_worker_that_is_replaced_meets_the_others_at_the_next_save(tmp_path: Path) -> None:
    """D.8, --max_restart: it does not take a save that the others have made for the next one; level L2 throughout."""
    flags = ("--server_num=2", "--worker_num=2", "--max_restart=2")
    with Launcher(tmp_path, TRAIN, *flags, env={"FAILS": "1", "FLEET_PS_LEVEL": "2"}) as job:
        assert job.wait(CAP_S) == 0, job.stderr + job.log("workerlog.1")
        assert "worker 1 ended with code 3 and is started again" in job.stderr
    assert rows_of(tmp_path / "one") == [-1, -1, 0, 0, 0]
    assert rows_of(tmp_path / "two") == [-1, -1, -1, -1, 0]


def test_a_save_after_every_process_was_killed_and_started_again(tmp_path: Path) -> None:
    """D.8, 003-19: servers go on from FLEET_PS_FOLDER; the workers' second save waits for both, as the first did."""
    endpoints = _free_endpoints(2)
    shared = {
        "PADDLE_PSERVERS_IP_PORT_LIST": ",".join(endpoints),
        "PADDLE_TRAINERS_NUM": "2",
        "FLEET_PS_FOLDER": str(tmp_path / "state"),
        "FAILS": "all",
    }
    (tmp_path / "train.py").write_text(TRAIN)
    roles = [{"TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": f"{rank}"} for rank in range(2)]
    for endpoint in endpoints:
        host, _, port = endpoint.partition(":")
        roles.append({"TRAINING_ROLE": "PSERVER", "POD_IP": host, "PADDLE_PORT": port})
    # The script writes beside itself.
    command = ["-c", f"import os, runpy; os.chdir({str(tmp_path)!r}); runpy.run_path('train.py', run_name='__main__')"]

    def start_all() -> list[subprocess.Popen[str]]:
        return [start(command, {**shared, **role}) for role in roles]

    processes = start_all()
    try:
        deadline = time.monotonic() + CAP_S
        while not all((tmp_path / f"seen{rank}").exists() for rank in range(2)):
            assert time.monotonic() < deadline
            assert all(process.poll() is None for process in processes)
            time.sleep(0.05)
    finally:
        end(*processes)
    processes = start_all()
    try:
        for process in processes:
            code, text = finish(process, CAP_S)
            assert code == 0, text
    finally:
        end(*processes)
    assert rows_of(tmp_path / "one") == [-1, -1, 0, 0, 0]
    assert rows_of(tmp_path / "two") == [-1, -1, -1, -1, 0]


# In step 6 one worker is killed; in sync mode the other waits for it. Every gradient is 1, and so is its mean.
SAVES_TOGETHER = """
import os, pathlib, signal, sys
import torch
from fleet import fleet
fleet.init()
model = torch.nn.Sequential(torch.nn.Embedding(8, 2, sparse=True), torch.nn.Linear(2, 1))
torch.nn.init.zeros_(model[0].weight)
strategy = fleet.DistributedStrategy()
strategy.a_sync = False
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), strategy)
model = fleet.distributed_model(model)
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
    sys.exit(0)
rank = fleet.worker_index()
checkpoint = fleet.elastic.Checkpoint("checkpoint", model, optimizer)
checkpoint.resume()
fleet.init_worker()
for step in range(checkpoint.step, 12):
    model[0](torch.tensor([step % 8, (step + rank) % 8])).sum().mul(0.5).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 6 and rank == int(os.environ["DIES"]) and not pathlib.Path("died").exists():
        pathlib.Path("died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if step % 4 == 3:
        checkpoint.save(0)
fleet.barrier_worker()
if rank == 0:
    torch.save(model[0].weight.detach().clone(), "weight.pt")
fleet.stop_worker()
"""


@pytest.mark.parametrize("dies", [0, 1])
def test_a_worker_that_waits_for_a_restarted_one_ends_before_the_lease(tmp_path: Path, dies: int) -> None:
    """Nobody trains alone meanwhile: both go on from the checkpoint, and each step counts once."""
    flags = ("--server_num=1", "--worker_num=2", "--max_restart=3")
    began = time.monotonic()
    with Launcher(tmp_path, SAVES_TOGETHER, *flags, env={"DIES": str(dies)}) as job:
        assert job.wait(CAP_S) == 0, job.stderr + job.log(f"workerlog.{1 - dies}")
    assert time.monotonic() - began < 55  # the lease is 60 s
    expected = torch.zeros(8, 2)
    for step in range(12):
        for rank in range(2):
            for place in (step % 8, (step + rank) % 8):
                expected[place] -= 0.25
    torch.testing.assert_close(torch.load(tmp_path / "weight.pt", weights_only=True), expected)
