"""What the plans of both modes share: the entry point, the command, the variables every process gets.

A plan is pure: a configuration and the nodes' records in, process records out. Nothing is started and nothing on
this machine is looked at; ports were chosen by :func:`fleet.launch.plan.ports.make_peer`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fleet.env import Environment
from fleet.errors import LaunchError
from fleet.launch.cli.script import python_command
from fleet.launch.plan.addresses import join_endpoint
from fleet.launch.plan.records import LaunchConfig, Peer, ProcessSpec

PROXIES = ("http_proxy", "https_proxy")
# Of an outer torchrun: they would send the worker to a store and a run that are not this job's.
_OUTER = ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID")
# Credentials that only the launcher needs.
_LAUNCHERS_OWN = ("FLEET_ETCD_PASSWORD",)
# Addresses of etcd, which may hold a user and password; the workers need none of them.
_ADDRESSES = ("PADDLE_ELASTIC_SERVER", "PADDLE_MASTER", "PET_RDZV_ENDPOINT")
JOB_SECRET = "FLEET_JOB_SECRET"


def plan_processes(
    config: LaunchConfig,
    peers: Sequence[Peer],
    node_rank: int,
    generation: int,
    restarts: int,
    environment: Environment,
) -> list[ProcessSpec]:
    """Returns the processes of this node, servers first, in the order they are to be started.

    Args:
        config: what the user asked for.
        peers: every node of the job in rank order, this one included.
        node_rank: place of this node in ``peers``.
        generation: number of this start of the job's workers; it grows with each one.
        restarts: how often they were started anew after a failure.
        environment: what the processes inherit.

    Raises:
        LaunchError: the job has no worker, or two processes share an endpoint.
    """
    from fleet.launch.plan.plan_collective import plan_collective
    from fleet.launch.plan.plan_ps import plan_ps

    plan = plan_ps if config.mode == "ps" else plan_collective
    specs = plan(config, peers, node_rank, generation, environment)
    count = {"TORCHELASTIC_RESTART_COUNT": f"{restarts}"}
    return [replace(s, environment={**s.environment, **count}) if s.role == "worker" else s for s in specs]


def command(config: LaunchConfig) -> tuple[str, ...]:
    """Returns the command of each process; the same for all, they differ in their environment."""
    return python_command(config.script, config.script_args, is_module=config.is_module, run_direct=config.run_direct)


def common_variables(config: LaunchConfig, environment: Environment, generation: int, num_nodes: int) -> dict[str, str]:
    """Returns what servers and workers get alike."""
    variables = {
        "PADDLE_NNODES": f"{num_nodes}",
        "PADDLE_LOG_DIR": f"{config.log_dir.absolute()}",
        "PADDLE_JOB_ID": config.job_id,
        "POD_NAME": config.pod_name,
        "FLEET_POD": config.pod_id,
        "FLEET_GENERATION": f"{generation}",
    }
    if config.secret:
        variables[JOB_SECRET] = config.secret
    if config.sets_thread_count:
        variables["OMP_NUM_THREADS"] = "1"
    if config.interface and not environment.has("GLOO_SOCKET_IFNAME"):
        variables["GLOO_SOCKET_IFNAME"] = config.interface
    if config.interface and not config.is_single_node and not environment.has("NCCL_SOCKET_IFNAME"):
        variables["NCCL_SOCKET_IFNAME"] = f"={config.interface}"  # "=": this name, not every name that begins with it
    for name in PROXIES:
        value = environment.raw(name)
        if value is not None:
            variables[f"{name}_original"] = value
    return variables


def torch_variables(rank: int, world_size: int, local_rank: int, local_size: int, node_rank: int) -> dict[str, str]:
    """Returns torch's names of a worker's place; ``env://`` and DistributedDataParallel read these."""
    return {
        "RANK": f"{rank}",
        "WORLD_SIZE": f"{world_size}",
        "LOCAL_RANK": f"{local_rank}",
        "LOCAL_WORLD_SIZE": f"{local_size}",
        "GROUP_RANK": f"{node_rank}",
    }


def store_variables(host: str, port: int) -> dict[str, str]:
    """Returns where the workers' store listens, in both contracts."""
    return {
        "PADDLE_MASTER": join_endpoint(host, port),
        "MASTER_ADDR": host,
        "MASTER_PORT": f"{port}",
    }


def removed_variables(environment: Environment) -> tuple[str, ...]:
    """Returns the inherited variables that no process of the job gets."""
    inherited = environment.inherited()
    logins = [name for name in _ADDRESSES if "@" in inherited.get(name, "")]
    return tuple(name for name in (*PROXIES, *_OUTER, *_LAUNCHERS_OWN, *logins) if name in inherited)


def place(
    config: LaunchConfig,
    environment: Environment,
    *,
    role: str,
    index: int,
    local_index: int,
    position: int,
    variables: Mapping[str, str],
    echo: bool,
) -> ProcessSpec:
    """Returns one process; a value too long for an environment goes to the backup file instead.

    ``position`` numbers the processes of this node, servers first (it names envlog.N).
    """
    kept = {k: v for k, v in variables.items() if len(v) <= config.environment_limit}
    overflow = {k: v for k, v in variables.items() if k not in kept}
    if role == "worker" and config.watches_workers:
        kept["FLEET_WORKER_FILE"] = f"{config.scratch_path / f'worker.{index}'}"
        kept["FLEET_PREEMPT_GRACE"] = f"{config.preempt_grace_s:g}"
    backup = None
    if role == "worker":
        backup = config.log_dir.absolute() / f"backup_env.{index}.json"
        kept["PADDLE_BACKUP_ENV_PATH"] = f"{backup}"
    elif overflow:
        backup = config.log_dir.absolute() / f"backup_env.server.{index}.json"
        kept["PADDLE_BACKUP_ENV_PATH"] = f"{backup}"
    return ProcessSpec(
        role=role,
        index=index,
        local_index=local_index,
        command=command(config),
        environment=kept,
        log_path=log_path(config, role, local_index),
        echo=echo,
        removed=(*removed_variables(environment), *(name for name in overflow if name in environment.inherited())),
        overflow=overflow,
        backup_path=backup,
        environment_log_path=config.log_dir / f"envlog.{position}",
    )


def log_path(config: LaunchConfig, role: str, local_index: int) -> Path:
    """Returns ``workerlog.N`` or ``serverlog.N`` in the log folder; N counts the role's processes on this node."""
    return config.log_dir / f"{role}log.{local_index}"


def check_endpoints(endpoints: Sequence[str]) -> None:
    """Raises LaunchError when two processes would listen at one endpoint."""
    seen: set[str] = set()
    for endpoint in endpoints:
        if endpoint in seen:
            raise LaunchError(
                f"Two processes of the job have the endpoint {endpoint}. Give the nodes different "
                "addresses (--host) or different first ports (--start_port)."
            )
        seen.add(endpoint)
