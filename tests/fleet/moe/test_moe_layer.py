"""Experts (surface 12): what one process with all experts computes is what every mesh computes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fleet
from fleet.errors import ConfigError, UnsupportedOptionError
from fleet.moe.moe_layer import ExpertList, MoELayer
from fleet.strategies._shared.experts import is_expert
from tests.helpers import expert_training as training
from tests.helpers.workers import run_workers

GSHARD, SWITCH = {"type": "gshard", "top_k": 2}, {"type": "switch", "top_k": 1}
TWO = [({"sharding": 2, "ep": 2}, GSHARD), ({"mp": 2, "ep": 2}, SWITCH), ({"dp": 2}, GSHARD)]
FOUR = [({"sharding": 4, "ep": 2, "moe_sharding": 2}, GSHARD)]
MORE = [
    ({"sharding": 2, "mp": 2, "ep": 2, "moe_sharding": 2}, SWITCH),
    ({"sharding": 4, "ep": 4}, {"type": "naive", "top_k": 2}),
]


@pytest.mark.parametrize(
    ("jobs", "world_size"), [(TWO, 2), (FOUR, 4), pytest.param(MORE, 4, marks=pytest.mark.slow)], ids=["2", "4", "more"]
)
def test_trains_as_one_process(jobs: list[Any], world_size: int) -> None:
    """Surface 12: losses (gates' too), norms and every gradient, also of an expert without tokens, do not change.

    Capacities and losses of gates count all tokens (P20); experts are exchanged over moe_sharding and clipped once.
    Whole states have the names and values of one process.
    """
    starts = training.start_weights(GSHARD)
    expected = {gate["type"]: training.alone(gate, starts) for _, gate in jobs}
    for rank, results in enumerate(run_workers(training.on_mesh, world_size, jobs, starts, backend=None)):
        for (degrees, gate), found in zip(jobs, results, strict=True):
            apart = training.differences(found, expected[gate["type"]])
            assert max(apart.values()) < 1e-5, (rank, degrees, apart)
            idle = [name for name in found["gradients"] if ".experts.3." in name]
            assert all(not found["gradients"][name].any() for name in idle)
            assert (found["experts"] > 0) == ("ep" in degrees)
            assert found["reloaded"]
            everything = len(found["weights"])
            assert found["held"] < everything if degrees.get("sharding", 1) > 1 else found["held"] == everything


def test_a_plain_layer_is_the_weighted_sum() -> None:
    """Surface 12: the weighted sum by the raw top-k values, whatever the shape of the input."""
    torch.manual_seed(0)
    layer = MoELayer(8, [nn.Linear(8, 8) for _ in range(3)], gate={"type": "naive", "top_k": 2})
    x = torch.randn(2, 5, 8)
    value, chosen = layer.gate(x.view(-1, 8))
    expected = [
        sum(v * layer.experts[int(e)](t) for v, e in zip(vs, es, strict=True))
        for t, vs, es in zip(x.view(-1, 8), value, chosen, strict=True)
    ]
    torch.testing.assert_close(layer(x).view(-1, 8), torch.stack(expected))
    assert sorted({name.split(".")[1] for name, _ in layer.named_parameters() if name.startswith("exp")}) == list("012")
    assert not any(map(is_expert, layer.parameters()))  # data parallel exchanges them


def test_an_expert_without_tokens_gets_zeros() -> None:
    """Surface 12: it is not called, and its gradient is not missing, also where no expert has tokens."""
    layer = MoELayer(4, [nn.Linear(4, 4) for _ in range(2)], gate={"type": "naive", "top_k": 1})
    layer.gate.gate.weight.data.zero_()
    layer.gate.gate.bias.data.copy_(torch.tensor([1.0, 0.0]))
    layer(torch.randn(3, 4)).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
    assert layer.experts[1].weight.grad is not None
    assert not layer.experts[1].weight.grad.any()
    layer.zero_grad()
    layer(torch.randn(0, 4)).sum().backward()
    assert all(p.grad is not None for p in layer.experts.parameters())


def test_recompute_gives_the_same_gradients() -> None:
    """Surface 12: recompute_interval runs the experts again."""
    torch.manual_seed(0)
    layer = MoELayer(8, [nn.Linear(8, 8) for _ in range(3)], gate=SWITCH)
    layer.gate.switch_eps = 0.0
    again = copy.deepcopy(layer)
    again.recompute_interval = 1
    x = torch.randn(6, 8)
    for one in (layer, again):
        (one(x).square().sum() + one.gate.get_loss()).backward()
        assert one.gate.get_loss() is None
    for a, b in zip(layer.parameters(), again.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_wrong_arguments() -> None:
    """Each names what was given and what fits."""
    experts = [nn.Linear(4, 4)] * 2
    with pytest.raises(ConfigError, match="at least one torch.nn.Module"):
        MoELayer(4, [])
    with pytest.raises(TypeError, match="derives from NaiveGate"):
        MoELayer(4, experts, gate=nn.Linear(4, 2))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="takes the keys 'type'"):
        MoELayer(4, experts, gate={"type": "gsard"})
    with pytest.raises(ConfigError, match="the gate chooses among 3 experts"):
        MoELayer(4, experts, gate=fleet.moe.NaiveGate(4, 3, 1))
    with pytest.raises(UnsupportedOptionError, match="offload"):
        MoELayer(4, experts, recompute_ctx={"offload": True})
    assert len(ExpertList(experts, 2)) == 2


def test_options_that_need_whole_models_are_refused() -> None:
    """Options that take every worker to hold every parameter are refused with experts that are divided."""
    from fleet.strategies._declare.strategy_plan import problems

    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"sharding_degree": 2, "ep_degree": 2}
    assert problems(strategy, 2) == []
    strategy.sharding_configs = {"stage": 2}
    assert any("each expert is on some of them only" in str(error) for error in problems(strategy, 2))
    strategy.sharding_configs = {"stage": 1}
    strategy.hybrid_configs = {"mp_degree": 2, "sharding_degree": 1}
    strategy.localsgd = True
    assert any("'localsgd' is on" in str(error) for error in problems(strategy, 2))
