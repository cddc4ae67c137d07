"""One node, a fixed list, a scheduler's list, or nodes that meet."""

from __future__ import annotations

import pytest

from fleet.errors import ConfigError
from tests.helpers.launching import notes, plan, read

LIST = "--ips=10.0.0.1,10.0.0.2"


def owns(*hosts: str) -> dict[str, object]:
    return {"owns": lambda host: host in hosts, "address": hosts[0]}


def test_own_place_in_the_list_comes_from_the_own_address() -> None:
    """002-13: the same command on each node."""
    for place, host in enumerate(("10.0.0.1", "10.0.0.2")):
        config = read("--ips", "10.0.0.1,10.0.0.2", "--gpus", "0,1", **owns(host))
        assert (config.nodes.rank, config.nodes.host, config.nodes.max) == (place, host, 2)
        assert [p.host for p in config.nodes.static_peers] == ["10.0.0.1", "10.0.0.2"]
        assert config.nodes.static_peers[0].ports == (6070, 6071)
        ranks = [spec.environment["PADDLE_TRAINER_ID"] for spec in plan(config, node_rank=place)]
        assert ranks == [f"{2 * place}", f"{2 * place + 1}"]


def test_host_and_pod_ip_win_over_the_interfaces() -> None:
    """002-13."""
    assert read(LIST, "--host=10.0.0.2", **owns("10.0.0.1")).nodes.rank == 1
    assert read(LIST, env={"POD_IP": "10.0.0.2"}, **owns("10.0.0.1")).nodes.rank == 1
    assert read(LIST, "--rank=1", **owns("10.0.0.1")).nodes.rank == 1


def test_an_own_address_outside_the_list_is_an_error() -> None:
    """002-14."""
    with pytest.raises(ConfigError, match=r"This node \(10.0.0.9\) is not in --ips=10.0.0.1,10.0.0.2"):
        read(LIST, **owns("10.0.0.9"))
    with pytest.raises(ConfigError, match=r"--host=10.0.0.9 is not in"):
        read(LIST, "--host=10.0.0.9")
    with pytest.raises(ConfigError, match="not in --ips"):
        read("--ips=10.0.0.1", **owns("10.0.0.9"))


def test_two_addresses_of_one_machine_need_a_word() -> None:
    with pytest.raises(ConfigError, match="all belong to this machine.*--host or --rank"):
        read("--ips=127.0.0.2,127.0.0.3", **owns("127.0.0.2", "127.0.0.3"))


@pytest.mark.parametrize(
    "ips",
    ["127.0.0.1,10.0.0.2", "127.0.0.2,10.0.0.1", "0.0.0.0,10.0.0.1", "10.0.0.1,localhost", "10.0.0.1,10.0.0.1", ","],
)
def test_lists_that_cannot_work_are_errors(ips: str) -> None:
    """002-13: 127.0.0.1 among several addresses is refused."""
    with pytest.raises(ConfigError, match="--ips"):
        read(f"--ips={ips}", **owns("10.0.0.1"))


def test_one_address_is_one_node() -> None:
    assert read("--ips=127.0.0.1").nodes.is_single
    assert read("--ips=10.0.0.1", **owns("10.0.0.1")).nodes.is_single


def test_start_port() -> None:
    machine = owns("10.0.0.1")
    assert read(LIST, "--start_port=7000", **machine).nodes.static_peers[1].ports == (7000,)
    assert read(LIST, env={"FLAGS_START_PORT": "8000"}, **machine).nodes.static_peers[1].ports == (8000,)
    config = read(LIST, **machine)
    assert plan(config)[0].environment["PADDLE_MASTER"] == "10.0.0.1:6070"  # the first endpoint


def test_the_list_and_other_ways_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="Use one of them"):
        read(LIST, "--master=10.0.0.1:80")
    with pytest.raises(ConfigError, match="contradict"):
        read(LIST, "--nnodes=3")
    with pytest.raises(ConfigError, match="meet again after a restart"):
        read(LIST, "--max_restart=1", **owns("10.0.0.1"))
    config = read(LIST, env={"PADDLE_MASTER": "10.0.0.1:80"}, **owns("10.0.0.1"))
    assert len(config.nodes.static_peers) == 2
    assert "PADDLE_MASTER=10.0.0.1:80 is ignored" in notes(config)


