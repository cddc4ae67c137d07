"""Environment of collective workers, on one node and on several."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fleet.errors import LaunchError
from tests.helpers.launching import SCRIPT, peer_of, plan, read


def test_two_workers_on_one_node() -> None:
    """002-10, C.4: Fleet's five variables, the newer names and torch's."""
    config = read("--gpus=0,1", num_gpus=2)
    first, second = plan(config)
    env = second.environment
    assert (
        env.items()
        >= {
            "PADDLE_TRAINER_ENDPOINTS": "127.0.0.1:7000,127.0.0.1:7001",
            "FLAGS_selected_gpus": "1",
            "PADDLE_TRAINER_ID": "1",
            "PADDLE_TRAINERS_NUM": "2",
            "PADDLE_CURRENT_ENDPOINT": "127.0.0.1:7001",
        }.items()
    )
    assert (
        env.items()
        >= {
            "RANK": "1",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "7900",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }.items()
    )
    assert (
        env.items()
        >= {
            "PADDLE_MASTER": "127.0.0.1:7900",
            "PADDLE_GLOBAL_RANK": "1",
            "PADDLE_GLOBAL_SIZE": "2",
            "PADDLE_LOCAL_RANK": "1",
            "PADDLE_LOCAL_SIZE": "2",
            "PADDLE_RANK_IN_NODE": "1",
            "PADDLE_NNODES": "1",
            "PADDLE_DISTRI_BACKEND": "nccl",
            "PADDLE_AUTO_CLUSTER": "0",
            "PADDLE_LOCAL_DEVICE_IDS": "1",
            "PADDLE_WORLD_DEVICE_IDS": "0,1",
        }.items()
    )
    assert (first.echo, second.echo) == (True, False)
    assert env["POD_NAME"] == config.pod.name
    for absent in ("CUDA_VISIBLE_DEVICES", "TORCHELASTIC_USE_AGENT_STORE", "TRAINING_ROLE", "POD_IP"):
        assert absent not in env


def test_the_command_and_the_log_files() -> None:
    """002-24: workerlog.N; the interpreter is this one, unbuffered."""
    specs = plan(read("--nproc_per_node=2", "--log_dir=out", script=(SCRIPT, "--lr", "0.1")))
    assert specs[1].command == (sys.executable, "-u", SCRIPT, "--lr", "0.1")
    assert [spec.log_path for spec in specs] == [Path("out/workerlog.0"), Path("out/workerlog.1")]
    assert specs[1].environment["PADDLE_LOG_DIR"] == f"{Path('out').absolute()}"
    assert specs[1].environment["PADDLE_BACKUP_ENV_PATH"] == f"{Path('out/backup_env.1.json').absolute()}"


def test_a_cpu_worker_has_no_device() -> None:
    env = plan(read())[0].environment
    assert "FLAGS_selected_gpus" not in env
    assert env["PADDLE_DISTRI_BACKEND"] == "gloo"


def test_ranks_count_through_the_nodes() -> None:
    config = read("--nnodes=3", "--nproc_per_node=2", address="10.0.0.2")
    peers = [
        peer_of(config, host="10.0.0.1", ports=(80, 81, 82)),
        peer_of(config, host="10.0.0.2", ports=(80, 81)),
        peer_of(config, host="10.0.0.3", ports=(80,)),
    ]
    specs = plan(config, peers, node_rank=1, generation=2, restarts=1)
    assert [spec.index for spec in specs] == [3, 4]
    env = specs[1].environment
    assert (env["RANK"], env["WORLD_SIZE"], env["GROUP_RANK"], env["LOCAL_RANK"]) == ("4", "6", "1", "1")
    assert (env["PADDLE_CURRENT_ENDPOINT"], env["PADDLE_MASTER"]) == ("10.0.0.2:81", "10.0.0.1:7900")
    assert (env["FLEET_GENERATION"], env["TORCHELASTIC_RESTART_COUNT"]) == ("2", "1")
    assert env["PADDLE_NNODES"] == "3"
    assert "GLOO_SOCKET_IFNAME" not in env
    assert not any(spec.echo for spec in specs)
    assert [spec.echo for spec in plan(config, peers, node_rank=0)] == [True, False, False]


def test_ipv6_addresses_get_brackets() -> None:
    config = read("--nnodes=2")
    env = plan(config, [peer_of(config, host="fd00::1"), peer_of(config, host="fd00::2")], node_rank=1)[0].environment
    assert env["PADDLE_CURRENT_ENDPOINT"] == "[fd00::2]:7000"
    assert (env["MASTER_ADDR"], env["PADDLE_MASTER"]) == ("fd00::1", "[fd00::1]:7900")


def test_two_workers_at_one_endpoint_are_an_error() -> None:
    config = read("--nnodes=2")
    with pytest.raises(LaunchError, match="Two processes of the job have the endpoint 127.0.0.1:7000"):
        plan(config, [peer_of(config), peer_of(config)])


def test_a_job_without_workers_is_an_error() -> None:
    config = read("--nnodes=2")
    with pytest.raises(LaunchError, match="starts a worker"):
        plan(config, [peer_of(config, ports=())])


def test_the_plan_is_pure() -> None:
    config = read("--nproc_per_node=2")
    peers = [peer_of(config)]
    assert plan(config, peers) == plan(config, peers)
