"""What every process of a job gets."""

from __future__ import annotations

import sys

import pytest

from fleet.launch.plan.records import LaunchConfig, ProcessSpec
from tests.helpers.launching import SCRIPT, plan, read

MODES = [(), ("--server_num=1", "--worker_num=1")]


@pytest.fixture(params=MODES, ids=["collective", "ps"])
def flags(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return request.param  # type: ignore[no-any-return]


def specs_of(flags: tuple[str, ...], env: dict[str, str] | None = None) -> tuple[LaunchConfig, list[ProcessSpec]]:
    config = read(*flags, env=env)
    return config, plan(config, env=env, generation=3)


def test_marks_of_the_job(flags: tuple[str, ...]) -> None:
    config, specs = specs_of(flags)
    for spec in specs:
        assert spec.environment["FLEET_JOB_SECRET"] == config.pod.secret
        assert spec.environment["FLEET_POD"] == config.pod.id
        assert spec.environment["FLEET_GENERATION"] == "3"
        assert not any(config.pod.secret in word for word in spec.command)
        assert all(isinstance(value, str) for value in spec.environment.values())


def test_no_secret_means_no_variable() -> None:
    config = read("--nnodes=2", "--master=10.0.0.1:80")
    assert "FLEET_JOB_SECRET" not in plan(config)[0].environment


def test_one_node_stays_on_the_loopback_interface(flags: tuple[str, ...]) -> None:
    assert specs_of(flags)[1][-1].environment["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in specs_of(flags, {"GLOO_SOCKET_IFNAME": "eth1"})[1][-1].environment


def test_proxies_are_taken_away_and_kept_under_another_name(flags: tuple[str, ...]) -> None:
    """001-08, C.1."""
    for spec in specs_of(flags, {"http_proxy": "http://127.0.0.1:9"})[1]:
        assert spec.environment["http_proxy_original"] == "http://127.0.0.1:9"
        assert spec.removed == ("http_proxy",)
        assert "http_proxy" not in spec.environment


def test_an_outer_torchrun_does_not_shine_through(flags: tuple[str, ...]) -> None:
    for spec in specs_of(flags, {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "x"})[1]:
        assert set(spec.removed) == {"TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID"}


def test_thread_count() -> None:
    assert plan(read("--nproc_per_node=2"))[1].environment["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in plan(read())[0].environment


def test_lists_too_long_for_the_environment_go_to_the_file(flags: tuple[str, ...]) -> None:
    """C.1: PADDLE_ENV_LIMIT_LEN."""
    config = read("--server_num=1", "--worker_num=9") if flags else read("--nproc_per_node=9")
    env = {"PADDLE_ENV_LIMIT_LEN": "100", "PADDLE_TRAINER_ENDPOINTS": ""}
    short = read(*(("--server_num=1", "--worker_num=9") if flags else ("--nproc_per_node=9",)), env=env)
    for spec in plan(short, env=env):
        assert "PADDLE_TRAINER_ENDPOINTS" not in spec.environment
        assert spec.overflow["PADDLE_TRAINER_ENDPOINTS"].count(":") == 9
        assert "PADDLE_TRAINER_ENDPOINTS" in spec.removed
        assert spec.environment["PADDLE_BACKUP_ENV_PATH"] == f"{spec.backup_path}"
    assert all(not spec.overflow for spec in plan(config))


def test_an_address_with_a_password_is_not_handed_on() -> None:
    """The launcher alone talks to etcd."""
    addresses = {"PADDLE_ELASTIC_SERVER": "me:pw@10.0.0.1:2379", "PADDLE_ELASTIC_NP": "1"}
    assert "PADDLE_ELASTIC_SERVER" in plan(read(), env=addresses)[0].removed
    assert plan(read(), env={**addresses, "PADDLE_ELASTIC_SERVER": "10.0.0.1:2379"})[0].removed == ()


def test_files_of_processes_do_not_collide() -> None:
    specs = plan(read("--server_num=2", "--worker_num=2"))
    assert [f"{spec.environment_log_path}" for spec in specs] == [f"log/envlog.{i}" for i in range(4)]
    assert len({spec.log_path for spec in specs}) == 4


@pytest.mark.parametrize(
    ("flags", "script", "command"),
    [
        ((), (SCRIPT, "a"), (sys.executable, "-u", SCRIPT, "a")),
        (("-m",), ("pkg.train", "a"), (sys.executable, "-u", "-m", "pkg.train", "a")),
        ((), ("run_check",), (sys.executable, "-u", "-m", "fleet", "run_check")),
        ((), ("/bin/sh", "-c", "x"), ("/bin/sh", "-c", "x")),
    ],
)
def test_commands(flags: tuple[str, ...], script: tuple[str, ...], command: tuple[str, ...]) -> None:
    assert plan(read(*flags, script=script))[0].command == command
