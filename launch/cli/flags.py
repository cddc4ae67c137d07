"""Every flag of the launcher as one table: name, group, default, environment twins, and fate.

Three families meet here: Fleet's newer launcher (``--devices --nnodes --master``), ``fleetrun`` (``--gpus --ips
--server_num --worker_num``) and torchrun (``--nproc-per-node --node-rank --rdzv-endpoint``). A flag is used, or
accepted with one warning that gives the reason, or refused with the reason; ``fate`` says which.
"""

from __future__ import annotations

from typing import Any

from fleet.launch.cli.flag import FAILURE, FLEETRUN, LAUNCH, LOGS, NODES, PROCESSES, SERVERS, WARNED, Flag, make_flag
from fleet.launch.cli.unused_flags import REFUSED_FLAGS, WITHOUT_EFFECT

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

_NODES = (
    make_flag("nnodes", NODES, "1", "number of nodes, N or MIN:MAX", env=("PADDLE_NNODES", "PET_NNODES"), style=LAUNCH),
    make_flag(
        "master",
        NODES,
        None,
        "where the nodes meet: ip:port, http://ip:port or etcd://ip:port; without it and"
        " with several nodes, this node opens a meeting point and prints the command for the others",
        aliases=("rdzv_endpoint",),
        env=("PADDLE_MASTER", "PET_RDZV_ENDPOINT"),
        style=LAUNCH,
    ),
    make_flag(
        "rank",
        NODES,
        -1,
        "rank of this node; -1: any",
        aliases=("node_rank",),
        env=("PADDLE_RANK", "PADDLE_TRAINER_ID", "PET_NODE_RANK"),
    ),
    make_flag(
        "ips",
        NODES,
        None,
        "addresses of all nodes, comma separated, the same list on each; no meeting point is needed",
        env=("PADDLE_IPS",),
        style=FLEETRUN,
    ),
    make_flag(
        "host",
        NODES,
        None,
        "address of this node; found by itself when absent",
        aliases=("local_addr",),
        env=("POD_IP", "PET_LOCAL_ADDR"),
    ),
    make_flag(
        "start_port",
        NODES,
        6070,
        "first port of each node: its servers, if any, then its workers; without it and --ips free ports are taken",
        env=("PADDLE_START_PORT",),
    ),
    make_flag("sort_ip", NODES, False, "order the nodes by address", env=("PADDLE_SORT_IP",)),
    make_flag(
        "job_id",
        NODES,
        "default",
        "name that keeps jobs apart: letters, digits, . _ -",
        aliases=("rdzv_id",),
        env=("PADDLE_ELASTIC_JOB_ID", "PADDLE_JOB_ID", "PET_RDZV_ID"),
    ),
    make_flag(
        "standalone", NODES, False, "one node, whatever the environment says about others", env=("PET_STANDALONE",)
    ),
    make_flag(
        "master_addr",
        NODES,
        None,
        "address of node 0; with --master_port the same as --master",
        env=("PET_MASTER_ADDR",),
    ),
    make_flag(
        "master_port",
        NODES,
        None,
        "port at node 0; on one node the port of the process-group store",
        kind="int",
        env=("PET_MASTER_PORT",),
    ),
    make_flag(
        "rdzv_backend",
        NODES,
        None,
        "torchrun's name for the kind of meeting point: static, c10d or etcd-v2",
        env=("PET_RDZV_BACKEND",),
    ),
)

_PROCESSES = (
    make_flag(
        "nproc_per_node",
        PROCESSES,
        None,
        "processes on this node: a number, auto, gpu or cpu; default one per device, 1 without",
        aliases=("nproc",),
        env=("PADDLE_NPROC_PER_NODE", "PET_NPROC_PER_NODE"),
    ),
    make_flag(
        "devices",
        PROCESSES,
        None,
        "device numbers of the machine, comma separated",
        env=("PADDLE_DEVICES",),
        style=LAUNCH,
    ),
    make_flag("gpus", PROCESSES, None, "the same, with the fleetrun output", style=FLEETRUN),
    make_flag("npus", PROCESSES, None, "the same for an NPU backend", style=FLEETRUN),
    make_flag("xpus", PROCESSES, None, "the same for an XPU backend", style=FLEETRUN),
    make_flag(
        "backend", PROCESSES, "auto", "process-group backend: auto, gloo or nccl", env=("PADDLE_DISTRI_BACKEND",)
    ),
    make_flag("run_mode", PROCESSES, None, "collective or ps; default from the other flags", env=("PADDLE_RUN_MODE",)),
    make_flag("module", PROCESSES, False, "the script is the name of a module, run as python -m does"),
    make_flag(
        "no_python", PROCESSES, False, "run the script itself instead of handing it to Python", env=("PET_NO_PYTHON",)
    ),
)

