"""Every text the launcher prints about a job: configuration blocks, tables, job and pod lines, the copy command.

Two families of output: ``LAUNCH INFO`` lines (the logger adds that prefix) and, in fleetrun style, the argument block
and the tables of variables as well. The words are those of the documentation, because scripts read them.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from fleet.common.addresses import split_endpoint
from fleet.launch.plan.process_plan import SERVER_ROWS, WORKER_ROWS
from fleet.launch.plan.records import LaunchConfig, ProcessSpec
from fleet.launch.processes.logs import MAX_OPENING_LINES, LaunchLog, open_log, write_all
from fleet.launch.processes.redact import is_secret_name, redact, redact_arguments

_LAUNCH_NAMES = (
    "auto_cluster_config", "auto_parallel_config", "auto_tuner_json", "devices", "elastic_level", "elastic_timeout",
    "enable_gpu_log", "gloo_port", "host", "ips", "job_id", "legacy", "log_dir", "log_level", "log_overwrite",
    "master", "max_restart", "nnodes", "nproc_per_node", "rank", "run_mode", "server_num", "servers", "sort_ip",
    "start_port", "trainer_num", "trainers", "training_script", "training_script_args", "with_gloo",
)  # fmt: skip
_FLEETRUN_NAMES = (
    "gpus", "heter_worker_num", "heter_workers", "http_port", "ips", "log_dir", "nproc_per_node", "server_num",
    "servers", "training_script", "training_script_args", "worker_num", "workers",
)  # fmt: skip
COLLECTIVE_ROWS = (
    "PADDLE_CURRENT_ENDPOINT",
    "PADDLE_TRAINERS_NUM",
    "PADDLE_TRAINER_ENDPOINTS",
    "FLAGS_selected_gpus",
    "PADDLE_TRAINER_ID",
)
_NODE_FLAGS = ("rank", "host")
_RULE = "-" * 80


def announce(config: LaunchConfig, log: LaunchLog) -> None:
    """Writes the configuration in the asked style, then every note on how it was read.

    The terminal gets the warnings alone, and of many the first ones.
    """
    for line in configuration_lines(config):
        log.detail(line)
    for line in fleetrun_lines(config):
        log.detail(line, prefix=False)
    for note in config.command.notes:
        if note.level == "INFO":
            log.detail(note.text)
    warnings = [note for note in config.command.notes if note.level != "INFO"]
    shown = warnings if len(warnings) < MAX_OPENING_LINES else warnings[: MAX_OPENING_LINES - 2]
    for note in shown:
        log.write(note.level, note.text)
    for note in warnings[len(shown) :]:
        log.detail(f"{note.level}: {note.text}")
    if len(shown) < len(warnings):
        log.warning(f"{len(warnings) - len(shown)} more warnings are in {config.log_file}.")


def configuration_lines(config: LaunchConfig) -> list[str]:
    """Returns the configuration block, one log line each, names in alphabetical order; None means not given."""
    names = sorted({*_LAUNCH_NAMES, *config.command.given} & set(config.command.arguments))
    return [
        "-----------  Configuration  ----------------------",
        *(f"{name}: {_shown(config.command.arguments[name])}" for name in names),
        "-" * 50,
    ]


def fleetrun_lines(config: LaunchConfig) -> list[str]:
    """Returns fleetrun's argument block, without a prefix; empty unless the style is fleetrun."""
    if config.logs.style != "fleetrun":
        return []
    values = dict(config.command.arguments)
    if values.get("ips") is None:
        values["ips"] = "127.0.0.1"
    names = sorted({*_FLEETRUN_NAMES, *config.command.given} & set(values))
    return [
        "-----------  Configuration Arguments -----------",
        *(f"{name}: {_shown(values[name])}" for name in names),
        "-" * 48,
    ]


def _shown(value: object) -> str:
    if isinstance(value, list):
        return f"{redact_arguments(value)}"
    return redact(f"{value}")


def job_line(config: LaunchConfig, num_nodes: int | None = None) -> str:
    """Returns the line about the job: ``replicas CURRENT[MIN:MAX]`` counts nodes."""
    current = config.nodes.min if num_nodes is None else num_nodes
    return (
        f"Job: {config.job_id}, mode {config.mode}, replicas {current}[{config.nodes.min}:{config.nodes.max}], "
        f"elastic {config.elastic.is_elastic}"
    )


def run_pod_line(config: LaunchConfig, specs: Sequence[ProcessSpec]) -> str:
    """Returns the line before the processes of this node start; replicas counts them."""
    return f"Run Pod: {config.pod.name}, replicas {len(specs)}, status ready"


def watching_pod_line(config: LaunchConfig, specs: Sequence[ProcessSpec]) -> str:
    """Returns the line after the processes of this node started."""
    return f"Watching Pod: {config.pod.name}, replicas {len(specs)}, status running"


def node_line(config: LaunchConfig, host: str, node_rank: int) -> str:
    """Returns the line that ties this launcher's log to its node's address."""
    return f"Node: {host}, rank {node_rank}, pod {config.pod.name}"


