"""CommunicateTopology against brute force, and the getters of HybridCommunicateGroup."""

from __future__ import annotations

import itertools
import json
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import fleet
from fleet.errors import ConfigError
from fleet.job.axes import Axes
from fleet.paddle.topology import CommunicateTopology, HybridCommunicateGroup
from fleet.strategies._declare.degrees import plan_experts
from tests.helpers.workers import run_workers

NAMES = ["data", "pipe", "sharding", "sep", "context", "model"]


RECORDED = json.loads((Path(__file__).parents[2] / "data/hybrid/arithmetic.json").read_text())
OURS = {"data": "dp", "pipe": "pp", "sharding": "sharding", "sep": "sep", "context": "cp", "model": "mp"}


def place_of(rank: int, names: list[str], dims: list[int]) -> HybridCommunicateGroup:
    """Returns the groups of one rank as arithmetic, without any process."""
    asked = dict(zip(names, dims, strict=True))
    degrees = {OURS[name]: size for name, size in asked.items() if name in OURS}
    experts: dict[str, int] = {}
    if "expert" in asked:
        keys = {"ep": asked["expert"], "moe_sharding": asked["moe_sharding"], "cp": asked["context"], "cp_sharding": 1}
        hybrid = SimpleNamespace(**{f"{key}_degree": value for key, value in keys.items()})
        degrees, experts = plan_experts({"hybrid_configs": hybrid}, {**degrees, "cp": 1})
    axes = Axes(degrees, rank, experts=experts)
    job = SimpleNamespace(axes=axes, global_rank=rank, world_size=prod(degrees.values()), process_group=None)
    session: Any = SimpleNamespace(job=job, degrees=degrees)
    fleet_name = {ours: name for name, ours in OURS.items()}
    return HybridCommunicateGroup(
        CommunicateTopology([fleet_name[axis] for axis in degrees], list(degrees.values())), session=session
    )


@pytest.mark.parametrize("case", RECORDED["topology"], ids=lambda case: "x".join(map(str, case["dims"])))
def test_topology_is_the_recorded_one(case: dict[str, Any]) -> None:
    """Surface 2: lists, coordinates and fused groups of real topologies (inside a fused group the order may differ)."""
    topology = CommunicateTopology(case["names"], case["dims"])
    for axis, lists in case["comm"].items():
        assert topology.get_comm_list(axis) == lists
    for axis, lists in case["axis_list"].items():
        assert [topology.get_axis_list(axis, index) for index in range(topology.get_dim(axis))] == lists
    for axes, lists in case["fused"].items():
        assert sorted(topology.get_fused_ranks(axes.split(","))) == sorted(sorted(group) for group in lists)
    assert [list(topology.get_coord(rank)) for rank in range(topology.world_size())] == case["coord"]


@pytest.mark.parametrize("case", RECORDED["groups"], ids=lambda case: "x".join(map(str, case["dims"])))
def test_groups_are_the_recorded_ones(case: dict[str, Any]) -> None:
    """Surface 2: mode, groups, check groups, stage and sources of every rank."""
    axes_of = {"data", "model", "pipe", "sharding", "sep"}
    for known in case["ranks"]:
        place = place_of(known["rank"], case["names"], case["dims"])
        assert place.get_parallel_mode() == known["mode"]
        for axis in axes_of & set(known):
            assert getattr(place, f"get_{axis}_parallel_group")().ranks == known[axis]
        assert place.get_check_parallel_group().ranks == known["check"]
        if "check_sharding" in known:
            assert place.get_check_parallel_group(sharding=True).ranks == known["check_sharding"]
        assert (place.get_stage_id(), place.stage_id) == (known["stage"], known["stage"])
        stages = range(place.get_num_stages())
        assert [place.get_rank_from_stage(stage) for stage in stages] == known["stage_ranks"]
        assert (place.is_first_stage, place.is_last_stage) == (known["stage"] == 0, known["stage"] == stages[-1])
        for axis, source in known["src"].items():
            assert getattr(place, f"get_{axis}_parallel_group_src_rank")() == source
        for key in set(known) - {"rank", "mode", "check", "check_sharding", "stage", "stage_ranks", "src"} - axes_of:
            assert getattr(place, f"get_{key}_parallel_group")().ranks == sorted(known[key]), key


