"""The launcher is quiet: at most five lines before the first one of the script, in every form of the command."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.etcd import Etcd
from tests.helpers.workers import free_ports
from tests.launch.launcher import ROOT, Launcher

SCRIPT = """
import os, sys, time
if os.environ.get("TRAINING_ROLE") == "PSERVER":
    time.sleep(60)
print("lines before:", len([*open("stdout"), *open("stderr")]), flush=True)
"""
LIMIT = 5


def check(*jobs: Launcher) -> None:
    """The jobs end well, and no launcher wrote more lines than it may before its first worker ran."""
    for job in jobs:
        assert job.wait() == 0, job.stderr
        # The last line may come at the same time as the worker; then it is counted from what stands there.
        before = [line for line in job.stderr.splitlines() if not re.search("Pod completed|Exit code|all ", line)]
        printed = job.stdout.partition("lines before:")[0].splitlines()
        assert 1 <= len(before) + len(printed) <= LIMIT, job.stderr
        assert "Configuration" in next((job.folder / "log").glob("*.??????.log")).read_text()


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--gpus=0,1",),
        ("--nproc_per_node=2",),
        ("--devices=0,1", "--max_restart=1"),
        ("--server_num=1", "--worker_num=2"),
        ("--server_num=1", "--worker_num=2", "--gpus=0"),
        (
            "--elastic_level=0",
            "--max_restart=2",
            "--legacy=1",
            "--role=x",
            "--monitor_interval=1",
            "--start_method=spawn",
        ),
    ],
)
def test_on_one_node(tmp_path: Path, flags: tuple[str, ...]) -> None:
    with Launcher(tmp_path, SCRIPT, *flags) as job:
        check(job)


@pytest.mark.parametrize("place", ["--master", "--ips"])
def test_the_same_command_on_each_node(tmp_path: Path, place: str) -> None:
    """002-13, 000-14; nodes at 127.0.0.1 need no --host."""
    port = free_ports(1)[0]
    for_both: tuple[str, ...] = ("--nnodes=2", f"--master=127.0.0.1:{port}", "--gpus=0")
    if place == "--ips":
        for_both = ("--ips=127.0.0.2,127.0.0.3", f"--start_port={port}", "--gpus=0")
    own = [("--host=127.0.0.2",), ("--host=127.0.0.3",)] if place == "--ips" else [(), ()]
    with (
        Launcher(tmp_path / "a", SCRIPT, *for_both, *own[0]) as one,
        Launcher(tmp_path / "b", SCRIPT, *for_both, *own[1]) as two,
    ):
        check(one, two)


def test_with_the_printed_command(tmp_path: Path) -> None:
    with Launcher(tmp_path / "a", SCRIPT, "--nnodes=2", "--gpus=0") as one:
        _, _, _, _, *words = shlex.split(one.wait_for(r"(.*) train.py\n", "stdout")[1])
        with Launcher(tmp_path / "b", SCRIPT, *words, env={"FLEET_JOB_SECRET": one.printed_secret()}) as two:
            check(one, two)


@pytest.mark.parametrize("family", ["older", "newer"])
def test_on_etcd(tmp_path: Path, etcd: Etcd, family: str) -> None:
    job_id = f"--job_id=quiet-{family}"
    flags: tuple[str, ...] = (
        f"--elastic_server={etcd.endpoint}",
        "--np=2",
        job_id,
        "--elastic_pre_hook=printf a\\nb\\nc\\nd\\ne\\n",
    )
    if family == "newer":
        flags = (f"--master=etcd://{etcd.endpoint}", "--nnodes=2:3", "--elastic_level=1", "--elastic_timeout=1", job_id)
    with Launcher(tmp_path / "a", SCRIPT, *flags) as one, Launcher(tmp_path / "b", SCRIPT, *flags) as two:
        check(one, two)


def test_launch_ps(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    first = free_ports(1)[0]
    line = [sys.executable, "-m", "fleet.launch_ps", f"--start_port={first}", "train.py"]
    with (tmp_path / "stdout").open("w") as out, (tmp_path / "stderr").open("w") as err:
        env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
        subprocess.run(line, cwd=tmp_path, env=env, stdout=out, stderr=err, check=True, timeout=60)
    found = re.search(r"lines before: (\d+)", (tmp_path / "stdout").read_text())
    assert found
    assert int(found[1]) <= LIMIT
