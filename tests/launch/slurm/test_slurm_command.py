"""python -m fleet launch-on slurm: its options, what it refuses, and what it gives to sbatch."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fleet.errors import ConfigError, LaunchError
from fleet.launch.slurm.slurm_command import SlurmJob, batch_script, run
from tests.helpers.workers import free_ports


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Returns the batch script of a command line."""
    assert run(["--dry_run", *arguments]) == 0
    return capsys.readouterr().out


def test_the_options_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(
        capsys, "--nodes", "2", "--time=1:00", "--partition", "gpu", "--account=me", "--sbatch=--gres=gpu:4",
        "--sbatch", "--mem=8G", "--grace=90", "--requeue", "--python=/opt/python", "--nproc-per-node=4",
        "train.py", "--time=3",
    )  # fmt: skip
    for line in ("--nodes=2", "--time=1:00", "--partition=gpu", "--account=me", "--gres=gpu:4", "--mem=8G",
                 "--signal=TERM@90", "--requeue", "--job-name=train"):  # fmt: skip
        assert f"#SBATCH {line}\n" in text
    assert "--preempt_grace=90 --nproc-per-node=4 train.py --time=3\n" in text
    assert "/opt/python --nnodes=2" in text
    assert "requeue" not in printed(capsys, "train.py").replace("--no-requeue", "")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--nodes=0", "t.py"], "--nodes is 0"),
        (["--nodes=x", "t.py"], "--nodes.*invalid int value"),
        (["--nodes"], "--nodes has no value"),
        (["--grace=-1", "t.py"], "--grace is -1"),
        (["--requeue", "t.py"], "--requeue needs --grace"),
        (["--name=a b", "t.py"], "--name is 'a b'"),
        (["--name=--wrap", "t.py"], "--name is '--wrap'.*does not begin with '-'"),
        (["--nodes=2"], "the script is missing"),
        (["--nnodes=2", "t.py"], "--nnodes is a flag that the batch script sets"),
        (["--preempt_grace=5", "t.py"], "--preempt_grace.*Write --grace=SECONDS"),
        (["--nprocs=2", "t.py"], "unrecognized arguments: --nprocs"),
        (["--nodes=2", "--server_num=1", "--worker_num=2", "t.py"], "--server_num with --nodes=2.*Use --nodes=1"),
        (["--sbatch=--nodes=3", "t.py"], "--sbatch=--nodes=3: the batch script sets that option.*--nodes of this"),
        (["--sbatch=-N 3", "t.py"], "the batch script sets that option"),
        (["--sbatch=-N3", "t.py"], "--sbatch=-N3: the batch script sets that option"),
        (["--time=1:00\nrm x", "t.py"], "--time is '1:00.nrm x'; it takes one value"),
        (["--account=", "t.py"], "--account is ''; it takes one value"),
        (["--sbatch=--mem=1\r#SBATCH --x", "t.py"], "takes one option of sbatch"),
        (["--sbatch=gres", "t.py"], "takes one option of sbatch"),
        (["--sbatch=--mem=1\n#SBATCH --x", "t.py"], "takes one option of sbatch"),
    ],
)
def test_what_is_refused(arguments: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){expected}"):
        run(["--dry_run", *arguments])


def test_servers_on_one_node(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--server_num=1 --worker_num=2 t.py" in printed(capsys, "--server_num=1", "--worker_num=2", "t.py")


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["-h"]) == run(["--help"]) == 0
    assert capsys.readouterr().out.count("--grace") >= 2


def sbatch(folder: Path, code: int) -> None:
    """Puts a stand-in for sbatch into ``folder``."""
    path = folder / "sbatch"
    path.write_text(f'#!{sys.executable}\nimport sys\nprint("42;cluster")\nsys.stderr.write("no such partition\\n")\n'
                    f'open("submitted", "w").write(" ".join(sys.argv[1:]))\nsys.exit({code})\n')  # fmt: skip
    path.chmod(0o755)


