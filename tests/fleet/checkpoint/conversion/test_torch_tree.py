"""Nested dictionaries of torch programs and flat names, both ways; whose state a number of an optimizer is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fleet.checkpoint.conversion.torch_tree import state_of_tree, tree_of_state
from fleet.checkpoint.conversion.whole_state import WholeState
from fleet.errors import CheckpointError
from tests.helpers.many_tensors import comparable, many_entries


def stepped(model: nn.Module, make: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    optimizer = make(*arguments, **settings)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def read(tree: Any, key: str | None = None, in_order: bool = False) -> WholeState:
    return state_of_tree(tree, "x", "a tree", key, in_order)


def groups_of(tree: Any, in_order: bool = False) -> list[list[str]]:
    return [group["params"] for group in read(tree, None, in_order).groups("optimizer") or []]


def numbered(tree: Any) -> Any:
    """Returns ``tree`` with an optimizer that was built from parameters without names."""
    groups = [
        {name: value for name, value in group.items() if name != "param_names"}
        for group in tree["optimizer"]["param_groups"]
    ]
    return {**tree, "optimizer": {**tree["optimizer"], "param_groups": groups}}


def test_names_and_kinds_of_entries() -> None:
    state = read(many_entries())
    assert sorted(state.keys()) == ["epoch", "model", "optimizer", "rng", "scheduler", "text"]
    assert {key: kind for key, (kind, _) in state.kinds.items()} == {
        "model": "module", "optimizer": "optimizer", "scheduler": "value", "epoch": "value", "text": "value",
        "rng": "value",
    }  # fmt: skip
    assert state.tensors["optimizer/0.weight/exp_avg"].shape == (2, 1, 3, 3)
    assert not state.is_bare
    assert comparable(tree_of_state(state)) == comparable(many_entries())


def test_a_lone_state_dict_becomes_one_entry() -> None:
    model = nn.Linear(2, 3)
    state = read({**model.state_dict(), "_extra_state": {"version": (1, 2)}}, "net")
    assert list(state.tensors) == ["net/weight", "net/bias"]
    assert state.values == {"net/_extra_state": {"version": {"$": "tuple", "items": [1, 2]}}}
    assert tree_of_state(state)["_extra_state"] == {"version": (1, 2)}


def test_parameters_are_named_by_the_model_in_its_order_past_its_buffers_if_the_user_says_so() -> None:
    tree = many_entries()
    names = [name for name in tree["model"] if name.endswith((".weight", ".bias"))]
    assert groups_of(numbered(tree), in_order=True) == groups_of(tree) == [names]
    assert comparable(tree_of_state(read(numbered(tree), None, True))) == comparable(tree)


def test_names_are_kept_when_the_order_of_the_model_is_not() -> None:
    model = nn.Sequential(nn.Linear(2, 2).bfloat16(), nn.Linear(2, 2))
    tree = {"model": model.state_dict(), "optimizer": stepped(model, torch.optim.Adam, model.parameters()).state_dict()}
    made = tree_of_state(read(tree, None, True))
    made["model"] = dict(reversed(made["model"].items()))
    assert groups_of(made) == groups_of(tree, True) == [["0.weight", "0.bias", "1.weight", "1.bias"]]


def test_names_that_the_optimizer_has_count() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    turned = [*model.named_parameters()][::-1]
    tree = {"model": model.state_dict(), "optimizer": stepped(model, torch.optim.Adam, turned).state_dict()}
    assert groups_of(tree) == [["1.bias", "1.weight", "0.bias", "0.weight"]]
    assert comparable(tree_of_state(read(tree))) == comparable(tree)


def test_tied_parameters_count_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    optimizer = stepped(model, torch.optim.Adam, model.parameters())
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert groups_of(tree, in_order=True) == [["0.weight", "0.bias", "1.bias"]]


@pytest.mark.parametrize("case", ["two groups", "a buffer like a parameter", "another model", "no model", "turned"])
def test_parameters_without_names_keep_their_places(case: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
    groups: Any = model.parameters()
    state = model.state_dict()
    if case == "two groups":
        groups = [{"params": [model[1].weight, model[1].bias]}, {"params": [*model[0].parameters()]}]
    elif case == "a buffer like a parameter":
        state = {**state, "ema": torch.ones(2, 2)}
    elif case == "another model":
        state = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 4)).state_dict()
    elif case == "turned":
        groups = [*model.parameters()][::-1]
    tree = {"optimizer": stepped(model, torch.optim.Adam, groups).state_dict(), "epoch": 1}
    if case != "no model":
        tree["model"] = state
    assert all(name.startswith("#") for group in groups_of(tree) for name in group)
    assert "which parameters its 4 numbers stand for" in read(tree).notes[0]
    assert comparable(tree_of_state(read(tree))) == comparable(tree)
    with pytest.raises(CheckpointError, match="--in-order: x: .*one group and one model are needed"):
        read(tree, None, True)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, 0.1), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, amsgrad=True), lambda p: torch.optim.Adagrad(p), lambda p: torch.optim.RMSprop(p),
        lambda p: torch.optim.Adafactor(p), lambda p: torch.optim.Rprop(p), lambda p: torch.optim.NAdam(p),
    ],
)  # fmt: skip
def test_every_optimizer_comes_back(make: Callable[..., Any]) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    optimizer = stepped(model, make, model.named_parameters())
    tree = {"model": model.state_dict(), "optimizer": {**optimizer.state_dict(), "amp": {"scale": torch.ones(1)}}}
    assert comparable(tree_of_state(read(tree))) == comparable(tree)


def test_lbfgs_whose_state_is_no_tensors_comes_back() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.LBFGS(model.named_parameters(), max_iter=2)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert comparable(tree_of_state(read(tree))) == comparable(tree)


@pytest.mark.parametrize("key", ["", "a/b", "@0", "#x", "+amp"])
def test_an_entry_with_another_meaning_is_refused(key: str) -> None:
    with pytest.raises(CheckpointError, match="cannot be an entry"):
        read({key: {"w": torch.ones(1)}, "epoch": 1})


def test_an_optimizer_that_contradicts_itself_is_refused() -> None:
    group = {"lr": 1.0, "params": [0]}
    with pytest.raises(CheckpointError, match="a state of parameter 5"):
        read({"optimizer": {"state": {5: {"m": torch.ones(1)}}, "param_groups": [group]}})
    with pytest.raises(CheckpointError, match="'a/b'"):
        read({"optimizer": {"state": {0: {"a/b": torch.ones(1)}}, "param_groups": [group]}})
    state = read({"optimizer": {"state": {0: {"m": torch.ones(1)}}, "param_groups": [group]}})
    state.values["optimizer/groups@0"][0]["params"] = ["other"]
    with pytest.raises(CheckpointError, match="none of its groups"):
        tree_of_state(state)


def test_an_entry_that_is_two_things_is_refused() -> None:
    state = read({"model": {"w": torch.ones(1)}, "epoch": 1})
    state.values["model"] = 3
    with pytest.raises(CheckpointError, match="'model' is a value"):
        tree_of_state(state)
