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
DIVIDED: list[tuple[dict[str, int], int]] = [
    ({"sharding": 2, "mp": 2}, 3),
    ({"sharding": 2, "mp": 2}, 2),
]


def all_pairs(rank: int, world_size: int, meshes: Any, start: Any, three: Any, six: Any) -> None:
    """Trains on every mesh from worker 0's state and saves; continues what one process saved on every mesh.

    All meshes save the same bits, so what one process saved stands for what each of them did.
    """
    for degrees, stage in meshes:
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
    run_workers(all_pairs, 4, MESHES, whole_start(), reference(3), reference(6), backend=None)


@pytest.mark.slow
def test_parts_of_parts() -> None:
    """The same where sharding divides what mp leaves of the parameters; stages 2 and 3 with pp are refused."""
    run_workers(all_pairs, 4, DIVIDED, whole_start(), reference(3), reference(6), backend=None)


def refused(kind: type[Exception], call: Any, *args: Any) -> str:
    """Returns what ``call`` raises."""
    with pytest.raises(kind) as found:
        call(*args)
    return f"{found.value}"


def own_parts(rank: int, world_size: int, folder: str, start: Any) -> dict[str, Any]:
    """Saves and loads parts on mp 2, then on pp 2."""
    said: dict[str, Any] = {}
    for name, degrees in (("mp", {"mp": 2}), ("pp", {"pp": 2})):
        model, optimizer = started(degrees)
        model.load_full_state_dict(start if rank == 0 else {})
        step(model, optimizer, 1)
        with pytest.warns(OptionWarning, match="full_state_dict"):
            own = model.state_dict()
        with pytest.warns(OptionWarning, match="full_state_dict"):
            own_optimizer = optimizer.state_dict()
        before = {key: value.clone() for key, value in own.items()}
        said[f"save {name}"] = refused(ConfigError, fleet.save, {"net": own}, f"{folder}/x.pt")
        said[f"save opt {name}"] = refused(ConfigError, fleet.save, own_optimizer, f"{folder}/x.pt")
        torch.save(own, f"{folder}/{name}.marked.{rank}")
        fleet.save([model.local_state_dict(), optimizer.local_state_dict()], f"{folder}/{name}.{rank}")
        step(model, optimizer, 2)
        after = model.full_state_dict(), optimizer.full_state_dict()
        model.load_state_dict(before)  # without a mark: this worker's, in memory
        assert not difference(dict(model.module.state_dict()), before)
        optimizer.load_state_dict(fleet.load(f"{folder}/{name}.{rank}")[1])
        step(model, optimizer, 2)
        assert not difference((model.full_state_dict(), optimizer.full_state_dict()), after)
        fleet.util.barrier()
        theirs = fleet.load(f"{folder}/{name}.{1 - rank}")
        said[f"load {name}"] = refused(CheckpointError, model.load_state_dict, theirs[0])
        said[f"load opt {name}"] = refused(CheckpointError, optimizer.load_state_dict, theirs[1])
        marked = torch.load(f"{folder}/{name}.marked.{1 - rank}", weights_only=True)
        said[f"load marked {name}"] = refused(CheckpointError, model.load_state_dict, marked)
        whole = model.full_state_dict()
        strange = {**whole, "11.x": torch.zeros(1)}
        said[f"missing {name}"] = refused(CheckpointError, model.load_full_state_dict, strange if rank == 0 else {})
        said[f"strict {name}"] = refused(RuntimeError, model.load_state_dict, strange)
        model.set_state_dict({**whole, "epoch": 3})
    return said


def test_a_part_is_not_taken_for_the_whole(tmp_path: Any) -> None:
    """state_dict() warns, fleet.save() refuses it, and another worker's part does not load."""
    for rank, said in enumerate(run_workers(own_parts, 2, str(tmp_path), whole_start(), backend=None)):
        for name in ("mp", "pp"):
            for key in (f"load {name}", f"load opt {name}", f"load marked {name}"):
                assert f"part {1 - rank} of 2 ({name} 2)" in said[key], said[key]
                assert f"holds part {rank} of 2" in said[key]
            assert f"part {rank} of 2" in said[f"save {name}"]
            assert "full_state_dict()" in said[f"save opt {name}"]
            assert "11.x" in said[f"strict {name}"]
            assert "11.x" in said[f"missing {name}"]
            assert "(worker 0)" in said[f"missing {name}"]
