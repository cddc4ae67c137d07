"""Fleet's own contract for a collective worker."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fleet.env import Environment
from fleet.errors import ConfigError
from fleet.role_maker.fleet_contract import agreed_int, fleet_variables, read_device_ids, read_fleet, read_list

LAUNCHED = {
    "PADDLE_TRAINER_ID": "1",
    "PADDLE_TRAINERS_NUM": "2",
    "PADDLE_TRAINER_ENDPOINTS": "10.0.0.1:6170,10.0.0.1:6171",
    "PADDLE_CURRENT_ENDPOINT": "10.0.0.1:6171",
    "PADDLE_RANK_IN_NODE": "1",
    "PADDLE_LOCAL_RANK": "1",
    "PADDLE_LOCAL_SIZE": "2",
    "PADDLE_GLOBAL_RANK": "1",
    "PADDLE_GLOBAL_SIZE": "2",
    "PADDLE_MASTER": "10.0.0.1:6169",
    "PADDLE_NNODES": "1",
    "PADDLE_DISTRI_BACKEND": "gloo",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "6169",
}


def without(*names: str, **changed: str) -> Environment:
    """Returns what the launcher sets, with some variables left out and others changed."""
    return Environment({**{k: v for k, v in LAUNCHED.items() if k not in names}, **changed})


def test_what_the_launcher_sets() -> None:
    """002-10: the five variables of a worker, and torch's beside them."""
    record = read_fleet(Environment(LAUNCHED))
    assert (record.global_rank, record.world_size, record.local_rank, record.local_world_size) == (1, 2, 1, 2)
    assert record.worker_endpoints == ("10.0.0.1:6170", "10.0.0.1:6171")
    assert (record.master, record.backend, record.source) == ("10.0.0.1:6169", "gloo", "fleet launcher")
    assert (record.num_nodes, record.generation, record.agent_store) == (1, 0, False)


def test_the_five_variables_alone_are_enough() -> None:
    """002-10: the older launcher sets no PADDLE_MASTER; the workers meet at the first endpoint."""
    names = ("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM", "PADDLE_TRAINER_ENDPOINTS", "PADDLE_CURRENT_ENDPOINT")
    record = read_fleet(Environment({name: LAUNCHED[name] for name in names} | {"FLAGS_selected_gpus": "1"}))
    assert (record.master, record.local_rank, record.local_device_ids) == ("10.0.0.1:6170", 1, (1,))


def test_two_nodes_by_endpoints() -> None:
    env = Environment({"PADDLE_TRAINER_ID": "2", "PADDLE_TRAINER_ENDPOINTS": "a:1,a:2,b:1,b:2"})
    record = read_fleet(env)
    assert (record.world_size, record.local_rank, record.local_world_size, record.num_nodes) == (4, 0, 2, 2)


def test_one_process_in_each_pod_of_the_operator() -> None:
    """000-28: the operator's variables describe pods; one process in each is a worker."""
    env = Environment(
        {
            "PADDLE_TRAINER_ID": "1", "PADDLE_TRAINERS_NUM": "2", "TRAINING_ROLE": "TRAINER",
            "PADDLE_TRAINING_ROLE": "TRAINER", "POD_IP": "10.0.0.2", "PADDLE_PORT": "36001",
            "PADDLE_TRAINER_ENDPOINTS": "10.0.0.1:36001,10.0.0.2:36001", "PADDLE_TRAINERS": "10.0.0.1,10.0.0.2",
            "PADDLE_PSERVERS_IP_PORT_LIST": "",
        }
    )  # fmt: skip
    record = read_fleet(env)
    assert (record.global_rank, record.world_size, record.local_rank, record.num_nodes) == (1, 2, 0, 2)


def test_a_single_worker_needs_nothing_else() -> None:
    record = read_fleet(Environment({"PADDLE_TRAINERS_NUM": "1"}))
    assert (record.global_rank, record.world_size, record.local_rank, record.master) == (0, 1, 0, None)


def test_without_a_list_the_master_says_where_to_meet() -> None:
    env = {"PADDLE_TRAINER_ID": "1", "PADDLE_TRAINERS_NUM": "4", "PADDLE_MASTER": "far:9", "PADDLE_NNODES": "2"}
    record = read_fleet(Environment({**env, "PADDLE_LOCAL_RANK": "1", "PADDLE_LOCAL_SIZE": "2"}))
    assert (record.local_rank, record.local_world_size, record.num_nodes, record.master) == (1, 2, 2, "far:9")


