"""Exchanges of GPU tensors in host memory; the CPU's tensors stand for a GPU's, and their copies for the host's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from fleet.meta_parallel import attention_ring
from fleet.strategies._shared import through_host
from fleet.strategies._shared.parts import whole_state
from fleet.strategies._shared.through_host import (
    begin_receiving,
    begin_sending,
    full_tensor,
    needs_host,
)
from fleet.strategies.sharding.part_rules import keep_part_rules
from tests.helpers.workers import run_workers


def test_the_cpu_s_tensors_and_those_of_one_process_stay() -> None:
    assert not needs_host(torch.ones(1), None)


def exchange(rank: int, world_size: int) -> dict[str, Any]:
    """Exchanges as where gloo has to carry tensors of a GPU."""
    through_host.needs_host = attention_ring.needs_host = lambda tensor, group: True  # type: ignore[assignment]
    group, other = dist.group.WORLD, 1 - rank
    assert group is not None
    into, own = torch.zeros(3), torch.full((3,), float(rank))
    coming = begin_receiving(into, other, group, 7)
    sent = begin_sending(own, other, group, 7)
    before = into.tolist()
    coming.wait()
    sent.wait()
    passed = torch.zeros(2)
    attention_ring._wait(attention_ring._passed(torch.full((2,), rank + 5.0), passed, group, 8))
    mesh = init_device_mesh("cpu", (2,))
    part = DTensor.from_local(torch.full((1, 2), float(rank)), mesh, [Shard(0)])
    spread = DTensor.from_local(torch.tensor(rank + 1.0), mesh, [Partial()])
    same = DTensor.from_local(torch.tensor(4.0), mesh, [Replicate()])
    state = whole_state({"a": part}, keep=rank == 0)["a"]
    return {
        "before": before,
        "into": into.tolist(),
        "passed": passed.tolist(),
        "full": [full_tensor(one).tolist() for one in (part, spread, same)],
        "state": None if state is None else state.tolist(),
    }


def test_messages_and_parts_arrive() -> None:
    for rank, found in enumerate(run_workers(exchange, 2)):
        assert (found["before"], found["into"]) == ([0, 0, 0], [1 - rank] * 3)
        assert found["passed"] == [6 - rank] * 2
        assert found["full"] == [[[0, 0], [1, 1]], 3, 4]
        assert found["state"] == ([[0, 0], [1, 1]] if rank == 0 else None)


def penalty(rank: int, world_size: int) -> tuple[Any, ...]:
    """Returns a penalty by the documented formula, its gradient on this worker, and how often the host was asked."""
    asked: list[bool] = []

    def counts(tensor: Any, group: Any) -> bool:
        asked.append(True)
        return True

    through_host.needs_host = counts
    mesh = init_device_mesh("cpu", (2,))
    keep_part_rules(mesh, 2)
    keep_part_rules(mesh, 2)  # a second model
    part = DTensor.from_local(torch.full((1, 2), rank + 1.0), mesh, [Shard(0)]).requires_grad_()
    value = part.full_tensor().square().sum()
    value.backward()
    assert isinstance(part.grad, DTensor)
    return value.item(), part.grad.to_local().tolist(), part.grad.full_tensor().tolist(), len(asked)


def test_full_tensor_of_a_user_goes_through_the_host() -> None:
    """002-09: on workers that share a GPU torch's own ended the process."""
    for rank, found in enumerate(run_workers(penalty, 2)):
        assert found == (10.0, [[2 * (rank + 1.0)] * 2], [[2.0, 2.0], [4.0, 4.0]], 2)
