"""The records that the launcher's parts hand to each other: configuration, process, exit.

``config`` makes a :class:`LaunchConfig`; ``process_plan`` turns it (and the :class:`Peer` records, once the nodes have
met) into :class:`ProcessSpec` records; ``supervisor`` runs those and returns a :class:`GroupResult`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Note:
    """One line the launcher has to log before it starts: ``level`` is a name of the logging module."""

    level: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One node of the job, as it publishes itself where the nodes meet; JSON holds it (see ``peers``)."""

    name: str  # name of the pod
    host: str  # address at which the other nodes reach this one
    ports: tuple[int, ...] = ()  # one per worker of this node
    server_ports: tuple[int, ...] = ()  # one per parameter server of this node
    devices: tuple[str, ...] = ()  # FLAGS_selected_gpus of each worker; empty on CPU
    store_port: int = 0  # of the process-group store, when this node comes first
    http_port: int = 0  # of the gloo HTTP rendezvous, when this node comes first
    node_rank: int = -1  # the rank it asks for; -1: any


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The nodes of the job."""

    min_nodes: int = 1
    max_nodes: int = 1
    node_rank: int = -1  # -1: decided at the rendezvous
    master: str | None = None  # ip:port, http://ip:port or etcd://ip:port
    ips: tuple[str, ...] = ()
    host: str | None = None
    is_single_node: bool = True  # everything stays on 127.0.0.1
    static_peers: tuple[Peer, ...] = ()  # every node, when the user or a scheduler listed them: no rendezvous
    store_port: int | None = None  # port the user fixed for the process-group store


@dataclass(frozen=True, kw_only=True)
class Roles:
    """Servers and workers of a parameter-server job; empty lists: ports are chosen later."""

    server_num: int = 0
    server_standby: bool = False  # every server has a standby, on this node
    server_shards: int = 0  # shards that the servers divide among themselves and that can move; 0: one each, for good
    server_spare: int = 0  # server processes beside server_num that serve no shard at first
    worker_num: int = 0
    servers: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()
    local_servers: tuple[int, ...] = ()  # which of ``servers`` this node starts
    local_workers: tuple[int, ...] = ()  # which of ``workers`` this node starts
    is_single_node: bool = True
    host: str | None = None


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """The elastic settings."""

    is_elastic: bool = False
    elastic_server: str | None = None
    elastic_scale: int = 0
    elastic_force: bool = False
    elastic_pre_hook: str | None = None
    elastic_fault_level: int = 1  # PADDLE_ELASTIC_FAULT_TOLERANC_LEVEL
    elastic_ttl_s: int = 5  # PADDLE_ELASTIC_TTL: how long a node may be silent, also of a fixed job
    is_scheduled: bool = False  # a failed node exits with 101, so that its scheduler starts it again


@dataclass(frozen=True, kw_only=True)
class LaunchConfig(Nodes, Roles, Elastic):
    """What the user asked for, validated; ``arguments`` holds every flag as the configuration block prints it."""

    mode: str  # "collective" or "ps"
    script: str  # path of a .py file, another executable, or a module name when ``is_module``
    script_args: tuple[str, ...] = ()
    is_module: bool = False
    arguments: Mapping[str, object] = field(default_factory=dict)
    original_argv: tuple[str, ...] = ()
    program: str = "python -m fleet.launch"
    log_style: str = "launch"  # "launch" (LAUNCH INFO lines only) or "fleetrun" (block and tables as well)
    job_id: str = "default"
    # processes on this node
    nproc_per_node: int | None = None
    devices: tuple[int, ...] | None = None  # absolute device indices
    device_type: str = "cpu"  # "cpu" or "gpu", after looking at the machine
    backend: str = "auto"  # what --backend said: auto, gloo or nccl
    process_group_backend: str = "gloo"  # what it comes to: gloo or nccl
    with_gloo: int = 0
    http_port: int | None = None
    # logs
    log_dir: Path = Path("log")
    log_level: str = "INFO"
    log_overwrite: bool = False
    trackers: str = ""  # names of trackers, comma-separated
    page: int | None = None  # port of the job's page; 0: a free one; None: no page
    profile: str = ""  # steps that the workers profile, "FIRST:LAST"; empty: none
    # failure
    max_restart: int = 0
    elastic_level: int = -1
    elastic_timeout_s: float = 30.0
    grace_s: float = 30.0  # between SIGTERM and SIGKILL
    heartbeat_timeout_s: float = 0.0  # a worker that is silent for longer may hang; 0: nobody looks
    heartbeat_is_default: bool = False  # nobody asked for it: only workers that all wait for each other are ended
    preempt_grace_s: float = 0.0  # for the workers to save themselves after SIGTERM; 0: they are not asked
    # what the planner and the running half need besides
    notes: tuple[Note, ...] = ()  # to be logged once, after the configuration block
    pod_name: str = "pod"  # six random lower-case letters
    pod_id: str = ""  # random; marks every process of this node's part of the job (FLEET_POD)
    secret: str = field(default="", repr=False)  # FLEET_JOB_SECRET; empty: the nodes share none
    secret_is_users: bool = False  # it came from the environment, so its text is never printed
    given: tuple[str, ...] = ()  # names of the flags on the command line
    scratch_path: Path = Path("/tmp/fleet-pod")  # PADDLE_GLOO_FS_PATH; the running half makes and removes it
    sets_thread_count: bool = False  # OMP_NUM_THREADS=1 goes to the workers
    worker_devices: tuple[str, ...] = ()  # FLAGS_selected_gpus of each local worker; empty on CPU
    device_names: tuple[str, ...] = ()  # CUDA_VISIBLE_DEVICES entry of each chosen device
    gloo_port: int = 6767
    port_range: tuple[int, int] | None = None  # PORT_RANGE
    fixed_port: int | None = None  # first port of this node: --start_port, FLAGS_START_PORT or FLAGS_FIXED_PORT
    interface: str | None = "lo"  # for gloo and NCCL: loopback on one node, else chosen once the nodes are known
    sort_ip: bool = False
    enable_gpu_log: bool = True
    run_direct: bool = False  # the script is an executable of its own, not a Python file
    environment_limit: int = 48000  # longest value that goes into a child's environment (PADDLE_ENV_LIMIT_LEN)

    @property
    def server_ports(self) -> int:
        """How many ports the servers of this node take where they are counted."""
        if self.server_shards:
            return (self.server_num + self.server_spare) * self.server_shards
        return self.server_num * (1 + self.server_standby)

    @property
    def group_restarts(self) -> int:
        """How often all processes start again together; servers and workers start again one by one instead."""
        return self.max_restart - self.replacements

    @property
    def replacements(self) -> int:
        """How many servers and workers that fail start again in their places."""
        return self.max_restart if self.mode == "ps" else 0

    @property
    def watches_workers(self) -> bool:
        """Whether the launcher shares a file with each worker."""
        return self.heartbeat_timeout_s > 0 or self.preempt_grace_s > 0 or self.page is not None

    @property
    def page_folder(self) -> Path:
        """Where the processes of this node write what the page shows."""
        return self.scratch_path / "page"


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
    removed: tuple[str, ...] = ()  # inherited variables the process does not get
    pass_fds: tuple[int, ...] = ()  # descriptors of the launcher that the process gets
    overflow: Mapping[str, str] = field(default_factory=dict)  # too long for the environment: backup file only
    backup_path: Path | None = None  # where backup_environment() of ``texts`` is to be written
    environment_log_path: Path | None = None  # where environment_log() of ``texts`` is to be written


@dataclass(frozen=True, kw_only=True)
class ProcessExit:
    """How one process ended; ``exit_code`` is 128 + signal when a signal ended it."""

    spec: ProcessSpec
    pid: int
    exit_code: int
    signal_name: str | None
    lifetime_s: float
    ended_at: float  # time.monotonic() of the moment it was seen
    kill_reason: str = ""  # why the launcher killed it, when it did so on purpose
    steps: int = 0  # that it had finished, as far as it told


@dataclass(frozen=True, kw_only=True)
class GroupResult:
    """How a group of processes ended: ``first_failure`` is the one that failed first, not the last victim."""

    exit_code: int
    first_failure: ProcessExit | None = None
    stop_signal: int | None = None  # the signal that ended the launcher, when one did
    interrupted: bool = False  # the other nodes wanted a stop; ``exit_code`` says nothing then
    log_start_bytes: int = 0  # where this generation's part of the failed process's log file begins
    ended_before: tuple[ProcessExit, ...] = ()  # workers that had ended with 0 when the first one failed
    preempted: bool = False  # the workers were asked to save and stop, and ended by themselves
