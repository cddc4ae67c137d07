"""The processes of this node, of both modes: their commands, ranks, endpoints and variables.

A plan is pure: a configuration and the nodes' records in, process records out. Nothing is started and nothing on
this machine is looked at; ports were chosen by :func:`fleet.launch.plan.ports.make_peer`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fleet.common.addresses import join_endpoint, split_endpoint
from fleet.env import Environment
from fleet.errors import LaunchError
from fleet.launch.plan.peers import Peer
from fleet.launch.plan.records import LaunchConfig, ProcessSpec
from fleet.launch.processes.profile_report import PROFILE

PROXIES = ("http_proxy", "https_proxy")
# Of an outer torchrun: they would send the worker to a store and a run that are not this job's.
_OUTER = ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID")
# For the launcher alone: credentials, and the port that it listens at itself.
_LAUNCHERS_OWN = ("FLEET_ETCD_PASSWORD", "FLEET_PAGE")
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
        config: the job.
        peers: every node of the job in rank order, this one included.
        node_rank: place of this node in ``peers``.
        generation: number of this start of the job's workers; it grows with each one.
        restarts: how often they were restarted after a failure.
        environment: the variables that the processes inherit.

    Raises:
        LaunchError: the job has no worker, or two processes share an endpoint.
    """
    plan = plan_ps if config.mode == "ps" else plan_collective
    specs = plan(config, peers, node_rank, generation, environment)
    count = {"TORCHELASTIC_RESTART_COUNT": f"{restarts}"}
    return [replace(s, environment={**s.environment, **count}) if s.role == "worker" else s for s in specs]


def common_variables(config: LaunchConfig, environment: Environment, generation: int, num_nodes: int) -> dict[str, str]:
    """Returns the variables that servers and workers share."""
    variables = {
        "PADDLE_NNODES": f"{num_nodes}",
        "PADDLE_LOG_DIR": f"{config.logs.folder.absolute()}",
        "PADDLE_JOB_ID": config.job_id,
        "POD_NAME": config.pod.name,
        "FLEET_POD": config.pod.id,
        "FLEET_GENERATION": f"{generation}",
    }
    if config.pod.secret:
        variables[JOB_SECRET] = config.pod.secret
    if config.processes.sets_thread_count:
        variables["OMP_NUM_THREADS"] = "1"
    if config.nodes.interface and not environment.has("GLOO_SOCKET_IFNAME"):
        variables["GLOO_SOCKET_IFNAME"] = config.nodes.interface
    if config.nodes.interface and not config.nodes.is_single and not environment.has("NCCL_SOCKET_IFNAME"):
        variables["NCCL_SOCKET_IFNAME"] = (
            # NCCL takes "=NAME" for this name alone, and "NAME" for every name that begins with it.
            f"={config.nodes.interface}"
        )
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
    kept = {k: v for k, v in variables.items() if len(v) <= config.processes.environment_limit}
    overflow = {k: v for k, v in variables.items() if k not in kept}
    kept.update(_watching_variables(config, role, index))
    backup = None
    if role == "worker":
        backup = config.logs.folder.absolute() / f"backup_env.{index}.json"
        kept["PADDLE_BACKUP_ENV_PATH"] = f"{backup}"
    elif overflow:
        backup = config.logs.folder.absolute() / f"backup_env.server.{index}.json"
        kept["PADDLE_BACKUP_ENV_PATH"] = f"{backup}"
    return ProcessSpec(
        role=role,
        index=index,
        local_index=local_index,
        command=config.script.command,
        environment=kept,
        log_path=log_path(config, role, local_index),
        echo=echo,
        removed=(*removed_variables(environment), *(name for name in overflow if name in environment.inherited())),
        overflow=overflow,
        backup_path=backup,
        environment_log_path=config.logs.folder / f"envlog.{position}",
    )


def _watching_variables(config: LaunchConfig, role: str, index: int) -> dict[str, str]:
    """Returns the variables by which a process is watched, measured and shown."""
    variables = {}
    if config.page is not None:
        variables["FLEET_PAGE_FOLDER"] = f"{config.page.folder}"
    if role != "worker":
        return variables
    if config.watches_workers:
        variables["FLEET_WORKER_FILE"] = f"{config.pod.scratch_path / f'worker.{index}'}"
        variables["FLEET_PREEMPT_GRACE"] = f"{config.processes.preempt_grace_s:g}"
    if config.logs.profile:
        variables[PROFILE] = config.logs.profile
    if config.logs.trackers:
        variables["FLEET_TRACKERS"] = config.logs.trackers
    return variables


