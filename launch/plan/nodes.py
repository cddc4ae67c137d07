"""Which nodes there are, which one this is, and where they meet: from flags or from a scheduler's environment.

Four ways, in this order: ``--standalone`` or one node; ``--ips`` (everything is known beforehand); the endpoint list
of a scheduler (known as well); ``--nnodes`` with or without ``--master`` (the nodes meet first).
"""

from __future__ import annotations

from dataclasses import replace

from fleet.common.addresses import (
    check_distinct,
    is_loopback,
    join_endpoint,
    means_itself,
    split_endpoint,
    split_list,
    split_master,
)
from fleet.env import Environment
from fleet.errors import ConfigError, did_you_mean
from fleet.launch.cli.settings import Settings
from fleet.launch.plan.local_machine import Machine
from fleet.launch.plan.peers import Peer
from fleet.launch.plan.records import Nodes, Processes

_TORCHRUN_PORT = 29500
_NODE_FLAGS = ("nnodes", "master", "ips", "master_addr")


def read_nodes(settings: Settings, machine: Machine, processes: Processes, *, lists_nodes: bool) -> Nodes:
    """Returns the nodes of the job; raises ConfigError when the flags contradict each other.

    Args:
        settings: the flags.
        machine: this machine.
        processes: the workers of this node; every listed node has as many.
        lists_nodes: whether ``--ips`` or a scheduler's list may name the nodes. In a job with parameter servers the
            lists name servers and workers.
    """
    _fold_torchrun(settings)
    nodes = _listed_nodes(settings, machine, processes) if lists_nodes else None
    return replace(
        nodes or _read_meeting(settings, machine),
        first_port=_first_port(settings),
        port_range=_port_range(settings.environment),
        sort_ip=bool(settings.values["sort_ip"]),
    )


def _listed_nodes(settings: Settings, machine: Machine, processes: Processes) -> Nodes | None:
    """Returns the nodes that the user or a scheduler listed; None when they meet, or there is one."""
    ips = split_list(settings.text("ips"))
    if settings.has("ips") and not ips:
        raise ConfigError(
            f"{settings.named('ips')} is {settings.text('ips')!r}; it takes addresses separated by commas."
        )
    if settings.has("ips") and _ips_count(settings, ips):
        return _from_ips(settings, machine, ips, processes)
    pods = _scheduled_pods(settings)
    return _from_pods(settings, machine, pods, processes) if len(pods) > 1 else None


def _fold_torchrun(settings: Settings) -> None:
    """Folds torchrun's ``--standalone`` and ``--rdzv_backend`` into Fleet's flags; raises ConfigError on a clash."""
    if settings.values["standalone"]:
        for name in (*_NODE_FLAGS, "rank"):
            clash = name in settings.on_command_line and settings.text(name) not in ("1", "1:1", "0")
            if clash and "standalone" in settings.on_command_line:
                raise ConfigError(
                    f"--standalone is one node by itself, and {settings.named(name)}="
                    f"{settings.text(name)} asks for others. Omit one of them."
                )
            settings.drop(name, "--standalone is one node by itself")
    kind = settings.text("rdzv_backend")
    if kind in ("etcd", "etcd-v2"):
        master = settings.text("master")
        if master is None:
            raise ConfigError(
                f"{settings.named('rdzv_backend')}={kind} needs the address of etcd: --master etcd://ip:port."
            )
        if "://" not in master:
            settings.values["master"] = f"etcd://{master}"
    elif kind not in (None, "static", "c10d"):
        raise ConfigError(
            f"{settings.named('rdzv_backend')} is {kind!r}; it takes static, c10d, etcd or etcd-v2."
            f"{did_you_mean(f'{kind}', ('static', 'c10d', 'etcd'))}"
        )


def _ips_count(settings: Settings, ips: list[str]) -> bool:
    """Returns whether ``--ips`` decides; settles it against ``--master``."""
    if not settings.has("master"):
        return True
    if "ips" in settings.on_command_line and "master" in settings.on_command_line:
        raise ConfigError("--ips lists every node beforehand and --master lets them meet. Use one of them.")
    loser = "master" if "ips" in settings.on_command_line or "master" not in settings.on_command_line else "ips"
    settings.drop(loser, f"{settings.named('ips' if loser == 'master' else 'master')} decides")
    return loser == "master"


