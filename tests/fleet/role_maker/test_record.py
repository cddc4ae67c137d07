"""The record and the checks that every starter shares."""

from __future__ import annotations

import dataclasses

import pytest

from fleet.common.addresses import join_endpoint, split_endpoint
from fleet.errors import ConfigError
from fleet.role_maker.record import Role, RoleRecord, check_endpoints, check_rank, place_by_endpoints, place_by_numbers


def test_role_numbers_are_fleets() -> None:
    assert {role.name: int(role) for role in Role} == {
        "WORKER": 1, "SERVER": 2, "HETER_WORKER": 3, "ALL": 4, "COORDINATOR": 5,
    }  # fmt: skip


def test_the_record_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        RoleRecord().global_rank = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "parts"), [("a:1", ("a", 1)), (" 10.0.0.1:6170 ", ("10.0.0.1", 6170)), ("[::1]:65535", ("::1", 65535))]
)
def test_endpoints_are_split_and_joined(text: str, parts: tuple[str, int]) -> None:
    assert split_endpoint(text, "X") == parts
    assert join_endpoint(*parts) == text.strip()


@pytest.mark.parametrize("text", ["a", "a:", ":1", "a:0", "a:65536", "a:b", "etcd://a:1", "", "a:-1", "a:1.5"])
def test_malformed_endpoints_are_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="PADDLE_MASTER"):
        split_endpoint(text, "PADDLE_MASTER")


def test_master_parts() -> None:
    assert (RoleRecord(master="h:5").master_host, RoleRecord(master="h:5").master_port) == ("h", 5)
    assert (RoleRecord().master_host, RoleRecord().master_port) == ("127.0.0.1", 0)


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0), (0, -3)])
def test_ranks_outside_the_job_are_refused(rank: int, size: int) -> None:
    with pytest.raises(ConfigError, match="WORLD_SIZE"):
        check_rank(rank, size, "RANK", "WORLD_SIZE")


def test_an_address_that_stands_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"LIST holds \['a:1'\] more than once"):
        check_endpoints(("a:1", "b:1", "a:1"), "LIST")


def test_place_is_counted_from_endpoints() -> None:
    """002: ranks on a node follow the order of the list, also when nodes alternate."""
    record = RoleRecord(global_rank=2, world_size=4, worker_endpoints=("a:1", "b:1", "a:2", "b:2"))
    placed = place_by_endpoints(record, "LIST")
    assert (placed.local_rank, placed.local_world_size, placed.num_nodes) == (1, 2, 2)


@pytest.mark.parametrize(
    ("master", "local", "expected"),
    [
        ("127.0.0.1:1", (None, None), (3, 4, 1)),  # loopback: all on this node
        ("far:1", (None, None), (0, 1, 4)),  # one on each node
        ("far:1", (1, 2), (1, 2, 2)),
        ("far:1", (0, 3), (0, 3, 2)),  # uneven nodes
        ("127.0.0.1:1", (3, None), (3, 4, 1)),
    ],
)
def test_place_without_endpoints(
    master: str, local: tuple[int | None, int | None], expected: tuple[int, int, int]
) -> None:
    placed = place_by_numbers(RoleRecord(global_rank=3, world_size=4, master=master), local, ("LR", "LS"))
    assert (placed.local_rank, placed.local_world_size, placed.num_nodes) == expected


@pytest.mark.parametrize(
    ("local", "message"),
    [((1, None), "LS is not"), ((None, 2), "LR is not"), ((2, 2), "LR is 2"), ((0, 5), "LS is 5")],
)
def test_half_a_place_is_refused(local: tuple[int | None, int | None], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        place_by_numbers(RoleRecord(global_rank=3, world_size=4, master="far:1"), local, ("LR", "LS"))