@pytest.mark.parametrize(
    ("left_out", "changed", "message"),
    [
        ((), {"PADDLE_TRAINERS_NUM": "3", "PADDLE_GLOBAL_SIZE": "3"}, "PADDLE_TRAINERS_NUM is 3 and PADDLE_TRAINER_E"),
        ((), {"PADDLE_TRAINER_ID": "2", "PADDLE_GLOBAL_RANK": "2"}, "PADDLE_TRAINER_ID is 2"),
        ((), {"PADDLE_GLOBAL_RANK": "0"}, "PADDLE_GLOBAL_RANK"),
        ((), {"PADDLE_GLOBAL_SIZE": "8"}, "PADDLE_GLOBAL_SIZE"),
        ((), {"RANK": "0"}, "RANK is '0'"),
        ((), {"WORLD_SIZE": "8"}, "WORLD_SIZE is '8'"),
        ((), {"LOCAL_RANK": "0"}, "LOCAL_RANK"),
        ((), {"MASTER_PORT": "6168"}, "MASTER_ADDR"),
        ((), {"PADDLE_CURRENT_ENDPOINT": "10.0.0.1:6170"}, "PADDLE_CURRENT_ENDPOINT"),
        ((), {"PADDLE_TRAINER_ENDPOINTS": "10.0.0.1:1,10.0.0.1:1"}, "more than once"),
        ((), {"PADDLE_TRAINER_ENDPOINTS": "10.0.0.1,10.0.0.2"}, "host:port"),
        ((), {"PADDLE_TRAINERS_NUM": "two"}, "PADDLE_TRAINERS_NUM is 'two'"),
        ((), {"PADDLE_TRAINING_ROLE": "PSERVER"}, "PADDLE_TRAINING_ROLE is 'PSERVER'"),
        ((), {"TRAINING_ROLE": "PSERVER"}, "TRAINING_ROLE is 'PSERVER'"),
        (("PADDLE_TRAINER_ID", "PADDLE_GLOBAL_RANK", "RANK"), {}, "PADDLE_TRAINER_ID is not set"),
        (
            ("PADDLE_TRAINER_ENDPOINTS", "PADDLE_CURRENT_ENDPOINT", "PADDLE_MASTER", "MASTER_ADDR"),
            {},
            "PADDLE_MASTER, MASTER_ADDR",
        ),
    ],
)
def test_what_contradicts_itself_is_refused_by_name(
    left_out: tuple[str, ...], changed: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_fleet(without(*left_out, **changed))


def test_a_launcher_url_is_not_where_workers_meet() -> None:
    record = read_fleet(without("MASTER_ADDR", PADDLE_MASTER="etcd://10.0.0.9:2379"))
    assert record.master == "10.0.0.1:6170"


def test_restarts_are_counted() -> None:
    assert read_fleet(without(FLEET_GENERATION="3", TORCHELASTIC_RESTART_COUNT="3")).generation == 3
    assert read_fleet(without(TORCHELASTIC_RESTART_COUNT="2")).generation == 2


def test_a_long_list_comes_from_the_backup_file(tmp_path: Path) -> None:
    """B.3: PADDLE_BACKUP_ENV_PATH names a JSON file with what is too long for the environment."""
    path = tmp_path / "backup_env.1.json"
    endpoints = ",".join(f"10.0.{i // 250}.{i % 250}:6170" for i in range(4000))
    path.write_text(json.dumps({"PADDLE_TRAINER_ENDPOINTS": endpoints, "OTHER": "x"}))
    env = {"PADDLE_TRAINER_ID": "3999", "PADDLE_TRAINERS_NUM": "4000", "PADDLE_BACKUP_ENV_PATH": str(path)}
    record = read_fleet(Environment(env))
    assert (record.world_size, len(record.worker_endpoints), record.num_nodes) == (4000, 4000, 4000)
    assert read_list(Environment({**env, "PADDLE_TRAINER_ENDPOINTS": "a:1"}), "PADDLE_TRAINER_ENDPOINTS") == ("a:1",)


@pytest.mark.parametrize("content", [None, "{", "[1]", '{"PADDLE_TRAINER_ENDPOINTS": 3}'])
def test_a_bad_backup_file_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "backup.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match="PADDLE_BACKUP_ENV_PATH"):
        read_list(Environment({"PADDLE_BACKUP_ENV_PATH": str(path)}), "PADDLE_TRAINER_ENDPOINTS")


def test_device_ids() -> None:
    env = Environment({"PADDLE_WORLD_DEVICE_IDS": "0,1:2,3", "FLAGS_selected_gpus": "x"})
    assert read_device_ids(env, "PADDLE_WORLD_DEVICE_IDS") == (0, 1, 2, 3)
    assert read_device_ids(env, "PADDLE_LOCAL_DEVICE_IDS") == ()
    with pytest.raises(ConfigError, match="FLAGS_selected_gpus is 'x'"):
        read_device_ids(env, "PADDLE_LOCAL_DEVICE_IDS", "FLAGS_selected_gpus")


def test_blank_variables_count_as_absent() -> None:
    assert fleet_variables(Environment({"PADDLE_TRAINER_ID": " ", "PADDLE_TRAINERS_NUM": ""})) == []
    assert agreed_int(Environment({"RANK": ""}), ("RANK",)) is None