def _from_ips(settings: Settings, machine: Machine, ips: list[str], processes: Processes) -> Nodes:
    source = f"{settings.named('ips')}={','.join(ips)}"
    check_distinct(ips, source)
    # Several addresses of 127.0.0.0/8 are several nodes on one machine.
    own = [ip for ip in ips if means_itself(ip)]
    if len(ips) > 1 and own and not all(is_loopback(ip) and ip != "127.0.0.1" for ip in ips):
        raise ConfigError(
            f"{source}: {own[0]} means a different machine on each node. Write the addresses that the "
            "nodes reach each other at."
        )
    if settings.has("nnodes") and settings.node_range("nnodes") != (len(ips), len(ips)):
        raise ConfigError(
            f"{settings.named('nnodes')}={settings.text('nnodes')} and {source} ({len(ips)} nodes) "
            "contradict each other. Omit one of them."
        )
    position = _own_position(settings, machine, ips, source)
    if len(ips) == 1:
        return Nodes(host=ips[0], store_port=settings.number("master_port"))
    first = _first_port(settings) or 6070
    ports = tuple(range(first, first + processes.num_workers))
    peers = tuple(
        Peer(
            name=f"node{i}",
            host=ip,
            ports=ports,
            devices=processes.worker_devices,
            store_port=first,
            node_rank=i,
        )
        for i, ip in enumerate(ips)
    )
    return Nodes(
        min=len(ips),
        max=len(ips),
        rank=position,
        host=ips[position],
        static_peers=peers,
        is_single=False,
    )


def _first_port(settings: Settings) -> int | None:
    """Returns the first port of a node: ``--start_port``, FLAGS_START_PORT, FLAGS_FIXED_PORT, PADDLE_START_PORT."""
    environment = settings.environment
    name = next((name for name in ("FLAGS_START_PORT", "FLAGS_FIXED_PORT") if environment.has(name)), None)
    if name is None or "start_port" in settings.on_command_line:
        port = settings.number("start_port") if settings.has("start_port") else None
        if name is not None and environment.int(name) != port:
            settings.warn(f"--start_port={port} on the command line wins over {name}={environment.int(name)}.")
        name = settings.named("start_port")
    else:
        port = environment.int(name)
    if port is not None and not 0 < port < 65536:
        raise ConfigError(f"{name} is {port}; it takes a port from 1 to 65535.")
    return port


def _port_range(environment: Environment) -> tuple[int, int] | None:
    text = environment.raw("PORT_RANGE")
    if text is None:
        return None
    first, _, last = text.partition(":")
    if not (first.strip().isdecimal() and last.strip().isdecimal()) or not 0 < int(first) <= int(last) < 65536:
        raise ConfigError(f"PORT_RANGE is {text!r} in the environment; it takes first:last, as in 35100:64000.")
    return int(first), int(last)


def _own_position(settings: Settings, machine: Machine, hosts: list[str], source: str) -> int:
    """Returns the position of this node in ``hosts``; raises ConfigError when it is not there or not certain."""
    rank = settings.number("rank")
    host = settings.text("host")
    if rank is not None and rank >= 0:
        if rank >= len(hosts):
            raise ConfigError(
                f"{settings.named('rank')} is {rank}, but {source} has {len(hosts)} nodes, counted from 0."
            )
        return rank
    if host is not None:
        if host not in hosts:
            raise ConfigError(
                f"{settings.named('host')}={host} is not in {source}. The list must hold the address of "
                "each node, in the same spelling."
            )
        return hosts.index(host)
    # Neither --rank nor --host says it, so the list has to hold exactly one address of this machine.
    own = [i for i, candidate in enumerate(hosts) if machine.owns(candidate)]
    if not own:
        raise ConfigError(
            f"This node ({machine.address}) is not in {source}. Add its address to the list on every "
            "node, or name this node with --host."
        )
    if len(own) > 1:
        raise ConfigError(
            f"{source}: {', '.join(hosts[i] for i in own)} all belong to this machine. Say which node "
            "this is with --host or --rank."
        )
    return own[0]


def _scheduled_pods(settings: Settings) -> list[tuple[str, tuple[int, ...]]]:
    """Returns host and first ports of each pod that a scheduler listed; empty when it did not or flags decide.

    For a launcher, PADDLE_TRAINER_ENDPOINTS has one entry per pod (its workers count on from that port).
    DISTRIBUTED_TRAINER_ENDPOINTS has one per worker, so its hosts are the nodes.
    """
    if settings.values["standalone"] or any(name in settings.on_command_line for name in _NODE_FLAGS):
        return []
    environment = settings.environment
    base = environment.int("PADDLE_PORT") or settings.number("start_port") or 6070
    for name in ("PADDLE_TRAINER_ENDPOINTS", "PADDLE_TRAINERS"):
        if environment.has(name):
            listed = [split_endpoint(item, name, base) for item in environment.list(name)]
            check_distinct([join_endpoint(*item) for item in listed], name)
            return [(host, (port,)) for host, port in listed]
    grouped: dict[str, list[int]] = {}
    for item in environment.list("DISTRIBUTED_TRAINER_ENDPOINTS"):
        host, port = split_endpoint(item, "DISTRIBUTED_TRAINER_ENDPOINTS", base)
        grouped.setdefault(host, []).append(port)
    return [(host, tuple(ports)) for host, ports in grouped.items()]


