"""Elastic jobs on nodes that are killed, told to leave, cut off: network namespaces, a real etcd, real launchers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers import etcd as etcd_helper
from tests.helpers import namespaces
from tests.helpers.etcd import Etcd
from tests.helpers.namespaces import Network
from tests.launch.launcher import ROOT, Launcher, wait_until_gone

REASON = etcd_helper.missing() or namespaces.missing()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(REASON), reason=REASON)]

TTL_S = 3
WORKER = """
import os, time
e = os.environ
print("start", e["FLEET_GENERATION"], e["PADDLE_TRAINER_ID"], e["PADDLE_TRAINERS_NUM"], e["PADDLE_MASTER"],
      os.getpid(), time.time(), e["TORCHELASTIC_RESTART_COUNT"], flush=True)
while not os.path.exists("../finish"):
    if os.path.exists("fail"):
        code = int(open("fail").read())
        os.remove("fail")
        raise SystemExit(code)
    time.sleep(0.02)
"""


@dataclass(frozen=True)
class Start:
    """What a worker said at its start."""

    generation: int
    rank: int
    world: int
    master: str
    pid: int
    at: float
    restarts: int


def starts(job: Launcher) -> list[Start]:
    """Every start of a worker on a node, in order."""
    found = re.findall(r"start (\d+) (\d+) (\d+) (\S+) (\d+) ([\d.]+) (\d+)\n", job.log())
    return [Start(int(g), int(r), int(w), m, int(p), float(t), int(c)) for g, r, w, m, p, t, c in found]


class Cluster:
    """Four nodes and an etcd on a hub; launchers of one job, all ended at the end."""

    def __init__(self, folder: Path, network: Network) -> None:
        self.folder, self.network = folder, network
        self.etcd = Etcd(folder / "etcd", host=network.address(0), port=2379, inside=network.inside(0))
        self.jobs: list[Launcher] = []

    def node(self, number: int, name: str, *flags: str, np: str = "2", script: str = WORKER) -> Launcher:
        """Starts the launcher of the older family on a node."""
        server = f"--elastic_server={self.network.address(0)}:2379"
        return self.start(number, name, server, f"--np={np}", "--job_id=J", *flags, script=script)

    def start(self, number: int, name: str, *flags: str, script: str = WORKER) -> Launcher:
        env = {"PADDLE_ELASTIC_TTL": f"{TTL_S}"}
        job = Launcher(self.folder / name, script, *flags, env=env, inside=self.network.inside(number))
        self.jobs.append(job)
        return job

    def command(self, *words: str) -> str:
        """Runs ``python -m fleet.elastic`` on the hub."""
        server = f"--elastic_server={self.network.address(0)}:2379"
        line = [*self.network.inside(0), sys.executable, "-m", "fleet.elastic", server, "--job_id=J", *words]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(line, cwd=self.folder, env=env, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def finish(self) -> None:
        """Lets every worker end with 0."""
        (self.folder / "finish").touch()

    def close(self) -> None:
        for job in self.jobs:
            job.__exit__()
        self.etcd.kill()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Network(4) as network:
        one = Cluster(tmp_path, network)
        yield one
        one.close()


def together(*jobs: Launcher, after: float = 0.0, limit_s: float = 25.0) -> list[Start]:
    """Waits until the jobs' workers have started in one generation after ``after``; returns their starts."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        last = [found[-1] if (found := starts(job)) else None for job in jobs]
        new = [one for one in last if one is not None and one.at > after and one.world == len(jobs)]
        if len(new) == len(jobs) and len({one.generation for one in new}) == 1:
            assert sorted(one.rank for one in new) == list(range(len(jobs)))
            assert len({one.master for one in new}) == 1
            return new
        time.sleep(0.02)
    states = "\n".join(f"{job.folder.name}: {starts(job)}\n{job.stderr[-1500:]}" for job in jobs)
    raise AssertionError(f"no generation of {len(jobs)} nodes:\n{states}")


def delay_s(found: list[Start], since: float) -> float:
    return max(one.at for one in found) - since


