"""Peers as JSON, and back with a check."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fleet.errors import LaunchError
from fleet.launch.plan.peers import Peer, peer_from_json, peer_to_json

PEER = Peer(
    name="abc",
    host="fd00::1",
    ports=(1, 2),
    server_ports=(3,),
    devices=("0", "0,1"),
    store_port=4,
    http_port=5,
    node_rank=1,
)


def test_a_peer_survives_the_journey() -> None:
    assert peer_from_json(json.loads(json.dumps(peer_to_json(PEER)))) == PEER
    assert peer_from_json({**peer_to_json(PEER), "later": 1}) == PEER
    small = Peer(name="a", host="b")
    assert peer_from_json(peer_to_json(small)) == small
    assert peer_from_json({"name": "a", "host": "b"}) == replace(small, node_rank=-1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("name", ""),
        ("name", 1),
        ("name", "a b"),
        ("host", "x" * 300),
        ("host", "a\n"),
        ("host", None),
        ("host", "a,b"),
        ("ports", "12"),
        ("ports", [0]),
        ("ports", [70000]),
        ("ports", [True]),
        ("ports", ["1"]),
        ("ports", [1] * 5000),
        ("server_ports", {}),
        ("store_port", -1),
        ("store_port", 1.5),
        ("http_port", 70000),
        ("node_rank", -2),
        ("devices", [0]),
        ("devices", ["0;rm"]),
    ],
)
def test_anything_else_is_refused(name: str, value: object) -> None:
    with pytest.raises(LaunchError, match=f"published {name}="):
        peer_from_json({**peer_to_json(PEER), name: value})
