"""Options and clipping in a pipeline: what one process computes (study 5.3, 5.6; surface 8)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.workers import run_workers
from tests.strategies.mesh_jobs import CASES
from tests.strategies.stage_jobs import CLIPS, on_mesh, spoiled
from tests.strategies.test_mesh_options import trained

REFUSED = ("merged sharding", "sharding stage 3")
NOT_HERE = (*REFUSED, "cudnn_exhaustive_search", "to_static")  # the last two: without effect, and slow
QUICK = [case for case in trained("pp") if case not in NOT_HERE]
JOBS: list[tuple[dict[str, int], list[str]]] = [
    ({"pp_degree": 2, "dp_degree": 2}, QUICK),
    ({"pp_degree": 2, "mp_degree": 2}, [*CLIPS, "lamb", "lars", "muon", "amp"]),
    ({"pp_degree": 2, "sharding_degree": 2}, ["hook", "subclass", "each", "lamb", "muon"]),
]


def compare(jobs: list[tuple[dict[str, int], list[str]]], timeout_s: float = 120.0) -> None:
    """Trains every job on four workers, and compares with one."""
    cases = list(dict.fromkeys(switch for _, switches in jobs for switch in switches))
    expected = run_workers(on_mesh, 1, [({}, cases)], timeout_s=timeout_s)[0][0]
    found = run_workers(on_mesh, 4, jobs, timeout_s=timeout_s)
    for place, (degrees, switches) in enumerate(jobs):
        for switch in switches:
            check(f"{switch} on {degrees}", switch, [worker[place][switch] for worker in found], expected[switch])


def check(label: str, switch: str, workers: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Asserts that losses, norms and the weights of all stages are those of one worker."""
    tolerance = CASES[switch][2] if switch in CASES else 1e-5
    replicas = {worker["replica"]: worker["losses"] for worker in workers}
    means = [sum(losses) / len(replicas) for losses in zip(*replicas.values(), strict=True)]
    assert means == pytest.approx(expected["losses"], rel=tolerance), label
    for worker in workers:
        assert worker["norms"] == pytest.approx(expected["norms"], rel=1e-6), label
        for name, got in worker["weights"].items():
            weight: torch.Tensor = expected["weights"][name]
            assert torch.allclose(got, weight, atol=tolerance, rtol=tolerance), (label, name, got - weight)
    assert {name for worker in workers for name in worker["weights"]} == set(expected["weights"]), label


def test_options_and_clipping_in_a_pipeline() -> None:
    """5.3: losses, norms (1e-6) and weights, tied ones included, are those of one process."""
    compare(JOBS)


@pytest.mark.slow
def test_compiled_stages() -> None:
    """5.3: to_static compiles the layers of each stage."""
    compare([({"pp_degree": 2, "dp_degree": 2}, ["to_static"])], timeout_s=400)


def test_a_nan_is_named_with_stage_mp_rank_and_micro_batch() -> None:
    """7.3 FLAGS_pp_check_naninf: all stages raise with the place where it came up, not where it went to."""
    found = run_workers(spoiled, 4)
    assert all(messages == found[0] for messages in found)
    at = "step 2, rank 3 (pipeline stage 1, mp rank 1, micro-batch 1): NaN first appears in"
    assert found[0][0].startswith(f"{at} forward, in output 0 of module '3.down'")
    assert found[0][1].startswith(f"{at} backward, in the gradient that flows into output 0 of module '3.down'")
