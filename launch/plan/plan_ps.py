"""Plan of a parameter-server job: servers first, then workers, each with its role's variables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fleet.env import Environment
from fleet.errors import LaunchError
from fleet.launch.plan.addresses import join_endpoint, split_endpoint
from fleet.launch.plan.plan import check_endpoints, common_variables, place, store_variables, torch_variables
from fleet.launch.plan.records import LaunchConfig, Peer, ProcessSpec

HTTP_RENDEZVOUS = "3"
# The rows of the table that fleetrun prints for each role: exactly what its documentation shows.
SERVER_ROWS = (
    "PADDLE_TRAINERS_NUM",
    "TRAINING_ROLE",
    "POD_IP",
    "PADDLE_GLOO_RENDEZVOUS",
    "PADDLE_PSERVERS_IP_PORT_LIST",
    "PADDLE_PORT",
    "PADDLE_WITH_GLOO",
    "PADDLE_HETER_TRAINER_IP_PORT_LIST",
    "PADDLE_TRAINER_ENDPOINTS",
    "PADDLE_GLOO_HTTP_ENDPOINT",
    "PADDLE_GLOO_FS_PATH",
)
WORKER_ROWS = (
    "PADDLE_GLOO_HTTP_ENDPOINT",
    "PADDLE_GLOO_RENDEZVOUS",
    "PADDLE_PSERVERS_IP_PORT_LIST",
    "PADDLE_WITH_GLOO",
    "PADDLE_TRAINER_ENDPOINTS",
    "FLAGS_selected_gpus",
    "PADDLE_GLOO_FS_PATH",
    "PADDLE_TRAINERS_NUM",
    "TRAINING_ROLE",
    "XPU_VISIBLE_DEVICES",
    "PADDLE_HETER_TRAINER_IP_PORT_LIST",
    "PADDLE_TRAINER_ID",
    "CUDA_VISIBLE_DEVICES",
    "FLAGS_selected_xpus",
)


@dataclass(frozen=True)
class _Layout:
    """Every endpoint of the job and which of them belong to this node."""

    servers: list[str]
    workers: list[str]
    local_servers: Sequence[int]
    local_workers: Sequence[int]
    store: tuple[str, int]
    http: str


def plan_ps(
    config: LaunchConfig, peers: Sequence[Peer], node_rank: int, generation: int, environment: Environment
) -> list[ProcessSpec]:
    """Returns the servers and workers of node ``node_rank``, servers first.

    Endpoints come from ``--servers``/``--workers`` where these are given, else from ``peers`` in order. Raises
    LaunchError when the job has no server or no worker, or two processes share an endpoint.
    """
    layout = _layout(config, peers, node_rank)
    num_nodes, place_of_node = _listed_place(layout) if config.workers else (len(peers), node_rank)
    shared = {
        **common_variables(config, environment, generation, num_nodes),
        "PADDLE_PSERVERS_IP_PORT_LIST": ",".join(layout.servers),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(layout.workers),
        "PADDLE_TRAINERS_NUM": f"{len(layout.workers)}",
        "PADDLE_HETER_TRAINER_IP_PORT_LIST": "",
        "PADDLE_WITH_GLOO": f"{config.with_gloo}",
        "PADDLE_GLOO_RENDEZVOUS": HTTP_RENDEZVOUS,
        "PADDLE_GLOO_FS_PATH": f"{config.scratch_path}",
        "PADDLE_GLOO_HTTP_ENDPOINT": layout.http,
    }
    specs = [
        place(
            config,
            environment,
            role="server",
            index=index,
            local_index=i,
            position=i,
            echo=False,
            variables={**shared, **_server_variables(layout.servers[index]), **_server_state(config, environment)},
        )
        for i, index in enumerate(layout.local_servers)
    ]
    for i, index in enumerate(layout.local_workers):
        variables = {**shared, **_worker_variables(config, layout, i, place_of_node)}
        specs.append(
            place(
                config,
                environment,
                role="worker",
                index=index,
                local_index=i,
                position=len(layout.local_servers) + i,
                echo=index == 0,
                variables=variables,
            )
        )
    return specs


def _server_variables(endpoint: str) -> dict[str, str]:
    host, port = split_endpoint(endpoint, "the server's endpoint")
    return {"TRAINING_ROLE": "PSERVER", "PADDLE_ROLE": "PSERVER", "POD_IP": host, "PADDLE_PORT": f"{port}"}


def _server_state(config: LaunchConfig, environment: Environment) -> dict[str, str]:
    """Returns where servers keep what a restarted one needs, when they can be started again; the user's folder wins."""
    if not config.max_restart or environment.has("FLEET_PS_FOLDER"):
        return {}
    return {"FLEET_PS_FOLDER": f"{config.scratch_path / 'servers'}"}


def _worker_variables(config: LaunchConfig, layout: _Layout, local_rank: int, node_rank: int) -> dict[str, str]:
    """Returns a worker's own variables; it sees only its card, so for it that card has number 0."""
    rank = layout.local_workers[local_rank]
    names = config.device_names
    device = names[local_rank % len(names)] if names else "0"
    return {
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
    servers = list(config.servers) or [join_endpoint(p.host, port) for p in peers for port in p.server_ports]
    workers = list(config.workers) or [join_endpoint(p.host, port) for p in peers for port in p.ports]
    if not servers or not workers:
        missing = "worker" if servers else "server"
        raise LaunchError(f"No node of the job starts a {missing}. Give at least one node --{missing}_num=1.")
    check_endpoints([*servers, *workers])
    before, own = peers[:node_rank], peers[node_rank]
    first_server = sum(len(p.server_ports) for p in before)
    first_worker = sum(len(p.ports) for p in before)
    return _Layout(
        servers=servers,
        workers=workers,
        local_servers=config.local_servers
        if config.servers
        else range(first_server, first_server + len(own.server_ports)),
        local_workers=config.local_workers if config.workers else range(first_worker, first_worker + len(own.ports)),
        store=_store(config, peers, workers),
        http=_http(config, peers, servers),
    )


def _listed_place(layout: _Layout) -> tuple[int, int]:
    """Returns the number of nodes in the endpoint lists and this node's place, in the order they are first named."""
    hosts = list(dict.fromkeys(split_endpoint(e, "the list")[0] for e in (*layout.servers, *layout.workers)))
    own = [*(layout.servers[i] for i in layout.local_servers), *(layout.workers[i] for i in layout.local_workers)]
    return len(hosts), hosts.index(split_endpoint(own[0], "the list")[0])


def _store(config: LaunchConfig, peers: Sequence[Peer], workers: Sequence[str]) -> tuple[str, int]:
    """Returns where worker 0 opens the store: on its node, at a port every node knows."""
    host, port = split_endpoint(workers[0], "the first worker's endpoint")
    if config.workers and not config.is_single_node:
        return host, port
    first = next(peer for peer in peers if peer.ports or config.workers)
    return host, first.store_port or port


def _http(config: LaunchConfig, peers: Sequence[Peer], servers: Sequence[str]) -> str:
    """Returns the gloo rendezvous: beside server 0, at a free port or, where nodes cannot agree on one, a fixed one."""
    host, _ = split_endpoint(servers[0], "the first server's endpoint")
    if config.servers and not config.is_single_node:
        return join_endpoint(host, config.http_port or config.gloo_port)
    first = next(peer for peer in peers if peer.server_ports or config.servers)
    return join_endpoint(host, config.http_port or first.http_port or config.gloo_port)
