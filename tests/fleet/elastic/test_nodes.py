"""Two launchers: a request to one stops the whole job, and the node of the rank that hangs speaks."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from fleet.elastic import PREEMPTED
from tests.fleet.elastic.test_health import TRAIN
from tests.helpers import etcd as etcd_helper
from tests.helpers.etcd import Etcd
from tests.helpers.workers import free_ports
from tests.launch.launcher import Launcher

SECRET = {"FLEET_JOB_SECRET": "ab" * 32}
# Every node sees the checkpoints of the job.
SHARED = TRAIN.replace('"checkpoints"', '"../checkpoints"')
needs_etcd = pytest.mark.skipif(bool(etcd_helper.missing()), reason=etcd_helper.missing())


@pytest.mark.slow
def test_sigterm_to_one_launcher_saves_the_whole_job(tmp_path: Path) -> None:
    flags = ("--nnodes=2", "--host=127.0.0.1", f"--master=127.0.0.1:{free_ports(1)[0]}", "--preempt_grace=40")
    arguments = ("400", "none", "1", "0")
    with (
        Launcher(tmp_path / "a", TRAIN, *flags, "--rank=0", env=SECRET, args=arguments) as first,
        Launcher(tmp_path / "b", TRAIN, *flags, "--rank=1", env=SECRET, args=arguments) as second,
    ):
        second.wait_for("three", limit_s=50)
        second.signal(signal.SIGTERM)
        assert second.wait(40) == PREEMPTED, second.stderr
        assert first.wait(20) == PREEMPTED, first.stderr
    saved = list((tmp_path / "a" / "checkpoints").iterdir())
    assert len(saved) == 1  # worker 0's node has it
    assert not (tmp_path / "b" / "checkpoints").exists()


@pytest.mark.slow
def test_the_node_of_the_hung_rank_ends_the_job(tmp_path: Path) -> None:
    faults = {"FLEET_FAULTS": "step:hang:rank=1:step=5", **SECRET}
    flags = ("--nnodes=2", "--host=127.0.0.1", f"--master=127.0.0.1:{free_ports(1)[0]}", "--heartbeat_timeout=3")
    arguments = ("400", "none", "0", "0")
    with (
        Launcher(tmp_path / "a", TRAIN, *flags, "--rank=0", env=faults, args=arguments) as first,
        Launcher(tmp_path / "b", TRAIN, *flags, "--rank=1", env=faults, args=arguments) as second,
    ):
        assert second.wait(58) == 137, second.stderr
        assert first.wait(20) == 137, first.stderr
        assert "rank 1 has not finished step 6" in second.stderr
        assert "Another node ended the job" in first.stderr
        assert "Pod failed" not in first.stderr


def begun(job: Launcher) -> list[int]:
    """The steps at which this node's worker began, one a generation."""
    return [int(step) for step in re.findall(r"begins at (\d+) ", job.log())]


def samples_of(job: Launcher) -> list[int]:
    """Every sample that this node's workers trained on, over all generations."""
    return [int(word) for path in job.folder.glob("seen.*") for word in path.read_text().split()]


@needs_etcd
@pytest.mark.slow
def test_a_node_told_to_leave_saves_the_job_and_the_others_go_on(tmp_path: Path) -> None:
    """SIGTERM to one node of a range: all agree on the step, it exits 75, the others go on there; then all leave."""
    with Etcd(tmp_path / "etcd") as etcd:
        flags = (f"--master=etcd://{etcd.endpoint}", "--nnodes=2:3", "--job_id=P", "--elastic_level=1")
        flags += ("--elastic_timeout=60", "--preempt_grace=40", "--max_restart=0")
        jobs = [
            Launcher(tmp_path / name, SHARED, *flags, env=SECRET, args=("5000", "none", "0", "0")) for name in "abc"
        ]
        first, second, leaves = jobs
        try:
            for job in jobs:
                job.wait_for("three", limit_s=40)
            leaves.signal(signal.SIGTERM)
            assert leaves.wait(40) == PREEMPTED, leaves.stderr
            (saved,) = (tmp_path / "checkpoints").iterdir()
            stopped_at = int(saved.name[5:])
            for job in (first, second):
                job.wait_for(r"(?s)begins at .*begins at ", limit_s=40)
                assert begun(job) == [0, stopped_at]
                assert "with 2 nodes" in job.stderr
                assert job.process.poll() is None
            for job in (first, second):
                job.signal(signal.SIGTERM)
            assert [job.wait(40) for job in (first, second)] == [PREEMPTED, PREEMPTED], first.stderr + second.stderr
        finally:
            for job in jobs:
                job.__exit__()
        seen = [sample for job in jobs for sample in samples_of(job)]
        assert len(seen) == len(set(seen)) >= 3 * 2 * stopped_at, "no sample was trained on twice"


@needs_etcd
@pytest.mark.slow
def test_a_job_of_an_exact_number_waits_for_the_node_that_left(tmp_path: Path) -> None:
    """The older family: 75 and no 101 for the node that was told to leave; the same command goes on at its step."""
    with Etcd(tmp_path / "etcd") as etcd:
        flags = (f"--elastic_server={etcd.endpoint}", "--np=2", "--job_id=P", "--preempt_grace=40")
        arguments = ("5000", "none", "0", "0")
        with (
            Launcher(tmp_path / "a", SHARED, *flags, env=SECRET, args=arguments) as stays,
            Launcher(tmp_path / "b", SHARED, *flags, env=SECRET, args=arguments) as leaves,
        ):
            leaves.wait_for("three", limit_s=40)
            leaves.signal(signal.SIGTERM)
            assert leaves.wait(40) == PREEMPTED, leaves.stderr
            stays.wait_for("1 of 2 nodes wait here", "stderr", limit_s=40)
            (saved,) = (tmp_path / "checkpoints").iterdir()
            with Launcher(tmp_path / "c", SHARED, *flags, env=SECRET, args=arguments) as comes:
                comes.wait_for("begins at ", limit_s=40)
                stays.wait_for(r"(?s)begins at .*begins at ", limit_s=40)
                assert (begun(stays), begun(comes)) == ([0, int(saved.name[5:])], [int(saved.name[5:])])
