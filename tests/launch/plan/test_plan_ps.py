"""Environment of servers and workers of a parameter-server job."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from fleet.errors import LaunchError
from fleet.launch.plan.process_plan import SERVER_ROWS, WORKER_ROWS
from tests.helpers.launching import peer_of, plan, read

FLAGS = ("--server_num=1", "--worker_num=2", "--gpus=0,1")


def test_the_exact_rows_of_the_documentation() -> None:
    """002-20, 002-21: 11 names for a server, 14 for a worker."""
    shared = {
        "PADDLE_PSERVERS_IP_PORT_LIST",
        "PADDLE_TRAINER_ENDPOINTS",
        "PADDLE_TRAINERS_NUM",
        "TRAINING_ROLE",
        "PADDLE_HETER_TRAINER_IP_PORT_LIST",
        "PADDLE_WITH_GLOO",
        "PADDLE_GLOO_RENDEZVOUS",
        "PADDLE_GLOO_FS_PATH",
        "PADDLE_GLOO_HTTP_ENDPOINT",
    }
    assert set(SERVER_ROWS) == shared | {"POD_IP", "PADDLE_PORT"}
    assert set(WORKER_ROWS) == shared | {
        "PADDLE_TRAINER_ID",
        "FLAGS_selected_gpus",
        "FLAGS_selected_xpus",
        "CUDA_VISIBLE_DEVICES",
        "XPU_VISIBLE_DEVICES",
    }
    assert (len(SERVER_ROWS), len(WORKER_ROWS)) == (11, 14)
    server, worker, _ = plan(read(*FLAGS, num_gpus=2))
    assert set(SERVER_ROWS) <= set(server.environment)
    assert set(WORKER_ROWS) <= set(worker.environment)


def test_workers_that_share_a_card_exchange_through_gloo() -> None:
    """NCCL needs a card for each; the user's own choice stays."""

    def backend(num_gpus: int, **env: str) -> str | None:
        worker = plan(read(*FLAGS[:2], num_gpus=num_gpus, env=env))[1]
        return worker.environment.get("PADDLE_DISTRI_BACKEND")

    assert [backend(number) for number in (0, 1, 2)] == [None, "gloo", None]
    assert backend(1, PADDLE_DISTRI_BACKEND="nccl") is None  # it inherits it


def test_the_values() -> None:
    """002-15, 002-20, 002-22, 001-02, 001-03."""
    config = read(*FLAGS, num_gpus=2)
    server, _, worker = plan(config)
    env = server.environment
    assert (env["TRAINING_ROLE"], env["POD_IP"], env["PADDLE_PORT"]) == ("PSERVER", "127.0.0.1", "7500")
    assert env["PADDLE_PSERVERS_IP_PORT_LIST"] == "127.0.0.1:7500"
    assert env["PADDLE_TRAINER_ENDPOINTS"] == "127.0.0.1:7000,127.0.0.1:7001"
    assert (env["PADDLE_TRAINERS_NUM"], env["PADDLE_HETER_TRAINER_IP_PORT_LIST"]) == ("2", "")
    assert (env["PADDLE_WITH_GLOO"], env["PADDLE_GLOO_RENDEZVOUS"]) == ("0", "3")
    assert Path(env["PADDLE_GLOO_FS_PATH"]).parent == Path(tempfile.gettempdir())
    assert env["PADDLE_GLOO_HTTP_ENDPOINT"] == "127.0.0.1:7901"
    env = worker.environment
    assert (env["TRAINING_ROLE"], env["PADDLE_TRAINER_ID"], env["PADDLE_ROLE"]) == ("TRAINER", "1", "TRAINER")
    assert (env["FLAGS_selected_gpus"], env["CUDA_VISIBLE_DEVICES"]) == ("0", "1")
    assert (env["FLAGS_selected_xpus"], env["XPU_VISIBLE_DEVICES"]) == ("0", "1")
    assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"], env["MASTER_PORT"]) == ("1", "2", "1", "7900")


def test_servers_have_no_place_among_the_workers_and_workers_no_address() -> None:
    """002-21."""
    server, worker, _ = plan(read(*FLAGS))
    for name in (
        "PADDLE_TRAINER_ID",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "FLAGS_selected_gpus",
        "CUDA_VISIBLE_DEVICES",
    ):
        assert name not in server.environment
    for name in ("POD_IP", "PADDLE_PORT"):
        assert name not in worker.environment


def test_files_and_echo() -> None:
    """002-24: serverlog.N and workerlog.N; worker 0 is the one on the terminal."""
    specs = plan(read("--server_num=2", "--worker_num=2"))
    assert [spec.log_path.name for spec in specs] == ["serverlog.0", "serverlog.1", "workerlog.0", "workerlog.1"]
    assert [spec.echo for spec in specs] == [False, False, True, False]


def test_workers_take_the_cards_in_turn_by_their_own_numbers() -> None:
    """C.4."""
    config = read("--server_num=1", "--worker_num=3", env={"CUDA_VISIBLE_DEVICES": "4,6"}, num_gpus=8)
    devices = [spec.environment["CUDA_VISIBLE_DEVICES"] for spec in plan(config) if spec.role == "worker"]
    assert devices == ["4", "6", "4"]
    assert plan(read(*FLAGS))[1].environment["CUDA_VISIBLE_DEVICES"] == "0"  # no GPU at all
    for hides in ("", "-1"):
        env = {"CUDA_VISIBLE_DEVICES": hides}
        specs = plan(read(*FLAGS[:2], env=env, num_gpus=8), env=env)
        assert specs[1].environment["CUDA_VISIBLE_DEVICES"] == hides, "the user hid every card"


