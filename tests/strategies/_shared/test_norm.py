"""norm: one norm over the mesh, in torch's own clipping too (surface 8.2, study 5.2 and 5.3)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.workers import run_workers
from tests.strategies._shared.norm_jobs import FORMS, on_meshes, overflow, train

MESHES: dict[str, dict[str, Any]] = {
    "dp2 mp2": {"hybrid_configs": {"dp_degree": 2, "mp_degree": 2}},
    "sharding2 mp2": {"hybrid_configs": {"sharding_degree": 2, "mp_degree": 2}},
    "sharding2 mp2 stage 2": {
        "sharding": True,
        "sharding_configs": {"sharding_degree": 2, "mp_degree": 2, "stage": 2},
    },
}


def test_clipping_is_that_of_one_process() -> None:
    """8.2: in each form in which users clip, norms (1e-6), losses and weights are those of one process."""
    expected = {form: train(form, None, wrap=False) for form in FORMS}
    found = run_workers(on_meshes, 4, list(MESHES.values()))
    for place, mesh in enumerate(MESHES):
        for form, reference in expected.items():
            workers = [worker[place][form] for worker in found]
            for got in workers:
                assert got["norms"] == pytest.approx(reference["norms"], rel=1e-6), (mesh, form)
                for name, weight in reference["weights"].items():
                    torch.testing.assert_close(got["weights"][name], weight, atol=1e-6, rtol=1e-5, msg=f"{mesh} {form}")
            means = [sum(pair) / 2 for pair in zip(workers[0]["losses"], workers[2]["losses"], strict=True)]
            assert means == pytest.approx(reference["losses"], rel=1e-5), (mesh, form)


def test_an_overflow_on_one_mp_rank_skips_the_step_on_all() -> None:
    """8.3: with amp, a GradScaler of the loop, and one that distributed_scaler has seen; the scale falls on all."""
    found = run_workers(overflow, 2)
    assert found[0] == found[1]
    for kind, result in found[0].items():
        assert result["moved"] == [True, False, True], kind
        assert result["scales"][1] < result["scales"][0], kind