def test_it_is_written_and_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match=r"train\.sbatch is written, and there is no sbatch on this machine"):
        run(["train.py"])
    sbatch(tmp_path, 0)
    assert run(["--to=job.sh", "train.py"]) == 0
    assert (tmp_path / "job.sh").read_text() == (tmp_path / "train.sbatch").read_text()
    assert (tmp_path / "submitted").read_text() == "--parsable ./job.sh"
    assert "Submitted job 42 with job.sh" in capsys.readouterr().out
    sbatch(tmp_path, 1)
    with pytest.raises(LaunchError, match=r"sbatch refused train\.sbatch with exit code 1: no such partition"):
        run(["train.py"])
    with pytest.raises(LaunchError, match="cannot be written"):
        run(["--to=no/such/folder", "train.py"])


# Starts its command once a node, as srun does in a batch job: rank of the node in SLURM_NODEID, highest exit code.
SRUN = """#!{python}
import os, signal, subprocess, sys

nodes = int(os.environ["SLURM_JOB_NUM_NODES"])
tasks = [
    subprocess.Popen(sys.argv[1:], env={{**os.environ, "SLURM_NODEID": str(node), "SLURM_PROCID": str(node)}})
    for node in range(nodes)
]
with open(os.environ["SRUN_PIDS"], "w") as file:
    file.write(" ".join(str(task.pid) for task in tasks))
sys.exit(max(abs(task.wait()) for task in tasks))
"""
SCONTROL = """#!/bin/bash
if [ "$1 $2" = "show hostnames" ]; then echo 127.0.0.1; echo 127.0.0.2; else echo "$@" > "$SCONTROL_SAID"; fi
"""


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """Returns the environment of a batch job of two nodes."""
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    for name, text in (("srun", SRUN.format(python=sys.executable)), ("scontrol", SCONTROL)):
        (bin_dir / name).write_text(text)
        (bin_dir / name).chmod(0o755)
    known = {name: value for name, value in os.environ.items() if not name.startswith(("PADDLE_", "FLEET_"))}
    number = free_ports(1)[0] - 20000  # the port of the job is free
    return {
        **known,
        "PATH": f"{bin_dir}:{known['PATH']}",
        "SLURM_JOB_ID": str(number % 10000),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NTASKS_PER_NODE": "1",
        "POD_IP": "127.0.0.1",
        "SRUN_PIDS": str(tmp_path / "pids"),
        "SCONTROL_SAID": str(tmp_path / "said"),
        # What a shell inside another job has.
        "PADDLE_TRAINERS_NUM": "7",
        "RANK": "5",
        "WORLD_SIZE": "9",
    }


