"""Jobs on a real Ray cluster: two nodes on this machine."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from ray.exceptions import ActorDiedError, ActorUnavailableError

from fleet.errors import ConfigError, LaunchError, WorkerFailedError
from fleet.integrations._ray_job import RayJob
from fleet.integrations._ray_request import read_request
from fleet.integrations.ray import launch
from tests.helpers.sources import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Yields the address of a cluster of two nodes with a processor and, as far as Ray knows, two GPUs each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # empty, it leaves a node no GPUs
        nodes = Cluster()
        for _ in range(2):
            nodes.add_node(num_cpus=1, num_gpus=2, object_store_memory=80 << 20, include_dashboard=False)
        try:
            yield nodes.address
        finally:
            nodes.shutdown()


@pytest.fixture
def connected(cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Connects this process, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONBREAKPOINT", "")  # Ray sets it
    ray.init(address=cluster, log_to_driver=False, logging_level="ERROR")
    try:
        yield
    finally:
        ray.shutdown()


TRAIN = """
import json, os, sys
import torch
from fleet import fleet

fleet.init(is_collective=True)
torch.manual_seed(0)
model = fleet.distributed_model(torch.nn.Linear(4, 1))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
x = torch.arange(32.0).reshape(8, 4) / 32
for _ in range(3):
    model(x[fleet.worker_index() :: fleet.worker_num()]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
if fleet.is_first_worker():
    print("worker 0 says \\u0436")
    with open("found.json", "w") as file:
        seen = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MINE")}
        json.dump([fleet.worker_num(), seen, sys.argv[1:], model.weight.tolist()], file)
"""
FAILING = """
import os, time

if os.environ["PADDLE_TRAINER_ID"] == "1":
    raise OSError("no more disk")
time.sleep(60)
"""
ARGUMENTS = ["two words", "it's", '"quoted"', "$HOME `id` \\", "new\nline", "--nodes=3", "\u0436", ""]
ENDLESS = """
import os, sys, time
from pathlib import Path

if os.fork() == 0:
    os.setsid()  # a process of the script that belongs to no group of the job any more
Path(f"pid.{os.getpid()}").touch()
while True:
    time.sleep(0.1)
"""


def left(folder: Path, limit_s: float = 15.0) -> list[str]:
    """Returns the processes of ENDLESS that still run after a while."""
    deadline = time.monotonic() + limit_s
    while True:
        running = [path.suffix[1:] for path in folder.glob("pid.*") if Path(f"/proc/{path.suffix[1:]}").exists()]
        running = [pid for pid in running if "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]]
        if not running or time.monotonic() > deadline:
            return running
        time.sleep(0.1)


def wait_for(folder: Path, count: int, process: subprocess.Popen[str] | None = None) -> None:
    """Returns when ``count`` processes of ENDLESS run."""
    deadline = time.monotonic() + 60
    while len(list(folder.glob("pid.*"))) < count:
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None, process.communicate()[0]
        time.sleep(0.1)


def is_free() -> bool:
    """Returns whether every processor of the cluster is free again, after a while."""
    deadline = time.monotonic() + 20
    while ray.available_resources().get("CPU", 0) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    return bool(ray.available_resources()["CPU"] == 2)


def trained_alone() -> list[float]:
    """Returns the weights that TRAIN gives in plain torch on one process."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.arange(32.0).reshape(8, 4) / 32).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.weight[0].tolist())


def test_two_nodes_train_as_one_process(connected: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my train.py").write_text(TRAIN)
    launch(
        "my train.py",
        args=ARGUMENTS,
        nodes=2,
        nproc_per_node=1,
        resources_per_node={"CPU": 1, "GPU": 0},
        placement_strategy="STRICT_SPREAD",
        env={"MINE": "a b"},
    )
    assert "worker 0 says \u0436" in capsys.readouterr().out
    workers, seen, arguments, weights = json.loads((tmp_path / "found.json").read_text())
    assert (workers, arguments) == (2, ARGUMENTS)
    assert seen == {"CUDA_VISIBLE_DEVICES": "-1", "OMP_NUM_THREADS": "1", "MINE": "a b"}
    (logs,) = (tmp_path / "log").glob("ray-*")
    assert sorted(path.name for path in logs.iterdir()) == ["node-0", "node-1"]
    assert weights[0] == pytest.approx(trained_alone(), rel=1e-6)
    assert is_free()


def test_the_report_of_the_first_failure_is_raised(connected: None, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FAILING)
    rule = "(?s)Its last lines.*Worker 1 of 2.*first to fail.*no more disk"
    with pytest.raises(WorkerFailedError, match=rule) as found:
        launch("train.py", nodes=2, nproc_per_node=1)
    assert (found.value.rank, found.value.exit_code) == (1, 1)
    assert Path(found.value.log_path).read_text().endswith("OSError: no more disk\n")
    assert is_free()


def test_an_actor_that_is_killed_ends_the_job(connected: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(ENDLESS)
    follow = RayJob._follow

    def kill_and_follow(job: Any) -> None:
        wait_for(tmp_path, 4)
        ray.kill(job._actors[1])
        follow(job)

    monkeypatch.setattr(RayJob, "_follow", kill_and_follow)
    with pytest.raises(LaunchError, match="(?s)Node 1 .*. of the job is lost.*Ray says.*Start the job again"):
        launch("train.py", nodes=2, nproc_per_node=1)
    assert left(tmp_path) == []
    assert is_free()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_driver_that_ends_leaves_nothing(number: int, connected: None, cluster: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ENDLESS)
    command = ["launch-on", "ray", "--nodes=2", "--nproc_per_node=1", f"--address={cluster}", "train.py"]
    driver = subprocess.Popen(
        [sys.executable, "-m", "fleet", *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    wait_for(tmp_path, 4, driver)
    driver.send_signal(number)
    said = driver.communicate(timeout=60)[0]
    assert driver.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL), said
    assert left(tmp_path) == []
    assert is_free()


def test_two_jobs_at_once_have_gpus_of_their_own(connected: None, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, sys\nopen(sys.argv[1], 'w').write(os.environ['CUDA_VISIBLE_DEVICES'])\n"
    )
    with ThreadPoolExecutor() as pool:
        jobs = [pool.submit(launch, "train.py", args=[name], resources_per_node={"GPU": 1}) for name in ("a", "b")]
        assert [job.result(timeout=60) for job in jobs] == [None, None]
    # They stand on one node with different GPUs, or on two nodes.
    assert {(tmp_path / name).read_text() for name in ("a", "b")} <= {"0", "1"}
    assert is_free()


def test_a_driver_in_a_task_with_a_copied_folder(cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "two words"
    folder.mkdir()
    (folder / "train.py").write_text("import os, sys\nopen(sys.argv[1], 'w').write(os.getcwd())\nsys.exit(4)\n")
    before = set(Path(tempfile.gettempdir()).glob("fleet-ray-*"))
    monkeypatch.setenv("PYTHONBREAKPOINT", "")
    ray.init(address=cluster, log_to_driver=False, logging_level="ERROR", runtime_env={"working_dir": str(folder)})

    def drive(found: str) -> None:
        from fleet.integrations.ray import launch

        launch("train.py", args=[found], resources_per_node={"GPU": 1})

    try:
        with pytest.raises(WorkerFailedError, match="ended with exit code 4"):
            ray.get(ray.remote(num_cpus=0)(drive).remote(str(tmp_path / "found")), timeout=60)
    finally:
        ray.shutdown()
    ran_in = (tmp_path / "found").read_text()
    assert "working_dir_files" in ran_in
    (logs,) = set(Path(tempfile.gettempdir()).glob("fleet-ray-*")) - before
    assert (logs / "workerlog.0").exists()
    shutil.rmtree(logs)


def test_what_the_cluster_lacks_is_named(connected: None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rule = r"asks for 3 x \(CPU 1\), STRICT_SPREAD; the cluster has CPU 2 \(free 2\) on 2 node.*within timeout_s=4"
    with pytest.raises(LaunchError, match=rule):
        launch("t.py", nodes=3, placement_strategy="STRICT_SPREAD", timeout_s=4)
    assert "Waiting for 3 s of 4 s" in caplog.text
    assert is_free()


def test_the_example_runs_a_script(connected: None, cluster: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os, sys\nprint('rank', os.environ['PADDLE_TRAINER_ID'], sys.argv[1:])\n")
    example = ROOT / "examples" / "frameworks" / "run_on_ray.py"
    command = [sys.executable, str(example), f"--address={cluster}", "--script=train.py", "--", "--epochs", "two words"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 0 ['--epochs', 'two words']" in done.stdout
    (log,) = tmp_path.glob("log/ray-*/node-1/workerlog.0")
    assert log.read_text().startswith("rank 1 ")


def test_a_script_that_the_nodes_lack(connected: None, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="(?s)exit code 2.*The script 'absent.py' does not exist") as found:
        launch("absent.py", flags=["--max_restart=1"])
    assert found.value.exit_code == 2


def test_a_connection_that_is_cut_for_a_moment_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[Exception] = [ActorUnavailableError("cut", None), ActorDiedError()]

    def fail(call: object) -> None:
        raise errors.pop(0)

    monkeypatch.setattr(ray, "get", fail)
    request = read_request(
        script="train.py", args=[], nodes=1, nproc_per_node=None, resources_per_node=None, placement_strategy="PACK",
        flags=[], env=None, working_dir=None, address=None, timeout_s=1)  # fmt: skip
    job = RayJob(request, "", "00")
    assert job._heard(0, None) == ("", None)
    with pytest.raises(LaunchError, match="Node 0 of the job could not start.*actor died"):
        job._heard(0, None)


def test_settings_of_a_connection_that_stands_already(connected: None) -> None:
    with pytest.raises(ConfigError, match="address='x:1': this program is connected.*Omit it"):
        launch("train.py", address="x:1")
    with pytest.raises(ConfigError, match=r"working_dir='.': .*ray\.init\(runtime_env"):
        launch("train.py", working_dir=".")
