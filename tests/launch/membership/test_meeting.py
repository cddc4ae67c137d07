"""Jobs of several nodes: two launchers on one machine, real processes."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.workers import free_port
from tests.launch.launcher import ROOT, Launcher, wait_until_gone

SECRET = {"FLEET_JOB_SECRET": "0123456789abcdef" * 4}
HELLO = """
import os
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], os.environ["PADDLE_TRAINER_ENDPOINTS"],
      os.environ["PADDLE_MASTER"])
"""
TWO = ("--nnodes=2", "--nproc_per_node=1")


def master() -> tuple[str, ...]:
    """A meeting point on this machine, where all the nodes are."""
    return (f"--master=127.0.0.1:{free_port()}",)


def ranks(*jobs: Launcher) -> list[str]:
    return sorted(found for job in jobs for found in re.findall(r"rank (\d+) of", job.log()))


def test_copied_command_forms_the_job(tmp_path: Path) -> None:
    """000-05, 000-06: the sentence, 80 dashes, the command with --master first; both exit 0."""
    with Launcher(tmp_path / "a", HELLO, *TWO, "--job_id=copied") as one:
        lines = one.wait_for(r"(?s)Copy the following.*-{80}.*-{80}\n", "stdout")[0].splitlines()
        assert lines[0].startswith("Copy the following command to other nodes to run. It reads the job's secret from ")
        assert lines[1] == lines[3] == "-" * 80
        secret, _, _, module, *words = shlex.split(lines[2])
        name, value = secret.partition("=")[0], one.printed_secret()
        assert module == "fleet.launch"
        assert words[0] == "--master"
        assert words[2:] == [*TWO, "--job_id=copied", "train.py"]
        assert value not in one.stderr + one.stdout
        with Launcher(tmp_path / "b", HELLO, *words[:-1], env={name: value}) as two:
            assert (one.wait(), two.wait()) == (0, 0)
            assert "rank 0 of 2" in one.log(), "the master's node comes first"
            assert "rank 1 of 2" in two.log()
            assert one.log().split()[4:] == two.log().split()[4:], "one list of endpoints, one store"
            assert "rank 0" in one.stdout
            assert "rank 1" not in two.stdout
            assert "replicas 2[2:2], elastic False" in one.stderr
        for path in (path for path in tmp_path.rglob("*") if path.is_file()):
            assert value.encode() not in path.read_bytes(), path


def test_the_command_pasted_on_this_machine(tmp_path: Path) -> None:
    """000-06: as it stands, in the same folder and without ssh; each launcher has its own logs there."""
    with Launcher(tmp_path, HELLO, *TWO) as one:
        command = one.wait_for(r"(.*) train.py\n", "stdout")[0]
        assert command.startswith("FLEET_JOB_SECRET=")
        path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        env = {"PATH": path, "PYTHONPATH": str(ROOT)}
        two = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
        assert (one.wait(), two.returncode) == (0, 0), two.stderr
        assert one.log().startswith("rank 0 of 2")
        assert one.log("launcher-2/workerlog.0").startswith("rank 1 of 2")
        assert "those of this one are in log/launcher-2" in two.stderr


def test_chosen_master_on_all_nodes(tmp_path: Path) -> None:
    """000-07; without a secret it works as well, with one warning that names the variable."""
    flags = (*TWO, *master())
    with Launcher(tmp_path / "a", HELLO, *flags) as one, Launcher(tmp_path / "b", HELLO, *flags) as two:
        assert (one.wait(), two.wait()) == (0, 0)
        assert ranks(one, two) == ["0", "1"]
        assert one.stderr.count("FLEET_JOB_SECRET") == 1


def test_ranks_that_were_asked_for(tmp_path: Path) -> None:
    flags = (*TWO, *master())
    with Launcher(tmp_path / "a", HELLO, *flags, "--rank=1", env=SECRET) as one:
        one.wait_for("Waiting peer start", "stderr")
        with Launcher(tmp_path / "b", HELLO, *flags, "--rank=0", env=SECRET) as two:
            assert (one.wait(), two.wait()) == (0, 0)
            assert "rank 1 of 2" in one.log()
            assert "rank 0 of 2" in two.log()


def test_operator_environment_alone(tmp_path: Path) -> None:
    """000-28, E.5: PADDLE_MASTER, PADDLE_NNODES and PADDLE_JOB_ID are all a pod gets."""
    env = {"PADDLE_MASTER": f"127.0.0.1:{free_port()}", "PADDLE_NNODES": "2", "PADDLE_JOB_ID": "job-7"}
    env["POD_IP"] = "127.0.0.1"
    with Launcher(tmp_path / "a", HELLO, env=env) as one, Launcher(tmp_path / "b", HELLO, env=env) as two:
        assert (one.wait(), two.wait()) == (0, 0)
        assert ranks(one, two) == ["0", "1"]


def test_jobs_on_one_master_stay_apart(tmp_path: Path) -> None:
    """000-13: two jobs of two nodes, one master; the host of the service stays until the other job is done."""
    flags = (*TWO, *master())
    slow = HELLO + "import time; time.sleep(1.5)\n"
    with (
        Launcher(tmp_path / "a", HELLO, *flags, "--job_id=one", env=SECRET) as a,
        Launcher(tmp_path / "b", slow, *flags, "--job_id=two", env=SECRET) as b,
        Launcher(tmp_path / "c", HELLO, *flags, "--job_id=one", env=SECRET) as c,
        Launcher(tmp_path / "d", slow, *flags, "--job_id=two", env=SECRET) as d,
    ):
        assert [job.wait() for job in (a, b, c, d)] == [0, 0, 0, 0]
        assert ranks(a, c) == ["0", "1"]
        assert ranks(b, d) == ["0", "1"]


def test_wrong_secret_is_refused(tmp_path: Path) -> None:
    """The node with the wrong secret ends with an error; the job goes on to meet the right one."""
    flags = (*TWO, *master())
    with Launcher(tmp_path / "a", HELLO, *flags, env=SECRET) as one:
        one.wait_for("Waiting peer start", "stderr")
        for env in ({"FLEET_JOB_SECRET": "ff" * 32}, {}):
            with Launcher(tmp_path / "wrong", HELLO, *flags, env=env) as wrong:
                assert wrong.wait() == 1
                assert "FLEET_JOB_SECRET" in wrong.stderr
                assert wrong.log() == ""
        assert "refused 127.0.0.1" in one.stderr
        with Launcher(tmp_path / "b", HELLO, *flags, env=SECRET) as two:
            assert (one.wait(), two.wait()) == (0, 0)


@pytest.mark.slow
def test_missing_peer_times_out_and_is_named(tmp_path: Path) -> None:
    """003-36, 002-27: which ranks are absent; exit code not 0."""
    flags = ("--nnodes=3", "--nproc_per_node=1", "--elastic_timeout=1", *master())
    with (
        Launcher(tmp_path / "a", HELLO, *flags, "--rank=0", env=SECRET) as one,
        Launcher(tmp_path / "b", HELLO, *flags, "--rank=2", env=SECRET) as two,
    ):
        assert one.wait() == 1
        assert two.wait() == 1
        assert re.search(r"Waiting peer start\.\.\. 2 of 3 nodes wait here .*absent node ranks: 1", one.stderr)
        assert re.search(r"ERROR .*Not every node came within 10 s: .*absent node ranks: 1", one.stderr)


def test_nobody_at_the_master_is_said(tmp_path: Path) -> None:
    """An address of another machine that does not answer."""
    flags = (*TWO, "--elastic_timeout=0", "--master=192.0.2.77:1", "--rank=1")
    with Launcher(tmp_path / "a", HELLO, *flags, env=SECRET) as one:
        assert one.wait() == 1
        assert "192.0.2.77:1" in one.stderr
        assert "absent node ranks: 0" in one.stderr


def test_another_program_at_the_port_of_the_master_is_said(tmp_path: Path) -> None:
    """It accepts connections and never answers as a launcher."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        flags = (*TWO, "--elastic_timeout=0", "--host=127.0.0.1", f"--master=127.0.0.1:{other.getsockname()[1]}")
        with Launcher(tmp_path / "a", HELLO, *flags, env=SECRET) as one:
            assert one.wait() == 1
            assert "another program of this machine holds that port" in one.stderr


