"""Hybrid meshes: every one equals one process (study section 6): losses, whole gradients, norms, weights."""

from __future__ import annotations

import pytest

from tests.helpers.mesh_results import check_results
from tests.helpers.meshes import Mesh, train_on
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


def check(mesh: Mesh) -> None:
    """Raises AssertionError unless the mesh trains as one process does."""
    check_results(mesh, run_workers(train_on, mesh.world_size, mesh, backend=None, timeout_s=240))


@pytest.mark.parametrize("mesh", QUICK, ids=str)
def test_a_mesh_equals_one_process(mesh: Mesh) -> None:
    """Losses of 8 steps, every whole gradient and the norm of the first, and the weights after the last."""
    check(mesh)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", SLOW, ids=str)
def test_a_larger_mesh_equals_one_process(mesh: Mesh) -> None:
    """The same with 8 workers, and with other numbers of micro-batches."""
    check(mesh)
