"""A plain model that pipeline_configs['split'] cuts: the stages together compute what the model does."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fleet import fleet
from fleet.options import DistributedStrategy
from fleet.strategies.pipeline.split import AUTO, SplitLayers
from tests.helpers.staged_training import CE, Case, close, start
from tests.helpers.workers import run_workers


class Block(nn.Module):
    def __init__(self, width: int, rate: float) -> None:
        super().__init__()
        self.norm, self.up, self.drop = nn.LayerNorm(width), nn.Linear(width, width), nn.Dropout(rate)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        moved: Tensor = self.drop(self.up(self.norm(x)))
        return x + moved * mask


class Gpt(nn.Module):
    """Positions by torch.arange, a mask that every block takes, blocks in a list of an inner module, tied weights."""

    def __init__(self, rate: float = 0.5) -> None:
        super().__init__()
        self.rate = rate
        self.body = nn.ModuleDict({"wte": nn.Embedding(11, 4), "wpe": nn.Embedding(8, 4)})
        self.body["h"] = nn.ModuleList(Block(4, rate) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.body["wte"].weight

    def forward(self, ids: Tensor, targets: None = None) -> Tensor:
        mask = (ids > 0).unsqueeze(-1)
        _, length = ids.shape
        x = self.body["wte"](ids) + self.body["wpe"](torch.arange(length, device=ids.device))
        for block in self.body["h"]:
            x = block(x, mask)
        x = nn.functional.dropout(x, self.rate, self.training)
        out: Tensor = self.head(x * self.scale)
        return out


def test_stages_together_are_the_model() -> None:
    """Issue 12, 1: a model with one list of blocks is cut without PipelineLayer; dropout follows the mode."""
    torch.manual_seed(0)
    model = Gpt()
    ids = torch.randint(0, 11, (2, 5))
    for training in (True, False):
        model.train(training)
        torch.manual_seed(1)
        wanted = model(ids)
        for starts in (AUTO, ("body.h.1", "head")):
            value = ids
            torch.manual_seed(1)
            stages = [SplitLayers(copy.deepcopy(model), starts, 3, stage) for stage in range(3)]
            for stage in stages:
                value = stage(value)
            assert torch.equal(value, wanted)
    names = {name for stage in stages for name in stage.state_dict()}
    assert names == set(model.state_dict())
    assert stages[0].ties == {"body.wte.weight": (0, 2)}
    assert stages[2].tied_parameters("body.wte.weight")[0].fleet_tied == (0, 2)
    assert "body.h.1.up.weight" not in stages[0].state_dict()
    assert stages[1].segment_parts == [0, 3, 5, 6]


def test_a_sequential_keeps_its_names() -> None:
    """A Sequential with names; stages have about as many parameters."""
    model = nn.Sequential()
    for name in ("one", "two", "three"):
        model.add_module(name, nn.Linear(2, 2))
    stages = [SplitLayers(model, AUTO, 2, stage) for stage in range(2)]
    assert [list(stage.state_dict()) for stage in stages] == [
        ["one.weight", "one.bias", "two.weight", "two.bias"],
        ["three.weight", "three.bias"],
    ]


class Idle(nn.Module):
    """Beside its layers a parameter, a buffer and a layer that forward does not use, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.spare, self.head = nn.Parameter(torch.ones(3)), nn.Linear(2, 2)
        self.register_buffer("seen", torch.ones(()))
        self.register_buffer("mask", torch.tensor([1.0, 0.0]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x * self.mask) + torch.ones(2)
        return x


def test_the_state_is_that_of_the_model() -> None:
    """What forward does not use is on the first stage; what the model does not save, no stage saves."""
    model = Idle()
    stages = [SplitLayers(copy.deepcopy(model), AUTO, 2, stage) for stage in range(2)]
    assert {name for stage in stages for name in stage.state_dict()} == set(model.state_dict())
    assert {"spare", "seen", "head.weight"} < set(stages[0].state_dict())
    x = torch.randn(3, 2)
    states = {name: value for stage in stages for name, value in stage.state_dict().items()}
    model.load_state_dict(states)
    assert torch.equal(stages[1](stages[0](x)), model(x))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = self.layers[0](x)
        out: Tensor = self.layers[1](x)
        return out


def test_what_cannot_be_followed_is_refused_with_the_rule() -> None:
    """A path that depends on values; names that are no layers; a wrong number of names."""
    with pytest.raises(ValueError, match="same path for all data"):
        SplitLayers(Branches(), AUTO, 2, 0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ValueError, match="no layer of the model. Layers, in the order in which data passes them: 0, 1"):
        SplitLayers(model, ("2",), 2, 0)
    with pytest.raises(ValueError, match="1 in all"):
        SplitLayers(model, ("0", "1"), 2, 0)
    with pytest.raises(ValueError, match="each stage has a layer"):
        SplitLayers(model, ("0",), 2, 0)


def test_auto_may_be_written_without_a_list() -> None:
    """The option takes a list of names or 'auto'."""
    strategy = DistributedStrategy()
    strategy.pipeline_configs = {"split": "auto"}
    assert strategy.pipeline_configs["split"] == ["auto"]


def flat_loss(out: Tensor, labels: Tensor) -> Tensor:
    return CE(out.flatten(0, 1), labels.flatten())


def trains_split(rank: int, world_size: int) -> None:
    for split in ("auto", ["body.h.2"]):
        start(Case({"pp_degree": 2, "dp_degree": 1}, pipeline={"split": split}))
        torch.manual_seed(0)
        model = Gpt(rate=0.0)
        whole, names = copy.deepcopy(model), set(model.state_dict())
        optimizer = torch.optim.SGD([{"params": model.parameters()}], lr=0.5)
        staged = fleet.distributed_model(model, loss_fn=flat_loss)
        assert set(staged.state_dict()) < names
        wrapped = fleet.distributed_optimizer(optimizer)
        assert {id(p) for p in wrapped.parameters()} == {id(p) for p in staged.parameters()}
        plain = torch.optim.SGD(whole.parameters(), lr=0.5)
        for step in range(3):
            ids = torch.randint(0, 11, (8, 5))
            loss = staged.train_batch([ids, ids], wrapped)
            expected = flat_loss(whole(ids), ids)
            expected.backward()
            plain.step()
            plain.zero_grad()
            close(loss, expected.detach(), f"loss {step}", 1e-5)
        for name, value in staged.state_dict().items():
            close(value, whole.state_dict()[name], name, 1e-5)


def test_split_models_train() -> None:
    """Issue 12, 1: the loop stays train_batch; an optimizer made before keeps the parameters of this stage."""
    run_workers(trains_split, 2, backend=None, timeout_s=100)
