"""Ports under strangers: idle ones, slow ones, ones that come back, and a low limit of open files."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.launch.membership.callers import Answerer, Seldom, most_connections
from fleet.launch.membership.kv_service import KeyValueService
from fleet.launch.membership.outage import ContactAnswer, ask
from tests.helpers.crowd import Crowd
from tests.helpers.job_keys import JobKeys
from tests.launch.launcher import ROOT, Launcher
from tests.launch.membership.test_meeting import HELLO, TWO, master, ranks

SECRET = b"0123456789abcdef"
# Runs a command with few open files allowed, the limit users meet most being 1,024.
FEW_FILES = ("sh", "-c", 'ulimit -n 160; exec "$0" "$@"')


def few_files(program: str) -> None:
    """Runs ``program`` under the low limit; it fails with what it printed."""
    done = subprocess.run(
        [*FEW_FILES, sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_port_holds_fewer_connections_than_there_are_files(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, most in ((64, 32), (1024, 768), (1 << 20, 4096), (-1, 4096)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert most_connections(4096) == most


def test_a_job_starts_amid_idle_strangers(tmp_path: Path) -> None:
    """Issue 10, High 4: 1,000 idle connections ended the launcher with a traceback."""
    flags = (*TWO, *master())
    secret = {"FLEET_JOB_SECRET": SECRET.hex()}
    with Launcher(tmp_path / "a", HELLO, *flags, env=secret, inside=FEW_FILES) as one:
        one.wait_for("Waiting peer start", "stderr")
        port = int(flags[2].rpartition(":")[2])
        with Crowd(("127.0.0.1", port), 300) as crowd:
            began = crowd.num_opened
            with Launcher(tmp_path / "b", HELLO, *flags, env=secret) as two:
                assert (one.wait(), two.wait()) == (0, 0), (one.stderr, two.stderr)
        assert crowd.num_opened > began
        assert ranks(one, two) == ["0", "1"]
        assert one.stderr.count("The rendezvous service refused 127.0.0.1") == 1
        assert "Traceback" not in one.stderr


def test_the_service_answers_members_while_strangers_return() -> None:
    service = KeyValueService(socket.create_server(("127.0.0.1", 0)), SECRET, lambda *about: None)
    service._most = 50
    address = service._listener.getsockname()
    clients = [JobKeys(address, SECRET, prefix="/job/", ttl_s=5.0) for _ in range(12)]
    try:
        clients[0].connect()
        with Crowd(address, 100):
            for number, client in enumerate(clients):
                if number:
                    client.connect()
                client.put(f"{number}", number, leased=True)
            assert clients[0].read().values == {f"{number}": number for number in range(12)}
            assert len(service._connections) <= 50
    finally:
        for client in clients:
            client.close()
        service.close()


def test_proved_connections_are_never_evicted() -> None:
    said: list[str] = []
    service = KeyValueService(
        socket.create_server(("127.0.0.1", 0)), SECRET, lambda *about: said.append(" ".join(about))
    )
    service._most = 2
    address = service._listener.getsockname()
    clients = [JobKeys(address, SECRET, prefix="/job/", ttl_s=5.0) for _ in range(2)]
    try:
        for client in clients:
            client.connect()
        with socket.create_connection(address, timeout=5) as third:
            assert third.recv(100) == b""
        assert said[0].endswith("2 launchers' connections are all that the limit of open files allows")
        clients[0].put("a", 1)
        assert clients[1].read().values == {"a": 1}
    finally:
        for client in clients:
            client.close()
        service.close()


def test_descriptors_that_others_took_stop_no_service() -> None:
    """A full table of open files: the newcomer takes the place of a stranger."""
    few_files(
        """
import os, socket, time
from fleet.launch.membership.kv_client import KeyValueClient
from fleet.launch.membership.kv_service import KeyValueService
service = KeyValueService(socket.create_server(("127.0.0.1", 0)), b"s", lambda *about: None)
address = service._listener.getsockname()
strangers = [socket.create_connection(address) for _ in range(20)]
while len(service._connections) < 20:
    time.sleep(0.01)
taken = []
try:
    while True:
        taken.append(os.dup(0))
except OSError:
    pass
os.close(taken.pop())  # for the client's own end; the service's end has to come from a stranger
client = KeyValueClient(address, b"s", ttl_s=5.0)
client.connect()
client.put("/job/a", "1")
assert client.read("/job/").values == {"a": 1}
for number in taken:
    os.close(number)
