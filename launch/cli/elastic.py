"""Whether a job is elastic and what it then needs, from flags and variables; etcd is not opened here."""

from __future__ import annotations

import shlex

from fleet._addresses import hide_user, join_endpoint, split_endpoint, split_master
from fleet.env import Environment
from fleet.errors import ConfigError, UnsupportedOptionError
from fleet.launch.cli.settings import Settings
from fleet.launch.membership.etcd_address import check_etcd_client, read_etcd_address
from fleet.launch.plan.nodes import read_range
from fleet.launch.plan.records import Elastic, LaunchConfig, Nodes


def read_elastic(settings: Settings, environment: Environment, nodes: Nodes) -> tuple[Elastic, Nodes]:
    """Returns the elastic settings and the nodes they lead to; raises ConfigError for half of a pair."""
    server = _server(settings, environment)
    np = settings.text("np")
    if server is None and np is None:
        return _newer_family(settings, environment, nodes)
    if server is None or np is None:
        given, missing = ("np", "elastic_server") if server is None else ("elastic_server", "np")
        raise ConfigError(
            f"{settings.named(given)} needs --{missing} as well: an elastic job has an etcd server "
            "and a number of nodes, as in --elastic_server=10.0.0.1:2379 --np=2 --job_id=JOB."
        )
    _check_one_family(settings)
    low, high = read_range(settings, "np")
    scale = settings.number("scale") or 0
    if scale < 0:
        raise ConfigError(f"{settings.named('scale')} is {scale}; it takes the number of nodes to add, from 0.")
    if not settings.has("job_id"):
        settings.warn("The elastic job has no --job_id; jobs named 'default' on one etcd server would mix.")
    split_hook(settings.text("elastic_pre_hook"), settings.named("elastic_pre_hook"))
    if settings.has("elastic_server"):
        settings.values["elastic_server"] = hide_user(f"etcd://{server}").removeprefix("etcd://")  # as it is printed
    elastic = Elastic(
        is_elastic=True,
        elastic_server=server,
        elastic_ttl_s=_ttl_s(environment),
        is_scheduled=True,
        elastic_scale=scale,
        elastic_force=bool(settings.values["force"]),
        elastic_pre_hook=settings.text("elastic_pre_hook"),
        elastic_fault_level=_fault_level(settings, environment),
    )
    nodes = Nodes(
        min_nodes=low + scale,
        max_nodes=high + scale,
        node_rank=_asked_rank(settings, high + scale),
        host=settings.text("host") or nodes.host,
        is_single_node=False,
    )
    return elastic, nodes


def _check_one_family(settings: Settings) -> None:
    """Raises ConfigError for flags that say in another way how many nodes there are, or where they meet."""
    for name in ("master", "master_addr", "nnodes", "ips", "standalone"):
        if name in settings.on_command_line and settings.values[name] and settings.text(name) != settings.text("np"):
            raise ConfigError(
                f"--{name}={settings.text(name)} and {settings.named('np')}={settings.text('np')} contradict each "
                "other: the nodes of a job with --elastic_server and --np meet on etcd, and --np is their number. Use "
                "these two, or --master etcd://ip:port --nnodes MIN:MAX --elastic_level 1."
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
    if not environment.has("PADDLE_ELASTIC_NP"):  # Kubernetes sets the pair below for any job beside an etcd
        return None
    names = ("PADDLE_ELASTIC_ETCD_SERVICE_HOST", "PADDLE_ELASTIC_ETCD_SERVICE_PORT")
    host, port = environment.raw(names[0]), environment.int(names[1])
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


def _newer_family(settings: Settings, environment: Environment, nodes: Nodes) -> tuple[Elastic, Nodes]:
    """Returns whether ``--nnodes MIN:MAX`` makes the job elastic; a warning names what is missing."""
    etcd = (nodes.master or "").startswith("etcd://")
    is_range = nodes.min_nodes != nodes.max_nodes
    level = settings.number("elastic_level")
    for name in ("scale", "force", "elastic_pre_hook"):
        if settings.has(name) and settings.values[name]:
            raise ConfigError(
                f"{settings.named(name)} belongs to an elastic job. Add --elastic_server and --np, or omit it."
            )
    ttl_s = _ttl_s(environment) if etcd else Elastic.elastic_ttl_s
    if not is_range and not (etcd and level == 1):
        return Elastic(elastic_ttl_s=ttl_s), nodes
    is_off = level != 1 and (etcd or settings.has("elastic_level"))
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
        return Elastic(is_elastic=True, elastic_server=server, elastic_ttl_s=_ttl_s(environment)), nodes
    settings.warn(
        f"The job is not elastic; missing: {', '.join(missing)}. It starts with exactly {nodes.min_nodes} "
        f"node{'s' if nodes.min_nodes > 1 else ''}."
    )
    if nodes.min_nodes == 1 and not etcd:
        return Elastic(), Nodes(host=settings.text("host"))
    return Elastic(elastic_ttl_s=ttl_s), Nodes(**{**vars(nodes), "max_nodes": nodes.min_nodes})


def check_server_job(settings: Settings, elastic: Elastic) -> None:
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
    return config.elastic_server is not None or (config.master or "").startswith("etcd://")


def check_elastic(config: LaunchConfig, environment: Environment) -> None:
    """Raises ConfigError when a job on etcd lacks the client, or its address cannot be used; nothing was started."""
    if not needs_etcd(config):
        return
    check_etcd_client()
    read_etcd_address(etcd_server(config), environment)


def etcd_server(config: LaunchConfig) -> str:
    """Returns the address of etcd as it was written."""
    return config.elastic_server or config.master or ""


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
