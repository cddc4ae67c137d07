"""Servers and workers of a parameter-server job: how many, where, and which of them this node starts."""

from __future__ import annotations

from dataclasses import replace

from fleet.common.addresses import check_distinct, join_endpoint, split_endpoint, split_list
from fleet.env import Environment
from fleet.errors import ConfigError
from fleet.launch.cli.settings import Settings
from fleet.launch.plan.local_machine import Machine
from fleet.launch.plan.records import Nodes, Servers

_FIRST_WORKER_PORT = 6170  # of workers listed without a port, counted up along the list


def read_servers(settings: Settings, machine: Machine, nodes: Nodes, *, is_scheduled: bool) -> tuple[Servers, Nodes]:
    """Returns the servers and workers, and the nodes as their lists make them.

    Args:
        settings: the flags.
        machine: this machine.
        nodes: one node, or nodes that meet, each with its counts.
        is_scheduled: whether a scheduler may have made this node one server or one worker.

    Raises:
        ConfigError: counts and lists contradict each other, or a kind of process is missing.
    """
    if settings.has("nproc_per_node"):
        raise ConfigError(
            f"{settings.named('nproc_per_node')} belongs to collective jobs. In a parameter-server job "
            "--worker_num says how many workers this node starts."
        )
    servers, place = _read(settings, machine, meets=not nodes.is_single, is_scheduled=is_scheduled)
    if nodes.is_single and place is not None:
        nodes = replace(nodes, is_single=False, host=place or settings.text("host") or machine.address)
    return servers, nodes


def _read(settings: Settings, machine: Machine, *, meets: bool, is_scheduled: bool) -> tuple[Servers, str | None]:
    """Returns the servers and workers, and the address of this node where lists name several; empty: unknown."""
    servers = _servers(settings)
    workers = _workers(settings)
    server_num = _count(settings, ("server_num",))
    worker_num = _count(settings, ("worker_num", "trainer_num"))
    if not any((servers, workers)) and server_num is None and worker_num is None and is_scheduled:
        for name in ("server_standby", "server_shards", "server_spare"):
            if settings.values[name]:
                raise ConfigError(
                    f"{settings.named(name)}: a scheduler starts the pods of this job, so the launcher cannot add "
                    "servers or ports. Omit it."
                )
        return _from_scheduler(settings.environment)
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
        return replace(counts, has_standbys=has_standbys, shards=shards, spares=spare), None
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


def _from_counts(server_num: int | None, worker_num: int | None, *, meets: bool) -> Servers:
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
    return Servers(num_servers=server_num or 0, num_workers=worker_num or 0)


def _from_lists(
    settings: Settings,
    machine: Machine,
    servers: list[str],
    workers: list[str],
    server_num: int | None,
    worker_num: int | None,
) -> tuple[Servers, str | None]:
    host = settings.text("host")

    def is_own(endpoint: str) -> bool:
        listed = split_endpoint(endpoint, "list")[0]
        return listed == host if host is not None else machine.owns(listed)

    local_servers = tuple(i for i, endpoint in enumerate(servers) if is_own(endpoint))
    local_workers = tuple(i for i, endpoint in enumerate(workers) if is_own(endpoint))
    single = len(local_servers) == len(servers) and len(local_workers) == len(workers)
    missing = "server" if not servers else "worker"
    if single and not (servers and workers):
        # One node with one kind listed and the other counted.
        if not (worker_num if servers else server_num):
            raise ConfigError(f"The {missing}s are missing: add --{missing}_num=N or --{missing}s=ip:port,ip:port.")
    elif not servers or not workers:
        raise ConfigError(
            f"--{'servers' if servers else 'workers'} lists other nodes, so --{missing}s must list its endpoints too."
        )
    elif not local_servers and not local_workers:
        raise ConfigError(
            f"This node ({host or machine.address}) is neither in --servers={','.join(servers)} nor in "
            f"--workers={','.join(workers)}. Add its address, or name this node with --host."
        )
    listed = Servers(
        num_servers=len(local_servers) if servers else server_num or 0,
        num_workers=len(local_workers) if workers else worker_num or 0,
        endpoints=tuple(servers),
        worker_endpoints=tuple(workers),
        local_servers=local_servers,
        local_workers=local_workers,
    )
    return listed, None if single else host or ""


def _from_scheduler(environment: Environment) -> tuple[Servers, str]:
    """Returns this pod's one server or one worker, at place PADDLE_TRAINER_ID of its list, and its address."""
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
    listed_pods = Servers(
        num_servers=len(own) if role == "PSERVER" else 0,
        num_workers=len(own) if role == "TRAINER" else 0,
        endpoints=tuple(servers),
        worker_endpoints=tuple(workers),
        local_servers=own if role == "PSERVER" else (),
        local_workers=own if role == "TRAINER" else (),
    )
    return listed_pods, split_endpoint(listed[index], name)[0]
