"""Parameters of recorded files in torch models: the recorded losses, transposes, masters, refusals."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fleet.checkpoint.paddle_files.paddle_names import propose_map
from fleet.checkpoint.paddle_files.paddle_pickle import PaddleState, read_paddle
from fleet.checkpoint.paddle_files.paddle_state import paddle_state
from fleet.errors import CheckpointError
from tests.helpers.paddle_files import CASES, RECORDED, VERSIONS, Mixed, mlp

DYNAMIC = [(version, name) for version in VERSIONS for name in CASES if name != "static"]


@pytest.mark.parametrize(("version", "name"), DYNAMIC)
def test_the_loss_of_the_saved_state(version: str, name: str) -> None:
    """In evaluation, so that running means and variances count."""
    path = RECORDED / version / f"{name}.pdparams"
    if not path.exists():
        assert (version, name) == ("2.6.2", "amsgrad")  # Adam of 2.6.2 has no amsgrad
        return
    model = CASES[name][0]()
    model.load_state_dict(paddle_state(path, model=model))
    model.eval()
    with np.load(path.with_suffix(".npz")) as recorded, torch.no_grad():
        x, y = torch.from_numpy(recorded["x"][0]), torch.from_numpy(recorded["y"][0])
        assert abs(nn.functional.cross_entropy(model(x), y).item() - recorded["evaluated"]) < 1e-6


def tied_head(is_head_first: bool = False) -> nn.ModuleDict:
    """Returns a square embedding and a head that share a weight."""
    words, head = nn.Embedding(4, 4), nn.Linear(4, 4, bias=False)
    head.weight = words.weight
    return nn.ModuleDict({"head": head, "words": words} if is_head_first else {"words": words, "head": head})


@pytest.mark.parametrize("is_head_first", [True, False])
@pytest.mark.parametrize("is_mapped", [True, False])
def test_a_head_tied_to_an_embedding_is_not_transposed(is_head_first: bool, is_mapped: bool) -> None:
    weight = torch.arange(16.0).view(4, 4)
    arrays = PaddleState({"words.weight": weight}, {"words.weight": "embedding_0.w_0"})
    names = {"words.weight": "words.weight", "head.weight": "words.weight"} if is_mapped else None
    model = tied_head(is_head_first)
    model.load_state_dict(paddle_state(arrays, names, model=model))
    assert torch.equal(model["words"].weight, weight)
    assert torch.equal(model["head"].weight, weight)


def test_a_tie_that_the_file_does_not_have_is_refused() -> None:
    weight, other = torch.arange(16.0).view(4, 4), torch.ones(4, 4)
    with pytest.raises(CheckpointError, match="are one parameter of the model.* which differ"):
        paddle_state(PaddleState({"words.weight": weight, "head.weight": other}), model=tied_head())
    own = dict.fromkeys(("words.weight", "head.weight"), "embedding_0.w_0")
    with pytest.raises(CheckpointError, match="does not transpose its weight"):
        paddle_state(PaddleState({"words.weight": weight, "head.weight": weight}, own), model=tied_head())


@pytest.mark.parametrize("version", VERSIONS)
def test_without_a_model_own_names_tell_what_is_transposed(version: str) -> None:
    path = RECORDED / version / "adamw.pdparams"
    model = Mixed()
    with_model = paddle_state(path, model=model)
    without = paddle_state(path)
    assert set(with_model) - set(without) == {"batch_norm.num_batches_tracked"}
    for name, value in without.items():
        assert torch.equal(value, with_model[name])
        assert value.is_contiguous()
    raw = read_paddle(path)
    assert torch.equal(without["hidden.weight"], raw["hidden.weight"].t())  # square
    assert torch.equal(without["words.weight"], raw["words.weight"])


def test_name_maps(tmp_path: Path) -> None:
    path = RECORDED / "2.6.2" / "static.pdparams"
    names = {"0.weight": "linear_0.w_0", "0.bias": "linear_0.b_0", "2.weight": "linear_1.w_0", "2.bias": "linear_1.b_0"}
    wanted = paddle_state(path, model=mlp())
    assert list(wanted) == list(names)
    assert paddle_state(path).keys() == set(names.values())
    for state in (paddle_state(path, names), paddle_state(path, names, model=mlp())):
        assert all(torch.equal(state[name], wanted[name]) for name in names)
    assert list(paddle_state(path, {"w": "linear_1.w_0"})) == ["w"]
    with pytest.raises(CheckpointError, match=r"names \['x'\].*does not have"):
        paddle_state(path, {"w": "x"})
    with pytest.raises(CheckpointError, match=r"no array for \['2.bias'\]"):
        paddle_state(path, {name: names[name] for name in list(names)[:3]}, model=mlp())
    with pytest.raises(CheckpointError, match=r"names \['9.bias'\].*model's state_dict"):
        paddle_state(path, names | {"9.bias": "linear_1.b_0"}, model=mlp())
    with pytest.raises(CheckpointError, match=r"'linear_1.b_0' of the file is \[4\]; '0.bias' of the model is \[8\]"):
        paddle_state(path, names | {"0.bias": "linear_1.b_0"}, model=mlp())


class Stack(nn.Module):
    """The layers of make.py's Mixed under other names, with both norms of one size."""

    def __init__(self) -> None:
        super().__init__()
        inner = Mixed()
        self.table, self.c, self.bn, self.ln = inner.words, inner.conv, inner.batch_norm, inner.norm
        self.dense, self.out = inner.hidden, inner.head