_SERVERS = (
    make_flag(
        "server_num",
        SERVERS,
        None,
        "parameter servers on this node",
        kind="int",
        env=("PADDLE_SERVER_NUM",),
        style=FLEETRUN,
    ),
    make_flag(
        "server_standby", SERVERS, False, "a standby for every server, which takes over if it is lost, disk and all"
    ),
    make_flag(
        "server_shards",
        SERVERS,
        None,
        "shards that the servers divide among themselves; python -m fleet.ps scale moves them while training goes on",
        kind="int",
    ),
    make_flag(
        "server_spare",
        SERVERS,
        None,
        "servers beside those of --server_num that serve no shard until python -m fleet.ps scale gives them some",
        kind="int",
    ),
    make_flag("worker_num", SERVERS, None, "parameter-server workers on this node", kind="int", style=FLEETRUN),
    make_flag(
        "trainer_num",
        SERVERS,
        None,
        "the same as --worker_num, newer name",
        kind="int",
        env=("PADDLE_TRAINER_NUM",),
        style=LAUNCH,
    ),
    make_flag(
        "servers",
        SERVERS,
        "",
        "ip:port of every server of the job, comma separated",
        env=("PADDLE_SERVERS_ENDPOINTS",),
        style=FLEETRUN,
    ),
    make_flag("workers", SERVERS, "", "ip:port or ip of every worker of the job, comma separated", style=FLEETRUN),
    make_flag(
        "trainers", SERVERS, "", "the same as --workers, newer name", env=("PADDLE_TRAINERS_ENDPOINTS",), style=LAUNCH
    ),
    make_flag(
        "with_gloo",
        SERVERS,
        0,
        "barriers between PS processes: 0 off, 1 workers, 2 workers and servers",
        env=("PADDLE_WITH_GLOO",),
    ),
    make_flag(
        "http_port",
        SERVERS,
        None,
        "port of the gloo HTTP rendezvous; default free, or --gloo_port with several nodes",
        kind="int",
        style=FLEETRUN,
    ),
    make_flag(
        "gloo_port", SERVERS, 6767, "port of the gloo HTTP rendezvous with several nodes", env=("PADDLE_GLOO_PORT",)
    ),
)

_LOGS = (
    make_flag(
        "log_dir",
        LOGS,
        "log",
        "folder of the log files; those of the job before move to previous/",
        env=("PADDLE_LOG_DIR", "PET_LOG_DIR"),
    ),
    make_flag(
        "log_level",
        LOGS,
        "INFO",
        "level of the launcher's own lines: DEBUG, INFO, WARNING, ERROR",
        env=("PADDLE_LOG_LEVEL",),
    ),
    make_flag("log_overwrite", LOGS, False, "remove the log files of the job before", env=("PADDLE_LOG_OVERWRITE",)),
    make_flag(
        "log_style",
        LOGS,
        None,
        "what the launcher writes to its log file, and when this flag is given to the terminal: launch: LAUNCH INFO "
        "lines; fleetrun: the argument block and the tables as well; default by the flags used",
        choices=(LAUNCH, FLEETRUN),
    ),
    make_flag(
        "profile",
        LOGS,
        None,
        "steps that torch's profiler records on every worker, FIRST:LAST, counted from 0, LAST not among them; one "
        "trace and a table of where the time went lie in profile/ in the log folder",
        env=("FLEET_PROFILE",),
    ),
    make_flag(
        "tracker",
        LOGS,
        None,
        "trackers that fleet.log writes to besides those of strategy.trackers, comma-separated: csv, json, mlflow, "
        "tensorboard, trackio, wandb",
        aliases=("trackers",),
        env=("FLEET_TRACKERS",),
    ),
    make_flag(
        "page",
        LOGS,
        None,
        "port on 127.0.0.1 of a page that shows the processes of this node while they run: steps, rates, memory, logs, "
        "stacks, curves, restarts; 0: a free port",
        kind="int",
        env=("FLEET_PAGE",),
    ),
    make_flag("enable_gpu_log", LOGS, True, "write {job_id}.gpu.log while GPU workers run"),
)

_FAILURE = (
    make_flag(
        "max_restart",
        FAILURE,
        3,
        "how often failed workers restart in place; a job that is not elastic restarts none unless this flag or "
        "--elastic_level 1 is given",
        aliases=("max_restarts",),
        env=("PADDLE_MAX_RESTART", "PET_MAX_RESTARTS"),
    ),
    make_flag(
        "elastic_level",
        FAILURE,
        -1,
        "-1: no handling (1 in an elastic job); 0: stop on a failure; 1: restart in place up to --max_restart",
        env=("PADDLE_ELASTIC_LEVEL",),
    ),
    make_flag(
        "elastic_timeout", FAILURE, 30, "seconds to wait for the peers", kind="seconds", env=("PADDLE_ELASTIC_TIMEOUT",)
    ),
    make_flag(
        "shutdown_timeout",
        FAILURE,
        30,
        "seconds between asking the processes to end and ending them",
        kind="seconds",
        env=("PET_SHUTDOWN_TIMEOUT",),
    ),
    make_flag(
        "elastic_server",
        FAILURE,
        None,
        "etcd host:port of an elastic job",
        env=("PADDLE_ELASTIC_SERVER",),
        style=FLEETRUN,
    ),
    make_flag("np", FAILURE, None, "nodes of an elastic job, N or MIN:MAX", env=("PADDLE_ELASTIC_NP",), style=FLEETRUN),
    make_flag("scale", FAILURE, 0, "nodes to add to --np", env=("PADDLE_ELASTIC_SCALE",), style=FLEETRUN),
    make_flag(
        "force",
        FAILURE,
        False,
        "accept an --np that differs from the one in etcd",
        env=("PADDLE_ELASTIC_FORCE",),
        style=FLEETRUN,
    ),
    make_flag(
        "elastic_pre_hook",
        FAILURE,
        None,
        "command with arguments, run without a shell before each start of the workers",
        style=FLEETRUN,
    ),
    *(make_flag(name, FAILURE, default, meaning, **more) for name, default, meaning, more in HEALTH_FLAGS),
)


def _with_fate(flags: tuple[Flag, ...], fate: str) -> tuple[Flag, ...]:
    return tuple(Flag(**{**vars(flag), "fate": fate}) for flag in flags)


FLAGS: dict[str, Flag] = {
    flag.name: flag
    for flag in (
        *_NODES,
        *_PROCESSES,
        *_SERVERS,
        *_LOGS,
        *_FAILURE,
        *_with_fate(WITHOUT_EFFECT, WARNED),
        *REFUSED_FLAGS,
    )
}

BY_SPELLING: dict[str, Flag] = {spelling: flag for flag in FLAGS.values() for spelling in flag.spellings}

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
