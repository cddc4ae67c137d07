"""The operator as a process against an API server over HTTP, its pods as processes, and kubectl where there is one."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import etcd
from tests.helpers.kube_api import ApiServer
from tests.helpers.kube_store import ApiError
from tests.helpers.kubernetes import DEPLOY, crd, job_document
from tests.helpers.pods import Loopback, Node
from tests.helpers.sources import ROOT

missing = [name for name in ("kopf", "kubernetes", "jsonschema") if find_spec(name) is None]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing), reason=f"needs {missing}: the extras k8s and dev")]
LIMIT_S = 40.0


class Kubelet:
    """Runs the pods of an API server and reports their states, one step at a time."""

    def __init__(self, api: ApiServer, node: Node) -> None:
        self.api, self.node = api, node

    def step(self) -> None:
        """Starts what is new, ends what is gone, reports what changed."""
        api, node = self.api, self.node
        documents = [api.get(kind, name) for kind in ("ConfigMap", "Service") for name in api.names(kind)]
        node.config_maps = {d["metadata"]["name"]: d["data"] for d in documents if d["kind"] == "ConfigMap"}
        secrets = [api.get("Secret", name) for name in api.names("Secret")]
        node.config_maps |= {f"secret/{d['metadata']['name']}": d["stringData"] for d in secrets}
        pods = {name: api.get("Pod", name) for name in api.names("Pod")}
        for name in set(node.containers) - set(pods):
            node.remove(name)
        for name in set(pods) - set(node.containers):
            node.add(pods[name])
        node.apply([d for d in documents if d["kind"] == "Service"])
        node.step()
        for name, container in node.containers.items():
            status: dict[str, Any] = {"phase": container.phase, "podIP": container.address}
            if container.phase == "Running":
                status["containerStatuses"] = [{"name": "paddle", "ready": container.process is not None}]
            with contextlib.suppress(ApiError):  # the operator has deleted it since
                api.store.patch(api.resource("Pod"), "default", name, {"status": status}, "status")

    def until(self, done: Callable[[], bool]) -> None:
        """Steps until ``done``; as long as pods come further, for a busy machine takes minutes to start three."""
        deadline, seen = time.monotonic() + LIMIT_S, ""
        while not done():
            jobs = [self.api.get("PaddleJob", name).get("status") for name in self.api.names("PaddleJob")]
            now = f"{jobs}\n{self.node.report()}"
            if now != seen:
                deadline, seen = time.monotonic() + LIMIT_S, now
            if time.monotonic() > deadline:
                raise AssertionError(f"nothing has changed for {LIMIT_S} s\n{now}")
            began = time.monotonic()
            self.step()
            time.sleep(max(0.05, time.monotonic() - began))  # half of the time is left to the pods


class Operator:
    """``python -m fleet.k8s operator`` as a process."""

    def __init__(self, folder: Path, api: ApiServer, *flags: str) -> None:
        config = folder / "kubeconfig"
        config.write_text(api.kubeconfig())
        self._log = folder / "operator.log"
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fleet.k8s", "operator", "--kubeconfig", str(config), *flags],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> Operator:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(5)

    @property
    def log(self) -> str:
        """What it wrote."""
        return self._log.read_text(errors="replace")


@pytest.fixture
def api() -> Iterator[ApiServer]:
    """An API server that knows PaddleJobs."""
    with ApiServer() as server:
        server.create(crd())
        yield server


@pytest.fixture
def kubelet(api: ApiServer, tmp_path: Path) -> Iterator[Kubelet]:
    """Runs the pods on loopback addresses."""
    with Node(tmp_path / "pods", Loopback(tmp_path)) as node:
        yield Kubelet(api, node)


def job(folder: Path, script: str, workers: int = 2, servers: int = 0, **spec: Any) -> dict[str, Any]:
    """Returns a job whose pods run ``script`` with the launcher."""
    path = folder / "train.py"
    path.write_text(script)
    document = job_document(workers, servers, **spec)
    for name in ("worker", "ps") if servers else ("worker",):
        container = document["spec"][name]["template"]["spec"]["containers"][0]
        container |= {"command": ["python"], "args": ["-m", "fleet.launch", str(path)]}
    return document


PRINT = """
import os, pathlib
rank = os.environ.get("PADDLE_TRAINER_ID")
pathlib.Path(__file__).with_name("rank." + rank).write_text(os.environ["PADDLE_TRAINER_ENDPOINTS"])
"""


@pytest.mark.parametrize("intranet", ["PodIP", "Service"])
def test_a_collective_job(api: ApiServer, kubelet: Kubelet, tmp_path: Path, intranet: str) -> None:
    """000-23, 000-28: from `kubectl create` to Completed; the pods' launchers form the job."""
    with Operator(tmp_path, api) as operator:
        api.create(job(tmp_path, PRINT, intranet=intranet, cleanPodPolicy="OnCompletion"))
        kubelet.until(lambda: phase(api) == "Completed" and api.names("Pod") == [])
        assert operator.process.poll() is None, operator.log
    assert operator.process.returncode == 0, operator.log
    assert (tmp_path / "rank.0").read_text() == (tmp_path / "rank.1").read_text()
    hosts = [end.rpartition(":")[0] for end in (tmp_path / "rank.0").read_text().split(",")]
    assert hosts == (["demo-worker-0", "demo-worker-1"] if intranet == "Service" else ["127.0.77.1", "127.0.77.2"])
    status = api.get("PaddleJob", "demo")["status"]
    assert (status["mode"], status["worker"]["succeeded"]) == ("Collective", 2)
    assert {"startTime", "completionTime"} <= status.keys()