FAILS = """
import os, sys, time
print("pid", os.getpid(), "generation", os.environ["FLEET_GENERATION"], os.environ["MASTER_PORT"], flush=True)
if os.environ["RANK"] == "1" and os.environ["FLEET_GENERATION"] in os.environ["FAIL_IN"].split(","):
    time.sleep(0.5)
    sys.exit(23)
time.sleep(60 if os.environ["FAIL_IN"] == "0" else 0.2)
"""
ENDING = '60 if os.environ["FAIL_IN"] == "0" else 0.2'


def test_failure_on_one_node_ends_all_with_its_code(tmp_path: Path) -> None:
    flags, env = (*TWO, *master()), {**SECRET, "FAIL_IN": "0"}
    with (
        Launcher(tmp_path / "a", FAILS, *flags, env=env) as one,
        Launcher(tmp_path / "b", FAILS, *flags, env=env) as two,
    ):
        assert (one.wait(), two.wait()) == (23, 23)
        failed, other = (two, one) if "Pod failed" in two.stderr else (one, two)
        assert "Worker 1 of 2" in failed.stderr
        assert "Another node ended the job: Worker 1 of 2" in other.stderr
        pids = [int(re.findall(r"pid (\d+)", job.log())[0]) for job in (one, two)]
        assert wait_until_gone(pids, 0.5) == []


def test_failure_on_one_node_restarts_all(tmp_path: Path) -> None:
    """Requirement 6: a new generation on every node, with a new store port."""
    flags, env = (*TWO, *master(), "--max_restart=2"), {**SECRET, "FAIL_IN": "0,1"}
    script = FAILS.replace(ENDING, '0.1 if os.environ["FLEET_GENERATION"] == "2" else 60')
    with (
        Launcher(tmp_path / "a", script, *flags, env=env) as one,
        Launcher(tmp_path / "b", script, *flags, env=env) as two,
    ):
        assert (one.wait(), two.wait()) == (0, 0)
        for job in (one, two):
            assert re.findall(r"generation (\d)", job.log()) == ["0", "1", "2"]
        ports = [re.findall(r"generation \d (\d+)", job.log()) for job in (one, two)]
        assert ports[0] == ports[1]
        assert len(set(ports[0])) == 3