def test_nodes_that_meet() -> None:
    """000-07, 000-08: --master is known to all, or this node opens the meeting point (None)."""
    config = read("--nnodes=2", "--master=10.0.0.1:6000", "--rank=1", address="10.0.0.2")
    assert (config.nodes.max, config.nodes.master, config.nodes.rank, config.nodes.host) == (
        2,
        "10.0.0.1:6000",
        1,
        "10.0.0.2",
    )
    assert not config.nodes.is_single
    assert read("--nnodes=2").nodes.master is None
    assert read("--nnodes=2", "--master=http://10.0.0.1:6000").nodes.master == "10.0.0.1:6000"
    assert read("--nnodes=2", "--rdzv-endpoint=10.0.0.1:6000", "--node-rank=0").nodes.rank == 0


def test_without_a_default_route_the_address_is_the_one_towards_the_master() -> None:
    """Issue 10, Low: the workers of every node listened on 127.0.0.1."""
    asked: list[tuple[str, int]] = []

    def towards(host: str, port: int) -> str:
        asked.append((host, port))
        return "169.254.3.2"

    assert read("--nnodes=2", "--master=169.254.3.1:6000", towards=towards).nodes.host == "169.254.3.2"
    assert asked == [("169.254.3.1", 6000)]
    assert read("--nnodes=2", "--master=10.0.0.1:80", "--host=10.0.0.3", towards=towards).nodes.host == "10.0.0.3"
    assert read("--nnodes=2", "--master=10.0.0.1:80", address="10.0.0.4", towards=towards).nodes.host == "10.0.0.4"
    assert len(asked) == 1


@pytest.mark.parametrize("text", ["0", "x", "2:1", "1:2:3", "-1", ":", "1:"])
def test_other_numbers_of_nodes_are_errors(text: str) -> None:
    with pytest.raises(ConfigError, match="N or MIN:MAX"):
        read(f"--nnodes={text}")


@pytest.mark.parametrize("text", ["10.0.0.1", "10.0.0.1:x", "ftp://a:1", ":80", "10.0.0.1:70000", "a:1,b:2", "a b:1"])
def test_other_masters_are_errors(text: str) -> None:
    with pytest.raises(ConfigError, match="--master"):
        read("--nnodes=2", f"--master={text}")


def test_ranks_lie_among_the_nodes() -> None:
    for flags in (("--nnodes=2", "--rank=2"), ("--rank=1",), ("--nnodes=2", "--rank=-2"), (LIST, "--rank=2")):
        with pytest.raises(ConfigError, match="counted from 0"):
            read(*flags)


def test_torchruns_names() -> None:
    config = read("--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1", "--master-port=29400")
    assert (config.nodes.master, config.nodes.rank) == ("10.0.0.1:29400", 1)
    assert read("--nnodes=2", "--master-addr=10.0.0.1").nodes.master == "10.0.0.1:29500"
    assert read("--master-port=29400").nodes.store_port == 29400
    assert read("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--nnodes=1").nodes.store_port is None
    with pytest.raises(ConfigError, match="static, c10d"):
        read("--rdzv-backend=mpi")
    assert read(env={"PET_NNODES": "2", "PET_MASTER_ADDR": "10.0.0.1", "PET_NODE_RANK": "1"}).nodes.rank == 1


def test_standalone_is_one_node_whatever_the_environment_says() -> None:
    config = read("--standalone", env={"PADDLE_NNODES": "4", "PADDLE_MASTER": "10.0.0.1:80"})
    assert (config.nodes.max, config.nodes.master) == (1, None)
    assert "PADDLE_NNODES=4 is ignored" in notes(config)
    with pytest.raises(ConfigError, match="--standalone is one node"):
        read("--standalone", "--nnodes=2")
    assert read("--standalone", "--nnodes=1").nodes.max == 1


