"""Units of a sharded model: by size, by name, and which parameters can be divided."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fleet
from fleet.errors import ConfigError
from fleet.strategies.sharding.units import bytes_of, check_divisible, find_anchors, plan_units
from tests.helpers.checked_training import batch
from tests.helpers.workers import run_workers

KIB = 1024


def layer(kib: int) -> nn.Linear:
    """Returns a layer of so many KiB."""
    return nn.Linear(16, 16 * kib, bias=False)


class Model(nn.Module):
    """An embedding and a head that share a weight, blocks of 5 KiB in a list, attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 16)
        blocks = [nn.Sequential(layer(2), nn.LayerNorm(4), layer(3)) for _ in range(3)]
        self.body = nn.ModuleDict({"blocks": nn.ModuleList(blocks)})
        self.attention = nn.MultiheadAttention(16, 2, bias=False)
        self.head = nn.Linear(16, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns ``x``."""
        return x


BLOCKS = [f"body.blocks.{place}" for place in range(3)]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (64 * KIB, []),  # the root alone
        (6 * KIB, [*BLOCKS, "attention"]),
        (4 * KIB, [*(f"{block}{part}" for block in BLOCKS for part in (".0", ".2", "")), "attention"]),
        (1, [*(f"{block}{part}" for block in BLOCKS for part in (".0", ".1", ".2")), "attention"]),
    ],
)
def test_units_by_size(limit: float, expected: list[str]) -> None:
    """A.2 segment_broadcast_MB: the largest modules within it; no lists, no shared parameters."""
    assert plan_units(Model(), limit) == expected


def test_units_hold_the_limit_and_nothing_is_lost() -> None:
    """Every unit keeps to the limit unless it is one layer, and together with the root they hold everything."""
    model = Model()
    named = dict(model.named_modules())
    for limit in (1, 500, 2 * KIB, 3 * KIB, 5 * KIB, 11 * KIB):
        left = {id(p): p for p in model.parameters()}
        for name in plan_units(model, limit):
            own = [p for p in named[name].parameters() if id(p) in left]
            assert own, f"{name} is empty"
            whole = not any(True for _ in named[name].children()) or name == "attention"
            assert bytes_of(iter(own)) <= limit or whole
            for p in own:
                del left[id(p)]


def test_bytes_count_a_shared_parameter_once() -> None:
    """Sizes are those of the memory."""
    assert bytes_of(Model().parameters()) == 4 * (16 * 16 + 3 * (5 * 256 + 8) + 4 * 16 * 16)


def test_anchors() -> None:
    """A.2 segment_anchors: inner modules first; a wrong name is refused with the nearest."""
    assert find_anchors(Model(), ["body.blocks.1", "body.blocks.1.0", "attention"]) == [
        "body.blocks.1.0", "body.blocks.1", "attention",
    ]  # fmt: skip
    for name, text in (
        ("body.block.1", "names no module. Did you mean 'body.blocks.1'"),
        ("", "names no module"),
        ("body.blocks", "a ModuleList without forward"),
        ("head", "shares the parameter 'weight' with a module outside it"),
    ):
        with pytest.raises(ConfigError) as error:
            find_anchors(Model(), [name])
        assert text in str(error.value)


def test_what_cannot_be_divided() -> None:
    """A scalar parameter and one without a shape are refused by name."""
    model = nn.Module()
    model.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ConfigError, match="'scale' is a scalar"):
        check_divisible(model, 2)
    with pytest.raises(ConfigError, match="'weight' has no shape yet"):
        check_divisible(nn.LazyLinear(3), 3)
    check_divisible(Model(), 3)


class Twice(nn.Module):
    """Two branches that share a module, or one parameter."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        shared = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.a, self.b = (nn.Sequential(nn.Linear(4, 4), shared) for _ in range(2))
        if tied:
            self.b[0].weight = self.a[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) + self.b(x).sin()  # type: ignore[no-any-return]


def test_a_module_under_two_units_is_a_unit() -> None:
    """Issue 36: both units held its parameters, and torch ended with a text of its own."""
    assert find_anchors(Twice(), ["a", "b"]) == ["a.1", "a", "b"]
    assert find_anchors(Twice(), ["b", "a.1"]) == ["a.1", "b"]
    assert plan_units(Twice(), 100) == ["a.0", "a.1", "b.0"]
    assert plan_units(Twice(), 200) == ["a.1", "a", "b"]
    with pytest.raises(ConfigError, match=r"'0\.weight' with a module outside"):
        find_anchors(Twice(tied=True), ["a"])


def train_twice(rank: int, world_size: int) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for stage in (2, 3):
        for configs in (
            {"sharding_segment_strategy": "segment_anchors", "segment_anchors": ["a", "b"]},
            {"segment_broadcast_MB": 1e-5},
        ):
            strategy = fleet.DistributedStrategy()
            strategy.sharding = True
            strategy.sharding_configs = {"stage": stage, **configs}
            fleet.init(is_collective=True, strategy=strategy)
            net = Twice()
            optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1))
            model = fleet.distributed_model(net)
            for step in range(3):
                model(batch(step, rank)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            found[f"stage {stage}, {configs}"] = model.full_state_dict()
    return found


def test_a_module_under_two_parents_trains_as_in_one_process() -> None:
    net = Twice()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(3):
        net(torch.cat([batch(step, rank) for rank in range(2)])).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in run_workers(train_twice, 2, backend=None):
        for name, weights in found.items():
            torch.testing.assert_close(weights, dict(net.state_dict()), msg=name)
