"""Servers and workers of a parameter-server job: how many, where, and which of them this node starts."""

from __future__ import annotations

from dataclasses import replace

from fleet._addresses import check_distinct, join_endpoint, split_endpoint, split_list
from fleet.env import Environment
from fleet.errors import ConfigError
from fleet.launch.cli.modes import is_scheduled_ps
from fleet.launch.cli.settings import Settings
from fleet.launch.plan.local_machine import Machine
from fleet.launch.plan.records import Roles

_FIRST_WORKER_PORT = 6170  # of workers listed without a port, counted up along the list


def read_roles(settings: Settings, environment: Environment, machine: Machine, *, meets: bool) -> Roles:
    """Returns the servers and workers; ``meets`` says that several nodes meet, each with counts of its own."""
    servers = _servers(settings)
    workers = _workers(settings)
    server_num = _count(settings, ("server_num",))
    worker_num = _count(settings, ("worker_num", "trainer_num"))
    if not any((servers, workers)) and server_num is None and worker_num is None and is_scheduled_ps(environment):
        for name in ("server_standby", "server_shards", "server_spare"):
            if settings.values[name]:
                raise ConfigError(
                    f"{settings.named(name)}: a scheduler starts the pods of this job, so the launcher cannot add "
                    "servers or ports. Omit it."
                )
        return _from_scheduler(environment)
    _check_count(settings, "server_num", server_num, servers)
    _check_count(settings, "worker_num", worker_num, workers)
    has_standbys = bool(settings.values["server_standby"])
    if has_standbys and (servers or meets):
        raise ConfigError(
            f"{settings.named('server_standby')} starts the standbys on one node, beside the servers that --server_num "
            "counts. For servers on several nodes, start each standby as a server with FLEET_PS_STANDBY=1, and list "
            "them in FLEET_PS_STANDBY_ENDPOINTS for all processes."
        )
    shards, spare = _read_shards(settings, server_num, counts_alone=not (servers or meets))
    if not servers and not workers:
        counts = _from_counts(server_num, worker_num, meets=meets)
        return replace(counts, server_standby=has_standbys, server_shards=shards, server_spare=spare)
    if meets:
        raise ConfigError(
            "--servers and --workers list every node beforehand, and --nnodes or --master lets the nodes "
            "meet. Use the lists, or counts (--server_num, --worker_num) with --nnodes."
        )
    return _from_lists(settings, machine, servers, workers, server_num, worker_num)


def _read_shards(settings: Settings, server_num: int | None, *, counts_alone: bool) -> tuple[int, int]:
    """Returns --server_shards and --server_spare.

    Raises:
        ConfigError: there are fewer shards than servers, or the servers are not counted on one node.
    """
    shards, spare = _count(settings, ("server_shards",)) or 0, _count(settings, ("server_spare",)) or 0
    if not shards and not spare:
        return 0, 0
    name = "server_shards" if shards else "server_spare"
    if not shards:
        raise ConfigError(
            f"{settings.named(name)} is {spare}, and --server_shards is absent: a spare server takes shards over from "
            "others. Write for example --server_num=2 --server_shards=6 --server_spare=1."
        )
    if settings.values["server_standby"] or not counts_alone:
        other = "--server_standby" if settings.values["server_standby"] else "servers on several nodes or from a list"
        raise ConfigError(
            f"{settings.named(name)} and {other}: shards that can move have no standbys, and the launcher starts their "
            "servers on one node, as --server_num counts them. For several nodes, list the endpoints in "
            "FLEET_PS_SHARD_ENDPOINTS for all processes."
        )
    if shards < (server_num or 0) + spare:
        raise ConfigError(
            f"{settings.named(name)} is {shards}, and there are {(server_num or 0) + spare} servers (--server_num and "
            "--server_spare): each needs a shard to serve. Give as many shards at least."
        )
    return shards, spare


def _servers(settings: Settings) -> list[str]:
    listed = split_list(settings.text("servers"))
    check_distinct(listed, settings.named("servers"))
    return [join_endpoint(*split_endpoint(item, settings.named("servers"))) for item in listed]


def _workers(settings: Settings) -> list[str]:
    names = [name for name in ("workers", "trainers") if split_list(settings.text(name))]
    if len(names) == 2 and split_list(settings.text("workers")) != split_list(settings.text("trainers")):
        raise ConfigError("--workers and --trainers name different endpoints. They mean the same; use one of them.")
    if not names:
        return []
    source = settings.named(names[0])
    first = settings.number("start_port") or 0 if settings.has("start_port") else _FIRST_WORKER_PORT
    listed = [
        join_endpoint(*split_endpoint(item, source, first + i))
        for i, item in enumerate(split_list(settings.text(names[0])))
    ]
    check_distinct(listed, source)
    return listed


def _count(settings: Settings, names: tuple[str, ...]) -> int | None:
    given = [name for name in names if settings.has(name)]
    if not given:
        return None
    values = {settings.number(name) for name in given}
    if len(values) > 1:
        raise ConfigError(
            f"{' and '.join(settings.named(name) for name in given)} mean the same and differ "
            f"({', '.join(f'{settings.number(name)}' for name in given)}). Use one of them."
        )
    value = settings.number(given[0]) or 0
    if value < 0:
        raise ConfigError(f"{settings.named(given[0])} is {value}; it takes a number from 0.")
    return value


