"""Whether a job is elastic, and its settings, from flags and variables; etcd is not opened here."""

from __future__ import annotations

import shlex
from dataclasses import replace

from fleet.common.addresses import hide_user, join_endpoint, split_endpoint, split_master
from fleet.env import Environment
from fleet.errors import ConfigError, UnsupportedOptionError
from fleet.launch.cli.settings import Settings
from fleet.launch.membership.etcd_address import check_etcd_client, read_etcd_address
from fleet.launch.plan.records import Elastic, LaunchConfig, Nodes


def read_elastic(settings: Settings, nodes: Nodes, *, has_servers: bool) -> tuple[Elastic, Nodes]:
    """Returns the elastic settings and the nodes they lead to.

    Raises:
        ConfigError: one flag of a pair is missing, or the flags contradict each other.
        UnsupportedOptionError: the job has parameter servers, and is elastic or is to save itself at one step.
    """
    elastic, nodes = _read_family(settings, nodes)
    if has_servers:
        _check_server_job(settings, elastic)
    settings.one_of("elastic_level", (-1, 0, 1))
    elastic = replace(elastic, max_restart=_max_restart(settings), timeout_s=settings.seconds("elastic_timeout"))
    return elastic, nodes


def _read_family(settings: Settings, nodes: Nodes) -> tuple[Elastic, Nodes]:
    """Returns the settings by the older family of flags, ``--elastic_server`` with ``--np``, or by the newer one."""
    environment = settings.environment
    server = _server(settings, environment)
    np = settings.text("np")
    if server is None and np is None:
        return _newer_family(settings, nodes)
    if server is None or np is None:
        given, missing = ("np", "elastic_server") if server is None else ("elastic_server", "np")
        raise ConfigError(
            f"{settings.named(given)} needs --{missing} as well: an elastic job has an etcd server "
            "and a number of nodes, as in --elastic_server=10.0.0.1:2379 --np=2 --job_id=JOB."
        )
    _check_one_family(settings)
    low, high = settings.node_range("np")
    scale = settings.number("scale") or 0
    if scale < 0:
        raise ConfigError(f"{settings.named('scale')} is {scale}; it takes the number of nodes to add, from 0.")
    if not settings.has("job_id"):
        settings.warn("The elastic job has no --job_id; jobs named 'default' on one etcd server would mix.")
    split_hook(settings.text("elastic_pre_hook"), settings.named("elastic_pre_hook"))
    if settings.has("elastic_server"):
        # The configuration block prints this value, so the user and password of etcd must be gone from it.
        settings.values["elastic_server"] = hide_user(f"etcd://{server}").removeprefix("etcd://")
    elastic = Elastic(
        is_elastic=True,
        server=server,
        ttl_s=_ttl_s(environment),
        is_scheduled=True,
        scale=scale,
        force=bool(settings.values["force"]),
        pre_hook=settings.text("elastic_pre_hook"),
        fault_level=_fault_level(settings, environment),
    )
    rank = _asked_rank(settings, high + scale)
    # The nodes meet on etcd: a master, a list or a port that the scheduler's environment holds does not count.
    nodes = replace(nodes, master=None, static_peers=(), store_port=None)
    host = settings.text("host") or nodes.host
    return elastic, replace(nodes, min=low + scale, max=high + scale, rank=rank, host=host, is_single=False)


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


def _check_one_family(settings: Settings) -> None:
    """Raises ConfigError for flags that say in another way how many nodes there are, or where they meet."""
    for name in ("master", "master_addr", "nnodes", "ips", "standalone"):
        if name in settings.on_command_line and settings.values[name] and settings.text(name) != settings.text("np"):
            raise ConfigError(
                f"--{name}={settings.text(name)} and {settings.named('np')}={settings.text('np')} contradict each "
                "other: the nodes of a job with --elastic_server and --np meet on etcd, and --np is their number. Use "
                "these two, or --master etcd://ip:port --nnodes MIN:MAX --job_id JOB."
            )


def _asked_rank(settings: Settings, num_nodes: int) -> int:
    """Returns the rank that this node asks for; under an operator the index of its pod, so that the pods behind the
    new end are the ones that leave when the job shrinks."""
    rank = settings.number("rank")
    if rank is None or rank == -1 or (rank >= num_nodes and settings.named("rank") == "PADDLE_TRAINER_ID"):
        return -1
    if not 0 <= rank < num_nodes:
        raise ConfigError(
            f"{settings.named('rank')} is {rank}, but there are {num_nodes} nodes, counted from 0; -1 takes any place."
        )
    return rank


def _fault_level(settings: Settings, environment: Environment) -> int:
    """Returns 1 when a failed node asks its scheduler for a restart; the variable counts in both spellings."""
    if settings.has("elastic_level") and settings.number("elastic_level") == 0:
        return 0
    names = ("PADDLE_ELASTIC_FAULT_TOLERANC_LEVEL", "PADDLE_ELASTIC_FAULT_TOLERANCE_LEVEL")
    given = [name for name in names if environment.has(name)] or [names[0]]
    levels = {environment.int(name) for name in given}
    if len(levels) > 1:
        raise ConfigError(
            f"{' and '.join(f'{name}={environment.raw(name)}' for name in given)} in the environment differ; they are "
            "one variable in two spellings. Set one of them."
        )
    return levels.pop()


