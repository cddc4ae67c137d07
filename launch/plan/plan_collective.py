"""Plan of a collective job: one worker per device, ranks node by node."""

from __future__ import annotations

from collections.abc import Sequence

from fleet.env import Environment
from fleet.errors import LaunchError
from fleet.launch.plan.addresses import join_endpoint
from fleet.launch.plan.plan import check_endpoints, common_variables, place, store_variables, torch_variables
from fleet.launch.plan.records import LaunchConfig, Peer, ProcessSpec


def plan_collective(
    config: LaunchConfig, peers: Sequence[Peer], node_rank: int, generation: int, environment: Environment
) -> list[ProcessSpec]:
    """Returns the workers of node ``node_rank``; ranks count through ``peers`` in order.

    Raises LaunchError when no peer has a worker, or two workers share an endpoint.

    Example:
        >>> config = LaunchConfig(mode="collective", script="train.py", nproc_per_node=2)
        >>> peer = Peer(name="pod", host="127.0.0.1", ports=(6070, 6071), store_port=6072)
        >>> specs = plan_collective(config, [peer], 0, 0, Environment({}))
        >>> specs[1].environment["PADDLE_CURRENT_ENDPOINT"]
        '127.0.0.1:6071'
    """
    endpoints = [join_endpoint(peer.host, port) for peer in peers for port in peer.ports]
    if not endpoints:
        raise LaunchError("No node of the job starts a worker. Raise --nproc_per_node.")
    check_endpoints(endpoints)
    own, first = peers[node_rank], peers[0]
    offset = sum(len(peer.ports) for peer in peers[:node_rank])
    shared = {
        **common_variables(config, environment, generation, len(peers)),
        **store_variables(first.host, first.store_port or first.ports[0]),
        "PADDLE_TRAINERS_NUM": f"{len(endpoints)}",
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "PADDLE_GLOBAL_SIZE": f"{len(endpoints)}",
        "PADDLE_LOCAL_SIZE": f"{len(own.ports)}",
        "PADDLE_DISTRI_BACKEND": config.process_group_backend,
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
    """Returns what only the worker ``local_rank`` of this node gets."""
    rank = offset + local_rank
    variables = {
        **torch_variables(rank, len(endpoints), local_rank, len(own.ports), node_rank),
        "PADDLE_TRAINER_ID": f"{rank}",
        "PADDLE_GLOBAL_RANK": f"{rank}",
        "PADDLE_LOCAL_RANK": f"{local_rank}",
        "PADDLE_RANK_IN_NODE": f"{local_rank}",
        "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
    }
    if config.worker_devices:
        variables["FLAGS_selected_gpus"] = config.worker_devices[local_rank]
        variables["PADDLE_LOCAL_DEVICE_IDS"] = config.worker_devices[local_rank]
    return variables
