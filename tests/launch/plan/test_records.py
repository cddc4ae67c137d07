"""The records are frozen and keep the secret out of their text."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from fleet.launch.plan.peers import Peer
from fleet.launch.plan.records import LaunchConfig, Pod, Script


def test_a_configuration_cannot_change() -> None:
    config = LaunchConfig(mode="collective", script=Script(name="train.py"), pod=Pod(secret="abc123"))
    with pytest.raises(FrozenInstanceError):
        config.mode = "ps"  # type: ignore[misc]
    assert "abc123" not in repr(config)


def test_defaults_describe_one_process_on_this_node() -> None:
    """000-08, 000-13, G3."""
    config = LaunchConfig(mode="collective", script=Script(name="train.py"))
    assert (config.nodes.max, config.job_id, config.servers.with_gloo, config.nodes.is_single) == (
        1,
        "default",
        0,
        True,
    )
    assert Peer(name="a", host="b").node_rank == -1
