"""srun and mpirun: the variables they set for each process, and a rendezvous address derived from them.

Standard library only.
"""

from __future__ import annotations

import math
import re
import zlib
from itertools import product

from fleet.common.addresses import join_endpoint
from fleet.env import Environment
from fleet.errors import ConfigError
from fleet.role_maker.record import RoleRecord, check_rank

_MAX_HOSTS = 100_000  # in a list; a range of a few characters can expand to any number
_DEFAULT_PORT = 29500  # torch's
# Below the range from which systems hand out free ports.
_FIRST_PORT = 10000
_NUM_PORTS = 20000


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
