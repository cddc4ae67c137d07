"""The translations run: each container's command as a process, with its environment and its restart policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fleet.k8s.paddle_job import read_job
from fleet.k8s.render import render
from tests.helpers.kubernetes import job_document
from tests.helpers.pods import Loopback, Node, pods_of_jobset, pods_of_trainjob

# Every worker meets every other where torch's store would be, and listens at its own endpoint.
WORKER = """
import os, socket, sys, time
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
host, _, port = os.environ["PADDLE_CURRENT_ENDPOINT"].rpartition(":")
master = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if (host, int(port)) != master:
    own = socket.create_server((host, int(port)))
if rank == 0:
    with socket.create_server(master) as listener:
        listener.settimeout(30)
        peers = [listener.accept()[0] for _ in range(world - 1)]
        ranks = sorted(int(peer.recv(9)) for peer in peers)
        assert ranks == list(range(1, world)), ranks
        [peer.sendall(b"go") for peer in peers]
else:
    for attempt in range(300):
        try:
            peer = socket.create_connection(master, 30)
            break
        except OSError:
            time.sleep(0.1)
    peer.sendall(b"%d" % rank)
    assert peer.recv(2) == b"go"
print("RANK", rank, "OF", world, "NODES", os.environ["PADDLE_NNODES"])
"""
# Bare processes, no launcher: each finds its role, servers listen, workers connect to every server.
ROLES = """
import socket, time
from fleet.base.role_maker import PaddleCloudRoleMaker
role = PaddleCloudRoleMaker(is_collective=False)
print(role.to_string(), flush=True)
ends = role.get_pserver_endpoints()
if role.is_server():
    host, _, port = role.get_local_endpoint().rpartition(":")
    with socket.create_server((host, int(port))) as listener:
        listener.settimeout(30)
        peers = [listener.accept()[0] for _ in range(role.worker_num())]
        [peer.sendall(b"%d" % role.server_index()) for peer in peers]
else:
    for index, end in enumerate(ends):
        host, _, port = end.rpartition(":")
        for attempt in range(300):
            try:
                peer = socket.create_connection((host, int(port)), 30)
                break
            except OSError:
                time.sleep(0.1)
        assert int(peer.recv(1)) == index
print("DONE", role.is_server(), role.role_id(), flush=True)
"""


def job(folder: Path, script: str, *, launcher: bool, servers: int = 0, **spec: Any) -> dict[str, Any]:
    """Returns a job of two workers (and servers) that run ``script``, with the launcher or without."""
    path = folder / "train.py"
    path.write_text(script)
    command = ["python", "-m", "fleet.launch"] if launcher else ["python"]
    document = job_document(2, servers, **spec)
    for name in ("worker", "ps") if servers else ("worker",):
        container = document["spec"][name]["template"]["spec"]["containers"][0]
        container |= {"command": [command[0]], "args": [*command[1:], str(path)]}
    return document


def start(node: Node, document: dict[str, Any], target: str) -> None:
    """Translates the job and gives its pods to ``node``."""
    documents = list(render(read_job(document), target).documents)
    node.config_maps["secret/demo-key"] = {"secret": "ab" * 32}
    if target == "pods":
        node.apply(documents)
        return
    pods = pods_of_jobset(documents[-1]) if target == "jobset" else pods_of_trainjob(*documents)
    for pod, name in pods:
        node.add(pod, name)


SLOW = pytest.mark.slow


@pytest.mark.parametrize("target", [pytest.param("pods", marks=SLOW), "jobset", pytest.param("trainjob", marks=SLOW)])
def test_a_collective_job_runs(tmp_path: Path, target: str) -> None:
    """000-28: a bare `python -m fleet.launch train.py` in each pod forms the job."""
    with Node(tmp_path / "pods", Loopback(tmp_path)) as node:
        start(node, job(tmp_path, WORKER, launcher=True), target)
        assert set(node.run().values()) == {"Succeeded"}, node.report()
        logs = [(c.folder / "log" / "workerlog.0").read_text() for c in node.containers.values()]
    assert sorted(logs) == [f"RANK {rank} OF 2 NODES 2\n" for rank in range(2)]


@pytest.mark.parametrize("target", ["pods", pytest.param("jobset", marks=SLOW)])
def test_a_parameter_server_job_finds_its_roles(tmp_path: Path, target: str) -> None:
    """000-25, 001-02, 001-03: two servers and two workers, without a launcher, as the seed's pods run them."""
    with Node(tmp_path / "pods", Loopback(tmp_path)) as node:
        start(node, job(tmp_path, ROLES, launcher=False, servers=2, withGloo=1), target)
        assert set(node.run().values()) == {"Succeeded"}, node.report()
        done = sorted(c.output.strip().splitlines()[-1] for c in node.containers.values())
    assert done == ["DONE False 0", "DONE False 1", "DONE True 0", "DONE True 1"]


def test_a_container_starts_again_as_its_policy_says(tmp_path: Path) -> None:
    """The simulator itself: without restarts the tests above could not tell the policies apart."""
    once = "import pathlib, sys\np = pathlib.Path('mark')\nseen = p.exists()\np.touch()\nsys.exit(0 if seen else 3)"
    for policy, phase, codes in (("OnFailure", "Succeeded", [3, 0]), ("Never", "Failed", [3])):
        folder = tmp_path / policy
        folder.mkdir()
        document = job(folder, once, launcher=False)
        document["spec"]["worker"] |= {"replicas": 1}
        document["spec"]["worker"]["template"]["spec"]["restartPolicy"] = policy
        with Node(folder / "pods", Loopback(folder)) as node:
            start(node, document, "pods")
            assert node.run() == {"demo-worker-0": phase}
            assert node.containers["demo-worker-0"].exit_codes == codes


def test_the_name_of_a_pod_is_what_its_variables_say(tmp_path: Path) -> None:
    """$(PADDLE_TRAINER_ID) in POD_IP is filled in by the kubelet, from the index that Job gives the pod."""
    from tests.helpers.pods import container_variables

    document = job_document(2)
    (jobset,) = render(read_job(document), "jobset").documents
    for index, (pod, name) in enumerate(pods_of_jobset(json.loads(json.dumps(jobset)))):
        values = container_variables(pod, "10.0.0.1", {})
        assert values is not None
        assert (values["PADDLE_TRAINER_ID"], values["POD_IP"]) == (str(index), name)
        assert f"{name}:36000" in values["PADDLE_TRAINER_ENDPOINTS"].split(",")
