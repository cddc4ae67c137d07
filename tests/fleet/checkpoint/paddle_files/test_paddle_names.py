"""Name maps: equal names, the only possibility, a proposal by order, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fleet.checkpoint.paddle_files.paddle_names import (
    entries_of,
    paddle_kind,
    propose_map,
    read_name_map,
    refuse_unsure,
    torch_name,
)
from fleet.checkpoint.paddle_files.paddle_pickle import PaddleState, read_paddle
from fleet.errors import CheckpointError
from tests.helpers.paddle_files import RECORDED, Mixed, mlp

MIXED = RECORDED / "3.3.1" / "adamw.pdparams"


def renamed(state: PaddleState) -> PaddleState:
    """Returns the state as a static program would name it."""
    return PaddleState({state.parameter_names[name]: value for name, value in state.items()})


class Renamed(nn.Module):
    """Mixed with other names, in another order."""

    def __init__(self) -> None:
        super().__init__()
        inner = Mixed()
        self.out, self.dense, self.ln = inner.head, inner.hidden, inner.norm
        self.bn, self.c, self.table = inner.batch_norm, inner.conv, inner.words


def test_equal_names_decide() -> None:
    proposed = propose_map(Mixed(), read_paddle(MIXED))
    assert proposed.unsure == {}
    assert proposed["batch_norm.running_var"] == "batch_norm._variance"
    assert proposed["head.weight"] == "head.weight"
    assert "batch_norm.num_batches_tracked" not in proposed


@pytest.mark.parametrize("state", [read_paddle(MIXED), renamed(read_paddle(MIXED))], ids=["names", "own names"])
def test_roles_shapes_and_layers_decide(state: PaddleState) -> None:
    """Paddle's own names tell norms, biases and running values of one shape apart."""
    proposed = propose_map(Renamed(), state)
    wanted = {
        "out.weight": "linear_1.w_0",
        "out.bias": "linear_1.b_0",
        "dense.weight": "linear_0.w_0",
        "dense.bias": "linear_0.b_0",
        "ln.weight": "layer_norm_0.w_0",
        "ln.bias": "layer_norm_0.b_0",
        "bn.weight": "batch_norm1d_0.w_0",
        "bn.bias": "batch_norm1d_0.b_0",
        "bn.running_mean": "batch_norm1d_0.w_1",
        "bn.running_var": "batch_norm1d_0.w_2",
        "c.weight": "conv1d_0.w_0",
        "c.bias": "conv1d_0.b_0",
        "table.weight": "embedding_0.w_0",
    }
    own = state.parameter_names
    assert {name: own.get(theirs, theirs) for name, theirs in proposed.items()} == wanted
    assert proposed.unsure == {}


def blocks() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))


BLOCKS = PaddleState(
    {
        name: torch.zeros(shape)
        for n, out in enumerate((4, 4, 2))
        for name, shape in ((f"linear_{n}.w_0", (4, out)), (f"linear_{n}.b_0", (out,)))
    }
)


def test_several_possibilities_are_proposed_by_order_and_not_taken(tmp_path: Path) -> None:
    proposed = propose_map(blocks(), BLOCKS)
    assert dict(proposed) == {f"{n}.{k}": f"linear_{n}.{k[0]}_0" for n in range(3) for k in ("weight", "bias")}
    assert proposed.unsure == {
        f"{n}.{kind}": [f"linear_0.{kind[0]}_0", f"linear_1.{kind[0]}_0"]
        for n in range(2)
        for kind in ("weight", "bias")
    }
    with pytest.raises(
        CheckpointError, match=r"(?s)do not decide.*0\.weight: linear_0\.w_0, or linear_1\.w_0.*name_map"
    ):
        refuse_unsure(proposed, "x.pdparams")
    proposed.write(tmp_path / "names.json")
    assert read_name_map(tmp_path / "names.json") == proposed


def lstm_arrays(is_changed: bool = False) -> PaddleState:
    """Returns what Paddle saves of an LSTM: each parameter under two names."""
    inner = nn.LSTM(3, 2).state_dict()
    cells = {f"rnn.0.cell.{name.removesuffix('_l0')}": value + is_changed for name, value in inner.items()}
    own = {name: f"lstm_cell_0.{name}" for name in inner}
    names = {f"rnn.{name}": own[name] for name in inner}
    names |= {f"rnn.0.cell.{name.removesuffix('_l0')}": own[name] for name in inner}
    return PaddleState({**{f"rnn.{name}": value for name, value in inner.items()}, **cells}, names)