def log_path(config: LaunchConfig, role: str, local_index: int) -> Path:
    """Returns ``workerlog.N`` or ``serverlog.N`` in the log folder; N counts the role's processes on this node."""
    return config.logs.folder / f"{role}log.{local_index}"


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


def plan_collective(
    config: LaunchConfig, peers: Sequence[Peer], node_rank: int, generation: int, environment: Environment
) -> list[ProcessSpec]:
    """Returns the workers of node ``node_rank``; ranks count through ``peers`` in order.

    Raises LaunchError when no peer has a worker, or two workers share an endpoint.

    Example:
        >>> from fleet.launch.plan.records import Processes, Script
        >>> script = Script(name="train.py")
        >>> config = LaunchConfig(mode="collective", script=script, processes=Processes(num_workers=2))
        >>> peer = Peer(name="pod", host="127.0.0.1", ports=(6070, 6071), store_port=6072)
        >>> specs = plan_collective(config, [peer], 0, 0, Environment({}))
        >>> specs[1].environment["PADDLE_CURRENT_ENDPOINT"]
        '127.0.0.1:6071'
    """
    endpoints = [join_endpoint(peer.host, port) for peer in peers for port in peer.ports]
    if not endpoints:
        raise LaunchError("No node of the job starts a worker. Raise --nproc_per_node.")
    check_endpoints(endpoints)
    own = peers[node_rank]
    first = peers[0]
    offset = sum(len(peer.ports) for peer in peers[:node_rank])
    shared = {
        **common_variables(config, environment, generation, len(peers)),
        **store_variables(first.host, first.store_port or first.ports[0]),
        "PADDLE_TRAINERS_NUM": f"{len(endpoints)}",
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "PADDLE_GLOBAL_SIZE": f"{len(endpoints)}",
        "PADDLE_LOCAL_SIZE": f"{len(own.ports)}",
        "PADDLE_DISTRI_BACKEND": config.processes.process_group_backend,
        "PADDLE_AUTO_CLUSTER": "0",
    }
    world_devices = ",".join(device for peer in peers for device in peer.devices)
    if world_devices:
        shared["PADDLE_WORLD_DEVICE_IDS"] = world_devices
    return [
        place(
            config,
            environment,
            role="worker",
            index=offset + i,
            local_index=i,
            position=i,
            echo=offset + i == 0,
            variables={**shared, **_own_variables(config, own, endpoints, offset, i, node_rank)},
        )
        for i in range(len(own.ports))
    ]


def _own_variables(
    config: LaunchConfig, own: Peer, endpoints: Sequence[str], offset: int, local_rank: int, node_rank: int
) -> dict[str, str]:
    """Returns the variables of the worker ``local_rank`` of this node alone."""
    rank = offset + local_rank
    variables = {
        **torch_variables(rank, len(endpoints), local_rank, len(own.ports), node_rank),
        "PADDLE_TRAINER_ID": f"{rank}",
        "PADDLE_GLOBAL_RANK": f"{rank}",
        "PADDLE_LOCAL_RANK": f"{local_rank}",
        "PADDLE_RANK_IN_NODE": f"{local_rank}",
        "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
    }
    if config.processes.worker_devices:
        variables["FLAGS_selected_gpus"] = config.processes.worker_devices[local_rank]
        variables["PADDLE_LOCAL_DEVICE_IDS"] = config.processes.worker_devices[local_rank]
    return variables


HTTP_RENDEZVOUS = "3"
STANDBYS = "FLEET_PS_STANDBY_ENDPOINTS"
SHARDS = "FLEET_PS_SHARD_ENDPOINTS"
# The rows of the table that fleetrun prints for each role: exactly those of its documentation.
SERVER_ROWS = (
    "PADDLE_TRAINERS_NUM", "TRAINING_ROLE", "POD_IP", "PADDLE_GLOO_RENDEZVOUS", "PADDLE_PSERVERS_IP_PORT_LIST",
    "PADDLE_PORT", "PADDLE_WITH_GLOO", "PADDLE_HETER_TRAINER_IP_PORT_LIST", "PADDLE_TRAINER_ENDPOINTS",
    "PADDLE_GLOO_HTTP_ENDPOINT", "PADDLE_GLOO_FS_PATH",
)  # fmt: skip
WORKER_ROWS = (
    "PADDLE_GLOO_HTTP_ENDPOINT", "PADDLE_GLOO_RENDEZVOUS", "PADDLE_PSERVERS_IP_PORT_LIST", "PADDLE_WITH_GLOO",
    "PADDLE_TRAINER_ENDPOINTS", "FLAGS_selected_gpus", "PADDLE_GLOO_FS_PATH", "PADDLE_TRAINERS_NUM", "TRAINING_ROLE",
    "XPU_VISIBLE_DEVICES", "PADDLE_HETER_TRAINER_IP_PORT_LIST", "PADDLE_TRAINER_ID", "CUDA_VISIBLE_DEVICES",
    "FLAGS_selected_xpus",
)  # fmt: skip


