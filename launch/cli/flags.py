"""Every flag of the launcher as one table: name, group, default, environment twins, and what becomes of it.

Three families meet here: Fleet's newer launcher (``--devices --nnodes --master``), ``fleetrun`` (``--gpus --ips
--server_num --worker_num``) and torchrun (``--nproc-per-node --node-rank --rdzv-endpoint``). A flag is used, or
accepted with one warning that gives the reason, or refused with the reason; ``fate`` says which.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

USED, WARNED, REFUSED = "used", "warned", "refused"
LAUNCH, FLEETRUN = "launch", "fleetrun"

NODES = "Nodes"
PROCESSES = "Processes and devices"
SERVERS = "Parameter server"
LOGS = "Logs"
FAILURE = "Failure and elastic"
NO_EFFECT = "Accepted without effect (one warning says why)"
NOT_HERE = "Known and refused (the message says why)"
GROUPS = (NODES, PROCESSES, SERVERS, LOGS, FAILURE, NO_EFFECT, NOT_HERE)


HEALTH_FLAGS: tuple[tuple[str, int, str, dict[str, Any]], ...] = (
    (
        "heartbeat_timeout",
        1800,
        "seconds without a finished step after which a worker counts as hung: its stack is shown, it is killed, and "
        "--max_restart applies; 0: never. Not given, only workers that all wait for each other are killed then, and "
        "others are reported",
        {"kind": "seconds", "env": ("FLEET_HEARTBEAT_TIMEOUT",)},
    ),
    (
        "preempt_grace",
        0,
        "seconds that SIGTERM to the launcher gives the workers to agree on a step, save a checkpoint and exit "
        "with 75; 0: they are ended at once",
        {"kind": "seconds", "env": ("FLEET_PREEMPT_GRACE",)},
    ),
)


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One flag; ``name`` is its key in the configuration block and its spelling after two dashes."""

    name: str
    group: str
    meaning: str
    default: str | int | bool | None = None
    kind: str = "text"  # text, int, seconds or switch
    aliases: tuple[str, ...] = ()
    env: tuple[str, ...] = ()  # twins in the environment, the first that is set counts
    style: str = ""  # the log style its presence on the command line asks for
    choices: tuple[str, ...] = ()
    fate: str = USED
    reason: str = ""

    @property
    def spellings(self) -> tuple[str, ...]:
        """Every spelling the command line takes: the name and its aliases, with ``_`` and with ``-``."""
        both = [s for name in (self.name, *self.aliases) for s in (f"--{name}", f"--{name.replace('_', '-')}")]
        short = ("-m",) if self.name == "module" else ()
        return (*short, *dict.fromkeys(both))


def _flag(name: str, group: str, default: str | int | bool | None, meaning: str, **more: object) -> Flag:
    kind = "switch" if isinstance(default, bool) else "int" if isinstance(default, int) else "text"
    return Flag(name=name, group=group, default=default, meaning=meaning, **{"kind": kind, **more})  # type: ignore[arg-type]


