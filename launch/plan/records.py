"""The records that the launcher's parts hand to each other: configuration, process, exit.

``config`` makes a :class:`LaunchConfig`; ``process_plan`` turns it (and the :class:`Peer` records, once the nodes have
met) into :class:`ProcessSpec` records; ``supervisor`` runs those and returns a :class:`GroupResult`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fleet.launch.plan.peers import Peer


@dataclass(frozen=True, kw_only=True)
class Note:
    """One line the launcher has to log before it starts: ``level`` is a name of the logging module."""

    level: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Script:
    """The program of the workers."""

    name: str  # path of a .py file, another executable, or a module name when ``is_module``
    args: tuple[str, ...] = ()
    is_module: bool = False
    is_executable: bool = False  # runs by itself, not through Python

    @property
    def command(self) -> tuple[str, ...]:
        """The words that start one process: this interpreter, unbuffered, unless the script runs by itself."""
        if self.is_executable:
            return (self.name, *self.args)
        return (sys.executable, "-u", *(("-m",) if self.is_module else ()), self.name, *self.args)


@dataclass(frozen=True, kw_only=True)
class Command:
    """The launcher's own command line, as the log repeats it."""

    program: str = "python -m fleet.launch"
    argv: tuple[str, ...] = ()
    given: tuple[str, ...] = ()  # names of the flags on the command line
    arguments: Mapping[str, object] = field(default_factory=dict)  # every flag, as the configuration block prints it
    notes: tuple[Note, ...] = ()  # logged once, after the configuration block


