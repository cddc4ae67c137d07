"""Arguments and environment -> one validated :class:`LaunchConfig`; nothing is started, nothing is changed.

Precedence: a flag on the command line, then its variable in the environment, then the default. A warning names both
values where flag and variable differ.
"""

from __future__ import annotations

import random
import re
import secrets
import string
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fleet._addresses import split_endpoint
from fleet.env import Environment
from fleet.errors import ConfigError, UnsupportedOptionError, did_you_mean
from fleet.launch.cli.elastic import check_server_job, read_elastic
from fleet.launch.cli.modes import PS, infer_mode, log_style
from fleet.launch.cli.parser import CommandLine, parse_command_line
from fleet.launch.cli.roles import read_roles
from fleet.launch.cli.script import check_shadow, misplaced_flags, read_script
from fleet.launch.cli.settings import Settings, launcher_environment, read_settings
from fleet.launch.plan.devices import DeviceChoice, choose_devices, visible_cards
from fleet.launch.plan.local_machine import Machine
from fleet.launch.plan.nodes import first_port, read_meeting, read_nodes, settings_ready
from fleet.launch.plan.records import LaunchConfig, Nodes, Roles
from fleet.launch.processes.profile_range import read_range

_NAME = re.compile(r"[A-Za-z0-9._-]+")
_LONGEST_NAME = 200
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_SECRET_BYTES = 32
PROGRAM = "python -m fleet.launch"


def read_config(
    argv: Sequence[str], environment: Environment, machine: Machine, program: str = PROGRAM
) -> LaunchConfig:
    """Returns what the user asked for; raises ConfigError (or a subclass) that says what to write instead."""
    command = parse_command_line(argv, program)
    check_platform(machine, command)
    environment = launcher_environment(environment)
    settings = read_settings(command, environment)
    inherited = environment.inherited()
    script = read_script(
        command,
        is_module=bool(settings.values["module"]),
        no_python=bool(settings.values["no_python"]),
        path=inherited.get("PATH"),
    )
    check_shadow(script)
    for sentence in misplaced_flags(script):
        settings.warn(sentence)
    visible = inherited.get("CUDA_VISIBLE_DEVICES")
    mode = infer_mode(settings, environment, len(visible_cards(machine.num_gpus, visible)))
    choice = choose_devices(settings, machine, visible)
    nodes, roles = _places(settings, environment, machine, mode, choice)
    elastic, nodes = read_elastic(settings, environment, nodes)
    if mode == PS:
        check_server_job(settings, elastic)
    config = LaunchConfig(
        mode=mode,
        **vars(script),
        original_argv=tuple(argv),
        program=program,
        log_style=log_style(settings),
        given=tuple(sorted(settings.on_command_line)),
        **vars(nodes),
        **vars(elastic),
        **_places_fields(roles, choice),
        **_plain_fields(settings, environment),
        **_identity(),
        interface={"Linux": "lo", "Darwin": "lo0"}.get(machine.system) if nodes.is_single_node else None,
    )
    config = _with_secret(config, settings, environment)
    return _finish(config, settings, environment)


def check_platform(machine: Machine, command: CommandLine) -> None:
    """Raises UnsupportedOptionError on an operating system where jobs of several processes are not supported."""
    if machine.system in ("Linux", "Darwin"):
        return
    raise UnsupportedOptionError(
        f"The launcher does not run on {machine.system}: distributed jobs are supported on Linux (and, for "
        f"development, macOS). Run a single process without the launcher: python {command.script}"
    )


def _places(
    settings: Settings, environment: Environment, machine: Machine, mode: str, choice: DeviceChoice
) -> tuple[Nodes, Roles | None]:
    if mode != PS:
        return read_nodes(settings, environment, machine, choice.num_workers, choice.worker_devices), None
    settings_ready(settings)
    if settings.has("nproc_per_node"):
        raise ConfigError(
            f"{settings.named('nproc_per_node')} belongs to collective jobs. In a parameter-server job "
            "--worker_num says how many workers this node starts."
        )
    nodes = read_meeting(settings, machine)
    roles = read_roles(settings, environment, machine, meets=not nodes.is_single_node)
    if nodes.is_single_node and not roles.is_single_node:
        nodes = replace(nodes, is_single_node=False, host=roles.host or settings.text("host") or machine.address)
    return nodes, roles