def phase(api: ApiServer, name: str = "demo") -> str:
    """Returns the phase of a job."""
    return str(api.get("PaddleJob", name).get("status", {}).get("phase"))


def test_a_job_whose_pod_fails(api: ApiServer, kubelet: Kubelet, tmp_path: Path) -> None:
    """000-26: cleanPodPolicy Never keeps the pods, to look at."""
    with Operator(tmp_path, api, "--namespace", "default"):
        api.create(job(tmp_path, "import sys; sys.exit(5)", cleanPodPolicy="Never"))
        kubelet.until(lambda: phase(api) == "Failed")
    assert api.names("Pod") == ["demo-worker-0", "demo-worker-1"]


TRAIN_PS = """
import torch
from fleet import fleet
fleet.init()
table = fleet.SparseEmbedding(4, combiner="sum")
strategy = fleet.DistributedStrategy()
strategy.a_sync = False  # asynchronous, the loss of the last step depends on how busy the machine is
model = torch.nn.Sequential(table, torch.nn.Linear(4, 1))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy)
model = fleet.distributed_model(model)
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
else:
    fleet.init_worker()
    ids = torch.arange(8).reshape(4, 2) + 2**40 * fleet.worker_index()
    for step in range(30):
        loss = (model(ids) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print("LOSS", loss.item(), flush=True)
    assert loss.item() < 0.5
    fleet.stop_worker()
"""


def test_a_job_with_servers(api: ApiServer, kubelet: Kubelet, tmp_path: Path) -> None:
    """000-25: training on a server; the job is Completed because the server ends after its workers."""
    with Operator(tmp_path, api):
        document = job(tmp_path, TRAIN_PS, 2, 1, withGloo=1, cleanPodPolicy="Never")
        for name in ("ps", "worker"):  # as in the original's example: the script alone, without a launcher
            container = document["spec"][name]["template"]["spec"]["containers"][0]
            container["args"] = container["args"][2:]
            container["env"] = [{"name": "OMP_NUM_THREADS", "value": "1"}]  # or three processes fight for each core
        api.create(document)
        kubelet.until(lambda: phase(api) in ("Completed", "Failed"))
    assert phase(api) == "Completed", kubelet.node.report()
    status = api.get("PaddleJob", "demo")["status"]
    assert (status["mode"], status["ps"]["succeeded"], status["worker"]["succeeded"]) == ("PS", 1, 2)
    (secret,) = api.names("Secret")
    assert len(api.get("Secret", secret)["stringData"]["secret"]) == 64


# Ends when it was told its job has three workers.
GROWS = """
import os, time
while os.environ["PADDLE_TRAINERS_NUM"] != "3":
    time.sleep(0.1)
"""


