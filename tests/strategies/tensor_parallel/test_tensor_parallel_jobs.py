"""Jobs with mp_degree above 1: every mesh trains as one process does, and what would be silently wrong is refused."""

from __future__ import annotations

import pytest

from fleet.strategies.tensor_parallel import equal_inputs, recompute_hybrid, sequence, whole_parameters
from tests.helpers import divided_training as training
from tests.helpers.workers import run_workers
from tests.strategies.tensor_parallel.job_checks import CHECKS

COVERED = (equal_inputs, recompute_hybrid, sequence, whole_parameters)


def _on_two(rank: int, world_size: int) -> dict[str, dict[str, float]]:
    found = {}
    training.start(mp=2)
    found["mp2"] = training.compare(training.divided_kit())
    training.start(mp=2)
    found["mp2, sequence"] = training.compare(training.sequence_kit())
    for check in CHECKS:
        check(rank, world_size)
    return found


def _on_four(rank: int, world_size: int) -> dict[str, dict[str, float]]:
    found = {}
    training.start(dp=2, mp=2)
    found["dp2 mp2"] = training.compare(training.divided_kit(), steps=3)
    training.start({"hybrid_configs": {"dp_degree": 2, "mp_degree": 2, "mp_configs": {"recompute_allgather": True}}})
    found["dp2 mp2, sequence, gathered again"] = training.compare(training.sequence_kit(), steps=3)
    training.start(mp=4)
    found["mp4"] = training.compare(training.divided_kit(), steps=3)
    training.start(mp=4)
    found["mp4, sequence"] = training.compare(training.sequence_kit(), steps=3)
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_mesh_trains_as_one_process(world_size: int) -> None:
    """Design 6: losses 1e-5, every whole gradient 1e-5 relative, weights after SGD steps 1e-5."""
    job = _on_two if world_size == 2 else _on_four
    for found in run_workers(job, world_size, timeout_s=100, backend=None):
        for mesh, values in found.items():
            assert values["divided"] == 21, mesh
            assert values["loss"] < 1e-5, (mesh, values)
            assert values["gradients"] < 1e-5, (mesh, values)
            assert values["weights"] < 1e-5, (mesh, values)
