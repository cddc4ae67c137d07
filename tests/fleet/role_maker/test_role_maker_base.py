"""RoleMakerBase: one record, asked once, under every name Fleet has had for a question."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fleet.errors import ConfigError, NotInitializedError
from fleet.job.job_workers import Workers
from fleet.job.util import UtilBase
from fleet.role_maker import RoleMakerBase
from fleet.role_maker.record import Role, RoleRecord

QUESTIONS = {
    "is_worker": True, "is_server": False, "is_first_worker": False, "is_coordinator": False,
    "is_heter_worker": False, "is_non_distributed": False, "worker_index": 1, "role_id": 1, "local_rank": 1,
    "worker_num": 2, "server_num": 1, "node_num": 1, "get_trainer_endpoints": ["a:1", "a:2"],
    "get_pserver_endpoints": ["s:1"], "get_local_endpoint": "a:2", "get_local_device_ids": [3],
    "get_world_device_ids": [2, 3],
}  # fmt: skip


class Fixed(RoleMakerBase):
    """A role maker that counts how often it is asked."""

    asked = 0

    def _generate_role(self) -> RoleRecord:
        self.asked += 1
        return RoleRecord(
            global_rank=1, world_size=2, local_rank=1, local_world_size=2, worker_endpoints=("a:1", "a:2"),
            server_endpoints=("s:1",), local_device_ids=(3,), world_device_ids=(2, 3),
        )  # fmt: skip


def test_every_question_under_both_names() -> None:
    """B.3: underscore names of 2.x, plain names of 1.x."""
    role: Any = Fixed()
    for name, answer in QUESTIONS.items():
        assert getattr(role, name)() == answer, name
        assert getattr(role, f"_{name}")() == answer, name
    assert (role.get_rank(), role.get_size(), role._get_node_num(), role._get_local_rank()) == (1, 2, 1, 1)


def test_the_role_is_found_once_and_late() -> None:
    role = Fixed()
    assert role.asked == 0
    role.generate_role()
    assert (role.worker_num(), role.worker_index(), role.asked) == (2, 1, 1)


def test_private_names_follow_a_subclass() -> None:
    class Other(Fixed):
        def worker_num(self) -> int:
            return 7

    role: Any = Other()
    assert role._worker_num() == 7


def test_a_server_answers_with_its_own_endpoint() -> None:
    class Server(RoleMakerBase):
        def _generate_role(self) -> RoleRecord:
            return RoleRecord(kind=Role.SERVER, global_rank=1, world_size=4, server_endpoints=("s:1", "s:2"))

    role = Server()
    assert (role.server_index(), role.get_local_endpoint(), role.is_first_worker()) == (1, "s:2", False)
    assert role.is_server() != role.is_worker()  # 001-09


def test_to_string_is_one_line() -> None:
    text = Fixed().to_string()
    assert "role: WORKER, current_id: 1, worker_num: 2" in text
    assert "['s:1']" in text
    assert "\n" not in text


def test_arrays_travel_after_init_only() -> None:
    role: Any = Fixed()
    with pytest.raises(NotInitializedError, match="fleet.init"):
        role.all_reduce(1)

    role.set_util(UtilBase(Workers(record=RoleRecord(), device=torch.device("cpu"))))
    assert role._all_reduce(3) == 3
    assert role._all_gather(3) == [3]
    role._barrier()
    role.barrier_worker()


def test_is_collective_is_a_switch() -> None:
    """003-06: a number or text in its place is refused."""
    with pytest.raises(ConfigError, match="is_collective"):
        Fixed(is_collective=1)  # type: ignore[arg-type]
    assert Fixed(is_collective=True).is_collective