def _places_fields(roles: Roles | None, choice: DeviceChoice) -> dict[str, Any]:
    """Returns the fields that say what this node starts and on which devices."""
    fields: dict[str, Any] = {
        "devices": tuple(int(card.name) for card in choice.cards) if _numbered(choice) else None,
        "device_names": tuple(card.name for card in choice.cards),
        "device_type": choice.device_type,
        "process_group_backend": choice.backend,
    }
    if roles is None:
        return {**fields, "nproc_per_node": choice.num_workers, "worker_devices": choice.worker_devices}
    taken = {name: value for name, value in vars(roles).items() if name not in ("is_single_node", "host")}
    return {**fields, **taken, "nproc_per_node": roles.worker_num}


def _numbered(choice: DeviceChoice) -> bool:
    return bool(choice.cards) and all(card.name.isdecimal() for card in choice.cards)


def _plain_fields(settings: Settings, environment: Environment) -> dict[str, Any]:
    """Returns the fields that one flag or variable sets by itself."""
    return {
        "backend": settings.text("backend"),
        "job_id": check_name(settings.text("job_id") or "default", settings.named("job_id")),
        "with_gloo": _one_of(settings, "with_gloo", (0, 1, 2)),
        "http_port": _port(settings, "http_port"),
        "gloo_port": _port(settings, "gloo_port"),
        "log_dir": Path(settings.text("log_dir") or "log"),
        "log_level": _log_level(settings),
        "log_overwrite": settings.values["log_overwrite"],
        "max_restart": _max_restart(settings),
        "elastic_level": _one_of(settings, "elastic_level", (-1, 0, 1)),
        "elastic_timeout_s": float(settings.values["elastic_timeout"] or 0),
        "grace_s": float(settings.values["shutdown_timeout"] or 0),
        "heartbeat_timeout_s": _heartbeat_timeout_s(settings, environment),
        "heartbeat_is_default": not settings.has("heartbeat_timeout"),
        "preempt_grace_s": float(settings.values["preempt_grace"] or 0),
        "sort_ip": settings.values["sort_ip"],
        "enable_gpu_log": settings.values["enable_gpu_log"],
        "trackers": settings.text("tracker") or "",
        "page": _page(settings),
        "profile": _profile(settings),
        "port_range": _port_range(environment),
        "fixed_port": first_port(settings, environment),
        "environment_limit": environment.int("PADDLE_ENV_LIMIT_LEN"),
    }


def _profile(settings: Settings) -> str:
    """Returns the steps to profile as the workers read them; an empty text for none."""
    text = settings.text("profile")
    return "" if text is None else "{}:{}".format(*read_range(text, settings.named("profile")))


def _page(settings: Settings) -> int | None:
    port = settings.number("page")
    if port is not None and not 0 <= port < 65536:
        raise ConfigError(f"{settings.named('page')} is {port}; it takes a port from 1 to 65535, or 0 for a free one.")
    return port


def _heartbeat_timeout_s(settings: Settings, environment: Environment) -> float:
    """Returns the limit that was asked for; by default the timeout of collective calls, when that is longer."""
    asked = float(settings.values["heartbeat_timeout"] or 0)
    return asked if settings.has("heartbeat_timeout") else max(asked, environment.float("PADDLE_PG_TIMEOUT") / 1000)


def check_name(name: str, source: str) -> str:
    """Returns ``name`` when it can stand in file names and keys; raises ConfigError otherwise."""
    if not _NAME.fullmatch(name) or name in (".", ".."):
        raise ConfigError(
            f"{source} is {name!r}; it takes letters, digits, '.', '_' and '-' only, because it names "
            "log files and keys."
        )
    if len(name) > _LONGEST_NAME:
        raise ConfigError(
            f"{source} is {name!r}, of {len(name)} characters; it takes {_LONGEST_NAME} at most, because it names "
            "log files."
        )
    return name


def _one_of(settings: Settings, name: str, allowed: tuple[int, ...]) -> int:
    value = settings.number(name)
    if value is None or value not in allowed:
        rule = ", ".join(f"{item}" for item in allowed)
        raise ConfigError(f"{settings.named(name)} is {value!r}; it takes one of {rule}.")
    return value


def _port(settings: Settings, name: str) -> int | None:
    value = settings.number(name)
    if value is not None and not 0 < value < 65536:
        raise ConfigError(f"{settings.named(name)} is {value}; it takes a port from 1 to 65535.")
    return value


def _log_level(settings: Settings) -> str:
    level = (settings.text("log_level") or "INFO").upper()
    if level not in _LEVELS:
        raise ConfigError(
            f"{settings.named('log_level')} is {level!r}; it takes {', '.join(_LEVELS)}.{did_you_mean(level, _LEVELS)}"
        )
    return level