@dataclass(frozen=True)
class _Layout:
    """Every endpoint of the job and which of them belong to this node."""

    servers: list[str]
    workers: list[str]
    local_servers: Sequence[int]
    local_workers: Sequence[int]
    store: tuple[str, int]
    http: str
    standbys: Sequence[str] = ()
    shards: Sequence[Sequence[str]] = ()  # of each server process, where shards can move


def plan_ps(
    config: LaunchConfig, peers: Sequence[Peer], node_rank: int, generation: int, environment: Environment
) -> list[ProcessSpec]:
    """Returns the servers and workers of node ``node_rank``, servers first.

    Endpoints come from ``--servers``/``--workers`` where these are given, else from ``peers`` in order. Raises
    LaunchError when the job has no server or no worker, or two processes share an endpoint.
    """
    layout = _layout(config, peers, node_rank)
    num_nodes, place_of_node = _listed_place(layout) if config.servers.worker_endpoints else (len(peers), node_rank)
    shared = {
        **common_variables(config, environment, generation, num_nodes),
        "PADDLE_PSERVERS_IP_PORT_LIST": ",".join(layout.servers),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(layout.workers),
        "PADDLE_TRAINERS_NUM": f"{len(layout.workers)}",
        "PADDLE_HETER_TRAINER_IP_PORT_LIST": "",
        "PADDLE_WITH_GLOO": f"{config.servers.with_gloo}",
        "PADDLE_GLOO_RENDEZVOUS": HTTP_RENDEZVOUS,
        "PADDLE_GLOO_FS_PATH": f"{config.pod.scratch_path}",
        "PADDLE_GLOO_HTTP_ENDPOINT": layout.http,
    }
    if layout.standbys:
        shared[STANDBYS] = ",".join(layout.standbys)
    if layout.shards:
        shared[SHARDS] = ";".join(map(",".join, layout.shards))
    specs = _server_specs(config, environment, layout, shared)
    num_servers = len(specs)
    for i, index in enumerate(layout.local_workers):
        variables = {**shared, **_worker_variables(config, environment, layout, i, place_of_node)}
        specs.append(
            place(
                config,
                environment,
                role="worker",
                index=index,
                local_index=i,
                position=num_servers + i,
                echo=index == 0,
                variables=variables,
            )
        )
    return specs


def _server_specs(
    config: LaunchConfig, environment: Environment, layout: _Layout, shared: Mapping[str, str]
) -> list[ProcessSpec]:
    """Returns this node's servers, then their standbys, which are numbered on; where shards move, its processes."""
    own: dict[str, str] = {}
    endpoints = [group[0] for group in layout.shards] or layout.servers
    servers = [(index, endpoints[index], own) for index in layout.local_servers]
    first = len(layout.servers)
    standbys = [(first + i, endpoint, {"FLEET_PS_STANDBY": "1"}) for i, endpoint in enumerate(layout.standbys)]
    return [
        place(
            config,
            environment,
            role="server",
            index=index,
            local_index=i,
            position=i,
            echo=False,
            variables={**shared, **_server_variables(endpoint), **_server_state(config, environment), **own},
        )
        for i, (index, endpoint, own) in enumerate([*servers, *standbys])
    ]


def _server_variables(endpoint: str) -> dict[str, str]:
    host, port = split_endpoint(endpoint, "the server's endpoint")
    return {"TRAINING_ROLE": "PSERVER", "PADDLE_ROLE": "PSERVER", "POD_IP": host, "PADDLE_PORT": f"{port}"}


def _server_state(config: LaunchConfig, environment: Environment) -> dict[str, str]:
    """Returns the folder with the state of a restarted server, where servers restart; the user's folder wins."""
    if not (config.elastic.max_restart or config.servers.has_standbys or config.servers.shards) or environment.has(
        "FLEET_PS_FOLDER"
    ):
        return {}
    return {"FLEET_PS_FOLDER": f"{config.pod.scratch_path / 'servers'}"}


