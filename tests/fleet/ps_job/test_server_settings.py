"""FLEET_PS_LEVEL and FLEET_PS_FOLDER: what a server keeps, and what of it survives (PS design 2d, L0 to L2)."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fleet.env import Environment
from fleet.errors import ConfigError, PSError
from fleet.facade import Fleet
from fleet.ps.client.client import Client
from fleet.ps.client.client_config import ClientConfig
from fleet.ps.server.server_config import ServerConfig
from fleet.ps.wire.transport import SocketTransport
from fleet.ps_job.server_settings import (
    Keeping,
    other_places,
    read_bound_socket,
    read_keeping,
    read_places,
    read_seconds,
    thread_note,
)
from fleet.ps_job.user_secret import read_user_secret
from fleet.role_maker import Role, UserDefinedRoleMaker
from tests.fleet.ps.service import Service, serving, silent
from tests.fleet.ps.test_recovery import TABLES, state_of, train
from tests.fleet.ps_job.test_server_job import make_sgd, served, strategy
from tests.helpers.served import WideAndDeep, batches, run_job
from tests.helpers.served import train as train_model


def keeping(**values: str) -> Keeping:
    return read_keeping(Environment(values), 3)


def test_the_level_is_1_with_a_folder_and_0_without(tmp_path: Path) -> None:
    assert keeping() == Keeping(folder=None, level=0)
    assert keeping(FLEET_PS_LEVEL="0") == Keeping(folder=None, level=0)
    assert keeping(FLEET_PS_FOLDER=str(tmp_path)) == Keeping(folder=tmp_path / "server-3", level=1)
    assert keeping(FLEET_PS_FOLDER=str(tmp_path), FLEET_PS_LEVEL="2") == Keeping(folder=tmp_path / "server-3", level=2)


def test_level_0_beside_a_folder_says_that_nothing_is_kept(tmp_path: Path) -> None:
    found = keeping(FLEET_PS_FOLDER=str(tmp_path), FLEET_PS_LEVEL="0")
    assert (found.folder, found.level) == (None, 0)
    assert "nothing is kept" in found.note


def test_a_standby_keeps_its_own_folder_at_level_3(tmp_path: Path) -> None:
    pair = {"FLEET_PS_FOLDER": str(tmp_path), "FLEET_PS_STANDBY_ENDPOINTS": "127.0.0.1:1"}
    assert keeping(**pair) == Keeping(folder=tmp_path / "server-3", level=1)
    assert keeping(**pair, FLEET_PS_STANDBY="1", FLEET_PS_LEVEL="3") == Keeping(folder=tmp_path / "standby-3", level=1)


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        (
            {"FLEET_PS_LEVEL": "3", "FLEET_PS_FOLDER": "/tmp"},
            "every server needs a standby",
        ),
        ({"FLEET_PS_STANDBY_ENDPOINTS": "a:1"}, "FLEET_PS_LEVEL is '3' .* FLEET_PS_FOLDER is not set"),
        (
            {"FLEET_PS_STANDBY_ENDPOINTS": "a:1", "FLEET_PS_FOLDER": "/tmp", "FLEET_PS_LEVEL": "1"},
            "it is 3",
        ),
    ],
)
def test_standbys_and_level_3_go_together(values: dict[str, str], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        keeping(**values)


SHARDS = "a:1,a:2;b:1,b:2"


def test_places_of_shards() -> None:
    places = read_places(Environment({"FLEET_PS_SHARD_ENDPOINTS": f" {SHARDS} "}), ["a:1", "b:2"])
    assert places == (("a:1", "a:2"), ("b:1", "b:2"))
    assert other_places(places, 1, "b:2") == ["a:2"]
    assert read_places(Environment({}), ["a:1"]) == ()


@pytest.mark.parametrize(
    ("values", "servers", "rule"),
    [
        ({}, ["a:1"], "lists 1 servers, a:1: each server process has one endpoint"),
        ({}, ["a:1", "c:2"], "each of them is at one of these at first"),
        ({}, ["a:1", "b:1"], "each of them is at one of these at first"),
        ({"FLEET_PS_SHARD_ENDPOINTS": "a:1,a:2;b:1,a:2"}, ["a:1", "a:2"], "of its own"),
        ({"FLEET_PS_SHARD_ENDPOINTS": "a:1,a:2;b:1"}, ["a:1", "a:2"], "of its own"),
        ({"FLEET_PS_SHARD_ENDPOINTS": "a:1;b"}, ["a:1"], "FLEET_PS_SHARD_ENDPOINTS"),
        ({"FLEET_PS_STANDBY_ENDPOINTS": "c:1,c:2"}, ["a:1", "b:2"], "have neither standbys nor a port"),
        ({"FLEET_PS_METRICS_PORT": "9000"}, ["a:1", "b:2"], "have neither standbys nor a port"),
    ],
)
def test_places_that_do_not_fit(values: dict[str, str], servers: list[str], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        read_places(Environment({"FLEET_PS_SHARD_ENDPOINTS": SHARDS, **values}), servers)


@pytest.mark.parametrize("values", [{}, {"FLEET_PS_FOLDER": "/tmp", "FLEET_PS_LEVEL": "2"}, {"FLEET_PS_LEVEL": "0"}])
def test_shards_that_move_need_a_folder_and_level_1(values: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="shards that can move need a folder, and level 1"):
        keeping(FLEET_PS_SHARD_ENDPOINTS=SHARDS, **values)


@pytest.mark.parametrize("value", ["4", "-1", "L2", "1.5", "true"])
def test_a_wrong_level_is_refused_with_the_rule(value: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=f"FLEET_PS_LEVEL is '{value}' in the environment; it (is 0 .* 3|takes an integer)"
    ):
        keeping(FLEET_PS_FOLDER=str(tmp_path), FLEET_PS_LEVEL=value)


@pytest.mark.parametrize("value", ["1", "2"])
def test_a_level_that_writes_needs_a_folder(value: str) -> None:
    with pytest.raises(ConfigError, match="FLEET_PS_FOLDER is not set.* Set it"):
        keeping(FLEET_PS_LEVEL=value)


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf"])
def test_seconds_are_above_0_and_finite(value: str) -> None:
    assert read_seconds(Environment({}), "FLEET_PS_LEASE") == 60
    with pytest.raises(ConfigError, match=f"FLEET_PS_LEASE is '{value}' .* above 0: seconds a worker may be silent"):
        read_seconds(Environment({"FLEET_PS_LEASE": value}), "FLEET_PS_LEASE")


def test_workers_started_by_hand_on_one_machine_hear_of_their_threads() -> None:
    for here in ("127.0.0.1:36001", "localhost:36001", "[::1]:36001", "unix:/tmp/server"):
        assert "Set it to 1" in thread_note(Environment({}), here, 2)
    assert not thread_note(Environment({"OMP_NUM_THREADS": "2"}), "127.0.0.1:36001", 2)
    assert not thread_note(Environment({}), "10.0.0.1:36001", 2)
    assert not thread_note(Environment({}), "127.0.0.1:36001", 1)


class Disk:
    """What a machine that dies now would find again: names and bytes that were synced, and nothing else."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: dict[int, int] = {}  # by inode
        self.names: dict[int, set[str]] = {}
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self._noting(getattr(os, name)))

    def _noting(self, sync: Callable[[int], None]) -> Callable[[int], None]:
        def noted(fd: int) -> None:
            found, path = os.fstat(fd), Path(f"/proc/self/fd/{fd}")
            names = set(os.listdir(path)) if os.path.isdir(path) else None
            sync(fd)
            if names is None:
                self.sizes[found.st_ino] = max(found.st_size, self.sizes.get(found.st_ino, 0))
            else:
                self.names[found.st_ino] = names

        return noted

    def image(self, folder: Path, target: Path) -> Path:
        """Copies to ``target`` what of ``folder`` is there after a loss of power."""
        target.mkdir()
        for name in sorted(self.names.get(folder.stat().st_ino, set())):
            path = folder / name
            if path.is_dir():
                self.image(path, target / name)
            elif path.exists():
                shutil.copyfile(path, target / name)
                os.truncate(target / name, min(self.sizes.get(path.stat().st_ino, 0), path.stat().st_size))
        return target


