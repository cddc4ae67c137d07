"""scale, status and clean on a real etcd."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from fleet.common.addresses import join_endpoint
from fleet.errors import ConfigError
from fleet.launch.cli.elastic_command import main, read_np
from fleet.launch.membership.agreement import Rules, first_world
from fleet.launch.membership.etcd_address import EtcdAddress
from fleet.launch.membership.kv_service import KeyValueService
from fleet.launch.membership.record_proof import RecordProofs
from fleet.launch.membership.world import COMPLETE, FIXED, OVER, RUNNING, Node, Reason, World, to_json
from tests.helpers import etcd as helper
from tests.helpers.etcd import Etcd
from tests.helpers.job_keys import JobKeys

with_etcd = pytest.mark.skipif(bool(helper.missing()), reason=helper.missing())
PEER = {"host": "10.0.0.1", "name": "abcdef"}
RUNS = World(generation=3, state=FIXED, nodes=("a", "b"), peers=(PEER, PEER), min_nodes=2, max_nodes=2)


class Command:
    """The command on one etcd, and the store behind it."""

    def __init__(self, server: Etcd, capsys: pytest.CaptureFixture[str]) -> None:
        from fleet.launch.membership.etcd import EtcdStore

        self.store = EtcdStore(EtcdAddress(endpoints=(server.endpoint,)), timeout_s=2.0)
        self._capsys, self._env = capsys, {"PADDLE_ELASTIC_SERVER": server.endpoint, "PADDLE_ELASTIC_JOB_ID": "J"}

    def put(self, key: str, record: World | Node) -> None:
        self.store.put(f"/paddle/J/{key}", json.dumps(to_json(record), sort_keys=True))

    def __call__(self, *argv: str, **env: str) -> tuple[int, str]:
        code = main(argv, {**self._env, **env})
        captured = self._capsys.readouterr()
        return code, captured.out + captured.err


@pytest.fixture
def command(etcd: Etcd, capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    one = Command(etcd, capsys)
    yield one
    one.store.delete("/paddle/J/")
    one.store.close()


@with_etcd
def test_a_reader_that_has_enough_is_no_error(command: Command, etcd: Etcd) -> None:
    """004-09: as in ``python -m fleet.elastic status | head -1``."""
    command.put("world", RUNS)
    reading, writing = os.pipe()
    os.close(reading)
    words = [sys.executable, "-m", "fleet.elastic", f"--elastic_server={etcd.endpoint}", "--job_id=J", "status"]
    done = subprocess.run(words, stdout=writing, stderr=subprocess.PIPE, timeout=30, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


@with_etcd
def test_scale_status_and_clean(command: Command) -> None:
    """004-09, 004-13: a real key, compared and set; refused for a job that does not exist or is over."""
    code, text = command("--np=4", "scale")
    assert (code, "No job 'J' is on this etcd" in text) == (1, True)
    command.put("world", RUNS)
    command.put("node/a", Node(host="10.0.0.1", phase=RUNNING, generation=3, peer=PEER))
    before = command.store.read("/paddle/J/").revision
    code, text = command("scale", PADDLE_ELASTIC_NP="2")
    assert (code, "nothing restarts" in text) == (0, True)
    assert command.store.read("/paddle/J/").revision == before, "nothing was written"
    code, text = command("--np=2:4", "scale")
    assert (code, "has --np=2:4 (was 2). action scale done" in text) == (0, True)
    world = command.store.read("/paddle/J/").values["world"]
    assert (world["min_nodes"], world["max_nodes"], world["generation"], world["state"]) == (2, 4, 3, FIXED)
    code, text = command("status")
    assert code == 0
    assert "fixed, generation 3, wants 2:4 nodes" in text
    assert "node 10.0.0.1: rank 0, running, pod abcdef" in text
    assert json.loads(command("status", "--json")[1])["world"]["max_nodes"] == 4
    code, text = command("clean")
    assert (code, "still has launchers on 10.0.0.1" in text) == (1, True)
    command.store.delete("/paddle/J/node/")
    assert command("clean")[0] == 0
    assert command.store.read("/paddle/").values == {}
    command.put("world", World(**{**vars(RUNS), "state": COMPLETE}))
    assert "is over (complete)" in command("--np=4", "scale")[1]
    command.put("world", first_world(Rules(min_nodes=1, max_nodes=1)))
    assert command("--np=4", "scale")[0] == 0, "a job that waits for its nodes exists"
    assert "job J: waiting for nodes, generation 0" in command("status")[1]
    scaled = Reason(kind="scaled", code=0, node="a", text="3 nodes", restart=True)
    command.put("world", World(**{**vars(RUNS), "state": OVER, "reason": scaled}))
    assert "job J: waiting for nodes, generation 3" in command("status")[1]
    command.put(
        "world", World(**{**vars(RUNS), "state": OVER, "reason": replace(scaled, kind="failed", restart=False)})
    )
    assert "job J: over, generation 3" in command("status")[1]


@with_etcd
@pytest.mark.parametrize("garbage", ["[" * 3000, '"x"', "[]", '{"host": 5}', '{"host": "h", "phase": []}'])
def test_what_no_launcher_has_written_is_ignored(command: Command, garbage: str) -> None:
    """Issue 10, Medium 9: garbage under a node's key ended in a traceback, and kept the job from being removed."""
    command.put("world", RUNS)
    command.store.put("/paddle/J/node/b", garbage)
    code, text = command("status")
    assert (code, "fixed, generation 3" in text) == (0, True)
    if garbage[-1] != "[":
        assert "ignored: node/b of an unknown host is no record of a launcher" in text or "of h is" in text
    assert command("status", "--json")[0] == command("scale", "--np=4")[0] == 0
    command.store.put("/paddle/J/world", garbage)
    for action in ("status", "scale"):
        code, text = command(action, "--np=4")
        assert (code, "The record of the job 'J' is no record of a launcher" in text) == (1, True), text
    assert "2 key(s) of the job 'J' removed" in command("clean")[1]