def test_killed_node_and_its_replacement(cluster: Cluster) -> None:
    """004-04, 004-05, 004-16, 004-19: the survivor waits, says for what, keeps its rank; all train with a new store."""
    one, two = cluster.node(1, "one"), cluster.node(2, "two")
    before = together(one, two)
    two.signal(signal.SIGKILL)
    assert wait_until_gone([before[1].pid], 1.0) == [], "no orphan on the lost node"
    assert wait_until_gone([before[0].pid], TTL_S + 5.0) == [], "the survivor stops its worker"
    one.wait_for(
        r"Waiting peer start\.\.\. 1 of 2 nodes wait here \(10\.77\.0\.11\); this node waits without", "stderr"
    )
    since = time.time()
    three = cluster.node(3, "three")
    after = together(one, three, after=since)
    assert delay_s(after, since) < 6.0
    assert after[0].rank == before[0].rank
    assert after[0].generation > before[0].generation
    assert after[0].master != before[0].master
    assert after[0].restarts == 0, "a lost node is no restart of a failed worker"
    cluster.finish()
    assert (one.wait(), three.wait()) == (0, 0)
    late = cluster.node(4, "late")
    assert late.wait() == 0
    assert "The job is complete" in late.stderr
    cluster.command("clean")


def test_scale_out_and_in(cluster: Cluster) -> None:
    """004-09, 004-10, 004-11, 004-12, 004-13, 004-14: and ranks are consistent on all nodes, 004-03."""
    one, two = cluster.node(1, "one"), cluster.node(2, "two")
    before = together(one, two)
    assert "nothing restarts" in cluster.command("--np=2", "scale")
    time.sleep(1.0)
    assert [len(starts(job)) for job in (one, two)] == [1, 1]
    cluster.command("--np=4", "scale")
    assert wait_until_gone([start.pid for start in before], 4.0) == [], "the job waits for its nodes"
    stale = cluster.node(3, "stale")
    assert stale.wait() == 1
    assert "started for 2 nodes, but the job on etcd has 4" in stale.stderr
    since = time.time()
    new = [cluster.node(3, "three", np="4"), cluster.node(4, "four", np="4")]
    after = together(one, two, *new, after=since)
    assert delay_s(after, since) < 4.0
    assert [start.rank for start in after[:2]] == [start.rank for start in before]
    assert "wants 4 nodes" in cluster.command("status")
    since = time.time()
    cluster.command("--np=1", "scale")
    (stays,) = [job for job, start in zip((one, two), before, strict=True) if start.rank == 0]
    together(stays, after=since)
    gone = [job for job in (one, two, *new) if job is not stays]
    assert [job.wait() for job in gone] == [0, 0, 0]
    assert "goes on without this one" in new[0].stderr
    cluster.finish()
    assert stays.wait() == 0


def test_node_that_is_told_to_leave(cluster: Cluster) -> None:
    """SIGTERM leaves a leave record: in a range the others go on at once, in an exact job they wait."""
    flags = (
        "--nnodes=2:3",
        "--master=etcd://10.77.0.1:2379",
        "--job_id=R",
        "--elastic_level=1",
        "--elastic_timeout=30",
    )
    jobs = [cluster.start(i, f"r{i}", *flags) for i in (1, 2, 3)]
    together(*jobs)
    since = time.time()
    jobs[1].signal(signal.SIGTERM)
    assert jobs[1].wait() == 143
    assert delay_s(together(jobs[0], jobs[2], after=since), since) < 5.0
    for job in (jobs[0], jobs[2]):
        job.signal(signal.SIGTERM)
        assert job.wait() == 143
    one, two = cluster.node(1, "one"), cluster.node(2, "two")
    before = together(one, two)
    two.signal(signal.SIGTERM)
    assert two.wait() == 143
    assert wait_until_gone([before[0].pid], 5.0) == []
    one.wait_for("1 of 2 nodes wait here", "stderr")
    since = time.time()
    assert delay_s(together(one, cluster.node(3, "three"), after=since), since) < 5.0


def test_healthy_job_outlives_etcd(cluster: Cluster) -> None:
    """004-18: restarted with its data, then unreachable for longer than a lease; nothing restarts."""
    one, two = cluster.node(1, "one"), cluster.node(2, "two")
    together(one, two)
    cluster.etcd.kill()
    time.sleep(2.0)
    cluster.etcd.start()
    time.sleep(2.0)
    cluster.etcd.kill()
    time.sleep(10.0)
    cluster.etcd.start()
    time.sleep(TTL_S + 1.0)
    cluster.etcd.freeze()
    time.sleep(10.0)
    cluster.etcd.thaw()
    time.sleep(TTL_S + 2.0)
    assert [len(starts(job)) for job in (one, two)] == [1, 1]
    assert "does not answer" in one.stderr
    assert "etcd answers again" in one.stderr
    cluster.finish()
    assert (one.wait(), two.wait()) == (0, 0)