def test_restarts_are_counted_over_all_nodes(tmp_path: Path) -> None:
    flags, env = (*TWO, *master(), "--max_restart=1"), {**SECRET, "FAIL_IN": "0,1,2"}
    script = FAILS.replace(ENDING, "60")
    with (
        Launcher(tmp_path / "a", script, *flags, env=env) as one,
        Launcher(tmp_path / "b", script, *flags, env=env) as two,
    ):
        assert (one.wait(), two.wait()) == (23, 23)
        assert re.findall(r"generation (\d)", one.log()) == ["0", "1"]


@pytest.mark.parametrize("host_dies", [False, True])
def test_killed_launcher_ends_the_other_node(tmp_path: Path, host_dies: bool) -> None:
    """Requirement 7: a node that is gone mid-job is noticed; nothing is left on either side."""
    flags, env = (*TWO, *master()), {**SECRET, "FAIL_IN": "0"}
    script = FAILS.replace("sys.exit(23)", "time.sleep(60)")
    with Launcher(tmp_path / "a", script, *flags, env=env) as one:
        one.wait_for("Waiting peer start", "stderr")
        with Launcher(tmp_path / "b", script, *flags, env=env) as two:
            pids = [int(job.wait_for(r"pid (\d+)")[1]) for job in (one, two)]
            dead, survivor = (one, two) if host_dies else (two, one)
            began = time.monotonic()
            dead.signal(signal.SIGKILL)
            assert survivor.wait() == 1
            assert time.monotonic() - began < (9.0 if host_dies else 5.0)
            assert wait_until_gone(pids, 1.0) == []
            assert "ERROR" in survivor.stderr


def test_sigterm_of_one_launcher_ends_both(tmp_path: Path) -> None:
    flags, env = (*TWO, *master()), {**SECRET, "FAIL_IN": "0"}
    script = FAILS.replace("sys.exit(23)", "time.sleep(60)")
    with (
        Launcher(tmp_path / "a", script, *flags, env=env) as one,
        Launcher(tmp_path / "b", script, *flags, env=env) as two,
    ):
        for job in (one, two):
            job.wait_for("pid")
        began = time.monotonic()
        one.signal(signal.SIGTERM)
        assert (one.wait(), two.wait()) == (143, 143)
        assert time.monotonic() - began < 5.0


def test_signal_while_waiting_for_peers(tmp_path: Path) -> None:
    with Launcher(tmp_path / "a", HELLO, *TWO, *master(), env=SECRET) as one:
        one.wait_for("Waiting peer start", "stderr")
        began = time.monotonic()
        one.signal(signal.SIGINT)
        assert one.wait() == 130
        assert time.monotonic() - began < 2.0


def test_node_that_is_done_first_waits_for_the_others(tmp_path: Path) -> None:
    flags = (*TWO, *master())
    script = 'import os, time; time.sleep(2 * int(os.environ["RANK"])); print("rank", os.environ["RANK"], "of")'
    with (
        Launcher(tmp_path / "a", script, *flags, env=SECRET) as one,
        Launcher(tmp_path / "b", script, *flags, env=SECRET) as two,
    ):
        assert (one.wait(), two.wait()) == (0, 0)
        assert ranks(one, two) == ["0", "1"]


PS = """
import os, time
role = os.environ["TRAINING_ROLE"]
print(role, "starts", flush=True)
if role == "PSERVER":
    time.sleep(60)
time.sleep(0.2 + 1.5 * int(os.environ["PADDLE_TRAINER_ID"]))
"""


def test_servers_stay_until_the_workers_of_every_node_are_done(tmp_path: Path) -> None:
    """002-23 on two nodes: node 0's server serves node 1's slower worker."""
    flags = ("--nnodes=2", "--server_num=1", "--worker_num=1", "--run_mode=ps", *master())
    with Launcher(tmp_path / "a", PS, *flags, env=SECRET) as one:
        one.wait_for("Waiting peer start", "stderr")
        with Launcher(tmp_path / "b", PS, *flags, env=SECRET) as two:
            assert (one.wait(), two.wait()) == (0, 0)
            assert "PSERVER starts" in one.log("serverlog.0")
            ended = [job.stderr.index("all workers exit") for job in (one, two)]
            assert all(ended)
            stamp = r"INFO \S+ (\d\d:\d\d:\d\d),\d+ all workers exit"
            assert abs(_seconds(re.search(stamp, one.stderr)) - _seconds(re.search(stamp, two.stderr))) <= 1


def _seconds(match: re.Match[str] | None) -> int:
    assert match
    hours, minutes, seconds = match[1].split(":")
    return int(hours) * 3600 + int(minutes) * 60 + int(seconds)


def test_environment_of_the_test_is_untouched() -> None:
    assert "FLEET_JOB_SECRET" not in os.environ