@with_etcd
def test_a_job_of_a_fixed_number_of_nodes_is_not_scaled(command: Command) -> None:
    command.put("world", RUNS)
    command.put("node/a", Node(host="10.0.0.1", phase=RUNNING, generation=3, peer=PEER, is_elastic=False))
    code, text = command("scale", "--np=2:4")
    assert (code, "has a fixed number of nodes, 2, so it cannot be scaled" in text) == (1, True), text
    assert "wants 2 nodes" in command("status")[1]


@with_etcd
def test_records_under_another_secret(command: Command) -> None:
    """With FLEET_JOB_SECRET in its environment the command takes only records that carry a proof of it."""
    ours, theirs = (RecordProofs(secret, "/paddle/J/") for secret in (b"ab" * 32, b"cd" * 32))
    node = Node(host="10.0.0.9", phase=RUNNING, generation=3, peer=PEER)
    command.store.put("/paddle/J/world", ours.text("world", RUNS))
    command.store.put("/paddle/J/node/b", theirs.text("node/b", node))
    code, text = command("status", FLEET_JOB_SECRET="ab" * 32)
    assert (code, "ignored: node/b of 10.0.0.9 is without a proof of FLEET_JOB_SECRET" in text) == (0, True)
    assert "node 10.0.0.9: rank 1, running" in command("status")[1], "who was not told the secret sees all"
    code, text = command("scale", "--np=4", FLEET_JOB_SECRET="cd" * 32)
    assert (code, "is without a proof of FLEET_JOB_SECRET. Set FLEET_JOB_SECRET as" in text) == (1, True)
    assert command("scale", "--np=4", FLEET_JOB_SECRET="ab" * 32)[0] == 0
    assert "still has launchers on 10.0.0.9" in command("clean")[1]
    assert command("clean", FLEET_JOB_SECRET="ab" * 32)[0] == 0


