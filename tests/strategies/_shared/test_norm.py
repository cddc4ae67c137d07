"""norm: one norm over the mesh, in torch's own clipping too (surface 8.2, study 5.2 and 5.3)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_, get_total_norm

import fleet
from fleet.errors import ConfigError
from fleet.job.axes import Axes
from fleet.strategies._shared.norm import copies, of_mesh, total_norm
from fleet.strategies._shared.parameter_layout import Layout, set_layout
from tests.helpers.toy_mesh import Toy, batch
from tests.helpers.workers import run_workers
from tests.strategies._shared.norm_jobs import FORMS, init, on_meshes, overflow, train

MESHES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "dp2 mp2": ({"hybrid_configs": {"dp_degree": 2, "mp_degree": 2}}, list(FORMS)),
    "sharding2 mp2": (
        {"hybrid_configs": {"sharding_degree": 2, "mp_degree": 2}},
        ["step_pre_hook", "subclass", "ClipGradByNorm"],
    ),
    "sharding2 mp2 stage 2": (
        {"sharding": True, "sharding_configs": {"sharding_degree": 2, "mp_degree": 2, "stage": 2}},
        ["imported before", "scaler"],
    ),
    "sharding2 mp2 stage 3": (
        {"sharding": True, "sharding_configs": {"sharding_degree": 2, "mp_degree": 2, "stage": 3}},
        ["after backward", "subclass", "ClipGradByGlobalNorm", "ClipGradByNorm"],
    ),
}


def test_clipping_is_that_of_one_process() -> None:
    """8.2: in each form in which users clip, norms (1e-6), losses and weights are those of one process."""
    expected = {form: train(form, None, wrap=False) for form in FORMS}
    found = run_workers(on_meshes, 4, list(MESHES.values()))
    for place, (mesh, (_, forms)) in enumerate(MESHES.items()):
        for form in forms:
            reference, workers = expected[form], [worker[place][form] for worker in found]
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


def on_pipeline_and_mp(rank: int, world_size: int) -> dict[str, Any]:
    """Takes norms of gradients that are made by hand on two stages of two parts each; stage 1 has none."""
    axes = init(hybrid_configs={"pp_degree": 2, "mp_degree": 2})
    stage, part = axes.rank("pp"), axes.rank("mp")
    module, found = nn.Module(), {}
    for name, values in (("whole", [1.0, 2.0]), ("divided", [3.0 + part]), ("tied", [5.0])):
        module.register_parameter(name, nn.Parameter(torch.zeros(len(values))))
        module.get_parameter(name).grad = torch.tensor(values) if stage == 0 or name == "tied" else None
    set_layout(module, "divided", Layout("mp", 0, 2, part, (2,)))
    module.get_parameter("tied").__dict__["fleet_tied"] = (0, 1)
    held = list(module.parameters())
    squares = 1 + 4 + 9 + 16 + 25
    found["total"] = float(total_norm(held, axes)) ** 2 / squares
    found["largest"] = float(total_norm(held, axes, math.inf))
    found["first order"] = float(total_norm(held, axes, 1.0))
    frozen = held if stage == 0 else []  # a worker without a gradient takes part
    found["frozen"] = float(total_norm(frozen, axes)) ** 2 / (squares - 12.5)
    found["copies"] = [copies(p, axes) for p in held]
    return found


def test_norms_on_pipeline_and_mp() -> None:
    """16, 8.2: divided, whole and tied gradients are counted once; a stage without gradients takes part."""
    for found in run_workers(on_pipeline_and_mp, 4):
        assert found["total"] == pytest.approx(1, rel=1e-6)
        assert found["frozen"] == pytest.approx(1, rel=1e-6)
        assert found["largest"] == 5
        assert found["first order"] == pytest.approx(1 + 2 + 3 + 4 + 5)
        assert found["copies"] == [2, 1, 4]


def refusals(rank: int, world_size: int) -> dict[str, str]:
    """Returns what is said to choices that have no norm, and to optimizers that need whole parameters."""
    found = {}
    axes = init(hybrid_configs={"mp_degree": 2})
    net = Toy(axes)
    for name, made in {
        "Muon": torch.optim.Muon([p for p in net.parameters() if p.dim() == 2]),
        "Adafactor": torch.optim.Adafactor(net.parameters()),
        "LBFGS": torch.optim.LBFGS(net.parameters()),
    }.items():
        found[name] = message(fleet.distributed_optimizer, made)
    model: Any = fleet.distributed_model(net)
    cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
    found["order"] = message(clip_grad_norm_, net.parameters(), 1.0, 0.0)
    strangers = [torch.full((3,), 2.0 + rank)]  # differ between workers and are no gradients
    found["strangers"] = str(float(get_total_norm(strangers)) ** 2)
    net.up.weight.grad = None if axes.rank("mp") == 0 else torch.full_like(net.up.weight, torch.inf)
    found["non-finite"] = message(clip_grad_norm_, net.parameters(), 1.0, error_if_nonfinite=True)
    alone = axes.group("mp")
    init(hybrid_configs={"dp_degree": 2})
    assert of_mesh() is None
    assert alone is not None
    net.up.weight.grad = torch.full_like(net.up.weight, 1.0 + rank)
    found["closed"] = str(float(clip_grad_norm_([net.up.weight], 1e9)) ** 2 / net.up.weight.numel())
    return found


def message(call: Any, *args: Any, **kwargs: Any) -> str:
    """Returns what ``call`` raises."""
    try:
        call(*args, **kwargs)
    except (ConfigError, RuntimeError) as error:
        return str(error)
    return "nothing"


def test_what_has_no_norm_and_what_is_left_alone() -> None:
    """8.2: torch's own function comes back with the session; optimizers over whole parameters are refused on mp."""
    for rank, found in enumerate(run_workers(refusals, 2)):
        assert "fleet.optimizer.Muon" in found["Muon"]
        assert "means over the rows and columns" in found["Adafactor"]
        assert "one history over all parameters" in found["LBFGS"]
        assert "order above 0" in found["order"]
        assert float(found["strangers"]) == pytest.approx(3 * (2 + rank) ** 2)
        assert "non-finite" in found["non-finite"]
        assert float(found["closed"]) == pytest.approx((1 + rank) ** 2)


def test_copies_on_every_kind_of_mesh() -> None:
    """16: a square is divided by the number of workers that hold the same value."""
    axes = Axes({"dp": 2, "pp": 2, "sharding": 2, "sep": 2, "mp": 4}, 0)
    whole = torch.zeros(4)
    assert copies(whole, axes) == 4
    assert copies(whole, axes, ("pp", "sharding", "sep", "mp")) == 16
    assert copies(whole, axes, ("pp", "sharding", "sep", "mp"), owned=True) == 8
    assert copies(whole, axes, tuple(axes.degrees)) == 32
