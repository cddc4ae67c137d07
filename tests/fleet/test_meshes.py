"""Hybrid meshes: every one equals one process (study section 6): losses, whole gradients, norms, weights."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.helpers.meshes import Mesh, joined, train_alone, train_on
from tests.helpers.workers import run_workers

QUICK = [
    Mesh({}),
    Mesh({"mp": 2}),
    Mesh({"mp": 2}, plain_loop=True, clip=0.5),
    Mesh({"pp": 2}),
    Mesh({"pp": 2}, tied=True, clip=0.5),
    Mesh({"pp": 2}, virtual=2),
    Mesh({"pp": 2, "mp": 2}, tied=True, clip=0.5),
    Mesh({"dp": 2, "mp": 2}, tied=True, clip=0.5, plain_loop=True),
    Mesh({"dp": 2, "pp": 2}, clip=0.5),
    Mesh({"sharding": 2, "mp": 2}, clip=0.5),
    Mesh({"sharding": 2, "pp": 2}, tied=True, clip=0.5),
    Mesh({"pp": 4}, micro_batches=2, tied=True),
]
SLOW = [
    Mesh({"mp": 4}, clip=0.5),
    Mesh({"pp": 4}, micro_batches=8),
    Mesh({"pp": 2}, micro_batches=1),
    Mesh({"dp": 2, "pp": 2, "mp": 2}, tied=True, clip=0.5),
    Mesh({"sharding": 2, "pp": 2, "mp": 2}, clip=0.5),
    Mesh({"dp": 2, "sharding": 2, "mp": 2}, clip=0.5),
    Mesh({"dp": 2, "sharding": 2, "pp": 2}, tied=True),
    Mesh({"pp": 4, "mp": 2}, tied=True, clip=0.5),
    Mesh({"dp": 4, "pp": 2}),
    Mesh({"pp": 2, "mp": 4}),
    Mesh({"dp": 2, "pp": 2, "mp": 2}, virtual=2, clip=0.5),
]


@cache
def alone(tied: bool, clip: float | None) -> dict[str, Any]:
    """Returns what one plain process computes."""
    return train_alone(Mesh({}, tied=tied, clip=clip))


def check(mesh: Mesh) -> None:
    """Raises AssertionError unless the mesh trains as one process does."""
    expected = alone(mesh.tied, mesh.clip)
    found = run_workers(train_on, mesh.world_size, mesh, backend=None, timeout_s=240)
    rows = {worker["row"]: worker["losses"] for worker in found}
    for worker in found:
        assert worker["losses"] == rows[worker["row"]], "workers of one model copy return different losses"
    mean = torch.tensor(list(rows.values())).mean(0)
    torch.testing.assert_close(mean, torch.tensor(expected["losses"]), rtol=0, atol=1e-5)
    gradients = joined([worker["gradients"] for worker in found])
    assert gradients.keys() == expected["gradients"].keys()
    for name, gradient in gradients.items():
        scale = expected["gradients"][name].abs().max().item()
        # A key's bias has no gradient but rounding: softmax ignores it.
        difference = (gradient - expected["gradients"][name]).abs().max().item()
        assert difference <= 1e-5 * max(scale, 1e-2), name
    for worker in found:
        torch.testing.assert_close(worker["norms"][0], expected["norms"][0], rtol=1e-6, atol=0)
    weights = joined([worker["weights"] for worker in found])
    for name, weight in weights.items():
        torch.testing.assert_close(
            weight, expected["weights"][name], rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("mesh", QUICK, ids=str)
def test_a_mesh_equals_one_process(mesh: Mesh) -> None:
    """Losses of 8 steps, every whole gradient and the norm of the first, and the weights after the last."""
    check(mesh)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", SLOW, ids=str)
def test_a_larger_mesh_equals_one_process(mesh: Mesh) -> None:
    """The same with 8 workers, and with other numbers of micro-batches."""
    check(mesh)