def _worker_variables(
    config: LaunchConfig, environment: Environment, layout: _Layout, local_rank: int, node_rank: int
) -> dict[str, str]:
    """Returns a worker's own variables; it sees only its card, so for it that card has number 0.

    Without a card it keeps the user's CUDA_VISIBLE_DEVICES, which may hide the cards of a machine that has some.
    """
    rank = layout.local_workers[local_rank]
    names = config.processes.device_names
    hidden = environment.inherited().get("CUDA_VISIBLE_DEVICES", "0")
    device = names[local_rank % len(names)] if names else hidden
    shares = bool(names) and config.nodes.is_single and len(layout.local_workers) > len(names)
    # nccl needs a GPU for each worker.
    takes_gloo = shares and config.processes.backend != "nccl"
    return {
        **({"PADDLE_DISTRI_BACKEND": "gloo"} if takes_gloo else {}),
        **store_variables(*layout.store),
        **torch_variables(rank, len(layout.workers), local_rank, len(layout.local_workers), node_rank),
        "TRAINING_ROLE": "TRAINER",
        "PADDLE_ROLE": "TRAINER",
        "PADDLE_TRAINER_ID": f"{rank}",
        "FLAGS_selected_gpus": "0",
        "FLAGS_selected_xpus": "0",
        "CUDA_VISIBLE_DEVICES": device,
        "XPU_VISIBLE_DEVICES": device,
    }


def _layout(config: LaunchConfig, peers: Sequence[Peer], node_rank: int) -> _Layout:
    servers = list(config.servers.endpoints) or [join_endpoint(p.host, port) for p in peers for port in p.server_ports]
    workers = list(config.servers.worker_endpoints) or [join_endpoint(p.host, port) for p in peers for port in p.ports]
    if not servers or not workers:
        missing = "worker" if servers else "server"
        raise LaunchError(f"No node of the job starts a {missing}. Give at least one node --{missing}_num=1.")
    check_endpoints([*servers, *workers])
    before = peers[:node_rank]
    own = peers[node_rank]
    # Standbys exist on one node only, whose ports hold the servers first, then their standbys.
    standbys = servers[len(servers) // 2 :] if config.servers.has_standbys else []
    servers = servers[: len(servers) - len(standbys)]
    shards: list[list[str]] = []
    if count := config.servers.shards:
        shards = [servers[first : first + count] for first in range(0, len(servers), count)]
        servers = [shards[shard % config.servers.num_servers][shard] for shard in range(count)]
    num_servers = len(shards) or len(own.server_ports) - len(standbys)
    first_server = sum(len(p.server_ports) for p in before)
    first_worker = sum(len(p.ports) for p in before)
    return _Layout(
        servers=servers,
        workers=workers,
        local_servers=config.servers.local_servers
        if config.servers.endpoints
        else range(first_server, first_server + num_servers),
        local_workers=config.servers.local_workers
        if config.servers.worker_endpoints
        else range(first_worker, first_worker + len(own.ports)),
        store=_store(config, peers, workers),
        http=_http(config, peers, servers),
        standbys=standbys,
        shards=shards,
    )


def _listed_place(layout: _Layout) -> tuple[int, int]:
    """Returns the number of nodes in the endpoint lists and this node's place, in the order they are first named."""
    hosts = list(dict.fromkeys(split_endpoint(e, "the list")[0] for e in (*layout.servers, *layout.workers)))
    own = [*(layout.servers[i] for i in layout.local_servers), *(layout.workers[i] for i in layout.local_workers)]
    return len(hosts), hosts.index(split_endpoint(own[0], "the list")[0])


def _store(config: LaunchConfig, peers: Sequence[Peer], workers: Sequence[str]) -> tuple[str, int]:
    """Returns where worker 0 opens the store: on its node, at a port every node knows."""
    host, port = split_endpoint(workers[0], "the first worker's endpoint")
    if config.servers.worker_endpoints and not config.nodes.is_single:
        return host, port
    first = next(peer for peer in peers if peer.ports or config.servers.worker_endpoints)
    return host, first.store_port or port


def _http(config: LaunchConfig, peers: Sequence[Peer], servers: Sequence[str]) -> str:
    """Returns the gloo rendezvous: beside server 0, at a free port or, where nodes cannot agree on one, a fixed one."""
    host, _ = split_endpoint(servers[0], "the first server's endpoint")
    if config.servers.endpoints and not config.nodes.is_single:
        return join_endpoint(host, config.servers.http_port or config.servers.gloo_port)
    first = next(peer for peer in peers if peer.server_ports or config.servers.endpoints)
    return join_endpoint(host, config.servers.http_port or first.http_port or config.servers.gloo_port)
