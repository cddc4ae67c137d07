"""Ports of this node."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest

from fleet.errors import ConfigError, LaunchError
from fleet.launch.plan.peers import Peer
from fleet.launch.plan.ports import PortHold, check_ports, fixed_ports, free_ports, hold_ports, is_free, make_peer
from tests.helpers.launching import notes, plan, read


@pytest.fixture
def busy() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_free_ports_are_distinct_and_free() -> None:
    ports = free_ports(50, "127.0.0.1")
    assert len(set(ports)) == 50
    assert all(35100 <= port <= 64000 and is_free("127.0.0.1", port) for port in ports)


def test_a_range_is_kept_and_its_end_is_an_error(busy: int) -> None:
    """PORT_RANGE."""
    assert free_ports(1, "127.0.0.1", (busy, busy + 200))[0] != busy
    with pytest.raises(LaunchError, match="PORT_RANGE"):
        free_ports(1, "127.0.0.1", (busy, busy))
    with pytest.raises(LaunchError, match="has 0"):
        free_ports(1, "127.0.0.1", (40000, 40001), taken=(40000, 40001))


def test_a_busy_port_is_named(busy: int) -> None:
    """C.3: fails clearly."""
    assert not is_free("127.0.0.1", busy)
    with pytest.raises(LaunchError, match=f"Port {busy} on 127.0.0.1 is in use"):
        fixed_ports(busy, 1, "127.0.0.1")
    with pytest.raises(LaunchError, match="do not exist|does not exist"):
        check_ports("127.0.0.1", (65536,))


def test_this_nodes_peer() -> None:
    """002-20, C.3: distinct free ports for every process, the store and the gloo rendezvous."""
    config = read("--server_num=2", "--worker_num=3")
    peer = make_peer(config)
    ports = [*peer.ports, *peer.server_ports, peer.store_port, peer.http_port]
    assert (len(peer.ports), len(peer.server_ports), len(set(ports))) == (3, 2, 7)
    assert (peer.host, peer.name) == ("127.0.0.1", config.pod.name)
    assert len(plan(config, [peer])) == 5


def test_fixed_ports_of_the_environment_and_flags() -> None:
    first = free_ports(1, "127.0.0.1", (61100, 63900))[0]
    config = read("--nproc_per_node=2", f"--master-port={first + 7}", env={"FLAGS_START_PORT": f"{first}"})
    peer = make_peer(config)
    assert (peer.ports, peer.store_port) == ((first, first + 1), first + 7)


@pytest.mark.parametrize("kind", ["flag", "variable"])
def test_start_port_begins_the_ports_of_one_node(kind: str) -> None:
    """Workers of a collective job; servers, then workers, of a parameter-server job; also with several nodes."""
    first = next(p for p in range(61100, 63900) if all(is_free("127.0.0.1", p + i) for i in range(3)))
    flags, env = (f"--start_port={first}",) if kind == "flag" else (), {"PADDLE_START_PORT": f"{first}"}
    env = {} if kind == "flag" else env
    peer = make_peer(read("--nproc_per_node=2", *flags, env=env))
    assert (peer.ports, peer.store_port) == ((first, first + 1), first)
    assert make_peer(read("--nnodes=2", "--host=127.0.0.1", "--nproc_per_node=2", *flags, env=env)).ports == peer.ports
    peer = make_peer(read("--server_num=1", "--worker_num=2", *flags, env=env))
    assert (peer.server_ports, peer.ports) == ((first,), (first + 1, first + 2))


def test_a_start_port_that_is_taken_or_means_nothing_is_refused(busy: int) -> None:
    with pytest.raises(LaunchError, match=f"Port {busy} on 127.0.0.1 is in use.*--start_port"):
        make_peer(read(f"--start_port={busy}"))
    with pytest.raises(ConfigError, match="listed with their ports"):
        read("--servers=127.0.0.1:7000", "--workers=127.0.0.1:7001", "--start_port=8000")
    assert read("--servers=127.0.0.1:7000", "--workers=127.0.0.1", "--start_port=8000").servers.worker_endpoints == (
        "127.0.0.1:8000",
    )


def test_the_flag_wins_over_the_variable() -> None:
    config = read("--start_port=7000", env={"FLAGS_START_PORT": "8000"})
    assert config.nodes.first_port == 7000
    assert "--start_port=7000 on the command line wins over FLAGS_START_PORT=8000" in notes(config)


def test_a_listed_node_keeps_its_ports(busy: int) -> None:
    flags = ("--ips=127.0.0.2,127.0.0.3", "--host=127.0.0.2")
    config = read(*flags, "--start_port=61999")
    assert make_peer(config) is config.nodes.static_peers[0]
    config = read("--servers", f"127.0.0.1:{busy}", "--worker_num=1")
    with pytest.raises(LaunchError, match="in use"):
        make_peer(config)


def test_counted_processes_stay_clear_of_listed_ones() -> None:
    first = next(p for p in range(61100, 63900) if all(is_free("127.0.0.1", p + i) for i in range(4)))
    config = read(f"--servers=127.0.0.1:{first}", "--worker_num=1", env={"PORT_RANGE": f"{first}:{first + 3}"})
    for _ in range(8):  # three ports of the four are needed, so a wrong choice shows soon
        peer = make_peer(config)
        assert first not in (*peer.ports, peer.store_port, peer.http_port)


def test_addresses_of_other_machines_are_not_looked_at() -> None:
    assert is_free("192.0.2.77", 80)


CONFIG = read("--server_num=1", "--worker_num=1")


def test_ports_are_held_and_free_again_after_release() -> None:
    first, second, store = free_ports(3, "127.0.0.1")
    peer = Peer(name="p", host="127.0.0.1", ports=(first,), server_ports=(second,), store_port=store)
    with hold_ports(CONFIG, peer) as held:
        assert not any(is_free("127.0.0.1", port) for port in (first, second, store))
        held.release()
        assert all(is_free("127.0.0.1", port) for port in (first, second, store))


def test_taken_port_is_left_to_the_process_to_report() -> None:
    (port,) = free_ports(1, "127.0.0.1")
    with PortHold([("127.0.0.1", port)]), PortHold([("127.0.0.1", port)]):
        pass
    assert is_free("127.0.0.1", port)


def test_hold_ends_with_the_block() -> None:
    (port,) = free_ports(1, "127.0.0.1")
    with pytest.raises(KeyError), PortHold([("127.0.0.1", port)]):
        raise KeyError
    assert is_free("127.0.0.1", port)


def test_the_port_of_a_server_is_handed_on_and_kept() -> None:
    """Issue 10, High 1: nobody takes a server's port between the plan and its listen, nor while it restarts."""
    (port,) = free_ports(1, "127.0.0.1")
    peer = Peer(name="p", host="127.0.0.1", ports=(port + 1,), server_ports=(port,), store_port=port + 2)
    server, worker = plan(CONFIG, [peer])
    with hold_ports(CONFIG, peer) as held:
        assert held.hand_on(worker) == worker
        passed = held.hand_on(server)
        held.release()
        (number,) = passed.pass_fds
        with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
            other.bind(("127.0.0.1", port))
        socket.create_server(("127.0.0.1", port)).close()  # a program that opens its PADDLE_PORT itself
        assert passed.environment == {**server.environment, "FLEET_PS_SOCKET": f"{number}"}
        with socket.socket(fileno=os.dup(number)) as listener:
            assert listener.getsockname() == ("127.0.0.1", port)
            listener.listen()
        assert not is_free("127.0.0.1", port), "once its server has listened, nobody else can, also while it is away"
        elsewhere = replace(server, environment={**server.environment, "POD_IP": "localhost"})
        assert held.hand_on(elsewhere) == elsewhere, "where a name leads is the server's to say"
    assert is_free("127.0.0.1", port)


def test_listed_servers_of_this_node_are_held_too() -> None:
    first, second = free_ports(2, "127.0.0.1")
    config = read(f"--servers=127.0.0.1:{first},127.0.0.9:{second}", "--workers=127.0.0.1:7900", "--host=127.0.0.1")
    assert list(config.servers.local_servers) == [0]
    with hold_ports(config, Peer(name="p", host="127.0.0.1", ports=())):
        assert not is_free("127.0.0.1", first)
        assert is_free("127.0.0.9", second)
