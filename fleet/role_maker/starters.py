"""Reads the role from the environment: one pure function for each way to start a job.

[Note: Who wins]
Starters nest, and the innermost decides, because it knows how many processes there are:

1. Fleet's own variables (PADDLE_TRAINER_ID ...). The launcher also sets torch's; they must agree.
2. RANK: torchrun, Kubeflow's PyTorchJob, or a user's script. torchrun inside a Slurm allocation is this case.
3. mpirun, even inside a Slurm allocation (there the Slurm variables describe mpirun's own daemons).
4. srun: only a task of a step. A batch shell also has SLURM_PROCID=0, and is not a task (see ``_refuse_batch_shell``).
5. Nothing: a single process; but a variable that implies several processes is an error, never a smaller job.

For srun and mpirun the rendezvous address is derived from their variables. Standard library only.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable
from dataclasses import replace
from itertools import product

from fleet.common.addresses import join_endpoint
from fleet.env import Environment
from fleet.errors import ConfigError
from fleet.role_maker.fleet_contract import fleet_variables, read_fleet
from fleet.role_maker.record import SINGLE, RoleRecord, check_rank, place_by_numbers

__all__ = ["RoleRecord", "read_fleet", "read_mpi", "read_record", "read_single", "read_slurm", "read_torch"]
_ALONE = "To run a single process on purpose, set PADDLE_TRAINERS_NUM=1."
_MAX_HOSTS = 100_000  # in a list; a range of a few characters can expand to any number
_DEFAULT_PORT = 29500  # torch's
# Below the range from which systems hand out free ports.
_FIRST_PORT = 10000
_NUM_PORTS = 20000


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


def is_slurm_task(env: Environment) -> bool:
    """Returns whether srun started this process; a batch or salloc shell has no step."""
    return env.has("SLURM_PROCID") and (env.has("SLURM_STEP_ID") or env.has("SLURM_STEP_NUM_TASKS"))


def is_mpi_process(env: Environment) -> bool:
    """Returns whether mpirun started this process.

    srun can also set PMI_RANK. Then there is a step, and MPI_LOCALRANKID of MPICH and Intel MPI is absent.
    """
    if env.has("OMPI_COMM_WORLD_RANK"):
        return True
    return env.has("PMI_RANK") and (env.has("MPI_LOCALRANKID") or not is_slurm_task(env))


def read_slurm(env: Environment) -> RoleRecord:
    """Returns the record of a task of an srun step.

    The rendezvous is at MASTER_ADDR and MASTER_PORT where set; otherwise on the first node of the step (loopback when
    there is one node), at a port derived from the numbers of job and step.
    """
    world_name = "SLURM_STEP_NUM_TASKS" if env.has("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    rank = _need_int(env, "SLURM_PROCID")
    world_size = _need_int(env, world_name)
    check_rank(rank, world_size, "SLURM_PROCID", world_name)
    # srun --mpi=pmi2 sets these as well, to equal values; other values come from a second starter or the shell.
    for name, value in (("PMI_RANK", rank), ("PMI_SIZE", world_size), ("WORLD_SIZE", world_size)):
        if env.has(name) and env.int(name) != value:
            raise ConfigError(
                f"{name} is {env.raw(name)!r} and srun says {value} (SLURM_PROCID {rank}, {world_name} {world_size}). "
                f"Unset {name}, or start the processes with one starter only."
            )
    name = "SLURM_STEP_NODELIST" if env.has("SLURM_STEP_NODELIST") else "SLURM_JOB_NODELIST"
    hosts = expand_hosts(env.str(name), name)
    num_nodes = env.int("SLURM_STEP_NUM_NODES") or len(hosts) or 1
    local_rank, local_world_size = _slurm_local(env, world_size, num_nodes)
    return RoleRecord(
        global_rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        num_nodes=num_nodes,
        backend=env.raw("PADDLE_DISTRI_BACKEND"),
        master=_slurm_master(env, hosts, num_nodes) if world_size > 1 else None,
        source="srun",
    )


def read_mpi(env: Environment) -> RoleRecord:
    """Returns the record of a process of Open MPI's, MPICH's or Intel MPI's mpirun.

    The rendezvous is at MASTER_ADDR, or on loopback when all workers are on this node. The port is MASTER_PORT, or
    derived from Open MPI's job name, or 29500.
    """
    if env.has("OMPI_COMM_WORLD_RANK"):
        rank_name = "OMPI_COMM_WORLD_RANK"
        world_name = "OMPI_COMM_WORLD_SIZE"
        local_rank_names = ("OMPI_COMM_WORLD_LOCAL_RANK", "LOCAL_RANK")
        local_size_names = ("OMPI_COMM_WORLD_LOCAL_SIZE", "LOCAL_WORLD_SIZE")
    else:
        rank_name = "PMI_RANK"
        world_name = "PMI_SIZE"
        local_rank_names = ("MPI_LOCALRANKID", "LOCAL_RANK")
        local_size_names = ("MPI_LOCALNRANKS", "LOCAL_WORLD_SIZE")
    rank = _need_int(env, rank_name)
    world_size = _need_int(env, world_name)
    check_rank(rank, world_size, rank_name, world_name)
    if env.has("WORLD_SIZE") and env.int("WORLD_SIZE") != world_size:
        raise ConfigError(
            f"WORLD_SIZE is {env.raw('WORLD_SIZE')!r} and {world_name} is {world_size!r}. Unset WORLD_SIZE."
        )
    local_rank = 0
    local_world_size = 1
    if world_size > 1:
        local_rank = _first_int(env, local_rank_names)
        local_world_size = _first_int(env, local_size_names)
    check_rank(local_rank, local_world_size, local_rank_names[0], local_size_names[0])
    return RoleRecord(
        global_rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        num_nodes=-(-world_size // local_world_size),
        backend=env.raw("PADDLE_DISTRI_BACKEND"),
        master=_mpi_master(env, world_size, local_world_size) if world_size > 1 else None,
        source="mpirun",
    )


def expand_hosts(text: str, name: str = "SLURM_STEP_NODELIST") -> list[str]:
    """Returns the hosts of a Slurm node list, in order.

    Example:
        >>> expand_hosts("gpu[01-03,7]-ib,login")
        ['gpu01-ib', 'gpu02-ib', 'gpu03-ib', 'gpu7-ib', 'login']
    """
    if set("[]") & set(re.sub(r"\[[^\[\]]*\]", "", text)):
        raise ConfigError(f"{name} is {text!r}; its brackets do not match.")
    hosts: list[str] = []
    # A comma inside brackets separates numbers, outside it separates items; both kinds of text make up one item.
    for item in re.findall(r"(?:\[[^\]]*\]|[^,\[\]])+", text.strip()):
        pieces = re.split(r"(\[[^\]]*\])", item.strip())
        choices = [_expand_range(piece[1:-1], text, name) if piece.startswith("[") else [piece] for piece in pieces]
        # Checked before the product is computed: a few characters of ranges can describe any number of hosts.
        if len(hosts) + math.prod(map(len, choices)) > _MAX_HOSTS:
            raise ConfigError(f"{name} is {text!r:.200}; it names more than {_MAX_HOSTS} hosts.")
        hosts.extend("".join(parts) for parts in product(*choices))
    return hosts


def task_counts(text: str, name: str = "SLURM_STEP_TASKS_PER_NODE") -> list[int]:
    """Returns the number of tasks of each node from Slurm's short form.

    Example:
        >>> task_counts("2(x3),1")
        [2, 2, 2, 1]
    """
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,9})(?:\(x([0-9]{1,9})\))?\s*", item)
        if match is None or len(counts) + int(match[2] or 1) > _MAX_HOSTS:
            raise ConfigError(f"{name} is {text!r:.200}; it has the form '2(x3),1', with at most {_MAX_HOSTS} nodes.")
        counts.extend([int(match[1])] * int(match[2] or 1))
    return counts


def _expand_range(text: str, whole: str, name: str) -> list[str]:
    numbers: list[str] = []
    for item in text.split(","):
        match = re.fullmatch(r"([0-9]{1,20})(?:-([0-9]{1,20}))?", item.strip())
        if match is None:
            raise ConfigError(f"{name} is {whole!r:.200}; its brackets hold numbers and ranges such as [1-3,7].")
        first = match[1]
        last = match[2] or first
        if len(numbers) + int(last) - int(first) >= _MAX_HOSTS:
            raise ConfigError(f"{name} is {whole!r:.200}; it names more than {_MAX_HOSTS} hosts.")
        # Slurm pads numbers to the width of the first one: [01-12].
        numbers.extend(str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    return numbers


def _slurm_local(env: Environment, world_size: int, num_nodes: int) -> tuple[int, int]:
    local_rank = _need_int(env, "SLURM_LOCALID") if world_size > 1 else 0
    if num_nodes == 1:
        return local_rank, world_size
    counts = task_counts(_need(env, "SLURM_STEP_TASKS_PER_NODE"))
    node = _need_int(env, "SLURM_NODEID")
    check_rank(node, len(counts), "SLURM_NODEID", "the number of nodes in SLURM_STEP_TASKS_PER_NODE")
    check_rank(local_rank, counts[node], "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE on this node")
    return local_rank, counts[node]


def _slurm_master(env: Environment, hosts: list[str], num_nodes: int) -> str:
    address = env.raw("MASTER_ADDR")
    if address is None:
        if num_nodes > 1 and not hosts:
            raise ConfigError("SLURM_STEP_NODELIST is not set and the step has several nodes. Set MASTER_ADDR.")
        address = hosts[0] if num_nodes > 1 else "127.0.0.1"
    if env.has("MASTER_PORT"):
        return join_endpoint(address.strip(), env.int("MASTER_PORT"))
    job = env.raw("SLURM_JOB_ID")
    step = env.raw("SLURM_STEP_ID")
    if job is None:
        raise ConfigError("SLURM_JOB_ID is not set, and the port of rank 0 is derived from it. Set MASTER_PORT.")
    return join_endpoint(address.strip(), _port_from(f"{job}.{step}"))


def _mpi_master(env: Environment, world_size: int, local_world_size: int) -> str:
    address = env.raw("MASTER_ADDR")
    if address is None:
        if local_world_size < world_size:
            raise ConfigError(
                f"mpirun started {world_size} processes, {local_world_size} of them on this node, and MASTER_ADDR is "
                "not set: mpirun does not say where rank 0 is. Set MASTER_ADDR to the host of rank 0 "
                "(mpirun -x MASTER_ADDR=..., or -genv MASTER_ADDR ...)."
            )
        address = "127.0.0.1"
    if env.has("MASTER_PORT"):
        return join_endpoint(address.strip(), env.int("MASTER_PORT"))
    job = env.raw("PMIX_NAMESPACE")
    return join_endpoint(address.strip(), _port_from(job) if job else _DEFAULT_PORT)


def _port_from(text: str) -> int:
    """Returns a port that jobs share with no other job, mostly; ``hash`` would differ between processes of one job."""
    return _FIRST_PORT + zlib.crc32(text.encode()) % _NUM_PORTS


def _need(env: Environment, name: str) -> str:
    value = env.raw(name)
    if value is None:
        raise ConfigError(f"{name} is not set, although its starter's other variables are. Set it.")
    return value


def _need_int(env: Environment, name: str) -> int:
    _need(env, name)
    return env.int(name)


def _first_int(env: Environment, names: tuple[str, ...]) -> int:
    name = next((name for name in names if env.has(name)), None)
    if name is None:
        raise ConfigError(
            f"{' and '.join(names)} are not set: this mpirun does not give a process its local rank. "
            f"Set {names[-1]}, or start the script with torchrun or python -m fleet.launch."
        )
    return env.int(name)
