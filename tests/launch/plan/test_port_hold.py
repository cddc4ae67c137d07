"""Chosen ports stay ours until the start."""

from __future__ import annotations

import os
import socket
from dataclasses import replace

import pytest

from fleet.launch.plan.port_hold import PortHold, hold_ports
from fleet.launch.plan.ports import free_ports, is_free
from fleet.launch.plan.records import Peer
from tests.helpers.launching import plan, read

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
    assert list(config.local_servers) == [0]
    with hold_ports(config, Peer(name="p", host="127.0.0.1", ports=())):
        assert not is_free("127.0.0.1", first)
        assert is_free("127.0.0.9", second)
