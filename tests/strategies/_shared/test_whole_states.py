"""The order of whole states, and what can travel; states of whole models are in tests/fleet/checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fleet.errors import CheckpointError
from fleet.job.axes import Axes, make_axes
from fleet.strategies._shared.parameter_layout import Layout, set_layout
from fleet.strategies._shared.parts import mark_part, marked_part
from fleet.strategies._shared.whole_states import WholeStates, cut, cut_state, described, in_layer_order, layouts_of
from tests.helpers.workers import run_workers

HOST = torch.device("cpu")


def test_order() -> None:
    """By the index of the layer, inside a layer as they are, shared layers first."""
    names = ["10.b", "2.w", "2.a", "shared_layers.embed.weight", "9.x.1.y"]
    assert in_layer_order(names) == ["shared_layers.embed.weight", "2.w", "2.a", "9.x.1.y", "10.b"]


def test_what_travels() -> None:
    """Tensors by their whole shape; numbers and texts; nothing else, except where it stays."""
    layout = Layout("mp", 0, 2, 1, (4, 3))
    assert described("w", torch.zeros(2, 3), layout) == ["w", "float32", [4, 3], None]
    assert described("w", torch.zeros(3, dtype=torch.int64), layout) == ["w", "int64", [3], None]
    assert described("n", 3, None) == ["n", "value", [], 3]
    assert described("n", object(), None, travels=False) == ["n", "value", [], None]
    with pytest.raises(CheckpointError, match="'n' is a object"):
        described("n", object(), None)


def test_cutting() -> None:
    """A whole tensor becomes the part, a part stays, and other shapes are left for the error of torch."""
    layout = Layout("mp", 0, 2, 1, (4,))
    state = {"w": torch.arange(4), "own": torch.arange(2), "odd": torch.arange(3), "n": 1}
    found = cut_state(state, dict.fromkeys(state, layout))
    assert found["w"].tolist() == [2, 3]
    assert found["own"] is state["own"]
    assert found["odd"] is state["odd"]
    assert cut(state["w"], None) is state["w"]


def test_places() -> None:
    """Which part of how many; another mesh of as many workers has other parts."""
    states = WholeStates(Axes({"dp": 2, "pp": 2, "mp": 2}, 5), HOST)
    layout = Layout("mp", 0, 2, 1, (4,))
    assert states.place([layout]) == {"rank": 1, "degree": 4, "pp": 2, "mp": 2}
    assert states.place([layout], {"rank": 1, "degree": 2}) == {"rank": 3, "degree": 8, "pp": 2, "mp": 2}
    alone = WholeStates(Axes({"dp": 2}, 1), HOST)
    assert alone.place([]) is None
    assert alone.place([], {"rank": 1, "degree": 2}) == {"rank": 1, "degree": 2}
    assert not alone.is_divided([])
    net = nn.Linear(2, 2)
    set_layout(net, "weight", Layout("mp", 0, 1, 0, (2, 2)))
    assert layouts_of(net) == {}


def test_marks() -> None:
    """A mark on the state survives files; plain dictionaries carry none."""
    state: Any = nn.Linear(1, 1).state_dict()
    mark_part(state, {"rank": 1, "degree": 2})
    assert marked_part([{"net": state}, 3]) == {"rank": 1, "degree": 2}
    assert marked_part({"net": dict(state)}) is None
    plain: dict[str, Any] = {}
    mark_part(plain, {"rank": 0, "degree": 1})
    assert marked_part(plain) is None


def peers_differ(rank: int, world_size: int) -> list[str]:
    """Returns what is said where the workers of one stage hold other entries, and what a list of stages is."""
    said = []
    axes = make_axes({"pp": 2, "mp": 2}, rank, torch.distributed.group.WORLD, 60)
    states = WholeStates(axes, HOST)
    assert states.said(states.stage) == [0, 1]
    with pytest.raises(CheckpointError) as found:
        states.entries({f"{rank}.w": torch.zeros(1)}, {})
    said.append(f"{found.value}")
    entries = states.entries({f"{states.stage}.w": torch.zeros(1), "tied": torch.zeros(2)}, {})
    said += [f"{entry.name}@{entry.stage}" for entry in entries]
    return said


def test_stages_are_united() -> None:
    """A tied entry belongs to the first stage; peers that differ raise on every worker."""
    for said in run_workers(peers_differ, 4):
        assert "rank 1 (pp 0, mp 1) differs from its peers along mp" in said[0]
        assert said[1:] == ["tied@0", "0.w@0", "1.w@1"]
