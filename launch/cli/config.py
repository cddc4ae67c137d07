"""Arguments and environment -> one validated :class:`LaunchConfig`; nothing is started, nothing is changed.

:func:`read_config` reads from top to bottom: each line calls one file of the launcher, which returns one record and
calls no other. Precedence: a flag on the command line, then its variable in the environment, then the default. A
warning names both values where flag and variable differ.
"""

from __future__ import annotations

import os
import random
import re
import secrets
import shutil
import string
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from fleet.common.addresses import split_endpoint, split_list
from fleet.common.tracker_names import check_trackers
from fleet.env import Environment
from fleet.errors import ConfigError, UnsupportedOptionError, did_you_mean
from fleet.launch.cli.elastic import read_elastic
from fleet.launch.cli.flag import FLEETRUN
from fleet.launch.cli.flags import BY_SPELLING, PS_FLAGS
from fleet.launch.cli.roles import read_servers
from fleet.launch.cli.settings import CommandLine, Settings, read_command
from fleet.launch.plan.devices import choose_devices
from fleet.launch.plan.local_machine import Machine
from fleet.launch.plan.nodes import read_nodes
from fleet.launch.plan.records import Command, LaunchConfig, Logs, Page, Pod, Processes, Script, Servers
from fleet.launch.processes.profile_report import read_range

COLLECTIVE = "collective"
PS = "ps"
PROGRAM = "python -m fleet.launch"
_REFUSED_MODES = {
    "ps-heter": "heterogeneous parameter servers are not part of this project",
    "rpc": "torch.distributed.rpc jobs are started as collective ones",
}
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_LONGEST_NAME = 200
_MOST_PER_CPU = 4  # workers that a processor takes before the launcher warns
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_SECRET_BYTES = 32
_IMPORTS_FLEET = re.compile(r"^\s*(from|import) fleet\b", re.MULTILINE)


def read_config(
    argv: Sequence[str], environment: Environment, machine: Machine, program: str = PROGRAM
) -> LaunchConfig:
    """Returns the job that the user asked for; raises ConfigError (or a subclass) with the line to write instead."""
    settings = read_command(argv, environment, program)
    check_platform(machine, settings.line)
    script = read_script(settings)
    mode = _read_mode(settings, len(machine.visible_cards(settings.visible_devices)))
    processes = choose_devices(settings, machine)
    nodes = read_nodes(settings, machine, processes, lists_nodes=mode != PS)
    servers = Servers()
    if mode == PS:
        servers, nodes = read_servers(settings, machine, nodes, is_scheduled=_is_scheduled_ps(settings))
        # Workers of such a job are counted by --worker_num, and each sees its card as number 0.
        processes = replace(processes, num_workers=servers.num_workers, worker_devices=())
    elastic, nodes = read_elastic(settings, nodes, has_servers=mode == PS)
    pod = _new_pod()
    config = LaunchConfig(
        mode=mode,
        script=script,
        job_id=check_name(settings.text("job_id") or "default", settings.named("job_id")),
        command=Command(program=program, argv=tuple(argv), given=tuple(sorted(settings.on_command_line))),
        pod=pod,
        nodes=replace(nodes, interface=_loopback(machine) if nodes.is_single else None),
        processes=_limits(settings, processes),
        elastic=elastic,
        servers=_gloo(settings, servers),
        logs=_logs(settings),
        page=_page(settings, pod),
    )
    _warn_of_crowding(config, settings, machine)
    return _completed(config, settings)


def _completed(config: LaunchConfig, settings: Settings) -> LaunchConfig:
    """Returns the configuration with its secret, thread count and notes; raises ConfigError when records contradict."""
    config = _with_secret(config, settings)
    _check_whole(config, settings)
    config = _with_thread_count(config, settings)
    # Last, so that it holds every note.
    command = replace(config.command, arguments=_arguments(config, settings), notes=tuple(settings.notes))
    return replace(config, command=command)


def check_platform(machine: Machine, line: CommandLine) -> None:
    """Raises UnsupportedOptionError on an operating system where jobs of several processes are not supported."""
    if machine.system in ("Linux", "Darwin"):
        return
    raise UnsupportedOptionError(
        f"The launcher does not run on {machine.system}: distributed jobs are supported on Linux (and, for "
        f"development, macOS). Run a single process without the launcher: python {line.script}"
    )


