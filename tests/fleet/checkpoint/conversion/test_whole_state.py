"""Whole states: entries taken, names changed, and the bytes of tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fleet.checkpoint.conversion.torch_tree import state_of_tree, tree_of_state
from fleet.checkpoint.conversion.whole_state import Described, WholeState, as_bytes, from_bytes
from fleet.errors import CheckpointError
from tests.helpers.many_tensors import bits, comparable, many_entries, many_tensors


def whole(tree: Any, key: str | None = None) -> WholeState:
    return state_of_tree(tree, "x", "a tree", key)


@pytest.mark.parametrize("name", sorted(many_tensors()))
def test_bytes_of_a_tensor_make_it_again(name: str) -> None:
    tensor = many_tensors()[name]
    described = Described(f"{tensor.dtype}".removeprefix("torch."), tuple(tensor.shape))
    assert bits(from_bytes(as_bytes(tensor), described)) == bits(tensor)


def test_one_entry_is_taken_and_the_others_are_named() -> None:
    state = whole(many_entries())
    model = state.only("model")
    assert model.keys() == ["model"]
    assert model.is_bare
    assert model.notes[0].startswith("left out: ")
    assert {*model.notes[0].removeprefix("left out: ").split(", ")} == {
        "optimizer",
        "scheduler",
        "epoch",
        "text",
        "rng",
    }
    with pytest.raises(CheckpointError, match=r"--key modle: x has no such entry.*Did you mean 'model'\?"):
        state.only("modle")


def test_new_names_reach_parameters_second_names_and_optimizers() -> None:
    state = whole(many_entries()).renamed({"conv.weight": "0.weight"})
    assert "model/conv.weight" in state.tensors
    assert "optimizer/conv.weight/exp_avg" in state.tensors
    assert (state.groups("optimizer") or [])[0]["params"][0] == "conv.weight"
    before = whole(many_entries())
    assert bits(state.read("optimizer/conv.weight/exp_avg")) == bits(before.read("optimizer/0.weight/exp_avg"))
    assert comparable(tree_of_state(state)["optimizer"]["state"]) == comparable(many_entries()["optimizer"]["state"])
    tied = whole(many_tensors()).renamed({"kept": "tied.first", "second": "tied.second"})
    assert tied.aliases == {"model/second": "model/kept"}


def test_names_can_be_exchanged() -> None:
    state = whole({"a": torch.zeros(1), "b": torch.ones(1)}).renamed({"a": "b", "b": "a"})
    assert comparable(tree_of_state(state)) == comparable({"a": torch.ones(1), "b": torch.zeros(1)})


def test_names_that_clash_or_are_unknown_are_refused() -> None:
    state = whole({"a": torch.zeros(1), "b": torch.ones(1), "_extra_state": 3})
    with pytest.raises(CheckpointError, match="two tensors would be called 'b'"):
        state.renamed({"b": "a"})
    with pytest.raises(CheckpointError, match="two tensors would be called '_extra_state'"):
        state.renamed({"_extra_state": "a"})
    with pytest.raises(CheckpointError, match="'a' would get two names"):
        state.renamed({"c": "a", "d": "a"})
    with pytest.raises(CheckpointError, match="'x' is no tensor"):
        state.renamed({"c": "x"})
