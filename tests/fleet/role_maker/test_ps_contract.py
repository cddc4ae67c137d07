"""Fleet's contract for a parameter-server job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fleet.env import Environment
from fleet.errors import ConfigError, UnsupportedOptionError
from fleet.role_maker.fleet_contract import has_servers, read_ps
from fleet.role_maker.record import Role

SERVER = {
    "PADDLE_PSERVERS_IP_PORT_LIST": "127.0.0.1:36001, 127.0.0.1:36002",
    "TRAINING_ROLE": "PSERVER",
    "PADDLE_TRAINERS_NUM": "2",
    "POD_IP": "127.0.0.1",
    "PADDLE_PORT": "36002",
}
WORKER = {
    "PADDLE_PSERVERS_IP_PORT_LIST": "127.0.0.1:36001,127.0.0.1:36002",
    "TRAINING_ROLE": "TRAINER",
    "PADDLE_TRAINERS_NUM": "2",
    "PADDLE_TRAINER_ID": "1",
}


def test_a_server_by_hand() -> None:
    """001-02: these five variables are enough for a server."""
    record = read_ps(Environment(SERVER))
    assert (record.kind, record.global_rank, record.world_size) == (Role.SERVER, 1, 2)
    assert record.server_endpoints == ("127.0.0.1:36001", "127.0.0.1:36002")


def test_a_worker_by_hand() -> None:
    """001-03, G4: four variables are enough for a worker, without POD_IP and PADDLE_PORT."""
    record = read_ps(Environment(WORKER))
    assert (record.kind, record.global_rank, record.world_size) == (Role.WORKER, 1, 2)
    assert (record.local_rank, record.local_world_size, record.num_nodes) == (0, 1, 1)  # G17: numbers, never None


def test_a_worker_with_a_list_of_workers() -> None:
    env = {**WORKER, "PADDLE_TRAINER_ENDPOINTS": "a:1,b:1", "PADDLE_TRAINERS": "a,b"}
    record = read_ps(Environment(env))
    assert (record.worker_endpoints, record.num_nodes, record.local_rank) == (("a:1", "b:1"), 2, 0)


@pytest.mark.parametrize("name", ["PADDLE_TRAINING_ROLE", "PADDLE_ROLE"])
def test_the_role_has_three_names(name: str) -> None:
    env = {key: value for key, value in WORKER.items() if key != "TRAINING_ROLE"}
    assert read_ps(Environment({**env, name: "TRAINER"})).kind is Role.WORKER


@pytest.mark.parametrize(
    ("base", "left_out", "changed", "message"),
    [
        (WORKER, "PADDLE_TRAINERS_NUM", {}, "PADDLE_TRAINERS_NUM is not set"),
        (WORKER, "PADDLE_TRAINER_ID", {}, "PADDLE_TRAINER_ID is not set"),
        (WORKER, "TRAINING_ROLE", {}, "TRAINING_ROLE is not set.*TRAINER or PSERVER"),
        (WORKER, "", {"TRAINING_ROLE": "BOSS"}, "TRAINING_ROLE is 'BOSS'.*TRAINER or PSERVER"),
        (WORKER, "", {"PADDLE_TRAINER_ID": "2"}, "PADDLE_TRAINER_ID is 2"),
        (WORKER, "", {"PADDLE_TRAINERS_NUM": "0"}, "PADDLE_TRAINERS_NUM is 0"),
        (WORKER, "", {"PADDLE_TRAINER_ENDPOINTS": "a:1"}, "lists 1 addresses"),
        (WORKER, "", {"PADDLE_PSERVERS_IP_PORT_LIST": "127.0.0.1"}, "PADDLE_PSERVERS_IP_PORT_LIST"),
        (SERVER, "POD_IP", {}, "POD_IP is not set"),
        (SERVER, "PADDLE_PORT", {}, "PADDLE_PORT is not set"),
        (SERVER, "", {"PADDLE_PORT": "36003"}, "POD_IP:PADDLE_PORT is '127.0.0.1:36003'"),
        (SERVER, "", {"POD_IP": "10.0.0.9"}, "POD_IP:PADDLE_PORT is '10.0.0.9:36002'"),
        (WORKER, "", {"PADDLE_WITH_GLOO": "3"}, "PADDLE_WITH_GLOO is 3"),
        (WORKER, "", {"PADDLE_WITH_GLOO": "1", "PADDLE_GLOO_RENDEZVOUS": "4"}, "PADDLE_GLOO_RENDEZVOUS is 4"),
        (WORKER, "", {"PADDLE_WITH_GLOO": "1"}, "PADDLE_GLOO_HTTP_ENDPOINT is not set"),
        (WORKER, "", {"PADDLE_WITH_GLOO": "1", "PADDLE_GLOO_RENDEZVOUS": "2"}, "PADDLE_GLOO_FS_PATH is not set"),
    ],
)
def test_what_is_missing_or_wrong_is_named(
    base: dict[str, str], left_out: str, changed: dict[str, str], message: str
) -> None:
    env = {key: value for key, value in base.items() if key != left_out} | changed
    with pytest.raises(ConfigError, match=message):
        read_ps(Environment(env))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"TRAINING_ROLE": "HETER_TRAINER"}, "HETER_TRAINER"),
        ({"TRAINING_ROLE": "HETER"}, "HETER"),  # the operator's spelling
        ({"TRAINING_ROLE": "COORDINATOR"}, "COORDINATOR"),
        ({"PADDLE_WITH_GLOO": "1", "PADDLE_GLOO_RENDEZVOUS": "1"}, "HDFS"),
    ],
)
def test_what_is_not_supported_says_so(changed: dict[str, str], message: str) -> None:
    with pytest.raises(UnsupportedOptionError, match=message):
        read_ps(Environment({**WORKER, **changed}))


def test_the_operators_port_can_differ_from_its_list() -> None:
    """E.3: in Service mode the lists hold port 36000 and PADDLE_PORT is another; the list is what workers dial."""
    env = {
        "PADDLE_PSERVERS_IP_PORT_LIST": "job-ps-0:36000,job-ps-1:36000", "TRAINING_ROLE": "PSERVER",
        "PADDLE_TRAINERS_NUM": "1", "POD_IP": "job-ps-1", "PADDLE_PORT": "41234", "PADDLE_TRAINER_ID": "1",
    }  # fmt: skip
    assert read_ps(Environment(env)).global_rank == 1
    with pytest.raises(ConfigError, match="job-ps-1:41234"):
        read_ps(Environment({**env, "PADDLE_TRAINER_ID": "0"}))


def test_where_host_arrays_are_exchanged() -> None:
    """002-22: PADDLE_WITH_GLOO and its meeting point."""
    assert read_ps(Environment(WORKER)).with_gloo == 0
    http = {"PADDLE_WITH_GLOO": "1", "PADDLE_GLOO_HTTP_ENDPOINT": "a:5"}
    record = read_ps(Environment({**WORKER, **http}))
    assert (record.with_gloo, record.master, record.gloo_path) == (1, "a:5", None)
    parts = {"PADDLE_WITH_GLOO": "1", "PADDLE_GLOO_HTTP_HOST": "b", "PADDLE_GLOO_HTTP_PORT": "6"}
    assert read_ps(Environment({**WORKER, **parts})).master == "b:6"
    folder = {"PADDLE_WITH_GLOO": "2", "PADDLE_GLOO_RENDEZVOUS": "2", "PADDLE_GLOO_FS_PATH": "shared"}
    record = read_ps(Environment({**SERVER, **folder}))
    assert (record.with_gloo, record.master, record.gloo_path) == (2, None, "shared")


def test_workers_meet_beside_worker_0() -> None:
    """E.3: the operators name the pod of server 0, where no worker can listen, and one of them its own port."""
    env = {
        **WORKER, "PADDLE_PSERVERS_IP_PORT_LIST": "10.0.0.1:41234", "PADDLE_TRAINERS_NUM": "2",
        "PADDLE_TRAINER_ENDPOINTS": "10.0.0.2:41234,10.0.0.3:41234", "PADDLE_WITH_GLOO": "1", "PADDLE_TRAINER_ID": "1",
    }  # fmt: skip
    for endpoint in ("10.0.0.1:41234", "10.0.0.1:41252"):
        record = read_ps(Environment({**env, "PADDLE_GLOO_HTTP_ENDPOINT": endpoint}))
        assert record.master == "10.0.0.2:41252"


def test_what_makes_a_parameter_server_job(tmp_path: Path) -> None:
    """B.3: absent or blank, the list makes no such job; a server without its list is a mistake."""
    assert has_servers(Environment(WORKER))
    assert not has_servers(Environment({"PADDLE_PSERVERS_IP_PORT_LIST": " ", "TRAINING_ROLE": "TRAINER"}))
    with pytest.raises(ConfigError, match="PADDLE_PSERVERS_IP_PORT_LIST is not set"):
        has_servers(Environment({"TRAINING_ROLE": "PSERVER"}))
    backup = tmp_path / "backup.json"
    backup.write_text(json.dumps({"PADDLE_PSERVERS_IP_PORT_LIST": "a:1"}))
    assert has_servers(Environment({"PADDLE_BACKUP_ENV_PATH": str(backup)}))