def _read_mode(settings: Settings, num_gpus: int) -> str:
    """Returns "collective" or "ps"; raises ConfigError when the flags ask for both."""
    ps_flags = [name for name in PS_FLAGS if settings.has(name)]
    hosts = [part for part in (settings.text("ips") or "").split(",") if part.strip()]
    if ps_flags and len(hosts) > 1:
        raise ConfigError(
            f"Only one mode can be run: {settings.named(ps_flags[0])} asks for parameter servers and "
            f"{settings.named('ips')}={settings.text('ips')} for a collective job. For parameter servers "
            "on several nodes use --servers and --workers."
        )
    mode = _given_mode(settings, ps_flags)
    if mode is None:
        mode = PS if ps_flags or _is_scheduled_ps(settings) else COLLECTIVE
        if settings.log_style == FLEETRUN:
            _note_choice(settings, ps_flags, num_gpus)
    return mode


def _given_mode(settings: Settings, ps_flags: list[str]) -> str | None:
    mode = settings.text("run_mode")
    if mode is None:
        return None
    if mode in _REFUSED_MODES:
        raise UnsupportedOptionError(
            f"{settings.named('run_mode')}={mode} cannot be honoured: {_REFUSED_MODES[mode]}. Use collective or ps."
        )
    if mode not in (COLLECTIVE, PS):
        raise ConfigError(
            f"{settings.named('run_mode')} is {mode!r}; it takes collective or ps."
            f"{did_you_mean(mode, (COLLECTIVE, PS))}"
        )
    if mode == COLLECTIVE and ps_flags:
        raise ConfigError(
            f"{settings.named('run_mode')}=collective and {settings.named(ps_flags[0])} exclude each "
            "other. Omit one of them."
        )
    return mode


def _is_scheduled_ps(settings: Settings) -> bool:
    """Returns whether a scheduler made this node one server or one worker of a parameter-server job."""
    environment = settings.environment
    return environment.has("PADDLE_PSERVERS_IP_PORT_LIST") and (
        environment.first("TRAINING_ROLE", "PADDLE_TRAINING_ROLE") is not None
    )


def _note_choice(settings: Settings, ps_flags: list[str], num_gpus: int) -> None:
    """Notes the choice in fleetrun's words, spelled as scripts that read its log expect them."""
    if ps_flags:
        found = [f"--{name}" for name in ps_flags]
        settings.note("INFO", f"Run parameter-sever mode. pserver arguments:{found}, cuda count:{num_gpus}")
    elif settings.has("ips"):
        settings.note("INFO", f"Run collective mode. gpu arguments:['--ips'], cuda count:{num_gpus}")
    elif num_gpus:
        settings.warn("Not found distinct arguments and compiled with cuda. Default use collective mode")


def _loopback(machine: Machine) -> str | None:
    return {"Linux": "lo", "Darwin": "lo0"}.get(machine.system)


def _limits(settings: Settings, processes: Processes) -> Processes:
    """Returns ``processes`` with how long each may be silent or take to end."""
    return replace(
        processes,
        backend=settings.text("backend") or Processes.backend,
        environment_limit=settings.environment.int("PADDLE_ENV_LIMIT_LEN"),
        grace_s=settings.seconds("shutdown_timeout"),
        heartbeat_timeout_s=_heartbeat_timeout_s(settings),
        heartbeat_is_default=not settings.has("heartbeat_timeout"),
        preempt_grace_s=settings.seconds("preempt_grace"),
    )


def _heartbeat_timeout_s(settings: Settings) -> float:
    """Returns the limit that was asked for; by default the timeout of collective calls, when that is longer."""
    asked = settings.seconds("heartbeat_timeout")
    if settings.has("heartbeat_timeout"):
        return asked
    return max(asked, settings.environment.float("PADDLE_PG_TIMEOUT") / 1000)


def _gloo(settings: Settings, servers: Servers) -> Servers:
    """Returns ``servers`` with the rendezvous of gloo."""
    return replace(
        servers,
        with_gloo=settings.one_of("with_gloo", (0, 1, 2)),
        http_port=settings.port("http_port"),
        gloo_port=settings.port("gloo_port") or Servers.gloo_port,
    )


