"""Chosen ports stay ours until the start."""

from __future__ import annotations

import pytest

from fleet.launch._port_hold import PortHold, hold_ports
from fleet.launch._ports import free_ports, is_free
from fleet.launch._records import Peer


def test_ports_are_held_and_free_again_after_release() -> None:
    first, second, store = free_ports(3, "127.0.0.1")
    peer = Peer(name="p", host="127.0.0.1", ports=(first,), server_ports=(second,), store_port=store)
    with hold_ports(peer) as held:
        assert not any(is_free("127.0.0.1", port) for port in (first, second, store))
        held.release()
        assert all(is_free("127.0.0.1", port) for port in (first, second, store))


def test_taken_port_is_left_to_the_process_to_report() -> None:
    (port,) = free_ports(1, "127.0.0.1")
    with PortHold("127.0.0.1", [port]), PortHold("127.0.0.1", [port]):
        pass
    assert is_free("127.0.0.1", port)


def test_hold_ends_with_the_block() -> None:
    (port,) = free_ports(1, "127.0.0.1")
    with pytest.raises(KeyError), PortHold("127.0.0.1", [port]):
        raise KeyError
    assert is_free("127.0.0.1", port)