def test_gloo_settings() -> None:
    """G3, 002-22."""
    config = read(*FLAGS, "--with_gloo=1", "--http_port=9999")
    env = plan(config)[0].environment
    assert (env["PADDLE_WITH_GLOO"], env["PADDLE_GLOO_HTTP_ENDPOINT"]) == ("1", "127.0.0.1:9999")


def test_several_nodes() -> None:
    config = read("--nnodes=2", "--server_num=1", "--worker_num=1")
    peers = [peer_of(config, host="10.0.0.1", ports=()), peer_of(config, host="10.0.0.2", ports=(80, 81))]
    (server,) = plan(config, peers, node_rank=0)
    three = [peer_of(config, host=f"10.0.0.{i}", ports=(80,)) for i in range(1, 4)]
    assert [spec.echo for spec in plan(config, three, node_rank=1)] == [False, False]
    second, worker, _ = plan(config, peers, node_rank=1)
    assert (server.index, second.index, worker.index, worker.environment["GROUP_RANK"]) == (0, 1, 0, "1")
    assert second.environment["PADDLE_PSERVERS_IP_PORT_LIST"] == "10.0.0.1:7500,10.0.0.2:7500"
    assert worker.environment["PADDLE_MASTER"] == "10.0.0.2:7900"  # the store is opened by worker 0, on its node
    assert worker.environment["PADDLE_GLOO_HTTP_ENDPOINT"] == "10.0.0.1:7901"
    assert worker.environment["PADDLE_NNODES"] == "2"


def test_lists_on_several_nodes_agree_on_ports_without_a_word() -> None:
    flags = ("--servers=10.0.0.1:7000", "--workers=10.0.0.1:8000,10.0.0.2:8000")
    for place, host in enumerate(("10.0.0.1", "10.0.0.2")):
        worker = plan(read(*flags, f"--host={host}"))[-1]
        assert worker.environment["PADDLE_MASTER"] == "10.0.0.1:8000"
        assert worker.environment["PADDLE_GLOO_HTTP_ENDPOINT"] == "10.0.0.1:6767"
        assert (worker.environment["PADDLE_NNODES"], worker.environment["GROUP_RANK"]) == ("2", f"{place}")


def test_a_job_without_servers_or_workers_is_an_error() -> None:
    config = read("--nnodes=2", "--server_num=1", "--worker_num=1")
    with pytest.raises(LaunchError, match="starts a server"):
        plan(config, [peer_of(config, server_ports=())])
    with pytest.raises(LaunchError, match="starts a worker"):
        plan(config, [peer_of(config, ports=())])
    with pytest.raises(LaunchError, match="Two processes"):
        plan(config, [peer_of(config, server_ports=(7000,))])


def test_shards_have_a_port_on_every_server() -> None:
    """Each server process is one of the lists, and each shard is at one of its places at first; spares have none."""
    config = read("--server_num=2", "--server_shards=5", "--server_spare=1", "--worker_num=1")
    specs = plan(config)
    servers = [spec for spec in specs if spec.role == "server"]
    (listed,) = {spec.environment["FLEET_PS_SHARD_ENDPOINTS"] for spec in specs}
    places = [group.split(",") for group in listed.split(";")]
    assert [len(group) for group in places] == [5, 5, 5]
    assert len({endpoint for group in places for endpoint in group}) == 15
    own = [f"{spec.environment['POD_IP']}:{spec.environment['PADDLE_PORT']}" for spec in servers]
    assert own == [group[0] for group in places]
    first = [places[shard % 2][shard] for shard in range(5)]
    assert {spec.environment["PADDLE_PSERVERS_IP_PORT_LIST"] for spec in specs} == {",".join(first)}
    assert [spec.index for spec in servers] == [0, 1, 2]
    assert len({spec.log_path for spec in specs}) == 4
    assert "FLEET_PS_FOLDER" in servers[2].environment


def test_every_server_has_a_standby() -> None:
    """After the servers, at ports of their own; every process knows all of them."""
    config = read("--server_num=2", "--server_standby", "--worker_num=1")
    servers = [spec for spec in plan(config) if spec.role == "server"]
    assert [spec.index for spec in servers] == [0, 1, 2, 3]
    assert [spec.environment.get("FLEET_PS_STANDBY") for spec in servers] == [None, None, "1", "1"]
    listed = {spec.environment["FLEET_PS_STANDBY_ENDPOINTS"] for spec in plan(config)}
    own = [f"{spec.environment['POD_IP']}:{spec.environment['PADDLE_PORT']}" for spec in servers]
    assert listed == {",".join(own[2:])}
    assert servers[2].environment["PADDLE_PSERVERS_IP_PORT_LIST"] == ",".join(own[:2])
    assert len({spec.log_path for spec in servers}) == 4
    assert "FLEET_PS_FOLDER" in servers[3].environment
