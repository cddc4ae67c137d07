"""asp keeps two of every four weights at exactly zero, the same ones on every worker."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn

import fleet
from fleet.errors import CheckpointError, ConfigError
from fleet.strategies.asp import eligible_weights, smaller_two_of_four
from tests.helpers.workers import run_workers


def net() -> Any:
    """A convolution and two linear layers that asp takes; a convolution of 3 channels and a head of 2 it does not."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Flatten(),
        nn.Linear(32, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8), nn.Linear(8, 2),
    )  # fmt: skip


SPARSE = ("2.weight", "4.weight", "7.weight")


def start(seed: int = 0, optimizer: Any = None, **options: Any) -> tuple[Any, Any]:
    strategy = fleet.DistributedStrategy()
    strategy.update({"asp": True, **options})
    fleet.init(is_collective=True, strategy=strategy)
    torch.manual_seed(seed)
    module = net()
    make = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3))
    wrapped = fleet.distributed_optimizer(make(module.parameters()))
    return fleet.distributed_model(module), wrapped


def train(model: Any, optimizer: Any, steps: range, rank: int = 0) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(31 * step + rank)
        model(torch.randn(4, 3, 6, 6, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def zeros(model: Any) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    whole = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in state.items()}
    return {name: whole[name] == 0 for name in SPARSE}


def brute_force(weight: torch.Tensor) -> torch.Tensor:
    """Returns the same mask by trying all six pairs of every four."""
    dropped = torch.zeros_like(weight, dtype=torch.bool)
    rest = [range(size) for dim, size in enumerate(weight.shape) if dim != 1]
    for place in itertools.product(*rest):
        for first in range(0, weight.shape[1], 4):

            def at(i: int, place: Any = place, first: int = first) -> tuple[int, ...]:
                return (place[0], first + i, *place[1:])

            pairs = itertools.combinations(range(4), 2)
            best = max(pairs, key=lambda pair: sorted((abs(float(weight[at(i)])) for i in pair), reverse=True))
            for i in set(range(4)) - set(best):
                dropped[at(i)] = True
    return dropped


@pytest.mark.parametrize("shape", [(8, 16), (8, 16, 3, 3), (16, 32, 1, 1)])
def test_mask_is_that_of_the_largest_two(shape: tuple[int, ...]) -> None:
    """A.1 asp: masks equal an exhaustive search, also with equal magnitudes, along the input dim."""
    torch.manual_seed(2)
    for weight in (torch.randn(shape), torch.randint(-2, 3, shape).float(), torch.zeros(shape)):
        found = smaller_two_of_four(weight)
        kept = weight.abs().masked_fill(found, 0).sum()
        assert kept == weight.abs().masked_fill(brute_force(weight), 0).sum()
        assert torch.equal(found, brute_force(weight))
        assert found.is_contiguous()


def test_which_layers() -> None:
    """A.1 asp: the rule of NVIDIA's ASP, exclusion by name and pattern, shared weights, frozen weights."""
    model = net()
    by_name = dict(model.named_parameters())
    assert eligible_weights(model, ()) == [by_name[name] for name in SPARSE]
    assert eligible_weights(model, ("4",)) == [by_name["2.weight"], by_name["7.weight"]]
    assert eligible_weights(model, ("[24]",)) == [by_name["7.weight"]]
    nested = nn.ModuleDict({"body": net(), "tail": nn.Linear(16, 8)})
    nested["tail"].weight = nested["body"][7].weight
    assert eligible_weights(nested, ("body",)) == []  # the tail shares a weight with a layer that stays dense
    assert eligible_weights(nn.Conv2d(64, 64, 3, groups=8), ()) == []  # 8 channels in each group
    with pytest.raises(ConfigError, match=r"'bodi', which names no module. Did you mean 'body'"):
        eligible_weights(nested, ("bodi",))


def test_a_model_without_such_layers_is_refused() -> None:
    """A.1 asp: nothing is ignored; a model that asp cannot act on is an error."""
    strategy = fleet.DistributedStrategy()
    strategy.asp = True
    fleet.init(is_collective=True, strategy=strategy)
    with pytest.raises(ConfigError, match="finds no weight in Linear"):
        fleet.distributed_model(nn.Linear(3, 8))


def test_zeros_stay_exactly_through_training() -> None:
    """A.1 asp: masks come from the weights at the first forward, loaded ones included; then zeros never move."""
    model, optimizer = start()
    torch.manual_seed(9)
    pretrained = net().state_dict()
    model.load_state_dict(pretrained)
    assert not any(mask.any() for mask in zeros(model).values())
    train(model, optimizer, range(1))
    expected = {name: brute_force(pretrained[name]) for name in SPARSE}
    for step in range(1, 6):
        found = zeros(model)
        assert all(torch.equal(found[name], expected[name]) for name in SPARSE), step
        train(model, optimizer, range(step, step + 1))
    dense = {name: value for name, value in model.state_dict().items() if name.endswith("weight")}
    assert not any((value == 0).any() for name, value in dense.items() if name not in SPARSE)
    model.load_state_dict(pretrained)  # weights of another time get the same masks
    assert all(torch.equal(zeros(model)[name], expected[name]) for name in SPARSE)


def test_equals_projected_training() -> None:
    """A.1 asp: the kept weights train as with the same masks applied by hand after each step."""
    model, optimizer = start()
    train(model, optimizer, range(5))
    torch.manual_seed(0)
    plain = net()
    by_hand = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    masks = {name: brute_force(p.detach()) for name, p in plain.named_parameters() if name in SPARSE}

    def project() -> None:
        for name, mask in masks.items():
            plain.get_parameter(name).data[mask] = 0.0

    project()
    for step in range(5):
        plain(torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(31 * step))).square().mean().backward()
        by_hand.step()
        by_hand.zero_grad()
        project()
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), atol=0, rtol=0)


