"""CommunicateTopology against brute force, and the getters of HybridCommunicateGroup."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fleet
from fleet.errors import ConfigError
from fleet.topology import CommunicateTopology

NAMES = ["data", "pipe", "sharding", "sep", "context", "model"]


def brute_force(names: list[str], dims: list[int], axis: str) -> list[list[int]]:
    """Returns the groups along an axis by looking at every pair of ranks."""
    places = [dict(zip(names, place, strict=True)) for place in itertools.product(*(range(size) for size in dims))]

    def together(a: int, b: int) -> bool:
        return all(places[a][name] == places[b][name] for name in names if name != axis)

    found: list[list[int]] = []
    for rank in range(len(places)):
        if not any(rank in group for group in found):
            found.append([other for other in range(len(places)) if together(rank, other)])
    return found


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 2), min_size=6, max_size=6), st.permutations(NAMES))
def test_comm_lists(dims: list[int], names: list[str]) -> None:
    """B.10: get_comm_list in any order of the axes, with ranks and coordinates that agree."""
    topology = CommunicateTopology(names, dims)
    assert topology.world_size() == len(list(itertools.product(*(range(size) for size in dims))))
    for axis in names:
        groups = topology.get_comm_list(axis)
        assert groups == brute_force(names, dims, axis)
        for group in groups:
            assert [topology.get_coord(rank)[axis] for rank in group] == list(range(topology.get_dim(axis)))
        for index in range(topology.get_dim_size(axis)):
            assert topology.get_axis_list(axis, index) == sorted(group[index] for group in groups)
    for rank in range(topology.world_size()):
        assert topology.get_rank(**topology.get_coord(rank)) == rank


def test_known_layout() -> None:
    """B.10: the layout that Paddle prints for 2 x 2 x 2."""
    topology = CommunicateTopology(["data", "pipe", "model"], [2, 2, 2])
    assert topology.get_comm_list("model") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert topology.get_comm_list("pipe") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert topology.get_comm_list("data") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topology.get_fused_ranks(["pipe", "model"]) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert topology.get_rank_from_stage(5, pipe=1) == 7
    assert topology.get_hybrid_group_names() == ["data", "pipe", "model"]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda t: t.get_comm_list("modle"), "Did you mean 'model'"),
        (lambda t: t.get_axis_list("model", 2), "has places 0 to 1"),
        (lambda t: t.get_rank(data=0), "takes a place along each of"),
        (lambda t: t.get_coord(4), "ranks are 0 to 3"),
        (lambda t: CommunicateTopology(["data"], [1, 2]), "one number"),
        (lambda t: CommunicateTopology(["data", "data"], [1, 2]), "different names"),
    ],
)
def test_wrong_calls(call: Any, text: str) -> None:
    """Messages name the axis and the rule."""
    with pytest.raises(ConfigError) as error:
        call(CommunicateTopology(["data", "model"], [2, 2]))
    assert text in str(error.value)


def test_one_process() -> None:
    """B.10: without other workers every degree is 1, every rank 0 and no group is needed."""
    fleet.init(is_collective=True)
    group = fleet.get_hybrid_communicate_group()
    for axis in NAMES:
        assert getattr(group, f"get_{axis}_parallel_world_size")() == 1
        assert getattr(group, f"get_{axis}_parallel_rank")() == 0
        assert getattr(group, f"get_{axis}_parallel_group")() is None
        assert getattr(group, f"get_{axis}_parallel_group_src_rank")() == 0
    assert group.get_parallel_mode() == fleet.ParallelMode.DATA_PARALLEL
    assert (group.get_stage_id(), group.get_num_stages()) == (0, 1)
    assert group.is_first_stage()
    assert group.is_last_stage()
    assert group.get_p2p_groups() is None
    assert group.get_rank_from_stage(0) == 0
    assert group.get_global_rank() == 0
    for name in ("get_check_parallel_group", "get_dp_sep_parallel_group", "get_pp_mp_parallel_group"):
        assert getattr(group, name)() is None
    assert group.topology().world_size() == 1
