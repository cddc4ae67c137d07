"""Descriptions of layers, and the layers that a stage builds of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fleet.errors import UnsupportedOptionError
from fleet.strategies.pipeline.descriptions import (
    LayerDesc,
    LocalSharedLayerDesc,
    SharedLayerDesc,
    StagedLayers,
)


def descs() -> list[object]:
    shared = ("emb", nn.Embedding)
    return [
        SharedLayerDesc(*shared, None, "weight", 5, 4),
        LayerDesc(nn.Linear, 4, 4),
        torch.tanh,
        nn.LayerNorm(4),
        LayerDesc(nn.Sequential, nn.Linear(4, 4)),
        SharedLayerDesc(*shared, lambda layer, x: x @ layer.weight.t(), "weight", 5, 4),
    ]


def staged(num_stages: int, stage: int, num_chunks: int = 1) -> StagedLayers:
    torch.manual_seed(11)
    return StagedLayers(descs(), num_stages, stage, num_chunks=num_chunks)


def test_a_layer_that_is_replaced_by_name_runs() -> None:
    """A strategy (sync_batch_norm, qat) or the user puts another module in the place of a layer of the list."""
    layers = staged(1, 0)
    ids = torch.tensor([[1, 2]])
    before = layers(ids)
    layers.add_module("3", nn.Identity())
    layers.shared_layers["emb"] = nn.Embedding.from_pretrained(torch.eye(5, 4))
    assert not torch.allclose(layers(ids), before)
    assert isinstance(layers.modules_of(0)[2], nn.Identity)
    assert isinstance(layers.run_function[3], nn.Identity)


@pytest.mark.parametrize(("num_stages", "num_chunks"), [(2, 1), (3, 1), (6, 1), (2, 2), (2, 3)])
def test_start_and_names_do_not_depend_on_the_mesh(num_stages: int, num_chunks: int) -> None:
    """Sections 6, 13: names hold the place in the whole list, interleaved too; every layer on one stage."""
    whole = staged(1, 0)
    after = torch.rand(1)
    expected = whole.state_dict()
    assert list(expected) == [
        "shared_layers.emb.weight", "1.weight", "1.bias", "3.weight", "3.bias", "4.0.weight", "4.0.bias",
    ]  # fmt: skip
    found: dict[str, Tensor] = {}
    stages = [staged(num_stages, stage, num_chunks) for stage in range(num_stages)]
    assert torch.equal(torch.rand(1), after)
    for stage in stages:
        for name, value in stage.state_dict().items():
            if not name.startswith("4."):  # a ready layer inside a description was made before
                assert torch.equal(value, expected[name]), name
            found[name] = value
    assert found.keys() == expected.keys()
    run: list[tuple[int, int]] = []
    for part in range(num_stages * num_chunks):
        stage = stages[part % num_stages]
        run += [(at, stage.get_stage_from_index(at)) for at in stage.layers_of(part // num_stages)]
        assert all(owner == part % num_stages for _, owner in run[-1:])
    assert [at for at, _ in run] == list(range(6))
    assert len(stages[0].run_function) == len([1 for _, owner in run if owner == 0])


def test_stages_together_compute_what_the_list_does() -> None:
    """Section 6: forward(input, chunk_id) runs the local layers; get_model_chunks; recomputed is bit-equal."""
    whole = staged(1, 0)
    ids = torch.tensor([0, 3])
    expected = whole(ids)
    value = ids
    pieces = [staged(2, stage, 2) for stage in range(2)]
    for piece in pieces:
        piece.load_state_dict({name: whole.state_dict()[name] for name in piece.state_dict()})
    for part in range(4):
        chunks = pieces[part % 2].get_model_chunks()
        assert chunks is not None
        value = chunks[part // 2](value)
    assert torch.equal(value, expected)
    with pytest.raises(ValueError, match="Give chunk_id"):
        pieces[0](ids)
    assert pieces[0].get_num_virtual_stages() == 2
    torch.manual_seed(11)
    again = StagedLayers(descs(), 1, 0, recompute_interval=2)
    again.load_state_dict(whole.state_dict())
    assert again.get_model_chunks() is None
    expected.sum().backward()
    again(ids).sum().backward()
    for name, p in whole.named_parameters():
        other = again.get_parameter(name).grad
        assert other is not None
        assert torch.equal(p.grad, other)  # type: ignore[arg-type]


def test_shared_layers_know_their_stages() -> None:
    """Section 6, shared weights: the stages that hold a key, the owner first; one layer on one stage."""
    first, last = staged(2, 0), staged(2, 1)
    assert first.ties == last.ties == {"emb": (0, 1)}
    assert first.tied_parameters("emb")[0].fleet_tied == (0, 1)  # type: ignore[attr-defined]
    assert staged(1, 0).ties == {}
    assert staged(3, 1).tied_parameters("emb") == []


def test_mistakes_are_explained() -> None:
    """Section 6, and study 5.6: TypeErrors of Paddle, a missing attribute, one key with two classes, DualPipeV."""
    with pytest.raises(TypeError, match="takes a class derived from torch.nn.Module"):
        LayerDesc(torch.tanh)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has no parameter 'weights'"):
        SharedLayerDesc("a", nn.Linear, None, "weights", 2, 2).build_layer()
    with pytest.raises(UnsupportedOptionError, match="DualPipeV schedule, which is not offered"):
        LocalSharedLayerDesc("a", nn.Linear)
    two = [
        SharedLayerDesc("a", nn.Linear, None, "weight", 2, 2),
        SharedLayerDesc("a", nn.Embedding, None, "weight", 2, 2),
    ]
    with pytest.raises(ValueError, match="names the classes Linear, Embedding"):
        StagedLayers(two, 1, 0)
    with pytest.raises(ValueError, match="entry 1 of the list is 3"):
        StagedLayers([nn.Linear(1, 1), 3], 1, 0)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="entry 0 of the list is <class"):
        StagedLayers([nn.Linear], 1, 0)
    with pytest.raises(ValueError, match="Make it the last layer"):
        StagedLayers([nn.Linear(1, 1)], 1, 0, loss_fn=nn.Linear(1, 1))
    with pytest.raises(ValueError, match="takes a function of output and label"):
        StagedLayers([nn.Linear(1, 1)], 1, 0, loss_fn=3)
    with pytest.raises(ValueError, match="the list has 1 layers"):
        StagedLayers([nn.Linear(1, 1)], 1, 0).get_stage_from_index(1)
