"""srun and mpirun: real sets of their variables, and what is missing or contradictory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.env import Environment
from fleet.errors import ConfigError
from fleet.role_maker.starters import (
    expand_hosts,
    is_mpi_process,
    is_slurm_task,
    read_mpi,
    read_slurm,
    task_counts,
)

SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "6",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NODELIST": "gpu[01-03]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-host-77@1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", []),
        ("a", ["a"]),
        ("a,b", ["a", "b"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[1,4-5]-ib,login", ["n1-ib", "n4-ib", "n5-ib", "login"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("a[1-2],b[007],c", ["a1", "a2", "b007", "c"]),
    ],
)
def test_node_lists_are_expanded(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["n[1-", "n]1[", "n[a-b]", "n[]", "n[1-2"])
def test_damaged_node_lists_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="SLURM_STEP_NODELIST"):
        expand_hosts(text)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=8), st.sampled_from(["n", "gpu-a", "x.y"]))
def test_a_list_of_single_numbers_comes_back(numbers: list[int], prefix: str) -> None:
    text = f"{prefix}[{','.join(f'{number:03}' for number in numbers)}]"
    assert expand_hosts(text) == [f"{prefix}{number:03}" for number in numbers]


def test_task_counts() -> None:
    assert task_counts("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(ConfigError, match="SLURM_STEP_TASKS_PER_NODE"):
        task_counts("2(x")


def test_a_task_of_srun() -> None:
    record = read_slurm(Environment(SRUN))
    assert (record.global_rank, record.world_size, record.local_rank, record.local_world_size) == (5, 6, 1, 2)
    assert (record.num_nodes, record.source, record.master_host) == (3, "srun", "gpu01")
    assert 10000 <= record.master_port < 30000


def test_every_task_finds_the_same_master_and_other_steps_another() -> None:
    def master(**changed: str) -> str | None:
        return read_slurm(Environment({**SRUN, **changed})).master

    assert master(SLURM_PROCID="0", SLURM_NODEID="0", SLURM_LOCALID="0") == master()
    ports = {master(SLURM_STEP_ID=str(step), SLURM_JOB_ID=job) for step in range(3) for job in ("4711", "4712")}
    assert len(ports) == 6


def test_one_node_meets_on_loopback() -> None:
    env = {**SRUN, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "gpu01", "SLURM_LOCALID": "5"}
    record = read_slurm(Environment(env))
    assert (record.master_host, record.local_rank, record.local_world_size) == ("127.0.0.1", 5, 6)


def test_a_given_master_stands() -> None:
    record = read_slurm(Environment({**SRUN, "MASTER_ADDR": "head", "MASTER_PORT": "123", "WORLD_SIZE": "6"}))
    assert record.master == "head:123"


def test_uneven_nodes() -> None:
    env = {**SRUN, "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "3,2,1", "SLURM_LOCALID": "1"}
    assert read_slurm(Environment(env)).local_world_size == 2


@pytest.mark.parametrize(
    ("left_out", "changed", "message"),
    [
        ((), {"SLURM_PROCID": "6"}, "SLURM_PROCID is 6"),
        ((), {"SLURM_LOCALID": "2"}, "SLURM_LOCALID is 2"),
        ((), {"SLURM_NODEID": "3"}, "SLURM_NODEID is 3"),
        ((), {"WORLD_SIZE": "8"}, "WORLD_SIZE is '8'"),
        ((), {"PMI_RANK": "0"}, "PMI_RANK is '0'"),
        (("SLURM_STEP_TASKS_PER_NODE",), {}, "SLURM_STEP_TASKS_PER_NODE is not set"),
        (("SLURM_NODEID",), {}, "SLURM_NODEID is not set"),
        (("SLURM_LOCALID",), {}, "SLURM_LOCALID is not set"),
        (("SLURM_STEP_NODELIST",), {}, "Set MASTER_ADDR"),
        (("SLURM_JOB_ID",), {}, "Set MASTER_PORT"),
        (("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), {}, "SLURM_NTASKS is not set"),
    ],
)
def test_srun_with_something_wrong(left_out: tuple[str, ...], changed: dict[str, str], message: str) -> None:
    env = {**{k: v for k, v in SRUN.items() if k not in left_out}, **changed}
    with pytest.raises(ConfigError, match=message):
        read_slurm(Environment(env))


def test_open_mpi_on_one_node() -> None:
    record = read_mpi(Environment(OPEN_MPI))
    assert (record.global_rank, record.world_size, record.local_rank, record.local_world_size) == (3, 4, 3, 4)
    assert (record.num_nodes, record.source, record.master_host) == (1, "mpirun", "127.0.0.1")
    assert record.master_port == read_mpi(Environment({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0"})).master_port


def test_open_mpi_on_two_nodes_needs_the_master() -> None:
    env = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        read_mpi(Environment(env))
    record = read_mpi(Environment({**env, "MASTER_ADDR": "head", "MASTER_PORT": "77"}))
    assert (record.master, record.num_nodes) == ("head:77", 2)


def test_mpich_and_intel() -> None:
    record = read_mpi(Environment(MPICH))
    assert (record.global_rank, record.world_size, record.local_rank, record.master) == (1, 2, 1, "127.0.0.1:29500")


def test_a_process_started_alone_by_mpirun() -> None:
    record = read_mpi(Environment({"PMI_RANK": "0", "PMI_SIZE": "1"}))
    assert (record.world_size, record.master, record.source) == (1, None, "mpirun")


@pytest.mark.parametrize(
    ("base", "left_out", "changed", "message"),
    [
        (OPEN_MPI, ("OMPI_COMM_WORLD_SIZE",), {}, "OMPI_COMM_WORLD_SIZE is not set"),
        (OPEN_MPI, (), {"OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_RANK is 4"),
        (OPEN_MPI, (), {"WORLD_SIZE": "2"}, "WORLD_SIZE is '2'"),
        (MPICH, ("MPI_LOCALRANKID",), {}, "LOCAL_RANK"),
        (MPICH, ("MPI_LOCALNRANKS",), {}, "LOCAL_WORLD_SIZE"),
        (MPICH, ("PMI_SIZE",), {}, "PMI_SIZE is not set"),
    ],
)
def test_mpirun_with_something_wrong(
    base: dict[str, str], left_out: tuple[str, ...], changed: dict[str, str], message: str
) -> None:
    env = {**{k: v for k, v in base.items() if k not in left_out}, **changed}
    with pytest.raises(ConfigError, match=message):
        read_mpi(Environment(env))


def test_who_started_the_process() -> None:
    batch_shell = Environment({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"})
    assert not is_slurm_task(batch_shell)
    assert is_slurm_task(Environment(SRUN))
    assert is_mpi_process(Environment({**SRUN, **OPEN_MPI}))
    assert is_mpi_process(Environment({**SRUN, **MPICH}))
    assert not is_mpi_process(Environment({**SRUN, "PMI_RANK": "5", "PMI_SIZE": "6"}))
