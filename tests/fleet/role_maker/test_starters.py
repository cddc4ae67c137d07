"""Which starter decides, torch's contract, and that no job becomes smaller in silence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fleet.env import Environment
from fleet.errors import ConfigError
from fleet.role_maker.starters import read_record, read_single, read_torch
from tests.fleet.role_maker.test_fleet_contract import LAUNCHED
from tests.fleet.role_maker.test_schedulers import MPICH, OPEN_MPI, SRUN

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
PYTORCH_JOB = {
    "RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456",
    "KUBERNETES_SERVICE_HOST": "10.96.0.1", "PET_NNODES": "3",
}  # fmt: skip
BATCH_SHELL = {"SLURM_JOB_ID": "4711", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}


@pytest.mark.parametrize(
    ("values", "source", "rank", "world_size"),
    [
        ({}, "single process", 0, 1),
        ({"HOME": "x"}, "single process", 0, 1),
        ({"WORLD_SIZE": "1"}, "single process", 0, 1),
        ({"PADDLE_NNODES": "1"}, "single process", 0, 1),
        (LAUNCHED, "fleet launcher", 1, 2),
        (TORCHRUN, "torchrun", 3, 4),
        (PYTORCH_JOB, "kubeflow", 1, 3),
        (SRUN, "srun", 5, 6),
        (OPEN_MPI, "mpirun", 3, 4),
        (MPICH, "mpirun", 1, 2),
        ({**SRUN, **TORCHRUN}, "torchrun", 3, 4),  # torchrun inside a Slurm allocation
        ({**SRUN, **LAUNCHED}, "fleet launcher", 1, 2),
        ({**BATCH_SHELL, "SLURM_NTASKS": "4", **LAUNCHED}, "fleet launcher", 1, 2),
        ({**BATCH_SHELL, "SLURM_NTASKS": "4", **TORCHRUN}, "torchrun", 3, 4),
        ({**SRUN, **OPEN_MPI}, "mpirun", 3, 4),  # Slurm started mpirun's daemons
        ({**SRUN, "PMI_RANK": "5", "PMI_SIZE": "6"}, "srun", 5, 6),  # srun --mpi=pmi2
        ({**SRUN, "WORLD_SIZE": "6", "MASTER_ADDR": "gpu01", "MASTER_PORT": "1"}, "srun", 5, 6),
        ({**BATCH_SHELL, "SLURM_NTASKS": "1"}, "single process", 0, 1),
        ({**BATCH_SHELL, "SLURM_NTASKS": "8", "PADDLE_TRAINERS_NUM": "1"}, "fleet launcher", 0, 1),
    ],
)
def test_the_inner_starter_decides(values: dict[str, str], source: str, rank: int, world_size: int) -> None:
    record = read_record(Environment(values))
    assert (record.source, record.global_rank, record.world_size) == (source, rank, world_size)
    assert isinstance(record.local_rank, int)  # G17


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"PADDLE_NNODES": "2"}, "PADDLE_NNODES is '2'"),
        ({"PADDLE_NNODES": "2:4", "PADDLE_MASTER": "a:1"}, "PADDLE_NNODES is '2:4'"),
        ({**BATCH_SHELL, "SLURM_NTASKS": "8"}, "SLURM_NTASKS is '8'.*srun"),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"}, "SLURM_NTASKS is '8'"),  # salloc
        ({**BATCH_SHELL, "SLURM_NTASKS_PER_NODE": "4", "SLURM_JOB_NUM_NODES": "2"}, "allocation for 8 tasks"),
        ({**BATCH_SHELL, "SLURM_JOB_NUM_NODES": "2"}, "SLURM_JOB_NUM_NODES is '2'"),
        ({"PADDLE_TRAINERS_NUM": "2"}, "PADDLE_TRAINER_ID is not set"),
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
    ],
)
def test_a_job_never_becomes_smaller_in_silence(values: dict[str, str], message: str) -> None:
    """Peers have run "rank 0 of 1" with exit status 0 where more were asked for."""
    with pytest.raises(ConfigError, match=message):
        read_record(Environment(values))


def test_a_single_process() -> None:
    record = read_single(Environment({"PADDLE_DISTRI_BACKEND": "gloo"}))
    assert (record.master, record.num_nodes, record.backend) == (None, 1, "gloo")


def test_torchrun() -> None:
    record = read_torch(Environment(TORCHRUN))
    assert (record.local_rank, record.local_world_size, record.num_nodes) == (1, 2, 2)
    assert (record.master, record.agent_store, record.generation) == ("head:29400", True, 2)


def test_kubeflow_starts_one_process_in_each_pod() -> None:
    record = read_torch(Environment(PYTORCH_JOB))
    assert (record.local_rank, record.local_world_size, record.num_nodes, record.agent_store) == (0, 1, 3, False)


def test_by_hand_on_one_machine() -> None:
    env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    record = read_torch(Environment(env))
    assert (record.source, record.local_rank, record.local_world_size) == ("torch variables", 1, 2)


def test_in_a_slurm_step_the_place_on_the_node_is_slurms() -> None:
    env = {**SRUN, "RANK": "5", "WORLD_SIZE": "6", "MASTER_ADDR": "gpu01", "MASTER_PORT": "29500"}
    record = read_torch(Environment(env))
    assert (record.local_rank, record.local_world_size, record.num_nodes) == (1, 2, 3)


@pytest.mark.parametrize(
    ("left_out", "changed", "message"),
    [
        (("MASTER_ADDR",), {}, "MASTER_ADDR is not set"),
        (("MASTER_PORT",), {}, "MASTER_PORT is not set"),
        ((), {"RANK": "4"}, "RANK is 4"),
        ((), {"RANK": "-1"}, "RANK is -1"),
        ((), {"RANK": "one"}, "RANK is 'one'"),
        ((), {"WORLD_SIZE": "0"}, "WORLD_SIZE is 0"),
        ((), {"LOCAL_RANK": "2"}, "LOCAL_RANK is 2"),
        ((), {"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE is 5"),
        (("LOCAL_WORLD_SIZE",), {}, "LOCAL_WORLD_SIZE is not"),
    ],
)
def test_torchs_contract_with_something_wrong(left_out: tuple[str, ...], changed: dict[str, str], message: str) -> None:
    env = {**{k: v for k, v in TORCHRUN.items() if k not in left_out}, **changed}
    with pytest.raises(ConfigError, match=message):
        read_record(Environment(env))


def test_a_rank_exported_in_the_batch_shell_is_found_out() -> None:
    env = {**SRUN, "RANK": "0", "WORLD_SIZE": "6", "MASTER_ADDR": "gpu01", "MASTER_PORT": "29500"}
    with pytest.raises(ConfigError, match="SLURM_PROCID"):
        read_record(Environment(env))


@pytest.mark.slow
def test_a_real_torchrun(tmp_path: Path) -> None:
    """fleet.init joins the job of torchrun, whose agent serves the store."""
    script = tmp_path / "train.py"
    script.write_text(
        "import pathlib, sys\n"
        "from fleet import fleet\n"
        "fleet.init(is_collective=True)\n"
        "total = fleet.all_reduce(fleet.worker_index() + 1)\n"
        "text = f'{total} {fleet.worker_num()} {fleet.local_rank()} {fleet.session.job.record.source}'\n"
        "pathlib.Path(sys.argv[1], str(fleet.worker_index())).write_text(text)\n"
    )
    options = ["--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(script), str(tmp_path)]
    root = Path(__file__).parents[3]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(root), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["3 2 0 torchrun", "3 2 1 torchrun"]