service.close()
"""
    )


def test_a_job_larger_than_the_limit_is_refused_at_the_start(tmp_path: Path) -> None:
    with Launcher(tmp_path, HELLO, "--nnodes=100", "--nproc_per_node=1", inside=FEW_FILES) as one:
        assert one.wait() == 1
        assert "up to 100 nodes, and this node, where they meet, can hold the connections of 40" in one.stderr
        assert "ulimit -n" in one.stderr


@pytest.fixture
def contact() -> Iterator[ContactAnswer]:
    answer = ContactAnswer("127.0.0.1", SECRET, "a", lambda: True)
    yield answer
    answer.close()


def test_the_contact_port_answers_amid_slow_strangers(contact: ContactAnswer) -> None:
    """Issue 10, Low: each stranger held the one thread for half a second, or a byte at a time for seconds."""
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(("127.0.0.1", contact.port))) for _ in range(20)]
        for sock in slow[:10]:
            sock.sendall(b"x")
        began = time.monotonic()
        assert ask("127.0.0.1", contact.port, "a", SECRET) is True
        assert time.monotonic() - began < 0.4
        for sock in slow:  # the limit counts from the start, not from the last byte
            sock.settimeout(3)
            assert sock.recv(1) == b""


def test_the_contact_port_answers_while_strangers_return(contact: ContactAnswer) -> None:
    with Crowd(("127.0.0.1", contact.port), 200):
        answers = [ask("127.0.0.1", contact.port, "a", SECRET) for _ in range(20)]
    assert answers.count(True) >= 18, answers


def test_a_long_question_and_an_answer_nobody_reads_end_the_connection() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    answerer = Answerer(
        listener,
        lambda text: b"x" * (8 << 20) if text.endswith(b"?") else None,
        most=2,
        limit_s=0.5,
        longest=64,
        name="test",
    )
    try:
        with socket.create_connection(address, timeout=5) as sock:
            sock.sendall(b"x" * 64)
            assert sock.recv(1) == b""
        with socket.create_connection(address, timeout=5) as unread:
            unread.sendall(b"?")
            with socket.create_connection(address, timeout=5) as sock:
                sock.sendall(b"?")
                assert sum(len(block) for block in iter(lambda: sock.recv(1 << 20), b"")) == 8 << 20
            time.sleep(1.0)
            assert not answerer._callers
    finally:
        answerer.close()


def test_a_newcomer_that_gets_the_number_of_a_dropped_caller_ends_nothing() -> None:
    """The dropped caller's byte is announced together with the newcomer, which has its descriptor by then."""
    entered, go_on = threading.Event(), threading.Event()

    def answer(text: bytes) -> bytes | None:
        if text == b"wait":
            entered.set()
            go_on.wait(10)
        return text if text.endswith(b"?") else None

    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    answerer = Answerer(listener, answer, most=2, limit_s=5.0, longest=64, name="test")
    try:
        with (
            socket.create_connection(address, timeout=5) as oldest,
            socket.create_connection(address, timeout=5) as waiting,
        ):
            waiting.sendall(b"wait")
            assert entered.wait(10)
            with socket.create_connection(address, timeout=5) as newcomer:
                oldest.sendall(b"x")
                go_on.set()
                newcomer.sendall(b"new?")
                assert newcomer.recv(16) == b"new?"
    finally:
        answerer.close()


def test_an_answer_that_fails_ends_one_connection() -> None:
    def answer(text: bytes) -> bytes:
        if text == b"fail":
            raise LookupError(text)
        return text

    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    answerer = Answerer(listener, answer, most=2, limit_s=5.0, longest=64, name="test")
    try:
        for text, heard in ((b"fail", b""), (b"still", b"still")):
            with socket.create_connection(address, timeout=5) as sock:
                sock.sendall(text)
                assert sock.recv(16) == heard
    finally:
        answerer.close()


def test_a_host_is_named_once_a_minute() -> None:
    said: list[str] = []
    seldom = Seldom(said.append)
    for at in (100.0, 101.0, 159.0, 161.0, 162.0):
        seldom("a", f"a at {at}", at)
    seldom("b", "b", 162.0)
    assert said == ["a at 100.0", "a at 161.0", "b"]
    for i in range(2000):
        seldom(f"{i}", "x", 170.0)
    assert said[3:] == ["x"] * 8 + ["x Lines about further addresses are left out for a minute."]
    seldom("late", "late", 222.0)
    assert said[-1] == "late"
