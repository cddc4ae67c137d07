"""Launch configurations for tests: a made-up machine and environment, the script is a file that exists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fleet.env import Environment
from fleet.launch.cli.config import read_config
from fleet.launch.plan.local_machine import Machine
from fleet.launch.plan.peers import Peer
from fleet.launch.plan.process_plan import plan_processes
from fleet.launch.plan.records import LaunchConfig, ProcessSpec

SCRIPT = __file__  # any Python file that exists


def read(
    *flags: str, script: Sequence[str] = (SCRIPT,), env: Mapping[str, str] | None = None, **machine: Any
) -> LaunchConfig:
    """Returns the configuration of ``flags`` in front of ``script`` on a machine with these fields."""
    return read_config([*flags, *script], Environment(dict(env or {})), Machine(**machine))


def notes(config: LaunchConfig, level: str = "WARNING") -> str:
    """Returns the notes of one level, one a line."""
    return "\n".join(note.text for note in config.command.notes if note.level == level)


def peer_of(config: LaunchConfig, first: int = 7000, **fields: Any) -> Peer:
    """Returns a peer with made-up ports for the processes that ``config`` starts."""
    workers = 0 if config.servers.worker_endpoints else config.processes.num_workers
    servers = 0 if config.servers.endpoints else config.servers.num_ports
    values: dict[str, Any] = {
        "name": config.pod.name,
        "host": "127.0.0.1",
        "ports": tuple(range(first, first + workers)),
        "server_ports": tuple(range(first + 500, first + 500 + servers)),
        "devices": config.processes.worker_devices,
        "store_port": first + 900,
        "http_port": first + 901,
    }
    return Peer(**{**values, **fields})


def plan(
    config: LaunchConfig,
    peers: Sequence[Peer] = (),
    node_rank: int = 0,
    generation: int = 0,
    restarts: int = 0,
    env: Mapping[str, str] | None = None,
) -> list[ProcessSpec]:
    """Returns the processes of a node; without ``peers`` it is alone, or those of a static list."""
    chosen = peers or config.nodes.static_peers or [peer_of(config)]
    return plan_processes(config, chosen, node_rank, generation, restarts, Environment(dict(env or {})))
