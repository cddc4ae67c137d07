"""The launcher and fleet.init in pods of the two existing operators, with exactly the variables these give.

Pods are processes in network namespaces of their own, so addresses and names are those of real machines.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import etcd
from tests.helpers.pods import Namespaces, Node, namespaces_work

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(namespaces_work()), reason=namespaces_work() or "no reason")]

# Two numbers meet on gloo; the sum shows that every worker took part.
TRAIN = """
import torch
from fleet import fleet
import torch.distributed as dist
fleet.init(is_collective=True)
value = torch.tensor([float(fleet.worker_index() + 1)])
dist.all_reduce(value)
print("SUM", value.item(), "RANK", fleet.worker_index(), "OF", fleet.worker_num(), flush=True)
"""
# paddle-operator 0.3.5: the port of the job is a random one; in Service mode its lists say 36000 all the same.
PORT = "41234"


def operator_pod(
    name: str, role: str, index: int, hosts: dict[str, list[str]], command: list[str], *, by_name: bool = False
) -> dict[str, Any]:
    """Returns a pod as paddle-operator makes it, its ConfigMap's data written out; ``by_name`` is intranet Service."""
    port = "36000" if by_name else PORT
    lists = {kind: ",".join(f"{host}:{port}" for host in listed) for kind, listed in hosts.items()}
    address = {"value": name} if by_name else {"valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    variables = {
        "PADDLE_TRAINER_ID": str(index),
        "TRAINING_ROLE": role,
        "PADDLE_TRAINING_ROLE": role,
        "PADDLE_PORT": PORT,
        "TRAINER_PORTS_NUM": "20",
        "PADDLE_TRAINER_ENDPOINTS": lists["TRAINER"],
        "PADDLE_TRAINERS": ",".join(hosts["TRAINER"]),
        "PADDLE_TRAINERS_NUM": str(len(hosts["TRAINER"])),
    }
    if "PSERVER" in hosts:
        variables |= {
            "PADDLE_PSERVERS_IP_PORT_LIST": lists["PSERVER"],
            "PADDLE_WITH_GLOO": "1",
            "PADDLE_GLOO_RENDEZVOUS": "3",
            "PADDLE_GLOO_HTTP_ENDPOINT": lists["PSERVER"].split(",")[0],
        }
    return pod(name, variables, command, {"name": "POD_IP", **address})