@pytest.mark.parametrize(
    "options",
    [
        {"lars": True},
        {"lamb": True, "optimizer": torch.optim.Adam},
        {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}},
        {"amp": True},
        {"amp": True, "amp_configs": {"use_pure_bf16": True}},
        {"recompute": True, "recompute_configs": {"checkpoints": ["4"]}},
        {"build_strategy": {"fuse_all_optimizer_ops": True}},
    ],
)
def test_with_other_options(options: dict[str, Any]) -> None:
    """A.5: the white list of asp."""
    model, optimizer = start(**options)
    train(model, optimizer, range(1))
    first = {name: mask.clone() for name, mask in zeros(model).items()}
    assert all(int(mask.sum()) == mask.numel() // 2 for mask in first.values())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    train(model, optimizer, range(1, 5))
    assert all(torch.equal(zeros(model)[name], first[name]) for name in SPARSE)
    assert any(not torch.equal(before[name], model.state_dict()[name]) for name in SPARSE)


@pytest.mark.parametrize("optimizer_first", [True, False])
def test_state_round_trips_exactly(optimizer_first: bool) -> None:
    """A.1 asp: masks are in state_dict(); a resumed training has the same zeros and the same numbers."""
    model, optimizer = start()
    train(model, optimizer, range(3))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    state = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, range(3, 6))
    again, other = start(seed=5)
    if optimizer_first:
        other.load_state_dict(state)
        again.load_state_dict(weights)
    else:
        again.load_state_dict(weights)
        other.load_state_dict(state)
    train(again, other, range(3, 6))
    torch.testing.assert_close(model.state_dict(), again.state_dict(), atol=0, rtol=0)
    torch.optim.SGD(net().parameters(), lr=0.1, momentum=0.9).load_state_dict(state)


def test_a_state_may_come_before_the_model() -> None:
    """A.1 asp: the calls come in any order."""
    model, optimizer = start()
    train(model, optimizer, range(2))
    state, expected = optimizer.state_dict(), zeros(model)
    module = net()
    fleet.init(is_collective=True, strategy=fleet.session.options)
    other = fleet.distributed_optimizer(torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9))
    other.load_state_dict(state)
    again = fleet.distributed_model(module)
    assert all(torch.equal(zeros(again)[name], expected[name]) for name in SPARSE)


def test_a_state_that_does_not_fit_is_refused() -> None:
    """A.1 asp: a mask of another shape, another pattern or for a dense layer is an error that changes nothing."""
    model, optimizer = start()
    train(model, optimizer, range(2))
    state = optimizer.state_dict()
    good = state["asp"]["dropped"]
    for name, mask, message in (
        ("0:4.weight", torch.zeros(16, 32, dtype=torch.bool), "two of every four"),
        ("0:4.weight", good["0:7.weight"], r"\(16, 32\)"),
        ("0:8.weight", good["0:7.weight"], "keeps dense here"),
    ):
        before = zeros(model)
        with pytest.raises(CheckpointError, match=message):
            optimizer.load_state_dict({**state, "asp": {"dropped": {**good, name: mask}}})
        assert all(torch.equal(zeros(model)[n], before[n]) for n in SPARSE)


def train_on(rank: int, world_size: int, options: dict[str, Any]) -> dict[str, Any]:
    """Starts each worker from other weights and data."""
    model, optimizer = start(seed=rank, **options)
    train(model, optimizer, range(4), rank)
    return {"zeros": zeros(model), "own": brute_force(net_of(rank).state_dict()["4.weight"])}


def net_of(seed: int) -> Any:
    torch.manual_seed(seed)
    return net()


def sharded(stage: int) -> dict[str, Any]:
    return {"sharding": True, "sharding_configs": {"sharding_degree": 2, "stage": stage}}


@pytest.mark.parametrize(
    "options",
    [{}, {"localsgd": True, "localsgd_configs": {"k_steps": 3}}, sharded(1), sharded(2), sharded(3)],
)
def test_workers_have_the_masks_of_rank_0(options: dict[str, Any]) -> None:
    """A.1 asp: from rank 0's weights, under data parallel and where workers train by themselves."""
    first, second = run_workers(train_on, 2, options, backend=None)
    for name in SPARSE:
        assert torch.equal(first["zeros"][name], second["zeros"][name])
    assert torch.equal(second["zeros"]["4.weight"], first["own"])
    assert not torch.equal(first["own"], second["own"])
