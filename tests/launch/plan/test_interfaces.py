"""The interface at which the others reach a node, also where the node's own name means 127.0.1.1 (Debian, Ubuntu)."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from fleet.common.addresses import means_itself
from fleet.env import Environment
from fleet.errors import ConfigError, LaunchError
from fleet.launch.job import _with_interface
from fleet.launch.plan import interfaces as _interfaces
from fleet.launch.plan.interfaces import interface_to, interfaces, own_address, reachable
from fleet.launch.plan.peers import Peer
from tests.helpers import etcd as etcd_helper
from tests.helpers import namespaces
from tests.helpers.etcd import Etcd
from tests.helpers.launching import plan, read
from tests.helpers.namespaces import Network
from tests.launch.launcher import ROOT, Launcher

NAMES = {"node1": ["127.0.1.1"], "node2": ["10.0.0.2"]}


@pytest.fixture
def debian(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine is node1 at 10.0.0.1 on eth0, with docker0 before it, and its name means 127.0.1.1."""
    known = {"127.0.0.1": "lo", "172.17.0.1": "docker0", "10.0.0.1": "eth0"}
    monkeypatch.setattr(_interfaces, "interfaces", lambda: known)
    monkeypatch.setattr(_interfaces, "_addresses", lambda host: NAMES.get(host, [host] if host else []))
    ways = {"node1": "127.0.0.1", "node2": "10.0.0.1", "10.0.0.2": "10.0.0.1", "192.0.2.1": "10.0.0.1"}
    monkeypatch.setattr(_interfaces, "address_towards", lambda host, port=9: ways.get(host))


@pytest.mark.parametrize(
    ("own", "others", "interface"),
    [
        ("10.0.0.1", ["10.0.0.2"], "eth0"),
        ("172.17.0.1", ["10.0.0.2"], "docker0"),  # the user's --host
        ("node1", ["node2"], "eth0"),
        ("", ["node1"], "eth0"),  # rank 0 under torchrun
        ("", ["node2"], "eth0"),
        ("10.0.0.1", [], "eth0"),
        ("127.0.0.2", ["127.0.0.3"], "lo"),
        ("", ["localhost"], "lo"),
    ],
)
@pytest.mark.usefixtures("debian")
def test_the_interface_towards_the_others(own: str, others: list[str], interface: str) -> None:
    assert interface_to(own, others) == interface


@pytest.mark.usefixtures("debian")
def test_the_own_name_is_replaced_where_it_leads_to_loopback() -> None:
    assert reachable("node1") == "10.0.0.1"
    assert [reachable(host) for host in ("node2", "127.0.0.1", "localhost")] == ["node2", "127.0.0.1", "localhost"]


def test_without_a_default_route_the_first_other_address_is_the_own_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_interfaces, "address_towards", lambda host, port=9: None)
    monkeypatch.setattr(_interfaces, "interfaces", lambda: {"127.0.0.1": "lo", "fe80::1": "e", "10.0.0.7": "e"})
    assert own_address() == "10.0.0.7"


def test_this_machine() -> None:
    assert interfaces().get("127.0.0.1") == "lo"
    assert own_address() in interfaces()
    assert [means_itself(host) for host in ("127.0.1.1", "localhost", "::1", "0.0.0.0", "10.0.0.1", "node1")] == [
        True,
        True,
        True,
        True,
        False,
        False,
    ]