def _logs(settings: Settings) -> Logs:
    level = (settings.text("log_level") or "INFO").upper()
    if level not in _LEVELS:
        raise ConfigError(
            f"{settings.named('log_level')} is {level!r}; it takes {', '.join(_LEVELS)}.{did_you_mean(level, _LEVELS)}"
        )
    steps = settings.text("profile")
    return Logs(
        folder=Path(settings.text("log_dir") or "log"),
        level=level,
        overwrites=bool(settings.values["log_overwrite"]),
        style=settings.log_style,
        has_gpu_log=bool(settings.values["enable_gpu_log"]),
        trackers=_trackers(settings),
        profile="" if steps is None else "{}:{}".format(*read_range(steps, settings.named("profile"))),
    )


def _trackers(settings: Settings) -> str:
    """Returns the names of trackers; a wrong one is refused here, before data is loaded and workers wait."""
    asked = settings.text("tracker") or ""
    # A program of another kind may have other packages.
    if not settings.values["no_python"]:
        check_trackers(dict.fromkeys(split_list(asked), settings.named("tracker")))
    return asked


def _page(settings: Settings, pod: Pod) -> Page | None:
    port = settings.number("page")
    if port is None:
        return None
    if not 0 <= port < 65536:
        raise ConfigError(f"{settings.named('page')} is {port}; it takes a port from 1 to 65535, or 0 for a free one.")
    return Page(port=port, folder=pod.scratch_path / "page")


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


def _new_pod() -> Pod:
    """Returns the random names that mark this launcher's part of the job."""
    pod_id = secrets.token_hex(8)
    letters = random.SystemRandom().choices(string.ascii_lowercase, k=6)
    return Pod(name="".join(letters), id=pod_id, scratch_path=Path(tempfile.gettempdir()) / f"fleet-{pod_id}")


def _with_secret(config: LaunchConfig, settings: Settings) -> LaunchConfig:
    """Returns the configuration with the job's secret: the user's, or a new one where this node can pass it on."""
    text = settings.environment.raw("FLEET_JOB_SECRET")
    if text is not None:
        if not re.fullmatch(r"([0-9a-fA-F]{2}){16,}", text.strip()):
            raise ConfigError(
                "FLEET_JOB_SECRET in the environment is not a key; it takes 32 hexadecimal digits or "
                'more. Make one with: python -c "import secrets; print(secrets.token_hex(32))"'
            )
        return replace(config, pod=replace(config.pod, secret=text.strip(), secret_is_users=True))
    # This node starts every process, or prints the command for the others with the secret in it.
    if config.nodes.is_single or _opens_meeting(config):
        return replace(config, pod=replace(config.pod, secret=secrets.token_hex(_SECRET_BYTES)))
    settings.warn(
        "FLEET_JOB_SECRET is not set, so the nodes of this job cannot prove to each other that they belong "
        "to it. Set it to the same random key on every node, unless only trusted machines reach these ports."
    )
    return config


def _opens_meeting(config: LaunchConfig) -> bool:
    """Returns whether this node prints the command, and in it the secret, for the others."""
    is_listed = config.nodes.static_peers or config.servers.endpoints
    return config.nodes.master is None and not is_listed and not config.elastic.is_elastic


def _check_whole(config: LaunchConfig, settings: Settings) -> None:
    """Raises ConfigError for values that contradict each other across the records."""
    nodes = config.nodes
    servers = config.servers
    count = config.elastic.max_restart
    fixed = nodes.static_peers or (servers.endpoints and not nodes.is_single)
    if fixed and settings.has("max_restart") and count:
        raise ConfigError(
            f"{settings.named('max_restart')}={count} needs a place where the nodes meet "
            "again after a restart. Use --nnodes with --master instead of a fixed list of nodes."
        )
    listed = servers.worker_endpoints if servers.endpoints else ()
    ports = {split_endpoint(item, "the list")[1] for item in listed} | {p for q in nodes.static_peers for p in q.ports}
    if ports and settings.has("start_port") and nodes.first_port not in ports:
        raise ConfigError(
            f"{settings.named('start_port')}={settings.text('start_port')} has nothing to begin: the endpoints of this "
            "job are listed with their ports. Omit it, or list the addresses without ports."
        )


def _warn_of_crowding(config: LaunchConfig, settings: Settings, machine: Machine) -> None:
    """Notes that the workers of this node are far more than its processors, before the machine stands still."""
    num_workers = config.processes.num_workers
    if num_workers > _MOST_PER_CPU * machine.num_cpus and not config.processes.worker_devices:
        settings.note(
            "WARNING",
            f"{num_workers} workers on {machine.num_cpus} processor{'s' * (machine.num_cpus != 1)}: they take turns, "
            "and each holds Python, torch and a copy of the model in memory. Ctrl-C ends them; --nproc_per_node sets "
            "how many there are.",
        )


