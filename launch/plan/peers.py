"""Peer: one node of the job; the plain record that travels between nodes, and back with every field checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from fleet.errors import LaunchError

_MAX_PROCESSES = 4096
_MAX_TEXT = 253  # the longest host name


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One node of the job, as it publishes itself where the nodes meet; JSON holds it."""

    name: str  # name of the pod
    host: str  # address at which the other nodes reach this one
    ports: tuple[int, ...] = ()  # one per worker of this node
    server_ports: tuple[int, ...] = ()  # one per parameter server of this node
    devices: tuple[str, ...] = ()  # FLAGS_selected_gpus of each worker; empty on CPU
    store_port: int = 0  # of the process-group store, when this node comes first
    http_port: int = 0  # of the gloo HTTP rendezvous, when this node comes first
    node_rank: int = -1  # the rank it asks for; -1: any


def peer_to_json(peer: Peer) -> dict[str, object]:
    """Returns ``peer`` as values that JSON holds."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(peer).items()}


def peer_from_json(record: Mapping[str, object]) -> Peer:
    """Returns the peer that another node published; raises LaunchError for anything but the expected fields.

    Fields this version does not know are ignored, so that a newer launcher can add some.
    """
    return Peer(
        name=_text(record, "name"),
        host=_text(record, "host"),
        ports=_ports(record, "ports"),
        server_ports=_ports(record, "server_ports"),
        devices=_devices(record),
        store_port=_number(record, "store_port", 0, 65535),
        http_port=_number(record, "http_port", 0, 65535),
        node_rank=_number(record, "node_rank", -1, _MAX_PROCESSES),
    )


def _wrong(name: str, value: object, rule: str) -> LaunchError:
    return LaunchError(
        f"Another node published {name}={str(value)[:80]!r}; {rule}. Run the same version of the "
        "launcher on every node."
    )


def _text(record: Mapping[str, object], name: str) -> str:
    value = record.get(name)
    valid = isinstance(value, str) and 0 < len(value) <= _MAX_TEXT and value.isprintable()
    if not isinstance(value, str) or not valid or set(value) & set(" ,/"):
        raise _wrong(name, value, "it has to be a name without spaces, commas and slashes")
    return value


def _number(record: Mapping[str, object], name: str, low: int, high: int) -> int:
    value = record.get(name, low)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _wrong(name, value, f"it has to be an integer from {low} to {high}")
    return value


def _list(record: Mapping[str, object], name: str) -> list[object]:
    value = record.get(name, [])
    if not isinstance(value, list | tuple) or len(value) > _MAX_PROCESSES:
        raise _wrong(name, value, f"it has to be a list of at most {_MAX_PROCESSES}")
    return list(value)


def _ports(record: Mapping[str, object], name: str) -> tuple[int, ...]:
    return tuple(_number({name: port}, name, 1, 65535) for port in _list(record, name))


def _devices(record: Mapping[str, object]) -> tuple[str, ...]:
    devices = _list(record, "devices")
    for device in devices:
        if not isinstance(device, str) or not all(c.isdigit() or c == "," for c in device):
            raise _wrong("devices", device, "it has to be device numbers")
    return tuple(f"{device}" for device in devices)
