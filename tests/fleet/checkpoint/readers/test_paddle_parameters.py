"""Paddle's files of parameters are read as states, and its files of optimizers are refused."""

from __future__ import annotations

import pytest

from fleet.checkpoint.conversion.formats import open_state
from fleet.checkpoint.conversion.torch_tree import tree_of_state
from fleet.checkpoint.paddle_files.paddle_state import paddle_state
from fleet.errors import CheckpointError
from tests.helpers.many_tensors import comparable
from tests.helpers.sources import ROOT


def test_paddles_files_go_to_their_readers() -> None:
    path = ROOT / "tests/data/paddle_checkpoint/3.3.1/adam.pdparams"
    theirs = paddle_state(path)
    state = open_state(str(path))
    assert state.kind == "a Paddle file"
    assert comparable(tree_of_state(state)) == comparable(theirs)
    name = next(iter(theirs))
    renamed = open_state(str(path), "net", {"other": name})
    assert list(renamed.tensors) == ["net/other"]
    with pytest.raises(CheckpointError, match=r"paddle_optimizer_state\(\)"):
        open_state(str(path.with_suffix(".pdopt")))
