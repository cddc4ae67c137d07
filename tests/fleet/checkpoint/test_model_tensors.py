"""The state of a module: names, tied weights, buffers, extra state, and what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fleet import checkpoint
from fleet.checkpoint.index import Index
from fleet.checkpoint.model_tensors import refuse
from fleet.errors import CheckpointError, ConfigError


class Tied(nn.Module):
    """An embedding and a head that may share a weight."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight


class Counting(nn.Linear):
    """A layer with a state beside its tensors."""

    count = 3

    def get_extra_state(self) -> Any:
        """Returns a number and a tensor."""
        return {"count": self.count, "seen": torch.arange(self.count)}

    def set_extra_state(self, state: Any) -> None:
        """Takes them."""
        self.count = state["count"]
        assert torch.equal(state["seen"], torch.arange(self.count))


def same(one: nn.Module, other: nn.Module) -> bool:
    """Returns whether two modules have equal tensors."""
    a, b = one.state_dict(), other.state_dict()
    return all(torch.equal(a[name], b[name]) for name in a if isinstance(a[name], torch.Tensor))


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(2, 2)),
        lambda: Tied(),
        lambda: Tied(tied=False),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)),
        lambda: nn.Linear(3, 4).to(torch.bfloat16),
        lambda: torch.optim.swa_utils.AveragedModel(nn.Linear(3, 4)),
        lambda: nn.ModuleDict({"one": nn.Linear(2, 2), "two": nn.LSTM(2, 3)}),
    ],
)
def test_a_module_comes_back(tmp_path: Path, make: Any) -> None:
    model, other = make(), make()
    with torch.no_grad():
        for number, tensor in enumerate(model.state_dict().values()):
            tensor.fill_(number + 2)
    checkpoint.save(tmp_path, {"model": model})
    pointers = [tensor.data_ptr() for tensor in other.state_dict().values()]
    assert checkpoint.load(tmp_path, {"model": other})["model"] is other
    assert same(model, other)
    assert pointers == [tensor.data_ptr() for tensor in other.state_dict().values()], "the memory is the module's own"


def test_a_tied_weight_is_there_once(tmp_path: Path) -> None:
    model = Tied()
    checkpoint.save(tmp_path, {"model": model})
    (file,) = tmp_path.glob("data-*")
    assert file.stat().st_size < 2 * model.embed.weight.numel() * 4 + 200
    apart = Tied(tied=False)
    checkpoint.load(tmp_path, {"model": apart})
    assert torch.equal(apart.head.weight, model.embed.weight)
    assert torch.equal(apart.embed.weight, model.embed.weight)


@pytest.mark.parametrize("left", ["embed.weight", "head.weight"])
def test_one_name_of_a_tied_weight_is_enough(tmp_path: Path, left: str) -> None:
    checkpoint.save(tmp_path, {"model": nn.ParameterDict({left.partition(".")[0]: nn.Embedding(5, 3).weight})})
    index = Index.from_json((tmp_path / "index.json").read_bytes(), "")
    index.tensors = {f"model/{left}": entry for entry in index.tensors.values()}
    (tmp_path / "index.json").write_text(index.to_json())
    tied, found = Tied(), checkpoint.load(tmp_path)["model"]
    checkpoint.load(tmp_path, {"model": tied})
    assert torch.equal(tied.head.weight, found[left])
    with pytest.raises(CheckpointError, match="missing"):
        checkpoint.load(tmp_path, {"model": Tied(tied=False)})


def test_weights_that_came_apart_do_not_become_one(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"model": Tied(tied=False)})
    with pytest.raises(CheckpointError, match="are one parameter here and differ in the checkpoint"):
        checkpoint.load(tmp_path, {"model": Tied()})


def test_extra_state_and_hooks_of_loading(tmp_path: Path) -> None:
    model, other = Counting(2, 2), Counting(2, 2)
    model.count = 7
    seen = []
    other.register_load_state_dict_post_hook(lambda module, keys: seen.append(module))
    checkpoint.save(tmp_path, {"model": model})
    checkpoint.load(tmp_path, {"model": other})
    assert other.count == 7
    assert seen == [other]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_module_has_the_names_of_its_own(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    checkpoint.save(tmp_path, {"model": torch.compile(model)})
    other = nn.Linear(2, 2)
    checkpoint.load(tmp_path, {"model": other})
    assert same(model, other)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (nn.Sequential(nn.Linear(3, 2)), r"missing: \['model/0.weight', 'model/0.bias'\] \(2 in all\)"),
        (nn.Linear(3, 2, bias=False), r"not of this model: \['model/bias'\] \(1 in all\)"),
        (nn.Linear(4, 2), r"'model/weight' is \[2, 3\] in the checkpoint and \[2, 4\] here"),
    ],
)
def test_another_model_is_refused_and_unchanged(tmp_path: Path, other: nn.Module, said: str) -> None:
    checkpoint.save(tmp_path, {"model": nn.Linear(3, 2)})
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(CheckpointError, match=said):
        checkpoint.load(tmp_path, {"model": other})
    assert all(torch.equal(before[name], tensor) for name, tensor in other.state_dict().items())


def test_no_problem_is_no_error() -> None:
    refuse([], "x")
    with pytest.raises(CheckpointError, match="nothing was changed"):
        refuse(["it is another"], "x")


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (nn.Linear(2, 2, device="meta"), "'model': 'weight' is on the device 'meta', which has no memory"),
        (nn.Sequential(nn.LazyLinear(2)), "'model': '0.weight' of a lazy module has no shape yet"),
    ],
)
def test_parameters_without_numbers_are_refused(tmp_path: Path, model: nn.Module, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        checkpoint.save(tmp_path / "new", {"model": model})
    checkpoint.save(tmp_path, {"model": nn.Linear(2, 2)})
    with pytest.raises(ConfigError, match=said):
        checkpoint.load(tmp_path, {"model": model})
