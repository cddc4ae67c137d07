"""Reads the environment variables ``FLEET_PS_*`` of a parameter-server job, and refuses impossible values."""

from __future__ import annotations

import math
import os
import socket
import ssl
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fleet.common.addresses import join_endpoint, split_endpoint
from fleet.env import VARIABLES, Environment
from fleet.errors import ConfigError
from fleet.ps.wire.transport import stays_here

LEVELS = (0, 1, 2, 3)


@dataclass(frozen=True, kw_only=True)
class Keeping:
    """The state that a server keeps for its restart: its folder (``None``: no state), and the level of its journal."""

    folder: Path | None
    level: int
    note: str = ""


def read_keeping(environment: Environment, index: int) -> Keeping:
    """Returns folder and level of server ``index``, by FLEET_PS_FOLDER and FLEET_PS_LEVEL.

    Raises:
        ConfigError: the level is not 0 to 3, is not 0 without a folder, or is 3 without standbys or not 3 with them.
    """
    folder = environment.raw("FLEET_PS_FOLDER")
    has_standbys = bool(environment.list("FLEET_PS_STANDBY_ENDPOINTS"))
    level_set = environment.raw("FLEET_PS_LEVEL")
    if environment.has("FLEET_PS_SHARD_ENDPOINTS") and (folder is None or level_set not in (None, "1")):
        raise ConfigError(
            f"FLEET_PS_FOLDER is {folder!r} and FLEET_PS_LEVEL {level_set!r} in the environment, and "
            "FLEET_PS_SHARD_ENDPOINTS is set: shards that can move need a folder, and level 1. Set FLEET_PS_FOLDER, "
            "and unset FLEET_PS_LEVEL."
        )
    usual = 3 if has_standbys else 0 if folder is None else 1
    level = environment.int("FLEET_PS_LEVEL") if environment.has("FLEET_PS_LEVEL") else usual
    if level not in LEVELS:
        raise ConfigError(
            f"FLEET_PS_LEVEL is {environment.raw('FLEET_PS_LEVEL')!r} in the environment; it is 0 (a server keeps "
            "nothing), 1 (what it keeps survives a killed process), 2 (and a machine that died) or 3 (its standby has "
            "it, too). Set one of them."
        )
    if has_standbys and level != 3:
        raise ConfigError(
            f"FLEET_PS_LEVEL is '{level}' in the environment, and FLEET_PS_STANDBY_ENDPOINTS is set: it is 3 for "
            "servers with standbys. Unset one of the two."
        )
    if level == 3 and not has_standbys:
        raise ConfigError(
            "FLEET_PS_LEVEL is '3' in the environment and FLEET_PS_STANDBY_ENDPOINTS is not set: every server needs a "
            "standby. Start the job with --server_standby, or list them for all processes."
        )
    if level and folder is None:
        raise ConfigError(
            f"FLEET_PS_LEVEL is {environment.raw('FLEET_PS_LEVEL') or f'{level}'!r} in the environment and "
            "FLEET_PS_FOLDER is not set; levels 1 to 3 write to that folder. Set it to a folder that a restarted "
            "server finds again."
        )
    if level == 0:
        unused = "" if folder is None else f"FLEET_PS_LEVEL is 0: nothing is kept in FLEET_PS_FOLDER={folder}"
        return Keeping(folder=None, level=0, note=unused)
    assert folder is not None
    place = "standby" if environment.bool("FLEET_PS_STANDBY") else "server"
    return Keeping(folder=Path(folder) / f"{place}-{index}", level=1 if level == 3 else level)  # 3 is 1 with a standby