@pytest.mark.skipif(bool(etcd.missing()), reason=etcd.missing() or "no reason")
def test_an_elastic_job_grows(api: ApiServer, kubelet: Kubelet, tmp_path: Path) -> None:
    """004-17: an edit of worker.replicas reaches the running launchers through etcd."""
    with (
        etcd.Etcd(tmp_path / "etcd") as server,
        Operator(tmp_path, api, "--etcd-server", server.endpoint),
    ):
        api.create(job(tmp_path, GROWS, elastic=1, cleanPodPolicy="Never"))
        logs = tmp_path / "pods" / "demo-worker-0" / "log"
        kubelet.until(lambda: phase(api) == "Running" and (logs / "workerlog.0").exists())
        change = {"spec": {"worker": {"replicas": 3}}}
        api.store.patch(api.resource("PaddleJob"), "default", "demo", change, "")
        kubelet.until(lambda: phase(api) == "Completed")
    assert api.names("Pod") == [f"demo-worker-{index}" for index in range(3)]
    assert api.get("PaddleJob", "demo")["status"]["elastic"] == "3"


# The job ends once it has shrunk; until then each of its launchers says which rank its pod got.
SHRINKS = """
import os, pathlib, time
rank, count = (os.environ["PADDLE_TRAINER" + name] for name in ("_ID", "S_NUM"))
pathlib.Path(os.environ["PADDLE_LOG_DIR"], f"{count}.{rank}").touch()
while os.environ["PADDLE_TRAINERS_NUM"] != "2":
    time.sleep(0.1)
"""


@pytest.mark.skipif(bool(etcd.missing()), reason=etcd.missing() or "no reason")
def test_an_elastic_job_shrinks_whoever_came_first(api: ApiServer, kubelet: Kubelet, tmp_path: Path) -> None:
    """004-11, 004-17: the launchers that leave are those of the pods that the operator deletes, the last ones."""
    document = job(tmp_path, SHRINKS, workers=3, elastic=1, cleanPodPolicy="Never")
    container = document["spec"]["worker"]["template"]["spec"]["containers"][0]
    late = f"sleep $((2 - PADDLE_TRAINER_ID)); exec {sys.executable} {' '.join(container['args'])}"
    container |= {"command": ["/bin/sh"], "args": ["-c", late]}
    with etcd.Etcd(tmp_path / "etcd") as server, Operator(tmp_path, api, "--etcd-server", server.endpoint):
        api.create(document)
        pods = tmp_path / "pods"
        kubelet.until(lambda: len(list(pods.glob("*/log/3.*"))) == 3)
        assert {f"{path.relative_to(pods)}" for path in pods.glob("*/log/3.*")} == {
            f"demo-worker-{index}/log/3.{index}" for index in range(3)
        }
        change = {"spec": {"worker": {"replicas": 2}}}
        api.store.patch(api.resource("PaddleJob"), "default", "demo", change, "")
        kubelet.until(lambda: phase(api) == "Completed")
    assert api.names("Pod") == ["demo-worker-0", "demo-worker-1"]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl on PATH")
def test_kubectl(kubelet: Kubelet, tmp_path: Path) -> None:
    """000-23, 000-29: install, submit, watch and uninstall, in the documented order, with the files of deploy/."""
    config = tmp_path / "config"

    def kubectl(*words: str) -> str:
        command = ["kubectl", "--kubeconfig", str(config), *words]
        environment = {**os.environ, "HOME": str(tmp_path)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    with ApiServer() as api:
        kubelet.api = api
        config.write_text(api.kubeconfig())
        kubectl("create", "--validate=false", "-f", str(DEPLOY / "v1" / "crd.yaml"))
        assert "paddlejobs.batch.paddlepaddle.org" in kubectl("get", "crd")
        with Operator(tmp_path, api):
            path = tmp_path / "job.yaml"
            path.write_text(json.dumps(job(tmp_path, PRINT, cleanPodPolicy="Never")))
            kubectl("create", "--validate=false", "-f", str(path))
            kubelet.until(lambda: phase(api) == "Completed")
            lines = [line.split() for line in kubectl("get", "pdj").splitlines()]
            assert lines[0] == ["NAME", "STATUS", "MODE", "AGE"]
            assert lines[1][:3] == ["demo", "Completed", "Collective"]
            assert "demo-worker-1" in kubectl("get", "pods")
            kubectl("delete", "pdj", "demo", "--wait=false")
            assert api.names("Pod") == []
        kubectl("delete", "crd", "paddlejobs.batch.paddlepaddle.org", "--wait=false")
        assert api.names("CustomResourceDefinition") == []