def restarted(service: Service, folder: Path) -> Any:
    """The state of a server that starts from ``folder``."""
    config = service.configs[0]
    other = Service(1, num_workers=config.num_workers, mode=config.mode, job=config.job)
    object.__setattr__(other.configs[0], "folder", folder)
    try:
        return state_of(other.start(0))
    finally:
        other.close()


@pytest.mark.parametrize("level", [1, 2])
def test_level_2_survives_the_loss_of_what_was_not_synced(
    level: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L2: every flushed push is on the disk, after a snapshot too. L1 promises that for a killed process only."""
    disk = Disk(monkeypatch)
    with serving(folder=tmp_path / "s", level=level) as service:
        client = service.client(tables=TABLES)
        for round_ in range(3):
            train(client, 4, round_)
            client.flush()
            now = state_of(service.servers[0])
            power_cut = disk.image(tmp_path / "s" / "server-0", tmp_path / f"power{round_}")
            kill = shutil.copytree(tmp_path / "s" / "server-0", tmp_path / f"kill{round_}")
            assert restarted(service, kill) == now
            assert (restarted(service, power_cut) == now) == (level == 2)
            if round_ == 1:
                client.snapshot()
        if level == 2:
            assert "server-0" in disk.names[(tmp_path / "s").stat().st_ino]


@pytest.mark.parametrize(("level", "found"), [("0", (None, 0)), ("1", ("server-0", 1)), ("2", ("server-0", 2))])
def test_the_variables_reach_the_server(
    level: str, found: tuple[str | None, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Level 0 writes no file at all; the others write a journal, which goes when the job is over."""
    monkeypatch.setenv("FLEET_PS_FOLDER", str(tmp_path / "state"))
    monkeypatch.setenv("FLEET_PS_LEVEL", level)
    configs: list[ServerConfig] = []
    files: list[list[str]] = []

    def serve(own: Fleet, index: int) -> None:
        own.init_server()
        configs.append(own.session.server_job._parts[0][0])
        own.run_server()

    def work(own: Fleet, rank: int) -> None:
        model, optimizer = served(own, strategy("sync"), make_sgd)
        train_model(model, optimizer, batches(2))
        files.append([path.name for path in tmp_path.rglob("*")])
        own.stop_worker()

    run_job(work, strategy=strategy("sync"), serve=serve)
    config = configs[0]
    assert (None if config.folder is None else config.folder.name, config.journal_level) == found
    assert any(name.startswith("journal-") for name in files[0]) == (level != "0")
    assert (files[0] == []) == (level == "0")
    assert not list(tmp_path.rglob("journal*"))


def test_one_process_with_its_server_inside_goes_on_from_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedded server keeps what the variables say: a process that dies and is started again has its rows."""
    monkeypatch.setenv("FLEET_PS_FOLDER", str(tmp_path))
    data = batches(6)

    def begin(seed: int) -> tuple[Fleet, Any, Any]:
        own = Fleet()
        own.init(strategy=strategy("sync"), log_level="WARNING")
        model, optimizer = served(own, strategy("sync"), make_sgd, seed=seed)
        return own, model, optimizer

    own, model, optimizer = begin(0)
    train_model(model, optimizer, data[:3])
    own.session.close()  # as if the process had died: no stop_worker
    assert list(tmp_path.rglob("journal-*"))
    own, model, optimizer = begin(9)
    train_model(model, optimizer, data[3:])
    after = {name: value.clone() for name, value in model.state_dict().items()}
    own.stop_worker()
    own.session.close()
    assert not list(tmp_path.rglob("journal-*"))  # it has ended as it should
    monkeypatch.delenv("FLEET_PS_FOLDER")
    own, model, optimizer = begin(0)
    train_model(model, optimizer, data)
    for name, value in model.state_dict().items():
        assert torch.equal(value, after[name]), name
    own.stop_worker()
    own.session.close()


def test_the_socket_of_the_launcher_is_taken_and_nothing_else() -> None:
    """Issue 10, High 1: the descriptor in FLEET_PS_SOCKET, or the reason why it is not there."""
    assert read_bound_socket(Environment({})) is None
    with socket.socket() as held, socket.socket() as other, open(os.devnull) as file:
        held.bind(("127.0.0.1", 0))
        found = read_bound_socket(Environment({"FLEET_PS_SOCKET": str(held.fileno())}))
        assert found is not None
        host, port = held.getsockname()
        other_port = SocketTransport(bound=found).bind("127.0.0.1:0")
        assert other_port.endpoint != f"{host}:{port}", "a server elsewhere opens its own"
        other_port.close()
        listener = SocketTransport(bound=found).bind(f"{host}:{port}")
        socket.create_connection((host, port), 5).close()
        listener.accept().close()
        found.detach()
        again = read_bound_socket(Environment({"FLEET_PS_SOCKET": str(held.fileno())}))
        assert again is not None, "a server that is started again finds it listening"
        again.detach()
        caller = socket.create_connection((host, port), 5)
        for number in (other.fileno(), file.fileno(), caller.fileno(), 10**6):
            with pytest.raises(ConfigError, match="FLEET_PS_SOCKET is .* this process has none there"):
                read_bound_socket(Environment({"FLEET_PS_SOCKET": str(number)}))
        with pytest.raises(ConfigError, match="64-bit integer"):
            read_bound_socket(Environment({"FLEET_PS_SOCKET": str(10**30)}))
        caller.close()
        other.getsockname()  # it is still open


def test_another_user_of_the_machine_is_kept_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 10, High 3: started by hand on loopback without a secret, servers took whoever came, with an empty key."""
    monkeypatch.setenv("FLEET_SECRET_FOLDER", str(tmp_path / "mine"))
    theirs = read_user_secret(Environment({"FLEET_SECRET_FOLDER": str(tmp_path / "theirs")}))

    def work(own: Fleet, rank: int) -> None:
        model, optimizer = served(own, strategy("async"), make_sgd)
        endpoints = own.session.job.record.server_endpoints
        for secret in (theirs, b"\0"):
            client = Client(ClientConfig(endpoints=endpoints, secret=secret, heartbeat=False), notify=silent)
            with pytest.raises(PSError, match="another job secret"):
                client.open()
            client.close()
        train_model(model, optimizer, batches(2))
        own.stop_worker()

    run_job(work, strategy=strategy("async"))
    assert (tmp_path / "mine" / "job-secret").stat().st_mode & 0o777 == 0o600


def test_a_job_that_other_machines_see_does_not_use_the_users_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the others would have another one; the message says how to make one for all."""
    monkeypatch.setenv("FLEET_SECRET_FOLDER", str(tmp_path / "mine"))
    own = Fleet()
    endpoints = ["127.0.0.1:1", "10.0.0.9:2"]
    role = UserDefinedRoleMaker(current_id=0, role=Role.SERVER, worker_num=1, server_endpoints=endpoints)
    own.init(role, strategy=strategy("sync"), log_level="ERROR")
    served_model(own)
    with pytest.raises(ConfigError, match="'10.0.0.9:2' without a job secret"):
        own.init_server()
    assert not (tmp_path / "mine").exists()
    own.session.close()


def served_model(own: Fleet) -> None:
    net = WideAndDeep()
    own.distributed_optimizer(make_sgd(net.parameters()), strategy("sync"))
    own.distributed_model(net)