def start(folder: Path, slurm: dict[str, str], **job: Any) -> subprocess.Popen[str]:
    """Starts the batch script of a job as sbatch does."""
    path = folder / "job.sbatch"
    path.write_text(batch_script(SlurmJob(name="job", python=sys.executable, **job)))
    return subprocess.Popen(
        ["bash", str(path)], cwd=folder, env=slurm, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


TRAIN = """
import json, os, sys
import torch
from fleet import fleet

fleet.init(is_collective=True)
torch.manual_seed(0)
model = fleet.distributed_model(torch.nn.Linear(4, 1))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
x = torch.arange(32.0).reshape(8, 4) / 32
for _ in range(3):
    model(x[fleet.worker_index() :: fleet.worker_num()]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
if fleet.is_first_worker():
    with open("found.json", "w") as file:
        nodes = int(os.environ.get("PADDLE_NNODES", 1))
        json.dump([fleet.worker_num(), nodes, sys.argv[1:], model.weight.tolist()], file)
sys.exit(int(sys.argv[1]) if len(sys.argv) > 1 and fleet.worker_index() == 1 else 0)
"""
ARGUMENTS = ["0", "two words", "it's", '"quoted"', "$HOME `id` \\", "new\nline", "--nodes=3", "\u0436", ""]


@pytest.mark.slow
def test_two_nodes_train_as_one_process(tmp_path: Path, slurm: dict[str, str]) -> None:
    (tmp_path / "my train.py").write_text(TRAIN)
    job = start(tmp_path, slurm, nodes=2, launcher=["--nproc_per_node=1", "my train.py", *ARGUMENTS])
    said = job.communicate(timeout=120)[0]
    assert job.returncode == 0, said
    workers, nodes, arguments, weights = json.loads((tmp_path / "found.json").read_text())
    assert (workers, nodes, arguments) == (2, 2, ARGUMENTS)
    subprocess.run([sys.executable, "my train.py"], cwd=tmp_path, check=True, timeout=120)
    alone = json.loads((tmp_path / "found.json").read_text())
    assert alone[0] == 1
    assert weights[0] == pytest.approx(alone[3][0], rel=1e-6)
    logs = tmp_path / "log" / f"slurm-{slurm['SLURM_JOB_ID']}"
    assert [(logs / f"node-{node}" / "workerlog.0").is_file() for node in range(2)] == [True, True]
    assert not (tmp_path / "said").exists()


@pytest.mark.slow
def test_a_failing_worker_ends_the_job_with_its_code(tmp_path: Path, slurm: dict[str, str]) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    job = start(tmp_path, slurm, nodes=2, requeue=True, grace_s=9, launcher=["--nproc_per_node=1", "train.py", "7"])
    said = job.communicate(timeout=120)[0]
    assert job.returncode == 7, said
    assert not (tmp_path / "said").exists()


ENDLESS = """
import time
import torch
from fleet import fleet

fleet.init(is_collective=True)
model = fleet.distributed_model(torch.nn.Linear(4, 1))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
with fleet.elastic.Checkpoint("checkpoints", model, optimizer) as checkpoint:
    checkpoint.resume()
    while True:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
        open("steps", "w").close()
"""


@pytest.mark.slow
def test_a_preempted_job_saves_itself_and_is_put_back(tmp_path: Path, slurm: dict[str, str]) -> None:
    """Slurm sends SIGTERM to the tasks before the time limit."""
    (tmp_path / "train.py").write_text(ENDLESS)
    job = start(tmp_path, slurm, nodes=2, requeue=True, grace_s=60, launcher=["--nproc_per_node=1", "train.py"])
    deadline = time.monotonic() + 120
    while not (tmp_path / "steps").exists() and time.monotonic() < deadline and job.poll() is None:
        time.sleep(0.05)
    for pid in (tmp_path / "pids").read_text().split():
        os.kill(int(pid), signal.SIGTERM)
    said = job.communicate(timeout=120)[0]
    assert job.returncode == 75, said
    assert (tmp_path / "said").read_text() == f"requeue {slurm['SLURM_JOB_ID']}\n"
    assert any((tmp_path / "checkpoints").iterdir())


def test_options_of_sbatch() -> None:
    job = SlurmJob(name="j", nodes=1, launcher=["--gpus=0,1", "a b.py"], options=["--gres=gpu:2"], log_dir="here")
    lines = batch_script(job).splitlines()
    assert lines[:6] == [
        "#!/bin/bash", "#SBATCH --job-name=j", "#SBATCH --nodes=1", "#SBATCH --ntasks-per-node=1",
        "#SBATCH --gres=gpu:2", "#SBATCH --no-requeue",
    ]  # fmt: skip
    (command,) = (line for line in lines if line.startswith("srun "))
    assert shlex.split(command)[1:] == [
        "python", "-m", "fleet.launch", "--job_id=slurm-$SLURM_JOB_ID", "--standalone", "--gpus=0,1", "a b.py",
    ]  # fmt: skip


def test_bash_reads_every_script() -> None:
    for nodes in (1, 2):
        for grace_s, requeue in ((0, False), (30, False), (30, True)):
            job = SlurmJob(name="j", nodes=nodes, launcher=["x.py"], grace_s=grace_s, requeue=requeue)
            subprocess.run(["bash", "-n"], input=batch_script(job), text=True, check=True)