def _with_thread_count(config: LaunchConfig, settings: Settings) -> LaunchConfig:
    if config.processes.num_workers <= 1 or settings.environment.has("OMP_NUM_THREADS"):
        return config
    settings.note(
        "INFO",
        "OMP_NUM_THREADS is not set; each worker gets 1, so that the workers of this node do not "
        "crowd each other out. Set it to use more CPU threads.",
    )
    return replace(config, processes=replace(config.processes, sets_thread_count=True))


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
    # Shows the number that holds: the flag's default counts with --elastic_level 1 only.
    values["max_restart"] = config.elastic.max_restart
    values["training_script"] = config.script.name
    values["training_script_args"] = list(config.script.args)
    return values


def read_script(settings: Settings) -> Script:
    """Returns the program of the workers, and warns of flags of the launcher that stand behind it.

    Raises ConfigError when the program does not exist, cannot be run, or would import another ``fleet``.
    """
    try:
        script = _find(settings)
    except OSError as error:
        raise ConfigError(f"The script {settings.line.script!r} cannot be looked for: {error.strerror}.") from None
    _check_shadow(script)
    for sentence in _misplaced_flags(script):
        settings.warn(sentence)
    return script


def _find(settings: Settings) -> Script:
    name = settings.line.script
    args = settings.line.script_args
    is_module = bool(settings.values["module"])
    no_python = bool(settings.values["no_python"])
    if is_module and no_python:
        raise ConfigError("--module runs through Python and --no_python does not. Omit one of them.")
    if is_module:
        return Script(name=name, args=args, is_module=True)
    if name == "run_check" and not Path(name).exists():
        return Script(name="fleet", args=("run_check", *args), is_module=True)
    if name.endswith(".py") and not no_python:
        if not Path(name).is_file():
            raise ConfigError(f"The script {name!r} does not exist (looked in {Path.cwd()}).{_near(name)}")
        return Script(name=name, args=args)
    if shutil.which(name, path=settings.environment.inherited().get("PATH")) is not None:
        return Script(name=name, args=args, is_executable=True)
    if not Path(name).exists():
        raise ConfigError(
            f"The script {name!r} is neither a file here ({Path.cwd()}) nor a program on PATH."
            f"{_near(name)} For a module put -m before its name."
        )
    if Path(name).is_file() and os.sep not in name and os.access(name, os.X_OK):
        return Script(name=f".{os.sep}{name}", args=args, is_executable=True)
    raise ConfigError(
        f"The script {name!r} is neither a .py file nor an executable. Make it executable (chmod +x), or "
        "give it the ending .py."
    )


def _misplaced_flags(script: Script) -> list[str]:
    """Returns a sentence for each flag of the launcher that stands behind the script and is not the script's own.

    A flag whose name stands in the script's text is taken to be its own.
    """
    text = _text_of(script)
    flags = [(word, BY_SPELLING.get(word.partition("=")[0])) for word in script.args if word.startswith("--")]
    return [
        f"{word} stands behind the script, so {script.name} gets it and the launcher does not. If it is meant for "
        f"the launcher, write it before {script.name}."
        for word, flag in flags
        if flag is not None and not any(name in text for name in (flag.name, *flag.aliases))
    ]


def _check_shadow(script: Script) -> None:
    """Raises ConfigError when ``import fleet`` in the script finds a file of the user instead of this package."""
    folder = Path() if script.is_module else Path(script.name).parent
    own_package = folder / "fleet" / "__init__.py"
    shadow = folder / "fleet.py" if not own_package.exists() else own_package
    if script.is_executable or not shadow.exists() or (folder / "fleet" / "facade.py").exists():
        return
    if script.is_module or _IMPORTS_FLEET.search(_text_of(script)):
        raise ConfigError(
            f"{shadow} stands beside {script.name}, so `import fleet` there finds it instead of this package. "
            "Rename it."
        )


def _text_of(script: Script) -> str:
    try:
        return Path(script.name).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _near(name: str) -> str:
    folder = Path(name).parent
    if not folder.is_dir():
        return ""
    near = get_close_matches(Path(name).name, [p.name for p in folder.iterdir() if p.is_file()], n=1, cutoff=0.6)
    return f" Did you mean {f'{folder / near[0]}'!r}?" if near else ""