def _check_count(settings: Settings, name: str, count: int | None, listed: list[str]) -> None:
    if listed and count is not None and count != len(listed):
        raise ConfigError(
            f"{settings.named(name)} is {count}, but the list of endpoints has {len(listed)}. Leave the "
            "count out, or make them agree."
        )


def _from_counts(server_num: int | None, worker_num: int | None, *, meets: bool) -> Roles:
    if not meets:
        for kind, count in (("server", server_num), ("worker", worker_num)):
            if not count:
                raise ConfigError(
                    f"A parameter-server job on one node needs --{kind}_num (or --{kind}s), and it is "
                    f"{'absent' if count is None else 0}. Write for example --server_num=1 "
                    "--worker_num=2."
                )
    elif not server_num and not worker_num:
        raise ConfigError("This node starts neither a server nor a worker. Give it --server_num or --worker_num.")
    return Roles(server_num=server_num or 0, worker_num=worker_num or 0, is_single_node=not meets)


def _from_lists(
    settings: Settings,
    machine: Machine,
    servers: list[str],
    workers: list[str],
    server_num: int | None,
    worker_num: int | None,
) -> Roles:
    host = settings.text("host")

    def is_own(endpoint: str) -> bool:
        listed = split_endpoint(endpoint, "list")[0]
        return listed == host if host is not None else machine.owns(listed)

    local_servers = tuple(i for i, endpoint in enumerate(servers) if is_own(endpoint))
    local_workers = tuple(i for i, endpoint in enumerate(workers) if is_own(endpoint))
    single = len(local_servers) == len(servers) and len(local_workers) == len(workers)
    if single and not (servers and workers):
        return _half_listed(servers, workers, server_num, worker_num, local_servers, local_workers)
    if not servers or not workers:
        raise ConfigError(
            f"--{'servers' if servers else 'workers'} lists other nodes, so --"
            f"{'workers' if servers else 'servers'} must list its endpoints too."
        )
    if not local_servers and not local_workers:
        raise ConfigError(
            f"This node ({host or machine.address}) is neither in --servers={','.join(servers)} nor in "
            f"--workers={','.join(workers)}. Add its address, or name this node with --host."
        )
    return Roles(
        server_num=len(local_servers),
        worker_num=len(local_workers),
        servers=tuple(servers),
        workers=tuple(workers),
        local_servers=local_servers,
        local_workers=local_workers,
        is_single_node=single,
        host=host,
    )


def _half_listed(
    servers: list[str],
    workers: list[str],
    server_num: int | None,
    worker_num: int | None,
    local_servers: tuple[int, ...],
    local_workers: tuple[int, ...],
) -> Roles:
    """Returns the roles of one node where one kind is listed and the other counted."""
    missing, count = ("server", server_num) if not servers else ("worker", worker_num)
    if not count:
        raise ConfigError(f"The {missing}s are missing: add --{missing}_num=N or --{missing}s=ip:port,ip:port.")
    return Roles(
        server_num=len(servers) or count,
        worker_num=len(workers) or count,
        servers=tuple(servers),
        workers=tuple(workers),
        local_servers=local_servers,
        local_workers=local_workers,
    )


def _from_scheduler(environment: Environment) -> Roles:
    """Returns the role of this pod: one server or one worker, at place PADDLE_TRAINER_ID of its list."""
    role = (environment.first("TRAINING_ROLE", "PADDLE_TRAINING_ROLE") or "").strip().upper()
    if role not in ("PSERVER", "TRAINER"):
        raise ConfigError(f"TRAINING_ROLE is {role!r} in the environment; a launcher starts PSERVER or TRAINER.")
    servers = [
        join_endpoint(*split_endpoint(e, "PADDLE_PSERVERS_IP_PORT_LIST"))
        for e in environment.list("PADDLE_PSERVERS_IP_PORT_LIST")
    ]
    base = environment.int("PADDLE_PORT") or _FIRST_WORKER_PORT
    name = "PADDLE_TRAINER_ENDPOINTS" if environment.has("PADDLE_TRAINER_ENDPOINTS") else "PADDLE_TRAINERS"
    workers = [join_endpoint(*split_endpoint(e, name, base)) for e in environment.list(name)]
    listed = servers if role == "PSERVER" else workers
    index = environment.int("PADDLE_TRAINER_ID")
    if not workers or not 0 <= index < len(listed):
        raise ConfigError(
            f"PADDLE_TRAINER_ID is {index} and TRAINING_ROLE is {role}, but the scheduler lists "
            f"{len(servers)} servers and {len(workers)} workers. Check the job's replicas."
        )
    own = (index,)
    return Roles(
        server_num=len(own) if role == "PSERVER" else 0,
        worker_num=len(own) if role == "TRAINER" else 0,
        servers=tuple(servers),
        workers=tuple(workers),
        local_servers=own if role == "PSERVER" else (),
        local_workers=own if role == "TRAINER" else (),
        is_single_node=False,
        host=split_endpoint(listed[index], name)[0],
    )