@dataclass(frozen=True, kw_only=True)
class Pod:
    """This launcher's part of the job."""

    name: str = "pod"  # six random lower-case letters
    id: str = ""  # random; marks every process of this node's part of the job (FLEET_POD)
    secret: str = field(default="", repr=False)  # FLEET_JOB_SECRET; empty: the nodes share none
    secret_is_users: bool = False  # it came from the environment, so its text is never printed
    scratch_path: Path = Path("/tmp/fleet-pod")  # PADDLE_GLOO_FS_PATH; the running half makes and removes it


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The nodes of the job, and the addresses and ports of this one."""

    min: int = 1
    max: int = 1
    rank: int = -1  # of this node; -1: decided at the rendezvous
    master: str | None = None  # ip:port, http://ip:port or etcd://ip:port
    host: str | None = None
    is_single: bool = True  # everything stays on 127.0.0.1
    static_peers: tuple[Peer, ...] = ()  # every node, when the user or a scheduler listed them: no rendezvous
    store_port: int | None = None  # port the user fixed for the process-group store
    first_port: int | None = None  # of this node: --start_port, FLAGS_START_PORT or FLAGS_FIXED_PORT
    port_range: tuple[int, int] | None = None  # PORT_RANGE
    interface: str | None = "lo"  # for gloo and NCCL: loopback on one node, else chosen once the nodes are known
    sort_ip: bool = False


@dataclass(frozen=True, kw_only=True)
class Processes:
    """The workers of this node, their devices, and how long each process may be silent or take to end."""

    num_workers: int = 0
    device_type: str = "cpu"  # "cpu" or "gpu", after looking at the machine
    device_names: tuple[str, ...] = ()  # CUDA_VISIBLE_DEVICES entry of each chosen device
    worker_devices: tuple[str, ...] = ()  # FLAGS_selected_gpus of each local worker; empty on CPU
    backend: str = "auto"  # as --backend names it: auto, gloo or nccl
    process_group_backend: str = "gloo"  # after looking at the devices: gloo or nccl
    sets_thread_count: bool = False  # OMP_NUM_THREADS=1 goes to the workers
    environment_limit: int = 48000  # longest value that goes into a child's environment (PADDLE_ENV_LIMIT_LEN)
    grace_s: float = 30.0  # between SIGTERM and SIGKILL
    heartbeat_timeout_s: float = 0.0  # a worker that is silent for longer may hang; 0: nobody looks
    heartbeat_is_default: bool = False  # nobody asked for it: only workers that all wait for each other are ended
    preempt_grace_s: float = 0.0  # for the workers to save themselves after SIGTERM; 0: they are not asked


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """Restarts after a failure, and the settings of a job whose nodes may change."""

    max_restart: int = 0
    timeout_s: float = 30.0  # --elastic_timeout
    is_elastic: bool = False
    server: str | None = None
    scale: int = 0
    force: bool = False
    pre_hook: str | None = None
    fault_level: int = 1  # PADDLE_ELASTIC_FAULT_TOLERANC_LEVEL
    ttl_s: int = 5  # PADDLE_ELASTIC_TTL: how long a node may be silent, also of a fixed job
    is_scheduled: bool = False  # a failed node exits with 101, so that its scheduler starts it again


@dataclass(frozen=True, kw_only=True)
class Servers:
    """Servers and workers of a parameter-server job; empty lists: ports are chosen later."""

    num_servers: int = 0
    has_standbys: bool = False  # every server has a standby, on this node
    shards: int = 0  # shards that the servers divide among themselves and that can move; 0: one each, for good
    spares: int = 0  # server processes beside num_servers that serve no shard at first
    num_workers: int = 0
    endpoints: tuple[str, ...] = ()
    worker_endpoints: tuple[str, ...] = ()
    local_servers: tuple[int, ...] = ()  # which of ``endpoints`` this node starts
    local_workers: tuple[int, ...] = ()  # which of ``worker_endpoints`` this node starts
    with_gloo: int = 0
    http_port: int | None = None
    gloo_port: int = 6767

    @property
    def num_ports(self) -> int:
        """How many ports the servers of this node take where they are counted."""
        if self.shards:
            return (self.num_servers + self.spares) * self.shards
        return self.num_servers * (1 + self.has_standbys)


@dataclass(frozen=True, kw_only=True)
class Logs:
    """The files and lines that the job leaves."""

    folder: Path = Path("log")
    level: str = "INFO"
    overwrites: bool = False
    style: str = "launch"  # "launch" (LAUNCH INFO lines only) or "fleetrun" (block and tables as well)
    has_gpu_log: bool = True
    trackers: str = ""  # names of trackers, comma-separated
    profile: str = ""  # steps that the workers profile, "FIRST:LAST"; empty: none


@dataclass(frozen=True, kw_only=True)
class Page:
    """The page of the job."""

    port: int  # 0: a free one
    folder: Path  # where the processes of this node write for it


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """The job that the user asked for, validated."""

    mode: str  # "collective" or "ps"
    script: Script
    job_id: str = "default"
    command: Command = Command()
    pod: Pod = Pod()
    nodes: Nodes = Nodes()
    processes: Processes = Processes()
    elastic: Elastic = Elastic()
    servers: Servers = Servers()
    logs: Logs = Logs()
    page: Page | None = None

    @property
    def watches_workers(self) -> bool:
        """Whether the launcher shares a file with each worker."""
        own = self.processes
        return own.heartbeat_timeout_s > 0 or own.preempt_grace_s > 0 or self.page is not None

    @property
    def log_file(self) -> Path:
        """The log of this launcher."""
        return self.logs.folder / f"{self.job_id}.{self.pod.name}.log"


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """One process of the job on this node; ``environment`` holds only the variables that the launcher adds."""

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
    """How a group of processes ended: ``first_failure`` is the process that failed first, not a victim of it."""

    exit_code: int
    first_failure: ProcessExit | None = None
    stop_signal: int | None = None  # the signal that ended the launcher, when one did
    interrupted: bool = False  # the other nodes wanted a stop; ``exit_code`` says nothing then
    log_start_bytes: int = 0  # where this generation's part of the failed process's log file begins
    ended_before: tuple[ProcessExit, ...] = ()  # workers that had ended with 0 when the first one failed
    preempted: bool = False  # the workers were asked to save and stop, and ended by themselves