POD = {
    "PADDLE_TRAINER_ENDPOINTS": "10.1.0.1:36543,10.1.0.2:36543",
    "PADDLE_TRAINERS": "10.1.0.1,10.1.0.2",
    "PADDLE_TRAINERS_NUM": "2",
    "PADDLE_TRAINER_ID": "1",
    "PADDLE_PORT": "36543",
    "POD_IP": "10.1.0.2",
    "TRAINING_ROLE": "TRAINER",
}


def test_a_bare_command_in_a_pod_forms_the_job() -> None:
    """000-28: no flag; one endpoint per pod in the environment, one per process for the workers."""
    config = read(env=POD, num_gpus=2)
    assert (config.mode, config.nodes.max, config.nodes.rank, config.nodes.host) == ("collective", 2, 1, "10.1.0.2")
    env = plan(config, node_rank=1, env=POD)[1].environment
    assert env["PADDLE_TRAINER_ENDPOINTS"] == "10.1.0.1:36543,10.1.0.1:36544,10.1.0.2:36543,10.1.0.2:36544"
    assert (env["PADDLE_TRAINER_ID"], env["PADDLE_TRAINERS_NUM"], env["PADDLE_NNODES"]) == ("3", "4", "2")
    assert env["PADDLE_CURRENT_ENDPOINT"] == "10.1.0.2:36544"
    assert env["MASTER_ADDR"] == "10.1.0.1"


def test_service_mode_with_another_port_in_the_list() -> None:
    """E.3: the list says 36000 while PADDLE_PORT is the random one; the list is what the others dial."""
    env = {**POD, "PADDLE_TRAINER_ENDPOINTS": "job-0:36000,job-1:36000", "PADDLE_PORT": "41234", "POD_IP": "job-1"}
    config = read(env=env)
    assert [p.ports for p in config.nodes.static_peers] == [(36000,), (36000,)]
    assert (config.nodes.rank, config.nodes.host) == (1, "job-1")


def test_hosts_alone_are_enough() -> None:
    env = {k: v for k, v in POD.items() if k != "PADDLE_TRAINER_ENDPOINTS"}
    assert [p.ports for p in read(env=env).nodes.static_peers] == [(36543,), (36543,)]
    del env["PADDLE_TRAINER_ID"]
    assert read(env=env).nodes.rank == 1  # by POD_IP


def test_a_list_per_worker_has_the_hosts_as_nodes() -> None:
    env = {"DISTRIBUTED_TRAINER_ENDPOINTS": "10.1.0.1:80,10.1.0.1:81,10.1.0.2:80,10.1.0.2:81", "POD_IP": "10.1.0.2"}
    config = read("--nproc_per_node=2", env=env)
    assert [(p.host, p.ports) for p in config.nodes.static_peers] == [("10.1.0.1", (80, 81)), ("10.1.0.2", (80, 81))]


def test_pods_whose_ports_run_into_each_other_are_an_error() -> None:
    env = {**POD, "PADDLE_TRAINER_ENDPOINTS": "10.1.0.1:80,10.1.0.1:81"}
    with pytest.raises(ConfigError, match="10.1.0.1:81' twice"):
        read("--nproc_per_node=2", env=env)


def test_one_pod_is_one_node_and_flags_win() -> None:
    env = {"PADDLE_TRAINER_ENDPOINTS": "10.1.0.1:36543", "PADDLE_TRAINER_ID": "0"}
    assert read(env=env).nodes.is_single
    assert read("--nnodes=2", env=POD).nodes.static_peers == ()


def test_kubeflow_needs_only_master_nodes_and_job() -> None:
    """E.5."""
    env = {"PADDLE_MASTER": "job-worker-0:36543", "PADDLE_NNODES": "3", "PADDLE_JOB_ID": "job"}
    config = read(env=env, address="10.2.0.3")
    assert (config.nodes.master, config.nodes.min, config.nodes.max) == ("job-worker-0:36543", 3, 3)
    assert (config.job_id, config.nodes.host, config.nodes.rank) == ("job", "10.2.0.3", -1)
    env = {**env, "PADDLE_SERVER_NUM": "1"}
    config = read(env=env)
    assert (config.mode, config.servers.num_servers, config.servers.num_workers) == ("ps", 1, 0)