@pytest.mark.parametrize("case", RECORDED["expert_groups"], ids=lambda case: "x".join(map(str, case["dims"])))
def test_expert_groups_are_the_recorded_ones(case: dict[str, Any]) -> None:
    """Surface 1.4 and 2: the groups of the expert grid, with the context axis inside the sharding axis."""
    for known in case.get("ranks", ()):
        place = place_of(known["rank"], case["names"], case["dims"])
        for key in set(known) - {"rank"}:
            assert getattr(place, f"get_{key}_parallel_group")().ranks == known[key], key
            assert getattr(place, f"get_{key}_parallel_world_size")() == len(known[key])
        sharding = len(known["sharding"])
        inner = len(known.get("cp_sharding", known["sharding"]))
        assert place.get_sharding_parallel_world_size() == sharding
        assert place.get_sharding_parallel_world_size(with_context_parallel=True) == inner
        assert place.get_expert_parallel_rank() == known["expert"].index(known["rank"])
    if "error" in case:  # an order that Paddle refuses; ours does not depend on it
        assert place_of(0, case["names"], case["dims"]).ranks("expert") == [0, 1]


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
            assert [getattr(topology.get_coord(rank), axis) for rank in group] == list(range(topology.get_dim(axis)))
        for index in range(topology.get_dim_size(axis)):
            assert topology.get_axis_list(axis, index) == sorted(group[index] for group in groups)
    for rank in range(topology.world_size()):
        assert topology.get_rank(**topology.get_coord(rank)._asdict()) == rank


def test_known_layout() -> None:
    """B.10: the layout that Paddle prints for 2 x 2 x 2."""
    topology = CommunicateTopology(["data", "pipe", "model"], [2, 2, 2])
    assert topology.get_comm_list("model") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert topology.get_comm_list("pipe") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert topology.get_comm_list("data") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topology.get_fused_ranks(["pipe", "model"]) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert topology.get_rank_from_stage(5, pipe=1) == 7
    assert topology.get_hybrid_group_names() == ["data", "pipe", "model"]
    place = topology.get_coord(6)
    assert place == topology.coordinate(data=1, pipe=1, model=0) == (1, 1, 0)
    assert (place.data, place.pipe, place.model) == (1, 1, 0)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda t: t.get_comm_list("modle"), "Did you mean 'model'"),
        (lambda t: t.get_axis_list("model", 2), "has coordinates 0 to 1"),
        (lambda t: t.get_rank(data=0), "takes a coordinate for each of"),
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
    """B.10: without other workers every degree is 1, every rank 0, and groups are that of one process."""
    fleet.init(is_collective=True)
    group = fleet.get_hybrid_communicate_group()
    for axis in NAMES:
        assert getattr(group, f"get_{axis}_parallel_world_size")() == 1
        assert getattr(group, f"get_{axis}_parallel_rank")() == 0
        own = getattr(group, f"get_{axis}_parallel_group")()
        assert (own.nranks, own.ranks, own.rank, own.process_group) == (1, [0], 0, dist.group.WORLD)
        assert getattr(group, f"get_{axis}_parallel_group_src_rank")() == 0
    assert group.get_parallel_mode() is None
    assert group.get_moe_sharding_parallel_world_size() == 0
    assert (group.stage_id, group.nranks, group.global_rank) == (0, 1, 0)
    assert (group.get_stage_id(), group.get_num_stages()) == (0, 1)
    assert group.is_first_stage is True
    assert group.is_last_stage is True
    assert group.get_p2p_groups() is None
    assert group.get_rank_from_stage(0) == 0
    assert group.get_global_rank() == 0
    for name in ("get_check_parallel_group", "get_dp_sep_parallel_group", "get_pp_mp_parallel_group"):
        assert getattr(group, name)().nranks == 1
    assert group.topology().world_size() == 1