_NODES = (
    _flag(
        "nnodes",
        NODES,
        "1",
        "number of nodes, N or MIN:MAX",
        env=("PADDLE_NNODES", "PET_NNODES"),
        style=LAUNCH,
    ),
    _flag(
        "master",
        NODES,
        None,
        "where the nodes meet: ip:port, http://ip:port or etcd://ip:port; without it and"
        " with several nodes, this node opens a meeting point and prints the command for the others",
        aliases=("rdzv_endpoint",),
        env=("PADDLE_MASTER", "PET_RDZV_ENDPOINT"),
        style=LAUNCH,
    ),
    _flag(
        "rank",
        NODES,
        -1,
        "rank of this node; -1: any",
        aliases=("node_rank",),
        env=("PADDLE_RANK", "PADDLE_TRAINER_ID", "PET_NODE_RANK"),
    ),
    _flag(
        "ips",
        NODES,
        None,
        "addresses of all nodes, comma separated, the same list on each; no meeting point is needed",
        env=("PADDLE_IPS",),
        style=FLEETRUN,
    ),
    _flag(
        "host",
        NODES,
        None,
        "address of this node; found by itself when absent",
        aliases=("local_addr",),
        env=("POD_IP", "PET_LOCAL_ADDR"),
    ),
    _flag(
        "start_port",
        NODES,
        6070,
        "first port of each node: its servers, if any, then its workers; without it and --ips free ports are taken",
        env=("PADDLE_START_PORT",),
    ),
    _flag("sort_ip", NODES, False, "order the nodes by address", env=("PADDLE_SORT_IP",)),
    _flag(
        "job_id",
        NODES,
        "default",
        "name that keeps jobs apart: letters, digits, . _ -",
        aliases=("rdzv_id",),
        env=("PADDLE_ELASTIC_JOB_ID", "PADDLE_JOB_ID", "PET_RDZV_ID"),
    ),
    _flag("standalone", NODES, False, "one node, whatever the environment says about others", env=("PET_STANDALONE",)),
    _flag(
        "master_addr",
        NODES,
        None,
        "address of node 0; with --master_port the same as --master",
        env=("PET_MASTER_ADDR",),
    ),
    _flag(
        "master_port",
        NODES,
        None,
        "port at node 0; on one node the port of the process-group store",
        kind="int",
        env=("PET_MASTER_PORT",),
    ),
    _flag(
        "rdzv_backend",
        NODES,
        None,
        "torchrun's name for the kind of meeting point: static, c10d or etcd-v2",
        env=("PET_RDZV_BACKEND",),
    ),
)

_PROCESSES = (
    _flag(
        "nproc_per_node",
        PROCESSES,
        None,
        "processes on this node: a number, auto, gpu or cpu; default one per device, 1 without",
        aliases=("nproc",),
        env=("PADDLE_NPROC_PER_NODE", "PET_NPROC_PER_NODE"),
    ),
    _flag(
        "devices",
        PROCESSES,
        None,
        "device numbers of the machine, comma separated",
        env=("PADDLE_DEVICES",),
        style=LAUNCH,
    ),
    _flag("gpus", PROCESSES, None, "the same, with the fleetrun output", style=FLEETRUN),
    _flag("npus", PROCESSES, None, "the same for an NPU backend", style=FLEETRUN),
    _flag("xpus", PROCESSES, None, "the same for an XPU backend", style=FLEETRUN),
    _flag("backend", PROCESSES, "auto", "process-group backend: auto, gloo or nccl", env=("PADDLE_DISTRI_BACKEND",)),
    _flag("run_mode", PROCESSES, None, "collective or ps; default from the other flags", env=("PADDLE_RUN_MODE",)),
    _flag("module", PROCESSES, False, "the script is the name of a module, run as python -m does"),
    _flag(
        "no_python", PROCESSES, False, "run the script itself instead of handing it to Python", env=("PET_NO_PYTHON",)
    ),
)

_SERVERS = (
    _flag(
        "server_num",
        SERVERS,
        None,
        "parameter servers on this node",
        kind="int",
        env=("PADDLE_SERVER_NUM",),
        style=FLEETRUN,
    ),
    _flag("server_standby", SERVERS, False, "a standby for every server, which takes over if it is lost, disk and all"),
    _flag(
        "server_shards",
        SERVERS,
        None,
        "shards that the servers divide among themselves; they move with python -m fleet.ps scale while training goes on",
        kind="int",
    ),
    _flag(
        "server_spare",
        SERVERS,
        None,
        "servers beside those of --server_num that serve no shard until python -m fleet.ps scale gives them some",
        kind="int",
    ),
    _flag("worker_num", SERVERS, None, "parameter-server workers on this node", kind="int", style=FLEETRUN),
    _flag(
        "trainer_num",
        SERVERS,
        None,
        "the same as --worker_num, newer name",
        kind="int",
        env=("PADDLE_TRAINER_NUM",),
        style=LAUNCH,
    ),
    _flag(
        "servers",
        SERVERS,
        "",
        "ip:port of every server of the job, comma separated",
        env=("PADDLE_SERVERS_ENDPOINTS",),
        style=FLEETRUN,
    ),
    _flag("workers", SERVERS, "", "ip:port or ip of every worker of the job, comma separated", style=FLEETRUN),
    _flag(
        "trainers", SERVERS, "", "the same as --workers, newer name", env=("PADDLE_TRAINERS_ENDPOINTS",), style=LAUNCH
    ),
    _flag(
        "with_gloo",
        SERVERS,
        0,
        "barriers between PS processes: 0 off, 1 workers, 2 workers and servers",
        env=("PADDLE_WITH_GLOO",),
    ),
    _flag(
        "http_port",
        SERVERS,
        None,
        "port of the gloo HTTP rendezvous; default free, or --gloo_port with several nodes",
        kind="int",
        style=FLEETRUN,
    ),
    _flag("gloo_port", SERVERS, 6767, "port of the gloo HTTP rendezvous with several nodes", env=("PADDLE_GLOO_PORT",)),
)