def _from_pods(
    settings: Settings, machine: Machine, pods: list[tuple[str, tuple[int, ...]]], processes: Processes
) -> Nodes:
    num_workers = processes.num_workers
    devices = processes.worker_devices
    hosts = [host for host, _ in pods]
    position = _own_position(settings, machine, hosts, f"the scheduler's list {','.join(hosts)}")
    peers = []
    for i, (host, listed) in enumerate(pods):
        ports = listed if len(listed) == num_workers else tuple(range(listed[0], listed[0] + num_workers))
        peers.append(Peer(name=f"node{i}", host=host, ports=ports, devices=devices, store_port=ports[0], node_rank=i))
    check_distinct(
        [join_endpoint(p.host, port) for p in peers for port in p.ports],
        f"the scheduler's endpoint list with {num_workers} processes per pod",
    )
    return Nodes(
        min=len(pods),
        max=len(pods),
        rank=position,
        host=hosts[position],
        static_peers=tuple(peers),
        is_single=False,
    )


def _read_meeting(settings: Settings, machine: Machine) -> Nodes:
    """Returns one node, or the nodes that meet at a master (given, or to be opened by this node)."""
    low, high = settings.node_range("nnodes")
    master = _master(settings, high)
    rank = settings.number("rank")
    rank = -1 if rank is None else rank
    if high == 1 and (settings.text("np") is not None or (rank >= 1 and settings.named("rank") == "PADDLE_TRAINER_ID")):
        # With --np the number of nodes is read later; otherwise the variable is left over from a worker.
        rank = -1
    if not -1 <= rank < high:
        raise ConfigError(
            f"{settings.named('rank')} is {rank}, but there are {high} nodes, counted from 0; -1 takes any place."
        )
    scheme = split_master(master, settings.named("master"))[0] if master else ""
    if high == 1 and scheme != "etcd":
        return Nodes(store_port=_single_port(settings, master), host=settings.text("host"))
    host = settings.text("host") or _own_host(machine, master if scheme == "http" else None)
    if scheme == "http" and master is not None:
        _check_master(settings, master, high, host)
    return Nodes(min=low, max=high, rank=rank, master=master, host=host, is_single=False)


def _own_host(machine: Machine, master: str | None) -> str:
    """Returns the address at which the other nodes reach this one.

    Beside a master on loopback they are all on this machine, and have its address. Without a default route the
    machine's address may be known on the way to the master alone.
    """
    place = split_endpoint(master, "--master")[0] if master else ""
    if is_loopback(place):
        return place
    if master is None or not means_itself(machine.address):
        return machine.address
    return machine.towards(*split_endpoint(master, "--master")) or machine.address


def _check_master(settings: Settings, master: str, max_nodes: int, host: str) -> None:
    """Raises ConfigError when every node would look for the others on itself, and this one may be elsewhere."""
    place, port = split_endpoint(master, "--master")
    if not means_itself(place):
        return
    name = settings.named("master" if settings.has("master") else "master_addr")
    if not means_itself(host):
        raise ConfigError(
            f"{name}={place}:{port} means a different machine on each of the {max_nodes} nodes, and this one is to be "
            f"reached at {host}. Write the address at which the nodes reach one of them, as in "
            f"--master=10.0.0.1:{port}. To start all of them on this machine, write --master=127.0.0.1:{port} alone."
        )
    settings.note("INFO", f"{name}={place}:{port} is this machine, so all {max_nodes} nodes of the job start here.")


def _master(settings: Settings, max_nodes: int) -> str | None:
    master = settings.text("master")
    addr = settings.text("master_addr")
    port = settings.number("master_port")
    if master is not None:
        if max_nodes == 1 and master.rpartition(":")[2] == "0":
            # torchrun writes port 0 for any free port; one node needs no meeting point.
            return None
        scheme, hosts = split_master(master, settings.named("master"))
        master = f"etcd://{hosts}" if scheme == "etcd" else hosts
    if addr is None or max_nodes == 1:
        return master
    joined = join_endpoint(addr, port or _TORCHRUN_PORT)
    if master is not None and master != joined:
        raise ConfigError(
            f"{settings.named('master')}={master} and {settings.named('master_addr')}={addr} name "
            "different places. Use one of them."
        )
    return joined


def _single_port(settings: Settings, master: str | None) -> int | None:
    """Returns the port of the store on one node: ``--master_port``, or the port of an unneeded ``--master``."""
    port = settings.number("master_port")
    if port is not None and not 0 <= port < 65536:
        raise ConfigError(f"{settings.named('master_port')} is {port}; it takes a port from 1 to 65535, or 0 for any.")
    if port:
        return port
    return split_endpoint(master, settings.named("master"))[1] if master else None