def read_standbys(environment: Environment, servers: Sequence[str]) -> list[str]:
    """Returns the standby of each of ``servers``; none where the job has none.

    Raises:
        ConfigError: the job starts its server inside the worker.
    """
    listed = environment.list("FLEET_PS_STANDBY_ENDPOINTS")
    name = "FLEET_PS_STANDBY_ENDPOINTS" if listed else "FLEET_PS_STANDBY"
    if not servers and (listed or environment.bool(name)):
        raise ConfigError(
            f"{name} is {environment.raw(name)!r} in the environment, and this job has no servers: its one process "
            "serves itself, and would be lost together with its rows; it is for jobs with servers. Unset it."
        )
    return [join_endpoint(*split_endpoint(each, "FLEET_PS_STANDBY_ENDPOINTS")) for each in listed]


def read_places(environment: Environment, servers: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Returns the endpoint of every shard on every server process, ``[process][shard]``; empty: shards do not move.

    Raises:
        ConfigError: the lists do not fit ``servers``, or something else is set that shards cannot have.
    """
    name = "FLEET_PS_SHARD_ENDPOINTS"
    if not environment.has(name):
        return ()
    for other in ("FLEET_PS_STANDBY_ENDPOINTS", "FLEET_PS_STANDBY", "FLEET_PS_METRICS_PORT"):
        if environment.has(other):
            raise ConfigError(
                f"{other} is {environment.raw(other)!r} in the environment, and {name} is set: shards that can move "
                "have neither standbys nor a port for metrics. Unset one of the two."
            )
    # One group a process, in the order of the servers; within it one endpoint a shard.
    groups = environment.str(name).split(";")
    places = tuple(
        tuple(join_endpoint(*split_endpoint(each, name)) for each in group.split(",") if each.strip())
        for group in groups
    )
    listed = [endpoint for group in places for endpoint in group]
    fits = all(len(group) == len(servers) for group in places) and len(set(listed)) == len(listed)
    if not fits or any(all(group[i] != one for group in places) for i, one in enumerate(servers)):
        raise ConfigError(
            f"{name} is {environment.raw(name)!r} in the environment, and PADDLE_PSERVERS_IP_PORT_LIST lists "
            f"{len(servers)} servers, {','.join(servers)}: each server process has one endpoint of its own for each of "
            "them, in their order, and each of them is at one of these at first. Correct one of the two."
        )
    return places


def other_places(places: Sequence[Sequence[str]], shard: int, first: str) -> list[str]:
    """Returns where else than at ``first`` a shard may be served."""
    return [group[shard] for group in places if group[shard] != first]


def read_server_tls(environment: Environment) -> ssl.SSLContext | None:
    """Returns the TLS context of a server, by FLEET_PS_CERT and FLEET_PS_KEY; ``None``: without TLS.

    Raises:
        ConfigError: a file cannot be used, or another of the three variables is set without FLEET_PS_CERT.
    """
    certificate = environment.raw("FLEET_PS_CERT")
    key = environment.raw("FLEET_PS_KEY")
    if certificate is None:
        for name in ("FLEET_PS_KEY", "FLEET_PS_CA"):
            if environment.raw(name) is not None:
                raise ConfigError(
                    f"{name} is set in the environment of a parameter server and FLEET_PS_CERT is not. Set that "
                    "to the file of its certificate, or unset all three."
                )
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(certificate, key)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"FLEET_PS_CERT is {certificate!r} and FLEET_PS_KEY is {key!r}: {error}. They take PEM files: the "
            "certificate, with those that lead to the authority, and its key without a password."
        ) from None
    _check_rights("FLEET_PS_CERT" if key is None else "FLEET_PS_KEY", certificate if key is None else key)
    return context


def _check_rights(name: str, path: str) -> None:
    """Raises ConfigError when others may write the key at ``path``, or all may read it; a group may read it."""
    mode = os.stat(path).st_mode if os.name == "posix" else 0
    if mode & (stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP):
        who, act = ("every user of this machine", "read") if mode & stat.S_IROTH else ("others", "write")
        raise ConfigError(
            f"{name} is {path!r}: {who} can {act} the key in it, and speak as the server. Let its "
            f"owner alone use it: chmod 600 {path} (defaultMode: 0440 of a Kubernetes secret)."
        )


def read_worker_tls(environment: Environment) -> ssl.SSLContext | None:
    """Returns the TLS context by which a worker checks its servers, by FLEET_PS_CA; ``None``: without TLS.

    Raises:
        ConfigError: the file cannot be used, or FLEET_PS_CERT is set alone.
    """
    authority = environment.raw("FLEET_PS_CA")
    if authority is None:
        if environment.raw("FLEET_PS_CERT") is not None:
            raise ConfigError(
                "FLEET_PS_CERT is set in the environment of a worker and FLEET_PS_CA is not, so it could not check the "
                "servers' certificates. Set FLEET_PS_CA to the file of the authority that signed them."
            )
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_verify_locations(authority)
    except OSError as error:
        raise ConfigError(
            f"FLEET_PS_CA is {authority!r}: {error}. It takes a PEM file with the certificate of the authority."
        ) from None
    return context


def read_bound_socket(environment: Environment) -> socket.socket | None:
    """Returns the socket, bound to its port, that the launcher has kept for this server.

    FLEET_PS_SOCKET names it; without the variable the result is ``None``. A server that ran before this one may have
    left it listening.

    Raises:
        ConfigError: there should be one, and this process does not have it.
    """
    if not environment.has("FLEET_PS_SOCKET"):
        return None
    # The number may name any descriptor of the script by now: only a bound socket of TCP without a peer is taken over.
    number = environment.int("FLEET_PS_SOCKET")
    try:
        if stat.S_ISSOCK(os.fstat(number).st_mode):
            held = socket.socket(fileno=number)
            if _is_bound(held):
                held.set_inheritable(False)
                return held
            held.detach()  # it belongs to somebody else
    except (OSError, OverflowError):
        pass
    raise ConfigError(
        f"FLEET_PS_SOCKET is {environment.raw('FLEET_PS_SOCKET')!r} in the environment: the launcher keeps the port of "
        "this server and hands its socket on as that descriptor, and this process has none there. A program between "
        "launcher and script has closed it: have that program keep it (pass_fds in Python's subprocess), or remove the "
        "variable for servers that the launcher did not start."
    )


def _is_bound(sock: socket.socket) -> bool:
    """Returns whether ``sock`` has a port of this machine and no peer, like a socket before ``listen()``."""
    if sock.type != socket.SOCK_STREAM or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    try:
        sock.getpeername()
    except OSError:
        return bool(sock.getsockname()[1])
    return False


def read_seconds(environment: Environment, name: str) -> float:
    """Returns the variable ``name`` as seconds; raises ConfigError unless it is a number above 0."""
    value = environment.float(name)
    if not (value > 0 and math.isfinite(value)):
        raise _wrong_value(environment, name, "a number above 0")
    return value


def read_count(environment: Environment, name: str) -> int:
    """Returns the variable ``name``, or its default; raises ConfigError unless it is an integer of 1 or more."""
    value = environment.int(name)
    if value < 1:
        raise _wrong_value(environment, name, "an integer of 1 or more")
    return value


def _wrong_value(environment: Environment, name: str, rule: str) -> ConfigError:
    given = f"{name} is {environment.raw(name)!r} in the environment; it takes {rule}"
    return ConfigError(f"{given}: {VARIABLES[name].meaning}. Correct it, or unset it.")


def thread_note(environment: Environment, server: str, num_workers: int) -> str:
    """Returns a line for a worker that was started beside others without a number of threads; else nothing.

    The launcher sets OMP_NUM_THREADS; started by hand, every process would use all cores of the machine at once.
    """
    if environment.has("OMP_NUM_THREADS") or num_workers < 2 or not stays_here(server):
        return ""
    return (
        f"OMP_NUM_THREADS is not set: each of the {num_workers} workers on this machine uses every core; they crowd "
        "each other out. Set it to 1, or to the cores of each process."
    )