def test_outage_that_the_nodes_prove_to_each_other(cluster: Cluster) -> None:
    """004-18: no node reaches etcd, which goes on and ends their leases; they reach each other, so nothing restarts."""
    one, two = cluster.node(1, "one"), cluster.node(2, "two")
    together(one, two)
    for node in (1, 2):
        cluster.network.lose_route(node, 0)
    time.sleep(10.0)
    assert "does not answer" in two.stderr
    for node in (1, 2):
        cluster.network.find_route(node, 0)
    two.wait_for("etcd answers again", "stderr")
    time.sleep(TTL_S + 1.0)
    assert [len(starts(job)) for job in (one, two)] == [1, 1]
    cluster.finish()
    assert (one.wait(), two.wait()) == (0, 0)


def test_silent_loss_of_the_network(cluster: Cluster) -> None:
    """The node that is cut off stops its own workers within its lease; the others go on; it comes back by itself."""
    one, two = cluster.node(1, "one"), cluster.node(2, "two")
    before = together(one, two)
    cluster.network.pull_cable(2)
    assert wait_until_gone([before[1].pid], TTL_S + 0.5) == [], "fenced within its lease"
    assert wait_until_gone([before[0].pid], 5.0) == []
    assert two.process.poll() is None
    cluster.network.plug_in(2)
    since = time.time()
    after = together(one, two, after=since)
    assert [start.rank for start in after] == [start.rank for start in before]
    cluster.finish()
    assert (one.wait(), two.wait()) == (0, 0)


def test_failed_worker_exits_101_and_the_same_command_resumes(cluster: Cluster) -> None:
    """004-06; its processes are gone, its peer waits."""
    one, two = cluster.node(1, "one"), cluster.node(2, "two")
    before = together(one, two)
    (cluster.folder / "two" / "fail").write_text("7")
    assert two.wait() == 101
    assert "was the first to fail: exit code 7" in two.stderr
    assert wait_until_gone([start.pid for start in before], 3.0) == []
    assert one.process.poll() is None
    since = time.time()
    again = cluster.node(2, "again")
    after = together(one, again, after=since)
    assert after[0].rank == before[0].rank
    cluster.finish()
    assert (one.wait(), again.wait()) == (0, 0)


def test_newer_family_restarts_in_place(cluster: Cluster) -> None:
    """000-20, G13: up to --max_restart over all nodes, then the worker's own code."""
    flags = ("--nnodes=2:4", "--master=etcd://10.77.0.1:2379", "--job_id=N", "--elastic_level=1", "--max_restart=1")
    one, two = (cluster.start(i, f"n{i}", *flags, "--elastic_timeout=1") for i in (1, 2))
    before = together(one, two)
    since = time.time()
    (cluster.folder / "n2" / "fail").write_text("7")
    after = together(one, two, after=since)
    assert [(start.rank, start.restarts) for start in after] == [(start.rank, 1) for start in before]
    assert after[0].master != before[0].master
    (cluster.folder / "n1" / "fail").write_text("9")
    assert (one.wait(), two.wait()) == (9, 9)


@pytest.mark.parametrize("turn", range(3))
def test_three_nodes_start_with_one_world(cluster: Cluster, turn: int) -> None:
    """Study 2.2: nodes that come while the window of a range is open; every node has the same world."""
    flags = ("--nnodes=2:3", "--master=etcd://10.77.0.1:2379", "--job_id=S", "--elastic_level=1", "--elastic_timeout=5")
    jobs = []
    for i in (1, 2, 3):
        jobs.append(cluster.start(i, f"s{turn}{i}", *flags))
        time.sleep(0.6)
    together(*jobs)
    cluster.finish()
    assert [job.wait() for job in jobs] == [0, 0, 0]
    assert [len(starts(job)) for job in jobs] == [1, 1, 1]