def test_more_than_one_possibility_is_refused_until_the_user_confirms(tmp_path: Path) -> None:
    state = read_paddle(RECORDED / "3.3.1" / "adamw.pdparams")
    path = tmp_path / "nameless.pdparams"  # without Paddle's own names, which tell the kinds of layers
    path.write_bytes(pickle.dumps({name: value.numpy() for name, value in state.items()}, 4))
    model = Stack()
    with pytest.raises(CheckpointError, match=r"(?s)bn\.weight: batch_norm\.weight, or norm\.weight.*name_map"):
        paddle_state(path, model=model)
    proposed = propose_map(model, read_paddle(path))
    assert set(proposed.unsure) == {"bn.weight", "ln.weight", "bn.bias", "ln.bias", "c.bias", "dense.bias"}
    loaded = paddle_state(path, proposed, model=model)
    assert torch.equal(loaded["dense.weight"], state["hidden.weight"].t())
    assert torch.equal(loaded["ln.bias"], state["norm.bias"])


def test_matrices_of_unknown_layers(tmp_path: Path) -> None:
    path = tmp_path / "own.pdparams"
    square = np.arange(9, dtype="f4").reshape(3, 3)
    path.write_bytes(pickle.dumps({"a": square, "b": square, "c": square[0]}, 4))
    with pytest.raises(CheckpointError, match=r"whether \['a', 'b'\] are weights of linear layers"):
        paddle_state(path)
    state = paddle_state(path, transpose=["b"])
    assert torch.equal(state["a"], state["b"].t())
    with pytest.raises(CheckpointError, match="only matrices"):
        paddle_state(path, transpose=["c"])
    for wrong in (["d"], "ab"):
        with pytest.raises(CheckpointError, match="must list names"):
            paddle_state(path, transpose=wrong)
    with pytest.raises(CheckpointError, match="without a model"):
        paddle_state(path, transpose=[], model=mlp())


def test_bfloat16_and_master_weights() -> None:
    path = RECORDED / "2.6.2" / "bfloat16.pdparams"
    with np.load(path.with_suffix(".npz")) as recorded:
        rounded = paddle_state(path, model=mlp())
        assert rounded["0.weight"].dtype == torch.bfloat16
        np.testing.assert_array_equal(rounded["2.weight"].float().numpy().T, recorded["2.weight"])
        whole = paddle_state(path, model=mlp(), masters=path.with_suffix(".pdopt"))
        assert whole["0.weight"].dtype == torch.float32
        np.testing.assert_array_equal(whole["2.weight"].numpy().T, recorded["master/linear_1.w_0"])
    with pytest.raises(CheckpointError, match="has no master weights"):
        paddle_state(path, masters=RECORDED / "2.6.2" / "adam.pdopt")
    with pytest.raises(CheckpointError, match=r"no parameter 'linear_0\.w_0'"):
        paddle_state(RECORDED / "2.6.2" / "rmsprop.pdparams", masters=path.with_suffix(".pdopt"))


def test_the_file_stays_as_it_is(tmp_path: Path) -> None:
    """Training on a loaded state, or writing to it, changes memory only."""
    path = tmp_path / "model.pdparams"
    shutil.copy(RECORDED / "3.3.1" / "adamw.pdparams", path)
    before = path.read_bytes()
    for value in paddle_state(path).values():
        value.zero_()
    assert path.read_bytes() == before
