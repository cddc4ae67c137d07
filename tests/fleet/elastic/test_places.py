"""A checkpoint of one mesh continues on any other: model, optimizer, position in the data, random streams."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

import fleet
from fleet.elastic.places import is_same_mesh, predecessor
from fleet.job.axes import Axes
from fleet.job.running import running_session
from fleet.strategies._shared.random_streams import TRACKER
from tests.helpers.staged import difference, reference, started, step, whole_start
from tests.helpers.workers import run_workers

# Of four workers; what a mesh leaves of them is dp.
MESHES: list[dict[str, int]] = [
    {},
    {"mp": 2},
    {"pp": 2},
    {"mp": 2, "pp": 2},
    {"sharding": 2, "mp": 2},
    {"mp": 4},
]


def job(axes: Axes) -> Any:
    """Stands for a session."""
    return SimpleNamespace(
        axes=axes,
        world_size=axes.world_size,
        global_rank=axes.global_rank,
        data_rank=axes.data_rank,
        data_replicas=axes.data_replicas,
    )


def saved_by(degrees: dict[str, int]) -> dict[str, Any]:
    """Returns what a checkpoint of a mesh says about its workers."""
    places = [Axes(degrees, rank) for rank in range(Axes(degrees, 0).world_size)]
    workers = [{"place": {**axes.coordinate(), "data": axes.data_rank}, "rank": axes.global_rank} for axes in places]
    return {
        "world_size": len(places),
        "replicas": places[0].data_replicas,
        "degrees": degrees,
        "workers": workers,
    }


def test_who_continues_whom() -> None:
    """The same rank on the same mesh; the first worker with the same data on another; nobody with other replicas."""
    two = {"dp": 2, "mp": 2}
    assert is_same_mesh(saved_by(two), job(Axes(two, 3)))
    assert (predecessor(saved_by(two), job(Axes(two, 3))) or {})["rank"] == 3
    turned = {"mp": 2, "dp": 2}
    assert not is_same_mesh(saved_by(two), job(Axes(turned, 1)))
    assert (predecessor(saved_by(two), job(Axes(turned, 1))) or {})["rank"] == 2
    assert (predecessor(saved_by(two), job(Axes({"dp": 2}, 1))) or {})["rank"] == 2
    assert predecessor(saved_by(two), job(Axes({"dp": 4}, 1))) is None
    old = {"world_size": 2, "workers": [{"rank": 0}, {"rank": 1}]}
    assert (predecessor(old, job(Axes({"dp": 2}, 1))) or {})["rank"] == 1
    assert predecessor(old, job(Axes({"mp": 2}, 1))) is None


def checkpoint_of(folder: str, model: Any, optimizer: Any) -> tuple[Any, Any]:
    """Returns a checkpoint in ``folder`` and its sampler."""
    sampler = fleet.elastic.ElasticSampler(range(48), seed=1)
    return fleet.elastic.Checkpoint(folder, model, optimizer, data=sampler), sampler


def draw() -> list[float]:
    """Returns numbers of the global stream and of the stream of divided layers, if there is one."""
    numbers = torch.rand(2).tolist()
    for name in TRACKER.names:
        with TRACKER.rng_state(name):
            numbers += torch.rand(2).tolist()
    return numbers


def all_pairs(rank: int, world_size: int, folder: str, start: Any, six: Any) -> list[Any]:
    """Saves on every mesh after 3 steps, resumes each on every mesh and makes 3 more; returns what was drawn."""
    drawn: dict[int, list[float]] = {}
    places = []
    for number, degrees in enumerate(MESHES):
        model, optimizer = started(degrees)
        model.load_full_state_dict(start if rank == 0 else {})
        checkpoint, sampler = checkpoint_of(f"{folder}/{number}", model, optimizer)
        step(model, optimizer, 3)
        session = running_session()
        assert session is not None
        session.job.num_steps = 3
        places.append([sampler.rank, sampler.num_workers, next(iter(sampler))])
        sampler.record(3)
        draw()
        checkpoint.save(wait=True)
        checkpoint.close()
        drawn[number] = draw()
    for number, degrees in enumerate(MESHES):
        model, optimizer = started(degrees)
        for source, saved in enumerate(MESHES):
            checkpoint, sampler = checkpoint_of(f"{folder}/{source}", model, optimizer)
            assert checkpoint.resume()
            replicas = 4 // (saved.get("mp", 1) * saved.get("pp", 1))
            assert sampler.done == 3 * replicas, f"{saved} -> {degrees}"
            found = draw()
            if source == number:
                assert found == drawn[source], f"{degrees}: the streams do not continue"
            elif sampler.num_workers == replicas == 1 and source != 3:
                assert found[:2] == drawn[source][:2], f"{saved} -> {degrees}: the global stream does not continue"
            step(model, optimizer, 3)
            where = difference((model.full_state_dict(), optimizer.full_state_dict()), six)
            assert not where, f"{saved} -> {degrees}: {where}"
            checkpoint.close()
    return places


def test_a_checkpoint_of_any_mesh_continues_on_any_other(tmp_path: Any) -> None:
    """Bit for bit; the workers of one model copy read the same samples."""
    found = run_workers(all_pairs, 4, str(tmp_path), whole_start(), reference(6), backend=None)
    for number, degrees in enumerate(MESHES):
        copy_size = degrees.get("mp", 1) * degrees.get("pp", 1)
        samples: dict[int, set[int]] = {}
        for said in found:
            data_rank, replicas, first = said[number]
            assert replicas == 4 // copy_size
            samples.setdefault(data_rank, set()).add(first)
        assert sorted(samples) == list(range(4 // copy_size))
        assert all(len(firsts) == 1 for firsts in samples.values())
        assert len(set.union(*samples.values())) == 4 // copy_size