def _server(settings: Settings, environment: Environment) -> str | None:
    text = settings.text("elastic_server")
    if text == "":
        raise ConfigError(f"{settings.named('elastic_server')} is {text!r}; it takes ip:port of etcd.")
    if text is not None:
        return split_master(text if "://" in text else f"etcd://{text}", settings.named("elastic_server"))[1]
    # Kubernetes sets the pair below for every pod beside a service called etcd, so alone it means nothing.
    if not environment.has("PADDLE_ELASTIC_NP"):
        return None
    names = ("PADDLE_ELASTIC_ETCD_SERVICE_HOST", "PADDLE_ELASTIC_ETCD_SERVICE_PORT")
    host = environment.raw(names[0])
    port = environment.int(names[1])
    if bool(host) != bool(port):
        raise ConfigError(
            f"{names[0]} is {host!r} and {names[1]} {port or None!r} in the environment; they belong together. Set "
            "both, or --elastic_server=ip:port."
        )
    if not host or not port:
        return None
    return join_endpoint(*split_endpoint(join_endpoint(host, port), " and ".join(names)))


def _ttl_s(environment: Environment) -> int:
    ttl_s = environment.int("PADDLE_ELASTIC_TTL")
    if not 2 <= ttl_s <= 3600:
        raise ConfigError(f"PADDLE_ELASTIC_TTL is {ttl_s} in the environment; it takes seconds from 2 to 3600.")
    return ttl_s


def _newer_family(settings: Settings, nodes: Nodes) -> tuple[Elastic, Nodes]:
    """Returns whether ``--nnodes MIN:MAX`` makes the job elastic; a warning names the missing flags."""
    environment = settings.environment
    etcd = (nodes.master or "").startswith("etcd://")
    is_range = nodes.min != nodes.max
    level = settings.number("elastic_level")
    for name in ("scale", "force", "elastic_pre_hook"):
        if settings.has(name) and settings.values[name]:
            raise ConfigError(
                f"{settings.named(name)} belongs to an elastic job. Add --elastic_server and --np, or omit it."
            )
    ttl_s = _ttl_s(environment) if etcd else Elastic.ttl_s
    if not is_range and not (etcd and level == 1):
        return Elastic(ttl_s=ttl_s), nodes
    is_off = level != 1 and settings.has("elastic_level")
    absences = (
        (nodes.master is None, "--master ip:port or etcd://ip:port"),
        (etcd and not settings.has("job_id"), "--job_id"),
        (not is_range, "--nnodes MIN:MAX"),
        (is_off, "--elastic_level 1"),
    )
    missing = [text for absent, text in absences if absent]
    if not missing:
        settings.values["elastic_level"] = 1
        server = (nodes.master or "").removeprefix("etcd://") if etcd else None
        return Elastic(is_elastic=True, server=server, ttl_s=_ttl_s(environment)), nodes
    settings.warn(
        f"The job is not elastic; missing: {', '.join(missing)}. It starts with exactly {nodes.min} "
        f"node{'s' if nodes.min > 1 else ''}."
    )
    if nodes.min == 1 and not etcd:
        return Elastic(), replace(nodes, max=1, rank=-1, master=None, host=settings.text("host"), is_single=True)
    return Elastic(ttl_s=ttl_s), replace(nodes, max=nodes.min)


def _check_server_job(settings: Settings, elastic: Elastic) -> None:
    """Raises UnsupportedOptionError when a job of parameter servers is elastic, or is to save itself at one step."""
    if float(settings.values["preempt_grace"] or 0):
        raise UnsupportedOptionError(
            f"{settings.named('preempt_grace')}={settings.text('preempt_grace')} makes the workers save at one step, "
            "and those of a job with parameter servers have no step in common. Omit it; save with "
            "fleet.save_persistables(), and --shutdown_timeout is the time between SIGTERM and SIGKILL."
        )
    if not elastic.is_elastic:
        return
    name = "nnodes" if settings.text("np") is None else "np"
    raise UnsupportedOptionError(
        f"{settings.named(name)}={settings.text(name)} makes the job elastic, and it has parameter servers. When "
        "nodes come or go, all processes of an elastic job start from scratch, and the servers would lose their "
        "tables. Omit the elastic settings; --max_restart=K restarts a failed server or worker in its place, with what "
        "it held."
    )


def needs_etcd(config: LaunchConfig) -> bool:
    """Returns whether the nodes of the job meet on etcd."""
    return config.elastic.server is not None or (config.nodes.master or "").startswith("etcd://")


def check_elastic(config: LaunchConfig, environment: Environment) -> None:
    """Raises ConfigError when a job on etcd lacks the client, or its address cannot be used; nothing was started."""
    if not needs_etcd(config):
        return
    check_etcd_client()
    read_etcd_address(etcd_server(config), environment)


def etcd_server(config: LaunchConfig) -> str:
    """Returns the address of etcd as it was written."""
    return config.elastic.server or config.nodes.master or ""


def split_hook(text: str | None, source: str) -> tuple[str, ...]:
    """Returns the words of the command to run before each start; it is a program with arguments, never a shell's line.

    Raises ConfigError for words that only a shell understands.
    """
    if text is None:
        return ()
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{source} is {text!r}; it takes a command, and its quotes do not match ({error}).") from None
    shell = [word for word in words if set(word) <= set("|&;<>") or word.startswith((">", "<")) or "$(" in word]
    if shell or not words:
        what = f"{shell[0]!r} is for a shell, and none is started" if shell else "it is empty"
        raise ConfigError(f"{source} is {text!r}; {what}. Put the lines into a script and name the script.")
    return tuple(words)