@pytest.mark.parametrize("name", ["rnn", "encoder"])
def test_a_parameter_with_two_names_in_the_file_is_taken_once(name: str) -> None:
    arrays = lstm_arrays()
    proposed = propose_map(nn.ModuleDict({name: nn.LSTM(3, 2)}), arrays)
    assert {ours: proposed[ours] for ours in proposed if "weight" in ours} == {
        f"{name}.weight_ih_l0": "rnn.weight_ih_l0", f"{name}.weight_hh_l0": "rnn.weight_hh_l0",
    }  # fmt: skip
    assert len(proposed) == 4
    assert proposed.unsure == {}


def test_other_numbers_under_one_own_name_are_not_left_out() -> None:
    with pytest.raises(CheckpointError, match=r"no entry for rnn\.0\.cell\.weight_ih"):
        propose_map(nn.ModuleDict({"rnn": nn.LSTM(3, 2)}), lstm_arrays(is_changed=True))


def test_what_fits_nothing_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"fits '0\.weight'.*a weight that Paddle would have as \[4, 7\]"):
        propose_map(nn.Sequential(nn.Linear(4, 7)), BLOCKS)
    with pytest.raises(CheckpointError, match=r"no entry for linear_.* of the file"):
        propose_map(nn.Sequential(nn.Linear(4, 2)), BLOCKS)
    with pytest.raises(CheckpointError, match=r"fits '2\.weight'.*linear_0\.w_0, linear_1\.w_0 would"):
        propose_map(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 2)), BLOCKS)


def test_equal_names_of_other_shapes_are_refused() -> None:
    state = read_paddle(RECORDED / "3.3.1" / "adam.pdparams")
    with pytest.raises(CheckpointError, match=r"of the file is \[8, 4\]; .* is \[5, 8\], which is \[out, in\]"):
        propose_map(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 5)), state)


def test_tied_weights_take_one_array() -> None:
    model = nn.ModuleDict({"words": nn.Embedding(6, 4), "out": nn.Linear(4, 6, bias=False)})
    model["out"].weight = model["words"].weight
    proposed = propose_map(model, PaddleState({"embedding_0.w_0": torch.zeros(6, 4)}))
    assert dict(proposed) == {"words.weight": "embedding_0.w_0", "out.weight": "embedding_0.w_0"}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("linear_0.w_0", "linear"),
        ("encoder/column_parallel_linear_12.w_0", "linear"),
        ("fc_3.w_0", "linear"),
        ("embedding_0.w_0", "embedding"),
        ("vocab_parallel_embedding_0.w_0", "embedding"),
        ("sync_batch_norm_0.w_1", "batch_norm"),
        ("conv2d_transpose_0.w_0", "conv"),
        ("lstm_cell_0.w_0", "other"),
        ("my_weight", ""),
        ("fc.weight", ""),
    ],
)
def test_own_names_tell_the_layer(name: str, kind: str) -> None:
    assert paddle_kind(name) == kind


def test_entries_and_names() -> None:
    entries = entries_of(mlp())
    assert entries["2.weight"].shape == (8, 4)
    assert entries["0.weight"].is_transposed
    assert not entries_of(nn.Embedding(3, 3))["weight"].is_transposed
    assert torch_name("a._mean") == "a.running_mean"
    assert torch_name("_variance") == "running_var"
    attention = entries_of(nn.MultiheadAttention(8, 2))
    assert attention["out_proj.weight"].is_transposed
    assert not attention["in_proj_weight"].is_transposed


@pytest.mark.parametrize("text", ["[1]", '{"a": 1}', "{", ""])
def test_wrong_name_maps(text: str, tmp_path: Path) -> None:
    (tmp_path / "names.json").write_text(text)
    with pytest.raises(CheckpointError, match="name_map="):
        read_name_map(tmp_path / "names.json")
    with pytest.raises(CheckpointError, match="No such file"):
        read_name_map(tmp_path / "none.json")