def groups_of(rank: int, world_size: int) -> list[Any]:
    """Uses the groups of a 2 x 2 grid as scripts do."""
    strategy = fleet.DistributedStrategy()
    strategy.sharding = True
    strategy.sharding_configs = {"dp_degree": 2}
    fleet.init(is_collective=True, strategy=strategy)
    place = fleet.get_hybrid_communicate_group()
    found: list[Any] = []
    for group in (place.get_data_parallel_group(), place.get_sharding_parallel_group()):
        tensor, gathered = torch.tensor([float(rank)]), [torch.zeros(1) for _ in range(2)]
        dist.all_gather(gathered, tensor, group=group)
        dist.all_reduce(tensor, group=group)
        first = torch.tensor([float(rank)])
        dist.broadcast(first, src=group.ranks[0], group=group)
        parts = torch.zeros(1)
        dist.scatter(parts, [torch.ones(1), torch.ones(1) * 2] if group.rank == 0 else None, group.ranks[0], group)
        work = dist.isend(parts, group.ranks[1], group) if group.rank == 0 else dist.irecv(parts, group.ranks[0], group)
        assert work is not None
        work.wait()
        dist.barrier(group=group)
        objects: list[Any] = [None, None]
        dist.all_gather_object(objects, rank, group=group)
        assert objects == group.ranks
        own = (group.nranks, group.world_size, int(group.rank), group.ranks, group.get_group_rank(rank))
        same = group.rank == dist.get_rank(group) and dist.get_world_size(group) == group.nranks
        ranks, fused = place.create_fuse_group(["data", "sharding"])
        assert (ranks, fused.nranks, fused.process_group) == ([0, 1, 2, 3], 4, dist.group.WORLD)
        found.append((own, same, dist.get_process_group_ranks(group) == group.ranks, tensor.item(), first.item(),
                      [t.item() for t in gathered], parts.item()))  # fmt: skip
        assert group.process_group is not None
        assert group == group.process_group
        assert group.get_group_rank(9) == -1
    return found


def test_groups_have_the_attributes_of_paddle() -> None:
    """B.10: nranks, ranks and rank, and torch's collectives take the group as it is."""
    for rank, (data, sharding) in enumerate(run_workers(groups_of, 4, backend=None)):
        for found, ranks in ((data, [rank % 2, rank % 2 + 2]), (sharding, [rank // 2 * 2, rank // 2 * 2 + 1])):
            own = (2, 2, ranks.index(rank), ranks, ranks.index(rank))
            assert found == (own, True, True, sum(ranks), ranks[0], ranks, 1.0)


def test_every_getter_of_an_axis_is_declared_for_type_checkers() -> None:
    getters = vars(fleet.HybridCommunicateGroup).items()
    made = {name for name, getter in getters if "_add_getters" in getattr(getter, "__qualname__", "")}
    assert len(made) == 45
    assert {name for name in made if "data" in name} == {
        "get_data_parallel_rank",
        "get_data_parallel_world_size",
        "get_data_parallel_group",
        "get_data_parallel_group_src_rank",
    }
    assert set(fleet.HybridCommunicateGroup.__annotations__) == made


def test_an_operation_on_a_group_of_one_process_says_that_there_is_no_process_group() -> None:
    fleet.init()
    group: Any = fleet.get_hybrid_communicate_group().get_sharding_parallel_group()
    with pytest.raises(AttributeError, match=r"single process.*nranks > 1"):
        dist.all_reduce(torch.ones(1), group=group)
    assert not hasattr(group, "allreduce")


def test_an_operation_on_a_group_of_one_process_of_a_collective_job() -> None:
    """Issue 36: it ended with an AttributeError, and a script that ran on several workers failed on one."""
    fleet.init(is_collective=True)
    group: Any = fleet.get_hybrid_communicate_group().get_sharding_parallel_group()
    number = torch.ones(1)
    dist.all_reduce(number, group=group)
    assert number.item() == group.nranks == 1
