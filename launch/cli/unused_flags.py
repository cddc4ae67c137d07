"""Flags of Paddle's and torch's launchers that are accepted without effect, refused with a reason, or gone."""

from __future__ import annotations

from fleet.launch.cli.flag import NO_EFFECT, NOT_HERE, REFUSED, make_flag

WITHOUT_EFFECT = (
    make_flag(
        "legacy",
        NO_EFFECT,
        False,
        "Paddle's switch to the older launcher",
        reason="one launcher takes both families of flags; --log_style fleetrun gives the older output",
    ),
    make_flag(
        "auto_parallel_config",
        NO_EFFECT,
        None,
        "Paddle's auto-parallel file",
        env=("PADDLE_AUTO_PARALLEL_CONFIG",),
        reason="the auto-parallel planner is not part of this project; set the degrees in DistributedStrategy",
    ),
    make_flag(
        "auto_cluster_config",
        NO_EFFECT,
        "0",
        "Paddle's auto-parallel switch",
        env=("PADDLE_AUTO_CLUSTER",),
        reason="the auto-parallel planner is not part of this project; set the degrees in DistributedStrategy",
    ),
    make_flag(
        "auto_tuner_json",
        NO_EFFECT,
        None,
        "Paddle's auto-tuner file",
        reason="the auto tuner is not part of this project; run the launcher once per configuration",
    ),
    make_flag(
        "monitor_interval",
        NO_EFFECT,
        None,
        "torchrun's polling interval",
        env=("PET_MONITOR_INTERVAL",),
        reason="the end of a process is noticed without such an interval",
    ),
    make_flag(
        "start_method",
        NO_EFFECT,
        None,
        "torchrun's way to start functions",
        env=("PET_START_METHOD",),
        reason="every worker is a program of its own, never a fork of the launcher",
    ),
    make_flag(
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

REFUSED_FLAGS = tuple(
    make_flag(name, NOT_HERE, default, meaning, fate=REFUSED, reason=reason, env=env)
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


REMOVED: dict[str, str] = {
    "cluster_node_ips": "use --ips",
    "selected_gpus": "use --gpus",
    "node_ip": "use --host; the address is found by itself when absent",
    "use_paddlecloud": "the scheduler's environment is read without a flag",
    "started_port": "use --start_port",
    "print_config": "the configuration is in the launcher's log file; --log_level DEBUG prints it",
}
