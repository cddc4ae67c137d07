"""The records that the launcher's parts hand to each other: configuration, process, exit.

``_cli`` makes a :class:`LaunchConfig`; ``_plan`` turns it (and the peers, once they have met) into
:class:`ProcessSpec` records; ``_supervisor`` runs those and returns a :class:`GroupResult`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """What the user asked for, validated; ``arguments`` holds every flag as the configuration block prints it."""

    mode: str  # "collective" or "ps"
    script: str  # path of a .py file, another executable, or a module name when ``is_module``
    script_args: tuple[str, ...] = ()
    is_module: bool = False
    arguments: Mapping[str, object] = field(default_factory=dict)
    original_argv: tuple[str, ...] = ()
    program: str = "python -m fleet.launch"
    log_style: str = "launch"  # "launch" (LAUNCH INFO lines only) or "fleetrun" (block and tables as well)
    # nodes
    min_nodes: int = 1
    max_nodes: int = 1
    node_rank: int = -1  # -1: decided at the rendezvous
    master: str | None = None  # ip:port, http://ip:port or etcd://ip:port
    ips: tuple[str, ...] = ()
    host: str | None = None
    start_port: int | None = None
    job_id: str = "default"
    # processes on this node
    nproc_per_node: int | None = None
    devices: tuple[int, ...] | None = None  # absolute device indices
    device_type: str = "cpu"  # "cpu" or "gpu", after looking at the machine
    backend: str = "auto"  # what --backend said: auto, gloo or nccl
    # parameter server
    server_num: int = 0
    worker_num: int = 0
    servers: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()
    with_gloo: int = 0
    http_port: int | None = None
    # logs
    log_dir: Path = Path("log")
    log_level: str = "INFO"
    log_overwrite: bool = False
    # failure
    max_restart: int = 0
    elastic_level: int = -1
    elastic_timeout_s: float = 30.0
    grace_s: float = 30.0  # between SIGTERM and SIGKILL


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """One process of the job on this node; ``environment`` holds only what the launcher adds."""

    role: str  # "worker" or "server"
    index: int  # rank within its role, over the whole job
    local_index: int  # rank within its role on this node
    command: tuple[str, ...]
    environment: Mapping[str, str]
    log_path: Path
    echo: bool = False  # copied to the launcher's standard output as well


@dataclass(frozen=True, kw_only=True)
class ProcessExit:
    """How one process ended; ``exit_code`` is 128 + signal when a signal ended it."""

    spec: ProcessSpec
    pid: int
    exit_code: int
    signal_name: str | None
    lifetime_s: float
    ended_at: float  # time.monotonic() of the moment it was seen


@dataclass(frozen=True, kw_only=True)
class GroupResult:
    """How a group of processes ended: ``first_failure`` is the one that failed first, not the last victim."""

    exit_code: int
    first_failure: ProcessExit | None = None
    stop_signal: int | None = None  # the signal that ended the launcher, when one did
