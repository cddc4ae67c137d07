"""python -m fleet launch-on slurm: its options, what it refuses, and what it gives to sbatch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fleet.errors import ConfigError, LaunchError
from fleet.launch.slurm.slurm_command import run


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
    assert (tmp_path / "submitted").read_text() == "--parsable job.sh"
    assert "Submitted job 42 with job.sh" in capsys.readouterr().out
    sbatch(tmp_path, 1)
    with pytest.raises(LaunchError, match=r"sbatch refused train\.sbatch with exit code 1: no such partition"):
        run(["train.py"])
    with pytest.raises(LaunchError, match="cannot be written"):
        run(["--to=no/such/folder", "train.py"])
