"""Servers and workers of a parameter-server job."""

from __future__ import annotations

import pytest

from fleet.errors import ConfigError
from tests.helpers.launching import plan, read


def test_counts_on_one_node() -> None:
    """003-17, 002-20."""
    config = read("--server_num=2", "--worker_num=3")
    assert (config.servers.num_servers, config.servers.num_workers, config.processes.num_workers) == (2, 3, 3)
    assert read("--server_num=1", "--trainer_num=2").servers.num_workers == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--server_num=1",), "needs --worker_num"),
        (("--worker_num=1",), "needs --server_num"),
        (("--server_num=0", "--worker_num=1"), "it is 0"),
        (("--server_num=-1", "--worker_num=1"), "from 0"),
        (("--worker_num=1", "--trainer_num=2", "--server_num=1"), "mean the same and differ"),
        (("--workers=127.0.0.1:1", "--trainers=127.0.0.1:2"), "mean the same"),
        (("--servers=127.0.0.1", "--worker_num=1"), "host:port"),
        (("--servers=127.0.0.1:1,127.0.0.1:1", "--worker_num=1"), "twice"),
        (("--servers=127.0.0.1:1", "--server_num=2", "--worker_num=1"), "list of endpoints has 1"),
        (("--servers=127.0.0.1:1", "--server_standby", "--worker_num=1"), "starts the standbys on one node"),
        (("--nnodes=2", "--server_num=1", "--server_standby"), "starts the standbys on one node"),
        (("--server_num=2", "--worker_num=1", "--server_spare=1"), "server_spare is 1, and --server_shards is absent"),
        (("--server_num=2", "--worker_num=1", "--server_shards=1"), "server_shards is 1, and there are 2 servers"),
        (("--server_num=2", "--worker_num=1", "--server_shards=2", "--server_spare=1"), "there are 3 servers"),
        (("--server_num=1", "--worker_num=1", "--server_shards=2", "--server_standby"), "have no standbys"),
        (("--nnodes=2", "--server_num=1", "--server_shards=2"), "on several nodes"),
        (("--servers=127.0.0.1:1", "--worker_num=1", "--server_shards=2"), "from a list"),
        (("--server_num=1", "--worker_num=1", "--server_shards=-2"), "takes a number from 0"),
        (("--servers=127.0.0.1:1",), "workers are missing"),
        (("--servers=10.0.0.1:1", "--worker_num=1"), "must list its endpoints too"),
        (("--servers=10.0.0.1:1", "--workers=10.0.0.2:1"), "neither in --servers"),
        (("--servers=127.0.0.1:1", "--workers=127.0.0.1:2", "--nnodes=2"), "Use the lists, or counts"),
        (("--run_mode=ps", "--nnodes=2"), "neither a server nor a worker"),
        (("--server_num=1", "--worker_num=1", "--nproc_per_node=2"), "belongs to collective"),
        (("--http_port=1",), "needs --server_num"),
        (("--servers=127.0.0.1:1", "--workers=127.0.0.1:2,10.0.0.2:2", "--max_restart=1"), "meet again"),
    ],
)
def test_roles_that_cannot_work_are_errors(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(*flags)


def test_lists_start_what_belongs_to_this_node() -> None:
    flags = ("--servers=10.0.0.1:7000,10.0.0.2:7000", "--workers=10.0.0.2,10.0.0.1:8000,10.0.0.2:8001")
    config = read(*flags, owns=lambda host: host == "10.0.0.2", address="10.0.0.2")
    assert (config.servers.local_servers, config.servers.local_workers) == ((1,), (0, 2))
    assert config.servers.worker_endpoints[0] == "10.0.0.2:6170"  # C.3: workers without a port
    assert (config.servers.num_servers, config.servers.num_workers, config.nodes.is_single) == (1, 2, False)
    assert read(*flags, "--host=10.0.0.1").servers.local_servers == (0,)
    specs = plan(config)
    assert [(s.role, s.index) for s in specs] == [("server", 1), ("worker", 0), ("worker", 2)]
    assert specs[1].environment["PADDLE_MASTER"] == "10.0.0.2:6170"


def test_lists_on_one_node_may_be_mixed_with_counts() -> None:
    config = read("--servers=127.0.0.1:7400,127.0.0.1:7401", "--worker_num=2")
    assert (config.servers.num_servers, config.servers.num_workers, config.nodes.is_single) == (2, 2, True)
    specs = plan(config)
    assert [s.role for s in specs] == ["server", "server", "worker", "worker"]
    assert specs[1].environment["PADDLE_PORT"] == "7401"


def test_several_nodes_may_differ_in_their_counts() -> None:
    config = read("--nnodes=2", "--server_num=1", "--worker_num=0")
    assert (config.servers.num_servers, config.servers.num_workers, config.nodes.is_single) == (1, 0, False)


POD = {
    "PADDLE_PSERVERS_IP_PORT_LIST": "10.1.0.1:36543,10.1.0.2:36543",
    "PADDLE_TRAINER_ENDPOINTS": "10.1.0.3:36543,10.1.0.4:36543",
    "PADDLE_TRAINERS_NUM": "2",
    "PADDLE_TRAINER_ID": "1",
    "PADDLE_PORT": "36543",
}


@pytest.mark.parametrize(("role", "host"), [("PSERVER", "10.1.0.2"), ("TRAINER", "10.1.0.4")])
def test_a_pod_of_the_operator_starts_its_one_process(role: str, host: str) -> None:
    """E.3: TRAINING_ROLE and PADDLE_TRAINER_ID name the pod's role and place."""
    config = read(env={**POD, "TRAINING_ROLE": role, "POD_IP": host})
    (spec,) = plan(config)
    assert (spec.role, spec.index, config.nodes.host) == ("server" if role == "PSERVER" else "worker", 1, host)
    assert spec.environment["TRAINING_ROLE"] == role
    assert spec.environment["PADDLE_PSERVERS_IP_PORT_LIST"] == POD["PADDLE_PSERVERS_IP_PORT_LIST"]


def test_a_pod_outside_its_list_is_an_error() -> None:
    with pytest.raises(ConfigError, match="Check the job's replicas"):
        read(env={**POD, "TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": "2"})
    with pytest.raises(ConfigError, match="PSERVER or TRAINER"):
        read(env={**POD, "TRAINING_ROLE": "HETER"})