def kubeflow_pod(
    name: str, nodes: int, master: str, command: list[str], roles: dict[str, str] | None = None
) -> dict[str, Any]:
    """Returns a pod as Kubeflow's training operator makes it; the first one knows its own address only."""
    variables = {"PYTHONUNBUFFERED": "1", "PADDLE_JOB_ID": "job", "PADDLE_NNODES": str(nodes), **(roles or {})}
    if name != master:
        return pod(name, {**variables, "PADDLE_MASTER": f"{master}:36543"}, command)
    made = pod(
        name, variables, command, {"name": "POD_IP_DUMMY", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    )
    made["spec"]["containers"][0]["env"].append({"name": "PADDLE_MASTER", "value": "$(POD_IP_DUMMY):36543"})
    return made


def pod(name: str, variables: dict[str, str], command: list[str], *more: dict[str, Any]) -> dict[str, Any]:
    """Returns a pod that runs ``command`` once, with these variables."""
    env = [*more, *({"name": key, "value": value} for key, value in variables.items())]
    container = {"name": "paddle", "image": "x", "command": command, "env": env}
    return {"kind": "Pod", "metadata": {"name": name}, "spec": {"containers": [container], "restartPolicy": "Never"}}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A node whose pods have namespaces."""
    with Node(tmp_path / "pods", Namespaces(tmp_path)) as made:
        yield made


def addresses(node: Node, names: list[str], *, by_name: bool) -> list[str]:
    """Returns what the endpoint lists hold: the pods' addresses or names."""
    for name in names:
        node.network.name(name, node.network.add(name))
    return names if by_name else [node.network.add(name) for name in names]


@pytest.mark.parametrize("launcher", [True, False], ids=["launcher", "bare"])
@pytest.mark.parametrize("by_name", [False, True], ids=["PodIP", "Service"])
def test_collective_job_of_paddle_operator(node: Node, tmp_path: Path, by_name: bool, launcher: bool) -> None:
    """000-28: with `python -m fleet.launch train_fleet.py` and with the script alone."""
    script = tmp_path / "train_fleet.py"
    script.write_text(TRAIN)
    command = ["python", *(["-m", "fleet.launch"] if launcher else []), str(script)]
    names = ["job-worker-0", "job-worker-1"]
    hosts = {"TRAINER": addresses(node, names, by_name=by_name)}
    for index, name in enumerate(names):
        node.add(operator_pod(name, "TRAINER", index, hosts, command, by_name=by_name), name)
    assert set(node.run().values()) == {"Succeeded"}, node.report()
    sums = sorted(worker_output(node, name, launcher) for name in names)
    assert sums == [f"SUM 3.0 RANK {rank} OF 2" for rank in range(2)]


def test_collective_job_of_kubeflow(node: Node, tmp_path: Path) -> None:
    """E.5: PADDLE_MASTER, PADDLE_NNODES and PADDLE_JOB_ID are all; the master is a name for others, an address here."""
    script = tmp_path / "train_fleet.py"
    script.write_text(TRAIN)
    names = ["job-worker-0", "job-worker-1"]
    addresses(node, names, by_name=True)
    for name in names:
        node.add(kubeflow_pod(name, 2, names[0], ["python", "-m", "fleet.launch", str(script)]), name)
    assert set(node.run().values()) == {"Succeeded"}, node.report()
    ranks = sorted(worker_output(node, name, True) for name in names)
    assert ranks == [f"SUM 3.0 RANK {rank} OF 2" for rank in range(2)]


def worker_output(node: Node, name: str, launcher: bool) -> str:
    """Returns the line that the worker of a pod printed."""
    container = node.containers[name]
    text = (container.folder / "log" / "workerlog.0").read_text() if launcher else container.output
    return next(line for line in text.splitlines() if line.startswith("SUM"))


# Finds its role, listens or connects, as a server and a worker do; the facade of the servers is not asked.
ROLES = """
import socket, time
from fleet.base.role_maker import PaddleCloudRoleMaker
role = PaddleCloudRoleMaker(is_collective=False)
if role.is_server():
    host, _, port = role.get_local_endpoint().rpartition(":")
    with socket.create_server((host, int(port))) as listener:
        listener.settimeout(30)
        peers = [listener.accept()[0] for _ in range(role.worker_num())]
        [peer.sendall(b"%d" % role.server_index()) for peer in peers]
        [peer.recv(1) for peer in peers]
else:
    for index, end in enumerate(role.get_pserver_endpoints()):
        host, _, port = end.rpartition(":")
        for attempt in range(300):
            try:
                peer = socket.create_connection((host, int(port)), 30)
                break
            except OSError:
                time.sleep(0.1)
        assert int(peer.recv(1)) == index
print("DONE", "server" if role.is_server() else "worker", role.role_id(), role.worker_num(), flush=True)
"""


def roles_seen(node: Node) -> list[str]:
    """Returns what every process of the job said at its end."""
    logs = [path for c in node.containers.values() for path in [c.folder / "output", *c.folder.glob("log/*log.[0-9]")]]
    lines = [line for path in logs for line in path.read_text().splitlines() if line.startswith("DONE")]
    return sorted(set(lines))


@pytest.mark.parametrize("launcher", [True, False], ids=["launcher", "bare"])
@pytest.mark.parametrize("by_name", [False, True], ids=["PodIP", "Service"])
def test_parameter_server_job_of_paddle_operator(node: Node, tmp_path: Path, by_name: bool, launcher: bool) -> None:
    """001-02, 001-03 and E.3: in Service mode the servers' own port is wrong, and the list is right."""
    script = tmp_path / "train.py"
    script.write_text(ROLES)
    command = ["python", *(["-m", "fleet.launch"] if launcher else []), str(script)]
    names = {"PSERVER": ["job-ps-0", "job-ps-1"], "TRAINER": ["job-worker-0", "job-worker-1"]}
    hosts = {role: addresses(node, listed, by_name=by_name) for role, listed in names.items()}
    for role, listed in names.items():
        for index, name in enumerate(listed):
            node.add(operator_pod(name, role, index, hosts, command, by_name=by_name), name)
    assert set(node.run().values()) == {"Succeeded"}, node.report()
    assert roles_seen(node) == [f"DONE {kind} {index} 2" for kind in ("server", "worker") for index in range(2)]


def test_parameter_server_job_of_kubeflow(node: Node, tmp_path: Path) -> None:
    """E.5: the Master pods are the servers; counts of one for each pod, the rest is agreed at the master."""
    script = tmp_path / "train.py"
    script.write_text(ROLES)
    command = ["python", "-m", "fleet.launch", str(script)]
    names = ["job-master-0", "job-worker-0", "job-worker-1"]
    addresses(node, names, by_name=True)
    for name in names:
        roles = {"PADDLE_SERVER_NUM": "1"} if "master" in name else {"PADDLE_TRAINER_NUM": "1"}
        node.add(kubeflow_pod(name, 3, names[0], command, roles), name)
    assert set(node.run().values()) == {"Succeeded"}, node.report()
    assert roles_seen(node) == ["DONE server 0 2", "DONE worker 0 2", "DONE worker 1 2"]


# Fails once on the pod of rank 1, and then works: the launcher asks for a restart with exit code 101.
ELASTIC = """
import os, pathlib, sys, time
mark = pathlib.Path("../mark")
rank = os.environ["PADDLE_TRAINER_ID"]
if rank == "1" and not mark.exists():
    mark.touch()
    sys.exit(7)
while not mark.exists():
    time.sleep(0.05)
if os.environ["FLEET_GENERATION"] == "0":
    time.sleep(60)
print("DONE rank", rank, "of", os.environ["PADDLE_TRAINERS_NUM"], flush=True)
"""


@pytest.mark.skipif(bool(etcd.missing()), reason=etcd.missing() or "no reason")
def test_elastic_job_of_paddle_operator(tmp_path: Path) -> None:
    """004-17, 004-06: no endpoint list; etcd is found through the variables of its service; 101 starts a pod anew."""
    script = tmp_path / "train.py"
    script.write_text(ELASTIC)
    network = Namespaces(tmp_path)
    with (
        Node(tmp_path / "pods", network) as node,
        etcd.Etcd(tmp_path / "etcd", host=network.HUB, port=2379, inside=network.inside_hub),
    ):
        node.services = {
            "PADDLE_ELASTIC_ETCD_SERVICE_HOST": network.HUB,
            "PADDLE_ELASTIC_ETCD_SERVICE_PORT": "2379",
        }
        for index in range(2):
            name = f"job-worker-{index}"
            variables = {
                "PADDLE_TRAINER_ID": str(index),
                "TRAINING_ROLE": "TRAINER",
                "PADDLE_TRAINING_ROLE": "TRAINER",
                "PADDLE_ELASTIC_JOB_ID": "default-job",
                "PADDLE_ELASTIC_NP": "2",
                "PADDLE_ELASTIC_TIMEOUT": "60",
            }
            address = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
            made = pod(name, variables, ["python", "-m", "fleet.launch", str(script)], address)
            made["spec"]["restartPolicy"] = "OnFailure"
            node.add(made, name)
        assert set(node.run().values()) == {"Succeeded"}, node.report()
        codes = sorted(code for c in node.containers.values() for code in c.exit_codes)
        logs = [(c.folder / "log" / "workerlog.0").read_text() for c in node.containers.values()]
    assert codes == [0, 0, 101]
    lines = sorted(line for log in logs for line in log.splitlines() if line.startswith("DONE"))
    assert lines == ["DONE rank 0 of 2", "DONE rank 1 of 2"]


# A few steps on a table; the loss falls only if pulls and pushes reach the server.
SERVED = """
import torch
from fleet import fleet
fleet.init()
strategy = fleet.DistributedStrategy()
strategy.a_sync = True
model = torch.nn.Sequential(fleet.SparseEmbedding(4, combiner="sum"), torch.nn.Linear(4, 1))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy)
model = fleet.distributed_model(model)
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
    print("DONE server", flush=True)
else:
    fleet.init_worker()
    ids = torch.arange(8).reshape(4, 2) + 2**40 * fleet.worker_index()
    for step in range(30):
        loss = (model(ids) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.5
    fleet.stop_worker()
    print("DONE worker", fleet.worker_index(), flush=True)
"""
KEY = {"name": "FLEET_JOB_SECRET", "value": "ab" * 32}


@pytest.mark.parametrize("operator", ["paddle-operator", "kubeflow"])
def test_training_on_servers(node: Node, tmp_path: Path, operator: str) -> None:
    """001-02, 001-03, 000-25: the pods' template adds the job's key, which no operator of others knows."""
    script = tmp_path / "train.py"
    script.write_text(SERVED)
    if operator == "kubeflow":
        names = {"PSERVER": ["job-master-0"], "TRAINER": ["job-worker-0", "job-worker-1"]}
    else:
        names = {"PSERVER": ["job-ps-0"], "TRAINER": ["job-worker-0", "job-worker-1"]}
    hosts = {role: addresses(node, listed, by_name=False) for role, listed in names.items()}
    for role, listed in names.items():
        for index, name in enumerate(listed):
            if operator == "kubeflow":
                count = {"PADDLE_SERVER_NUM" if role == "PSERVER" else "PADDLE_TRAINER_NUM": "1"}
                made = kubeflow_pod(name, 3, "job-master-0", ["python", "-m", "fleet.launch", str(script)], count)
            else:
                made = operator_pod(name, role, index, hosts, ["python", str(script)])
            made["spec"]["containers"][0]["env"].insert(0, KEY)
            node.add(made, name)
    assert set(node.run().values()) == {"Succeeded"}, node.report()
    assert roles_seen(node) == ["DONE server", "DONE worker 0", "DONE worker 1"]
