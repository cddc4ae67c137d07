"""Reads the role from the environment: one pure function for each way to start a job.

[Note: Who wins]
Starters nest, and the innermost decides, because it knows how many processes there are:

1. Fleet's own variables (PADDLE_TRAINER_ID ...). The launcher also sets torch's; they must agree.
2. RANK: torchrun, Kubeflow's PyTorchJob, or a user's script. torchrun inside a Slurm allocation is this case.
3. mpirun, even inside a Slurm allocation (there the Slurm variables describe mpirun's own daemons).
4. srun: only a task of a step. A batch shell also has SLURM_PROCID=0, and is not a task (see ``_refuse_batch_shell``).
5. Nothing: a single process; but a variable that implies several processes is an error, never a smaller job.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fleet.common.addresses import join_endpoint
from fleet.env import Environment
from fleet.errors import ConfigError
from fleet.role_maker.fleet_contract import fleet_variables, read_fleet
from fleet.role_maker.record import SINGLE, RoleRecord, check_rank, place_by_numbers
from fleet.role_maker.schedulers import is_mpi_process, is_slurm_task, read_mpi, read_slurm

__all__ = ["RoleRecord", "read_fleet", "read_mpi", "read_record", "read_single", "read_slurm", "read_torch"]

_ALONE = "To run a single process on purpose, set PADDLE_TRAINERS_NUM=1."


def read_record(env: Environment) -> RoleRecord:
    """Returns the role of this process in a collective job, as its starter set it.

    Raises:
        ConfigError: variables are missing, contradict each other, or describe a job that this process is not in.

    Example:
        >>> read_record(Environment({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"})).source
        'torch variables'
    """
    return _reader(env)(env)


def _reader(env: Environment) -> Callable[[Environment], RoleRecord]:
    if fleet_variables(env):
        return read_fleet
    if env.has("RANK"):
        return read_torch
    if is_mpi_process(env):
        return read_mpi
    if is_slurm_task(env):
        return read_slurm
    return read_single


def read_single(env: Environment) -> RoleRecord:
    """Returns the record of a process without a starter; refuses a process that was meant to join a job."""
    world_size = env.int("WORLD_SIZE")
    if world_size > 1:
        raise ConfigError(
            f"WORLD_SIZE is {world_size!r} and RANK is not set: this process would train alone. "
            f"Set RANK, or start the script with python -m fleet.launch or torchrun. {_ALONE}"
        )
    nodes = env.raw("PADDLE_NNODES")
    if nodes is not None and nodes.split(":")[0].strip() != "1":
        raise ConfigError(
            f"PADDLE_NNODES is {nodes!r} and PADDLE_TRAINER_ID is not set: this process would train alone. "
            f"Start the script with python -m fleet.launch, which reads PADDLE_NNODES. {_ALONE}"
        )
    _refuse_batch_shell(env)
    return RoleRecord(backend=env.raw("PADDLE_DISTRI_BACKEND"), source=SINGLE)


def _refuse_batch_shell(env: Environment) -> None:
    """Raises when a Slurm allocation for several tasks runs this process outside srun.

    A shell of sbatch or salloc has SLURM_NTASKS, and a batch shell SLURM_PROCID=0, whether or not the user forgot
    srun. A forgotten srun gives a one-process job that looks fine, so it is refused.
    """
    if not env.has("SLURM_JOB_ID"):
        return
    nodes = max(env.int("SLURM_JOB_NUM_NODES"), 1)
    tasks = env.int("SLURM_NTASKS") or env.int("SLURM_NTASKS_PER_NODE") * nodes or nodes
    if tasks > 1:
        name = next((n for n in ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE") if env.has(n)), "SLURM_JOB_NUM_NODES")
        raise ConfigError(
            f"{name} is {env.raw(name)!r}, an allocation for {tasks} tasks, and this process was not started by srun "
            f"(SLURM_STEP_ID is not set): it would train alone. Start it with srun python, or with torchrun or "
            f"python -m fleet.launch on each node. {_ALONE}"
        )


def read_torch(env: Environment) -> RoleRecord:
    """Returns the record that torch's contract describes: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, the local pair.

    Without LOCAL_RANK and LOCAL_WORLD_SIZE, srun gives the local rank. Outside a step the process is the only one on
    its node (Kubeflow starts one in each pod), unless MASTER_ADDR is loopback: then all processes are on this node.
    """
    if not env.has("WORLD_SIZE"):
        raise ConfigError(f"RANK is {env.raw('RANK')!r} and WORLD_SIZE is not set. Set both, or neither.")
    rank = env.int("RANK")
    world_size = env.int("WORLD_SIZE")
    check_rank(rank, world_size, "RANK", "WORLD_SIZE")
    _refuse_constant_rank(env, rank, world_size)
    record = RoleRecord(
        global_rank=rank,
        world_size=world_size,
        backend=env.raw("PADDLE_DISTRI_BACKEND"),
        master=_torch_master(env, world_size),
        source=_torch_source(env),
        agent_store=env.bool("TORCHELASTIC_USE_AGENT_STORE"),
        generation=env.int("TORCHELASTIC_RESTART_COUNT"),
    )
    record = place_by_numbers(record, _torch_local(env, world_size), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    return replace(record, num_nodes=env.int("GROUP_WORLD_SIZE") or record.num_nodes)


def _refuse_constant_rank(env: Environment, rank: int, world_size: int) -> None:
    """Refuses ``export RANK=$SLURM_PROCID`` of a batch shell, which gives every task the rank 0 of the shell."""
    # torchrun on each node of a step: SLURM_PROCID is the rank of the node and differs from RANK.
    if env.has("TORCHELASTIC_RUN_ID") or not is_slurm_task(env):
        return
    tasks = env.int("SLURM_STEP_NUM_TASKS")
    task = env.int("SLURM_PROCID")
    if tasks == world_size and task != rank:
        raise ConfigError(
            f"RANK is {rank!r} and SLURM_PROCID is {task!r} in a step of {tasks} tasks. Was RANK exported in the "
            "batch shell, where SLURM_PROCID is 0? Unset RANK: under srun it is not needed."
        )


def _torch_master(env: Environment, world_size: int) -> str | None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if world_size > 1 and not env.has(name):
            raise ConfigError(
                f"WORLD_SIZE is {world_size!r} and {name} is not set. Set MASTER_ADDR and MASTER_PORT to the address "
                "of rank 0, the same for every process."
            )
    address = env.raw("MASTER_ADDR")
    return join_endpoint(address.strip(), env.int("MASTER_PORT")) if address and env.has("MASTER_PORT") else None


def _torch_local(env: Environment, world_size: int) -> tuple[int | None, int | None]:
    local_rank = env.int("LOCAL_RANK") if env.has("LOCAL_RANK") else None
    local_size = env.int("LOCAL_WORLD_SIZE") if env.has("LOCAL_WORLD_SIZE") else None
    # In a step of another size a second starter runs inside the tasks, and Slurm's local ranks are those of the tasks.
    whole_step = is_slurm_task(env) and env.int("SLURM_STEP_NUM_TASKS") == world_size
    if whole_step and (local_rank is None or local_size is None):
        record = read_slurm(env)
        local_rank = record.local_rank if local_rank is None else local_rank
        local_size = record.local_world_size if local_size is None else local_size
    return local_rank, local_size


def _torch_source(env: Environment) -> str:
    if env.has("TORCHELASTIC_RUN_ID"):
        return "torchrun"
    return "kubeflow" if env.has("KUBERNETES_SERVICE_HOST") else "torch variables"
