"""Elastic jobs without etcd, on network namespaces: the nodes meet at the launcher of the --master node."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import namespaces
from tests.helpers.namespaces import Network
from tests.launch.launcher import ROOT, Launcher, wait_until_gone
from tests.launch.test_elastic_nodes import TTL_S, WORKER, delay_s, starts, together

REASON = namespaces.missing()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(REASON), reason=REASON)]
MASTER = "--master=10.77.0.11:6300"
SECRET = {"FLEET_JOB_SECRET": "5e" * 32}


class Nodes:
    """Three nodes without etcd, and launchers of one job; all are ended at the end."""

    def __init__(self, folder: Path, network: Network) -> None:
        self.folder, self.network, self.jobs = folder, network, list[Launcher]()

    def start(self, number: int, name: str, *flags: str, nnodes: str = "2:4") -> Launcher:
        """Starts a launcher on a node with the one line that the documentation shows."""
        env = {**SECRET, "PADDLE_ELASTIC_TTL": f"{TTL_S}"}
        words = (f"--nnodes={nnodes}", MASTER, "--elastic_timeout=1", *flags)
        job = Launcher(self.folder / name, WORKER, *words, env=env, inside=self.network.inside(number))
        self.jobs.append(job)
        return job

    def pair(self, nnodes: str = "2:4") -> tuple[Launcher, Launcher]:
        """Two nodes that train; the first one hosts the store."""
        one = self.start(1, "one", nnodes=nnodes)
        one.wait_for("Waiting peer start", "stderr")
        two = self.start(2, "two", nnodes=nnodes)
        together(one, two)
        return one, two

    def command(self, *words: str, code: int = 0) -> str:
        """Runs ``python -m fleet.elastic`` on node 3."""
        line = [*self.network.inside(3), sys.executable, "-m", "fleet.elastic", MASTER, *words]
        env = {**os.environ, **SECRET, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(line, cwd=self.folder, env=env, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    def finish(self) -> None:
        """Lets every worker end with 0."""
        (self.folder / "finish").touch()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with Network(3) as network:
        one = Nodes(tmp_path, network)
        yield one
        for job in one.jobs:
            job.__exit__()


def test_a_node_is_killed_and_replaced_then_the_job_grows_and_shrinks(nodes: Nodes) -> None:
    """Issue 11, acceptance 3: the walk of docs/run/elastic.md with --master IP:PORT and nothing else."""
    one, two = nodes.pair()
    before = starts(one)[-1], starts(two)[-1]
    assert before[0].rank == 0, "the node that hosts the store comes first"
    two.signal(signal.SIGKILL)
    assert wait_until_gone([before[1].pid], 1.0) == [], "no orphan on the lost node"
    assert wait_until_gone([before[0].pid], TTL_S + 5.0) == [], "the survivor stops its worker"
    one.wait_for(
        r"Waiting peer start\.\.\. 1 of 2:4 nodes wait here \(10\.77\.0\.11\); this node waits without", "stderr"
    )
    since = time.time()
    again = nodes.start(2, "again")
    after = together(one, again, after=since)
    assert (after[0].rank, after[0].restarts) == (0, 0), "a lost node is no restart of a failed worker"
    assert after[0].master != before[0].master
    since = time.time()
    three = nodes.start(3, "three")
    grown = together(one, again, three, after=since)
    assert [start.rank for start in grown] == [0, 1, 2], "those that ran keep their ranks"
    status = nodes.command("status")
    assert "job default: fixed" in status
    assert "wants 2:4 nodes" in status
    since = time.time()
    assert "has --np=1 (was 2:4). action scale done" in nodes.command("--np=1", "scale")
    together(one, after=since)
    assert [job.wait() for job in (again, three)] == [0, 0]
    assert "goes on without this one" in three.stderr
    assert "nothing to clean" in nodes.command("clean", code=1)
    nodes.finish()
    assert one.wait() == 0
    assert "No launcher answers at 10.77.0.11:6300" in nodes.command("status", code=1)


def test_the_loss_of_the_node_with_the_store_ends_the_job(nodes: Nodes) -> None:
    """The others say so, stop their workers within the lease and end with 1."""
    one, two = nodes.pair()
    pids = [starts(job)[-1].pid for job in (one, two)]
    one.signal(signal.SIGKILL)
    assert two.wait() == 1
    assert wait_until_gone(pids, 1.0) == []
    assert "This node left the job: The rendezvous service at 10.77.0.11:6300 has not answered" in two.stderr


def test_sigterm_to_the_node_with_the_store_ends_the_job_with_its_code(nodes: Nodes) -> None:
    one, two = nodes.pair()
    one.signal(signal.SIGTERM)
    assert [job.wait() for job in (one, two)] == [143, 143]
    assert "was stopped by signal 15" in two.stderr


def test_a_node_that_leaves_and_one_whose_cable_is_pulled(nodes: Nodes) -> None:
    """The others go on in both cases; who is cut off cannot tell its own loss from the store's, so it ends with 1."""
    one, two = nodes.pair(nnodes="1:3")
    three = nodes.start(3, "three", nnodes="1:3")
    together(one, two, three, after=starts(two)[-1].at)
    since = time.time()
    three.signal(signal.SIGTERM)
    assert three.wait() == 143
    left = together(one, two, after=since)
    assert delay_s(left, since) < 5.0
    since = time.time()
    nodes.network.pull_cable(2)
    assert wait_until_gone([left[1].pid], TTL_S + 0.5) == [], "fenced within its lease"
    together(one, after=since)
    assert two.wait() == 1
    nodes.finish()
    assert one.wait() == 0


def test_a_failed_worker_restarts_in_place(nodes: Nodes) -> None:
    """Up to --max_restart over all nodes, then the worker's own code on all of them."""
    one, two = (nodes.start(i, f"n{i}", "--max_restart=1") for i in (1, 2))
    before = together(one, two)
    since = time.time()
    (nodes.folder / "n2" / "fail").write_text("7")
    after = together(one, two, after=since)
    assert [(start.rank, start.restarts) for start in after] == [(start.rank, 1) for start in before]
    (nodes.folder / "n1" / "fail").write_text("9")
    assert (one.wait(), two.wait()) == (9, 9)