_LOGS = (
    _flag(
        "log_dir",
        LOGS,
        "log",
        "folder of the log files; those of the job before move to previous/",
        env=("PADDLE_LOG_DIR", "PET_LOG_DIR"),
    ),
    _flag(
        "log_level",
        LOGS,
        "INFO",
        "level of the launcher's own lines: DEBUG, INFO, WARNING, ERROR",
        env=("PADDLE_LOG_LEVEL",),
    ),
    _flag("log_overwrite", LOGS, False, "remove the log files of the job before", env=("PADDLE_LOG_OVERWRITE",)),
    _flag(
        "log_style",
        LOGS,
        None,
        "what the launcher writes to its log file, and when this flag is given to the terminal: launch: LAUNCH INFO "
        "lines; fleetrun: the argument block and the tables as well; default by the flags used",
        choices=(LAUNCH, FLEETRUN),
    ),
    _flag("enable_gpu_log", LOGS, True, "write {job_id}.gpu.log while GPU workers run"),
)

_FAILURE = (
    _flag(
        "max_restart",
        FAILURE,
        3,
        "how often failed workers restart in place; without --elastic_level 1 only when the flag is given",
        aliases=("max_restarts",),
        env=("PADDLE_MAX_RESTART", "PET_MAX_RESTARTS"),
    ),
    _flag(
        "elastic_level",
        FAILURE,
        -1,
        "-1: no handling (1 in an elastic job); 0: stop on a failure; 1: restart in place up to --max_restart",
        env=("PADDLE_ELASTIC_LEVEL",),
    ),
    _flag(
        "elastic_timeout", FAILURE, 30, "seconds to wait for the peers", kind="seconds", env=("PADDLE_ELASTIC_TIMEOUT",)
    ),
    _flag(
        "shutdown_timeout",
        FAILURE,
        30,
        "seconds between asking the processes to end and ending them",
        kind="seconds",
        env=("PET_SHUTDOWN_TIMEOUT",),
    ),
    _flag(
        "elastic_server",
        FAILURE,
        None,
        "etcd host:port of an elastic job",
        env=("PADDLE_ELASTIC_SERVER",),
        style=FLEETRUN,
    ),
    _flag("np", FAILURE, None, "nodes of an elastic job, N or MIN:MAX", env=("PADDLE_ELASTIC_NP",), style=FLEETRUN),
    _flag("scale", FAILURE, 0, "nodes to add to --np", env=("PADDLE_ELASTIC_SCALE",), style=FLEETRUN),
    _flag(
        "force",
        FAILURE,
        False,
        "accept an --np that differs from the one in etcd",
        env=("PADDLE_ELASTIC_FORCE",),
        style=FLEETRUN,
    ),
    _flag(
        "elastic_pre_hook",
        FAILURE,
        None,
        "command with arguments, run without a shell before each start of the workers",
        style=FLEETRUN,
    ),
    *(_flag(name, FAILURE, default, meaning, **more) for name, default, meaning, more in HEALTH_FLAGS),
)