def _max_restart(settings: Settings) -> int:
    """Returns how often workers are started again: only with ``--elastic_level 1`` or an explicit ``--max_restart``."""
    count = settings.number("max_restart") or 0
    level = settings.number("elastic_level")
    if count < 0:
        raise ConfigError(f"{settings.named('max_restart')} is {count}; it takes a number from 0.")
    if level == 0:
        if settings.has("max_restart") and count:
            settings.warn(
                "--elastic_level=0 stops the job on the first failure; "
                f"{settings.named('max_restart')}={count} is ignored."
            )
        return 0
    return count if level == 1 or settings.has("max_restart") else 0


def _port_range(environment: Environment) -> tuple[int, int] | None:
    text = environment.raw("PORT_RANGE")
    if text is None:
        return None
    first, _, last = text.partition(":")
    if not (first.strip().isdecimal() and last.strip().isdecimal()) or not 0 < int(first) <= int(last) < 65536:
        raise ConfigError(f"PORT_RANGE is {text!r} in the environment; it takes first:last, as in 35100:64000.")
    return int(first), int(last)


def _identity() -> dict[str, Any]:
    """Returns the random names that mark this launcher's part of the job."""
    pod_id = secrets.token_hex(8)
    letters = random.SystemRandom().choices(string.ascii_lowercase, k=6)
    return {
        "pod_name": "".join(letters),
        "pod_id": pod_id,
        "scratch_path": Path(tempfile.gettempdir()) / f"fleet-{pod_id}",
    }


def _with_secret(config: LaunchConfig, settings: Settings, environment: Environment) -> LaunchConfig:
    """Returns the configuration with the job's secret: the user's, or a new one where this node can pass it on."""
    text = environment.raw("FLEET_JOB_SECRET")
    if text is not None:
        if not re.fullmatch(r"([0-9a-fA-F]{2}){16,}", text.strip()):
            raise ConfigError(
                "FLEET_JOB_SECRET in the environment is not a key; it takes 32 hexadecimal digits or "
                'more. Make one with: python -c "import secrets; print(secrets.token_hex(32))"'
            )
        return replace(config, secret=text.strip(), secret_is_users=True)
    opens_meeting = config.master is None and not config.static_peers and not config.servers and not config.is_elastic
    if config.is_single_node or opens_meeting:
        return replace(config, secret=secrets.token_hex(_SECRET_BYTES))
    settings.warn(
        "FLEET_JOB_SECRET is not set, so the nodes of this job cannot prove to each other that they belong "
        "to it. Set it to the same random key on every node, unless only trusted machines reach these ports."
    )
    return config


def _finish(config: LaunchConfig, settings: Settings, environment: Environment) -> LaunchConfig:
    """Returns the configuration with its printed arguments and notes; checks what only the whole can tell."""
    fixed = config.static_peers or (config.servers and not config.is_single_node)
    if fixed and settings.has("max_restart") and config.max_restart:
        raise ConfigError(
            f"{settings.named('max_restart')}={config.max_restart} needs a place where the nodes meet "
            "again after a restart. Use --nnodes with --master instead of a fixed list of nodes."
        )
    listed = config.workers if config.servers else ()
    ports = {split_endpoint(item, "the list")[1] for item in listed} | {p for q in config.static_peers for p in q.ports}
    if ports and settings.has("start_port") and config.fixed_port not in ports:
        raise ConfigError(
            f"{settings.named('start_port')}={settings.text('start_port')} has nothing to begin: the endpoints of this "
            "job are listed with their ports. Omit it, or list the addresses without ports."
        )
    threads = (config.nproc_per_node or 0) > 1 and not environment.has("OMP_NUM_THREADS")
    if threads:
        settings.note(
            "INFO",
            "OMP_NUM_THREADS is not set; each worker gets 1, so that the workers of this node do not "
            "crowd each other out. Set it to use more CPU threads.",
        )
    arguments = _arguments(config, settings)
    return replace(config, sets_thread_count=threads, arguments=arguments, notes=tuple(settings.notes))


def _arguments(config: LaunchConfig, settings: Settings) -> dict[str, object]:
    """Returns every flag as the configuration block prints it."""
    values: dict[str, object] = dict(settings.values)
    if settings.has("gpus") and not settings.has("devices"):
        values["devices"] = settings.values["gpus"]
    if settings.has("worker_num") and not settings.has("trainer_num"):
        values["trainer_num"] = settings.values["worker_num"]
    if settings.has("workers") and not settings.has("trainers"):
        values["trainers"] = settings.values["workers"]
    values["run_mode"] = config.mode
    values["max_restart"] = config.max_restart  # the flag's default counts with --elastic_level 1 only
    values["training_script"] = config.script
    values["training_script_args"] = list(config.script_args)
    return values
