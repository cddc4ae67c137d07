"""Whole states do not depend on the mesh: saved on any mesh, loaded on any other (surface section 13)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import fleet
from fleet.errors import CheckpointError, ConfigError, OptionWarning
from tests.helpers.staged import difference, reference, started, step, whole_start
from tests.helpers.workers import run_workers

# Of four workers; what a mesh leaves of them is dp.
MESHES: list[tuple[dict[str, int], int]] = [
    ({}, 1),
    ({"mp": 2}, 1),
    ({"pp": 2}, 1),
    ({"mp": 2, "pp": 2}, 1),
    ({"mp": 4}, 1),
    ({"sharding": 2, "mp": 2}, 1),
    ({"sharding": 2, "pp": 2}, 1),
]


def all_pairs(rank: int, world_size: int, start: Any, three: Any, six: Any) -> None:
    """Trains on every mesh from worker 0's state and saves; continues what one process saved on every mesh.

    All meshes save the same bits, so what one process saved stands for what each of them did.
    """
    for degrees, stage in MESHES:
        model, optimizer = started(degrees, stage)
        model.load_full_state_dict(start if rank == 0 else {})
        step(model, optimizer, 3)
        found = model.full_state_dict(keep=rank == 0), optimizer.full_state_dict(keep=rank == 0)
        where = difference(found, three) if rank == 0 else difference(found, ({}, {}))
        assert not where, f"{degrees}, stage {stage}: {where}"
        model, optimizer = started(degrees, stage)
        model.load_state_dict(three[0])
        optimizer.load_state_dict(copy.deepcopy(three[1]))  # torch keeps the tensors
        step(model, optimizer, 3)
        where = difference((model.full_state_dict(), optimizer.full_state_dict()), six)
        assert not where, f"{degrees}, stage {stage}, continued: {where}"


def test_every_mesh_saves_what_every_mesh_loads() -> None:
    """Bit for bit: names, order, shapes, places in the optimizer, and three more steps."""
    run_workers(all_pairs, 4, whole_start(), reference(3), reference(6), backend=None)
