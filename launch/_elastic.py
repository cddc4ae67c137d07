"""Whether a job is elastic, and the one place that refuses to run what needs etcd."""

from __future__ import annotations

from dataclasses import dataclass

from fleet.env import Environment
from fleet.errors import ConfigError, UnsupportedOptionError
from fleet.launch._addresses import hide_user, join_endpoint, split_master
from fleet.launch._nodes import Nodes, read_range
from fleet.launch._records import LaunchConfig
from fleet.launch._settings import Settings


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """The elastic settings, under the names of :class:`LaunchConfig`'s fields."""

    is_elastic: bool = False
    elastic_server: str | None = None
    elastic_scale: int = 0
    elastic_force: bool = False
    elastic_pre_hook: str | None = None
    elastic_fault_level: int = 1


def read_elastic(settings: Settings, environment: Environment, nodes: Nodes) -> tuple[Elastic, Nodes]:
    """Returns the elastic settings and the nodes they lead to; raises ConfigError for half of a pair."""
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
    low, high = read_range(settings, "np")
    scale = settings.number("scale") or 0
    if scale < 0:
        raise ConfigError(f"{settings.named('scale')} is {scale}; it takes the number of nodes to add, from 0.")
    if not settings.has("job_id"):
        settings.warn("The elastic job has no --job_id; jobs named 'default' on one etcd server would mix.")
    elastic = Elastic(
        is_elastic=True,
        elastic_server=server,
        elastic_scale=scale,
        elastic_force=bool(settings.values["force"]),
        elastic_pre_hook=settings.text("elastic_pre_hook"),
        elastic_fault_level=environment.int("PADDLE_ELASTIC_FAULT_TOLERANC_LEVEL"),
    )
    fields = {**vars(nodes), "min_nodes": low + scale, "max_nodes": high + scale, "is_single_node": False}
    return elastic, Nodes(**fields)


def _server(settings: Settings, environment: Environment) -> str | None:
    text = settings.text("elastic_server")
    if text is not None:
        return split_master(text if "://" in text else f"etcd://{text}", settings.named("elastic_server"))[1]
    host = environment.raw("PADDLE_ELASTIC_ETCD_SERVICE_HOST")
    port = environment.int("PADDLE_ELASTIC_ETCD_SERVICE_PORT")
    if host and port and environment.has("PADDLE_ELASTIC_NP"):  # Kubernetes sets the pair for any job beside an etcd
        return join_endpoint(host, port)
    return None


def _newer_family(settings: Settings, nodes: Nodes) -> tuple[Elastic, Nodes]:
    """Returns whether ``--nnodes MIN:MAX`` makes the job elastic; a warning names what is missing."""
    etcd = (nodes.master or "").startswith("etcd://")
    is_range = nodes.min_nodes != nodes.max_nodes
    level = settings.number("elastic_level")
    for name in ("scale", "force", "elastic_pre_hook"):
        if settings.has(name) and settings.values[name]:
            raise ConfigError(
                f"{settings.named(name)} belongs to an elastic job. Add --elastic_server and --np, or leave it out."
            )
    if not is_range and not (etcd and level == 1):
        return Elastic(), nodes
    missing = [
        text
        for absent, text in (
            (not etcd, "--master etcd://ip:port"),
            (not settings.has("job_id"), "--job_id"),
            (not is_range, "--nnodes MIN:MAX"),
            (level != 1, "--elastic_level 1"),
        )
        if absent
    ]
    if not missing:
        return Elastic(is_elastic=True, elastic_server=(nodes.master or "").removeprefix("etcd://")), nodes
    settings.warn(
        f"The job is not elastic; missing: {', '.join(missing)}. It starts with exactly {nodes.min_nodes} "
        f"node{'s' if nodes.min_nodes > 1 else ''}."
    )
    if nodes.min_nodes == 1 and not etcd:
        return Elastic(), Nodes(host=settings.text("host"))
    return Elastic(), Nodes(**{**vars(nodes), "max_nodes": nodes.min_nodes})


def refuse_elastic(config: LaunchConfig) -> None:
    """Raises UnsupportedOptionError for a job that needs etcd; nothing was started."""
    master = config.master or ""
    if not config.is_elastic and not master.startswith("etcd://"):
        return
    server = config.elastic_server or master.removeprefix("etcd://")
    raise UnsupportedOptionError(
        f"The job asks for etcd at {hide_user(server)}, and the launcher cannot run elastic jobs yet. "
        "Use --nnodes=N with --master ip:port, or without --master; --elastic_level 1 restarts failed workers in place."
    )