@pytest.mark.usefixtures("debian")
def test_workers_of_several_nodes_get_it_and_the_users_choice_wins() -> None:
    config = read("--nnodes=2", "--host=10.0.0.1", "--master=10.0.0.2:80")
    peers = [Peer(name="a", host="10.0.0.1", ports=(80,)), Peer(name="b", host="10.0.0.2", ports=(80,))]
    config = _with_interface(config, peers[0], peers)
    variables = plan(config, peers)[0].environment
    assert (variables["GLOO_SOCKET_IFNAME"], variables["NCCL_SOCKET_IFNAME"]) == ("eth0", "=eth0")
    own = {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib1"}
    assert not {*own} & {*plan(config, peers, env=own)[0].environment}
    assert not any(name in plan(read(), env=own)[0].environment for name in own)


def test_nodes_that_name_loopback_beside_others_are_refused() -> None:
    config = read("--nnodes=2", "--host=10.0.0.1", "--master=10.0.0.2:80")
    peers = [Peer(name="a", host="10.0.0.1", ports=(80,)), Peer(name="b", host="127.0.0.1", ports=(80,))]
    with pytest.raises(LaunchError, match="127.0.0.1 means a different machine on each.*--host="):
        _with_interface(config, peers[0], peers)


def test_nodes_that_meet_elsewhere_and_all_name_loopback_are_refused() -> None:
    """Issue 10, Low: without a route each node's workers waited for the others on itself."""
    peers = [Peer(name=name, host="127.0.0.1", ports=(80,)) for name in "ab"]
    with pytest.raises(LaunchError, match="meet at 10.0.0.2:80, and all of them have the address 127.0.0.1.*--host="):
        _with_interface(read("--nnodes=2", "--master=10.0.0.2:80"), peers[0], peers)
    for flags in (("--master=10.0.0.2:80", "--host=127.0.0.1"), ()):
        assert _with_interface(read("--nnodes=2", *flags), peers[0], peers).nodes.interface == "lo"


@pytest.mark.parametrize("flag", ["--master=127.0.0.1:6000", "--rdzv-endpoint=localhost:6000", "--master_addr=::1"])
def test_a_master_on_loopback_has_all_its_nodes_on_this_machine(flag: str) -> None:
    """000-14; an address of another kind beside it contradicts it, and a place for listening is none to go to."""
    place = {"--master": "127.0.0.1", "--rdzv-endpoint": "localhost", "--master_addr": "::1"}[flag.partition("=")[0]]
    config = read("--nnodes=2", flag)
    assert (config.nodes.host, config.nodes.is_single) == (place, False)
    assert "so all 2 nodes of the job start here" in f"{config.command.notes}"
    assert read("--nnodes=2", flag, "--host=127.0.0.1").nodes.host == "127.0.0.1"
    with pytest.raises(ConfigError, match="means a different machine on each of the 2 nodes.*reached at 10.0.0.1"):
        read("--nnodes=2", flag, "--host=10.0.0.1")
    with pytest.raises(ConfigError, match="0.0.0.0:6000 means a different machine on each.*127.0.0.1:6000 alone"):
        read("--nnodes=2", "--master=0.0.0.0:6000", "--host=10.0.0.1")
    assert read("--nnodes=1", flag).nodes.is_single
    assert Environment({}).raw("PADDLE_MASTER") is None


TRAIN = """
import os, socket, torch
from fleet import fleet
fleet.init(is_collective=True)
total = torch.ones(1) * (fleet.worker_index() + 1)
torch.distributed.all_reduce(total)
print(socket.gethostname(), "sum", int(total), "on", os.environ["GLOO_SOCKET_IFNAME"], flush=True)
"""
SERVED = """
import torch
from fleet import fleet
model = torch.nn.Embedding(10, 2, sparse=True)
fleet.init()
strategy = fleet.DistributedStrategy()
strategy.a_sync = False
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1), strategy)
model = fleet.distributed_model(model)
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
else:
    fleet.init_worker()
    model(torch.tensor([[1, 2]])).sum().backward()
    optimizer.step()
    total = fleet.util.all_reduce(fleet.worker_index() + 1)
    fleet.stop_worker()
    print("sum", int(total), "on eth0", flush=True)
"""
SECRET = {"FLEET_JOB_SECRET": "ab" * 32}
REASON = namespaces.missing()
in_namespaces = [pytest.mark.slow, pytest.mark.skipif(bool(REASON), reason=REASON)]


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network(2, named=True) as nodes:
        yield nodes


Start = Callable[..., Launcher]


@pytest.fixture
def start(network: Network, tmp_path: Path) -> Iterator[Start]:
    """Starts a launcher on a node."""
    with ExitStack() as stack:

        def start_one(node: int, *flags: str, script: str = TRAIN) -> Launcher:
            folder = tmp_path / f"node{node}"
            return stack.enter_context(Launcher(folder, script, *flags, env=SECRET, inside=network.inside(node)))

        yield start_one


def check_sum(*jobs: Launcher) -> None:
    """Both nodes trained together."""
    for job in jobs:
        assert job.wait(90) == 0, job.stderr + job.log()
        assert re.search("sum 3 on eth0", job.log()), job.log()


class TestOnDebian:
    """Two nodes in network namespaces; gethostbyname(gethostname()) is 127.0.1.1 on both."""

    pytestmark = in_namespaces

    @pytest.mark.parametrize(
        "flags",
        [
            ("--ips=10.77.0.11,10.77.0.12",),
            ("--ips=node1,node2",),
            ("--nnodes=2", "--master=10.77.0.11:6300"),
            ("--nnodes=2", "--master=node1:6300"),
        ],
    )
    def test_the_same_command_on_each_node(self, start: Start, flags: tuple[str, ...]) -> None:
        check_sum(start(1, *flags), start(2, *flags))

    def test_the_printed_command(self, start: Start) -> None:
        first = start(1, "--nnodes=2")
        words = shlex.split(first.wait_for(r"-m fleet.launch (.*) train.py\n", "stdout")[1])
        assert words[1].startswith("10.77.0.11:")
        check_sum(first, start(2, *words))

    @pytest.mark.skipif(bool(etcd_helper.missing()), reason=etcd_helper.missing())
    def test_on_etcd(self, start: Start, network: Network, tmp_path: Path) -> None:
        with Etcd(tmp_path / "etcd", host=network.address(0), port=2379, inside=network.inside(0)):
            flags = ("--elastic_server=10.77.0.1:2379", "--np=2", "--job_id=debian")
            check_sum(start(1, *flags), start(2, *flags))

    @pytest.mark.parametrize("name", ["10.77.0.1{}", "node{}"])
    def test_parameter_servers(self, start: Start, name: str) -> None:
        one, two = name.format(1), name.format(2)
        flags = (f"--servers={one}:6170,{two}:6170", f"--workers={one}:6171,{two}:6171")
        check_sum(*(start(node, *flags, script=SERVED) for node in (1, 2)))

    @pytest.mark.parametrize("master", ["10.77.0.11", "node1"])
    def test_under_torchrun(self, network: Network, tmp_path: Path, master: str) -> None:
        (tmp_path / "train.py").write_text(TRAIN)
        flags = ["--nnodes=2", "--nproc-per-node=1", f"--master-addr={master}", "--master-port=6301"]
        jobs = []
        for node in (1, 2):
            line = [sys.executable, "-m", "torch.distributed.run", *flags, f"--node-rank={node - 1}", "train.py"]
            env = {**os.environ, "PYTHONPATH": str(ROOT)}
            inside = [*network.inside(node), *line]
            jobs.append(
                subprocess.Popen(inside, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            )
        try:
            for job in jobs:
                said = job.communicate(timeout=90)[0].decode()
                assert "sum 3 on eth0" in said, said
        finally:
            for job in jobs:
                job.kill()
                job.wait()