@pytest.mark.parametrize(
    ("argv", "env", "text"),
    [
        (("--job_id=J", "status"), {}, "The address of etcd is missing"),
        (("--elastic_server=127.0.0.1:1", "status"), {}, "The name of the job is missing"),
        (("--elastic_server=127.0.0.1:1", "--job_id=a/b", "status"), {}, "letters, digits"),
        (("--elastic_server=127.0.0.1:1", "--job_id=J", "scale"), {}, "scale needs the number of nodes"),
        (("--elastic_server=127.0.0.1:1", "--job_id=J", "--np=x", "scale"), {}, "N or MIN:MAX"),
        (("--elastic_server=127.0.0.1:1", "--job_id=J", "grow"), {}, "invalid choice: 'grow'"),
        ((), {"PADDLE_ELASTIC_SERVER": "127.0.0.1:1"}, "the following arguments are required: action"),
    ],
)
def test_what_cannot_be_used_exits_with_2(
    argv: tuple[str, ...], env: dict[str, str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """C.7: a missing or unknown action is an error."""
    assert main(argv, env) == 2
    assert text in capsys.readouterr().err


@with_etcd
def test_etcd_that_is_not_there_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("--elastic_server", f"127.0.0.1:{helper.free_port()}", "--job_id=J", "status"), {}) == 1
    assert "nothing listens there" in capsys.readouterr().err


def test_missing_client_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """004-20."""
    monkeypatch.setattr("fleet.launch.membership.etcd_address.find_spec", lambda name: None)
    assert main(("--elastic_server=127.0.0.1:1", "--job_id=J", "status"), {}) == 2
    assert "pip install '.[elastic]'" in capsys.readouterr().err


def test_numbers_of_nodes() -> None:
    assert [read_np("3"), read_np("2:4")] == [(3, 3), (2, 4)]
    for wrong in ("0", "4:2", "a", "1:2:3", ""):
        with pytest.raises(ConfigError, match="--np"):
            read_np(wrong)


@with_etcd
def test_what_a_record_says_moves_no_cursor_and_begins_no_line(command: Command) -> None:
    """Without the secret, records are shown as they are, whoever has written them."""
    host = "\x1b[31mevil\nnode 10.0.0.9: rank 0, running"
    command.put("world", replace(RUNS, reason=Reason(kind="failed", code=1, node="a", text="\x1b]0;title\x07\r\u202e")))
    command.put("node/a", Node(host=host, phase="\x1b[2K", generation=3, peer={"name": "\x1b[A"}))
    for action, num_lines in (("status", 3), ("clean", 1)):
        _, text = command(action)
        assert len(text.splitlines()) == num_lines
        assert "\\x1b[31mevil\\nnode" in text
        assert all(line.isprintable() for line in text.splitlines())


@pytest.fixture
def service() -> Iterator[JobKeys]:
    """The records of the job "default" at a launcher of the job."""
    listener = socket.create_server(("127.0.0.1", 0))
    one = KeyValueService(listener, SECRET.encode(), lambda *about: None)
    keys = JobKeys(listener.getsockname(), SECRET.encode(), prefix="/paddle/default/", ttl_s=5.0)
    keys.connect()
    yield keys
    keys.close()
    one.close()


SECRET = "5e" * 16


def at_launcher(keys: JobKeys, *words: str, secret: str = SECRET) -> int:
    address = join_endpoint(*keys.client.address)
    return main((f"--master={address}", *words), {"FLEET_JOB_SECRET": secret})


def test_a_job_without_etcd(service: JobKeys, capsys: pytest.CaptureFixture[str]) -> None:
    """Issue 11, 3: scale and status ask the launcher where the nodes meet; clean has nothing to do there."""
    assert at_launcher(service, "status") == 1
    assert "No job 'default' is there. Check --job_id and --master" in capsys.readouterr().err
    proofs = RecordProofs(SECRET.encode(), "/paddle/default/")
    service.put("world", json.loads(proofs.text("world", RUNS)))
    assert at_launcher(service, "--np=2:4", "scale") == 0
    assert at_launcher(service, "status") == 0
    assert "wants 2:4 nodes" in capsys.readouterr().out
    world = RecordProofs(SECRET.encode(), "/paddle/default/").checked(service.read()).values["world"]
    assert (world["min_nodes"], world["max_nodes"]) == (2, 4)
    assert at_launcher(service, "clean") == 1
    assert "so there is nothing to clean. Stop that launcher" in capsys.readouterr().err


def test_a_launcher_that_is_not_there_or_has_another_secret(
    service: JobKeys, capsys: pytest.CaptureFixture[str]
) -> None:
    assert at_launcher(service, "status", secret="ab" * 16) == 1
    assert "Set FLEET_JOB_SECRET" in capsys.readouterr().err
    assert main((f"--master=127.0.0.1:{helper.free_port()}", "status"), {}) == 1
    assert "nothing is left of it afterwards" in capsys.readouterr().err
    assert main(("status",), {}) == 2
    assert "or give --master=ip:port" in capsys.readouterr().err
