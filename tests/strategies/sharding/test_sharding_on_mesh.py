"""Sharding with mp: layers keep plain local parts, which stages 2 and 3 divide once more (study 5.3)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fleet.job.axes import Axes
from tests.helpers.workers import run_workers
from tests.strategies._shared.norm_jobs import init
from tests.strategies.sharding.mesh_layers import train


def stage(number: int) -> dict[str, Any]:
    """Returns the options of a stage on two shards of two parts."""
    return {"sharding": True, "sharding_configs": {"sharding_degree": 2, "mp_degree": 2, "stage": number}}


CASES: list[tuple[dict[str, Any], bool]] = [(stage(1), True), (stage(2), False), (stage(3), False), (stage(3), True)]


def test_sharding_with_divided_layers() -> None:
    """8.1, 5: losses and weights (1e-5) and norms (1e-6) are those of one process, also with sequence parallelism."""
    expected = run_workers(train, 1, [({}, False)])[0][0]
    found = run_workers(train, 4, CASES)
    for place, (options, in_sequence) in enumerate(CASES):
        label = f"stage {options['sharding_configs']['stage']}, in sequence: {in_sequence}"
        workers = [worker[place] for worker in found]
        means = [sum(pair) / 2 for pair in zip(workers[0]["losses"], workers[2]["losses"], strict=True)]
        assert means == pytest.approx(expected["losses"], rel=1e-5), label
        for worker in workers:
            assert worker["norms"] == pytest.approx(expected["norms"], rel=1e-6), label
            for name, weight in expected["weights"].items():
                torch.testing.assert_close(worker["weights"][name], weight, atol=1e-5, rtol=1e-5)


def mesh_of_copies(rank: int, world_size: int) -> list[list[int]]:
    """Returns the ranks of the mesh over which a stage 2 of sharding with dp and sep divides."""
    from fleet.job.running import running_session
    from fleet.strategies._shared.mesh import copies_mesh

    axes: Axes = init(hybrid_configs={"sharding_degree": 2, "sep_degree": 2})
    session = running_session()
    assert session is not None
    assert session.job.mesh is not None
    ranks: list[list[int]] = copies_mesh(session.job.mesh, axes).mesh.tolist()
    return ranks


def test_copies_come_before_shards() -> None:
    """3: the first dim of the mesh holds copies, the second the shards, whatever the order of the axes."""
    assert run_workers(mesh_of_copies, 4) == [[[0, 2], [1, 3]]] * 4