def copy_command_lines(config: LaunchConfig, master: str, secret_path: Path | None = None) -> list[str]:
    """Returns the sentence and the command for the other nodes; never for a log file.

    It holds the job's secret, because the meeting point takes only nodes that know it. A secret that came from the
    environment stays there, and a secret in a file of this node is read from it: the command refers to it, and
    the first line says how it travels.
    """
    secret = config.pod.secret
    way = ""
    if config.pod.secret_is_users:
        secret = "$FLEET_JOB_SECRET"
        way = " FLEET_JOB_SECRET has to have there the value that it has here."
    elif secret_path:
        host = split_endpoint(master, "master")[0]
        secret = f"$(cat {secret_path} 2>/dev/null || ssh {host} cat {secret_path})"
        way = (
            f" It reads the job's secret from {secret_path} of this machine, from another one by ssh; where ssh does "
            "not lead here, set FLEET_JOB_SECRET to the content of that file instead."
        )
    assignment = f'FLEET_JOB_SECRET="{secret}" ' if secret else ""
    words = shlex.join(["--master", master, *config.command.argv])
    lines = [
        f"Copy the following command to other nodes to run.{way}",
        _RULE,
        f"{assignment}{config.command.program} {words}",
        _RULE,
    ]
    own = [f"--{name}" for name in _NODE_FLAGS if name in config.command.given]
    if own:
        lines.append(f"On each node change what belongs to this one: {', '.join(own)}.")
    return lines


def start_messages(config: LaunchConfig, specs: Sequence[ProcessSpec]) -> list[str]:
    """Returns fleetrun's messages at the start of the processes, tables included; empty in the other style."""
    if config.logs.style != "fleetrun":
        return []
    messages = []
    tables = {"server": SERVER_ROWS, "worker": WORKER_ROWS} if config.mode == "ps" else {"worker": COLLECTIVE_ROWS}
    for role, rows in tables.items():
        group = [spec for spec in specs if spec.role == role]
        if group:
            kind = f" {role}" if config.mode == "ps" else ""
            messages.append(
                f"Local{kind} start {len(group)} processes. First process distributed environment info "
                f"(Only For Debug): \n{environment_table(group[0], rows)}\n"
            )
    messages.append(
        f"details abouts PADDLE_TRAINER_ENDPOINTS can be found in {config.logs.folder}/endpoints.log, and "
        f"detail running logs maybe found in {config.logs.folder}/workerlog.0"
    )
    return messages


def environment_table(spec: ProcessSpec, rows: Sequence[str]) -> str:
    """Returns the framed table of those ``rows`` that ``spec`` has; long values keep their end."""
    values = {**spec.environment, **spec.overflow}
    names = [name for name in rows if name in values and not is_secret_name(name)]
    border = f"    +{'=' * 87}+"
    line = f"    +{'-' * 87}+"
    body = [_row(name, values[name]) for name in names]
    return "\n".join([border, _row("Distributed Envs", "Value"), line, *body, border])


def _row(name: str, value: str) -> str:
    shown = value if len(value) < 45 else f"... {value[-41:]}"
    return f"    |{name:>40}  {redact(shown):^45}|"


def endpoints_log(specs: Sequence[ProcessSpec]) -> str:
    """Returns the content of ``endpoints.log``: a title, then the endpoint of every worker of the job."""
    values = [{**spec.environment, **spec.overflow}.get("PADDLE_TRAINER_ENDPOINTS", "") for spec in specs[:1]]
    return "\n".join(["PADDLE_TRAINER_ENDPOINTS: ", *(e for value in values for e in value.split(",") if e), ""])


def environment_log(spec: ProcessSpec) -> str:
    """Returns the content of ``envlog.N``: the launcher's own variables, ``NAME=VALUE``, sorted, no secrets."""
    return "".join(f"{name}={value}\n" for name, value in sorted(_own_variables(spec).items()))


def backup_environment(spec: ProcessSpec) -> str:
    """Returns the content of ``backup_env.N.json``: the same, with the values too long for an environment."""
    return json.dumps({**_own_variables(spec), **spec.overflow}, indent=1, sort_keys=True) + "\n"


def _own_variables(spec: ProcessSpec) -> dict[str, str]:
    """Returns the variables that may be written: a proxy may hold a password, so it stays out with the secrets."""
    return {
        name: value
        for name, value in spec.environment.items()
        if not is_secret_name(name) and not name.endswith("_proxy_original")
    }


def write_job_files(log_dir: Path, specs: Sequence[ProcessSpec]) -> None:
    """Writes the files that the processes read at their start, and the logs of their variables; replaces older files.

    The processes' own log files are there afterwards: a file that cannot be written is found before any process starts.
    """
    if not specs:
        return
    _write_text(log_dir / "endpoints.log", endpoints_log(specs))
    for spec in specs:
        if spec.environment_log_path is not None:
            _write_text(spec.environment_log_path, environment_log(spec))
        if spec.backup_path is not None:
            _write_text(spec.backup_path, backup_environment(spec))
        os.close(open_log(spec.log_path))


def _write_text(path: Path, text: str) -> None:
    fd = open_log(path, os.O_WRONLY | os.O_TRUNC)
    try:
        write_all(fd, text.encode())
    finally:
        os.close(fd)
