"""A parameter-server job with --max_restart: a failed process alone is started again, the others go on."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tests.helpers import etcd
from tests.helpers.workers import free_ports
from tests.launch.launcher import Launcher

SCRIPT = """
import os, pathlib, sys, time
role, port = os.environ["TRAINING_ROLE"], os.environ.get("PADDLE_PORT")
print(role, "starts", os.environ.get("FLEET_PS_FOLDER"), port, flush=True)
def first_time(name):
    path = pathlib.Path(name)
    known = path.exists()
    path.touch()
    return not known
if role == "PSERVER":
    if first_time("server"):
        time.sleep(0.2)
        sys.exit(5)
    time.sleep(60)
if os.environ["PADDLE_TRAINER_ID"] == "0" and first_time("worker"):
    sys.exit(3)
time.sleep(1.5)
"""


def test_failed_server_and_worker_are_started_again_alone(tmp_path: Path) -> None:
    with Launcher(tmp_path, SCRIPT, "--server_num=1", "--worker_num=2", "--max_restart=2") as job:
        assert job.wait() == 0, job.stderr
        server = [line.split() for line in job.log("serverlog.0").splitlines() if "PSERVER starts" in line]
        assert len(server) == 2
        assert server[0] == server[1], "the same port, and the same folder for what it must remember"
        assert server[0][2].endswith("servers")
        assert job.log("workerlog.0").count("TRAINER starts") == job.stdout.count("TRAINER starts") == 2
        assert job.log("workerlog.1").count("TRAINER starts") == 1
        assert "server 0 ended with code 5 and is started again; " in job.stderr
        assert "worker 0 ended with code 3 and is started again; " in job.stderr
        assert not Path(server[0][2]).exists()


SQUATTER = """
import os, pathlib, socket, sys, time
if os.environ["TRAINING_ROLE"] == "PSERVER":
    listener = socket.socket(fileno=int(os.environ["FLEET_PS_SOCKET"]))
    assert listener.getsockname()[1] == int(os.environ["PADDLE_PORT"])
    listener.listen()
    path = pathlib.Path("server")
    if not path.exists():
        path.touch()
        sys.exit(5)
    listener.accept()[0].sendall(b"second")
    time.sleep(60)
port = int(os.environ["PADDLE_PSERVERS_IP_PORT_LIST"].split(":")[1])
waiting, taken = None, 0
while True:
    if waiting is None:
        try:
            waiting = socket.create_connection(("127.0.0.1", port))
            waiting.setblocking(False)
        except ConnectionRefusedError:
            pass
    with socket.socket() as squatter:
        squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, waiting is not None)
        try:
            squatter.bind(("127.0.0.1", port))
            squatter.listen()
            taken += 1
        except OSError:
            pass
    try:
        print("taken", taken, "times, then", waiting.recv(6))
        break
    except (AttributeError, BlockingIOError):
        time.sleep(0.001)
"""


def test_the_port_of_a_server_is_never_free(tmp_path: Path) -> None:
    """Issue 10, High 1: the launcher holds it for the server, before it listens and while it is started again.

    Before a server has listened for the first time, a program that sets SO_REUSEADDR can listen there, as a server that
    opens its PADDLE_PORT itself does; afterwards nobody can.
    """
    with Launcher(tmp_path, SQUATTER, "--server_num=1", "--worker_num=1", "--max_restart=1") as job:
        assert job.wait() == 0, job.stderr
        assert "is started again" in job.stderr
        assert "taken 0 times, then b'second'" in job.log("workerlog.0")


def test_more_failures_than_restarts_end_the_job_with_the_code(tmp_path: Path) -> None:
    with Launcher(tmp_path, SCRIPT, "--server_num=1", "--worker_num=2", "--max_restart=1") as job:
        assert job.wait() in (3, 5)
        assert job.stderr.count("is started again; 0 restart(s) left") == 1


def test_without_the_flag_nothing_is_started_again_or_kept(tmp_path: Path) -> None:
    with Launcher(tmp_path, SCRIPT, "--server_num=1", "--worker_num=2") as job:
        assert job.wait() in (3, 5)
        assert "starts None" in job.log("serverlog.0")


@pytest.mark.slow
@pytest.mark.parametrize("meet", ["master", "etcd"])
def test_on_two_nodes_too(tmp_path: Path, meet: str) -> None:
    """A fixed number of nodes meets at a launcher or on etcd; only the failed processes start again, on both nodes."""
    with contextlib.ExitStack() as stack:
        master = f"127.0.0.1:{free_ports(1)[0]}"
        if meet == "etcd":
            if reason := etcd.missing():
                pytest.skip(reason)
            master = f"etcd://{stack.enter_context(etcd.Etcd(tmp_path / 'etcd')).endpoint}"
        flags = (
            "--nnodes=2",
            f"--master={master}",
            "--host=127.0.0.1",
            "--server_num=1",
            "--worker_num=1",
            "--max_restart=2",
        )
        jobs = [
            stack.enter_context(Launcher(tmp_path / name, SCRIPT, *flags, env={"FLEET_JOB_SECRET": "ab" * 32}))
            for name in "ab"
        ]
        assert [job.wait() for job in jobs] == [0, 0], jobs[0].stderr + jobs[1].stderr
        for index, job in enumerate(jobs):
            (server,) = (job.folder / "log").glob("serverlog.*")
            assert server.read_text().count("PSERVER starts") == 2
            assert job.log().count("TRAINER starts") == (2 if "worker 0 ended" in job.stderr else 1), index
            assert "The workers of this node were stopped" not in job.stderr
        assert sum("worker 0 ended with code 3 and is started again" in job.stderr for job in jobs) == 1


AFTER_SERVERS = """
import os, sys, time
if os.environ["TRAINING_ROLE"] == "PSERVER":
    time.sleep(0.5)
    sys.exit(0)
if os.environ["PADDLE_TRAINER_ID"] == "1":
    time.sleep(1.5)
    sys.exit(7)
"""


def test_a_worker_that_fails_after_the_servers_have_ended_is_not_started_again(tmp_path: Path) -> None:
    """It would wait for them: it was frozen for longer than its lease, and the others have finished without it."""
    with Launcher(tmp_path, AFTER_SERVERS, "--server_num=1", "--worker_num=2", "--max_restart=3") as job:
        assert job.wait() == 7, job.stderr
        assert "worker 1 ended with code 7 after the parameter servers" in job.stderr
        assert "is started again" not in job.stderr