_WITHOUT_EFFECT = (
    _flag(
        "legacy",
        NO_EFFECT,
        False,
        "Paddle's switch to the older launcher",
        reason="one launcher takes both families of flags; --log_style fleetrun gives the older output",
    ),
    _flag(
        "auto_parallel_config",
        NO_EFFECT,
        None,
        "Paddle's auto-parallel file",
        env=("PADDLE_AUTO_PARALLEL_CONFIG",),
        reason="the auto-parallel planner is not part of this project; set the degrees in DistributedStrategy",
    ),
    _flag(
        "auto_cluster_config",
        NO_EFFECT,
        "0",
        "Paddle's auto-parallel switch",
        env=("PADDLE_AUTO_CLUSTER",),
        reason="the auto-parallel planner is not part of this project; set the degrees in DistributedStrategy",
    ),
    _flag(
        "auto_tuner_json",
        NO_EFFECT,
        None,
        "Paddle's auto-tuner file",
        reason="the auto tuner is not part of this project; run the launcher once per configuration",
    ),
    _flag(
        "monitor_interval",
        NO_EFFECT,
        None,
        "torchrun's polling interval",
        env=("PET_MONITOR_INTERVAL",),
        reason="the end of a process is noticed without such an interval",
    ),
    _flag(
        "start_method",
        NO_EFFECT,
        None,
        "torchrun's way to start functions",
        env=("PET_START_METHOD",),
        reason="every worker is a program of its own, never a fork of the launcher",
    ),
    _flag(
        "role",
        NO_EFFECT,
        None,
        "torchrun's role name",
        env=("PET_ROLE",),
        reason="roles are worker and server here; --run_mode and the PS flags choose them",
    ),
)

_HETER = "heterogeneous parameter servers (workers on several kinds of devices) are not part of this project"
_COORDINATOR = "the federated-learning coordinator is not part of this project"
_MAPPING = "rank mapping by topology files is not part of this project; --ips in the order you want sets the ranks"
_TEE = "every process writes to its own file in --log_dir, and worker 0 is copied to the terminal"

_REFUSED = tuple(
    _flag(name, NOT_HERE, default, meaning, fate=REFUSED, reason=reason, env=env)
    for name, default, meaning, reason, env in (
        ("heter_worker_num", None, "heterogeneous workers", _HETER, ()),
        ("heter_workers", "", "endpoints of heterogeneous workers", _HETER, ()),
        ("heter_devices", "", "devices of heterogeneous workers", _HETER, ()),
        ("coordinator_num", None, "coordinators", _COORDINATOR, ()),
        ("coordinators", "", "endpoints of coordinators", _COORDINATOR, ()),
        ("cluster_topo_path", None, "topology file", _MAPPING, ("PADDLE_CLUSTER_TOPO_PATH",)),
        ("rank_mapping_path", None, "rank mapping file", _MAPPING, ("PADDLE_RANK_MAPPING_PATH",)),
        ("enable_auto_mapping", False, "automatic rank mapping", _MAPPING, ("PADDLE_ENABLE_AUTO_MAPPING",)),
        ("redirects", None, "torchrun's redirection", _TEE, ("PET_REDIRECTS",)),
        ("tee", None, "torchrun's copy to the terminal", _TEE, ("PET_TEE",)),
        ("local_ranks_filter", None, "torchrun's choice of ranks on the terminal", _TEE, ("PET_LOCAL_RANKS_FILTER",)),
        (
            "rdzv_conf",
            None,
            "torchrun's rendezvous settings",
            "the meeting point has one setting, --elastic_timeout",
            ("PET_RDZV_CONF",),
        ),
    )
)


def _with_fate(flags: tuple[Flag, ...], fate: str) -> tuple[Flag, ...]:
    return tuple(Flag(**{**vars(flag), "fate": fate}) for flag in flags)


FLAGS: dict[str, Flag] = {
    flag.name: flag
    for flag in (*_NODES, *_PROCESSES, *_SERVERS, *_LOGS, *_FAILURE, *_with_fate(_WITHOUT_EFFECT, WARNED), *_REFUSED)
}

BY_SPELLING: dict[str, Flag] = {spelling: flag for flag in FLAGS.values() for spelling in flag.spellings}

REMOVED: dict[str, str] = {
    "cluster_node_ips": "use --ips",
    "selected_gpus": "use --gpus",
    "node_ip": "use --host; the address is found by itself when absent",
    "use_paddlecloud": "the scheduler's environment is read without a flag",
    "started_port": "use --start_port",
    "print_config": "the configuration is in the launcher's log file; --log_level DEBUG prints it",
}

PS_FLAGS = (
    "worker_num",
    "server_num",
    "server_standby",
    "server_shards",
    "server_spare",
    "heter_worker_num",
    "servers",
    "workers",
    "heter_workers",
    "heter_devices",
    "http_port",
    "trainer_num",
    "trainers",
)
