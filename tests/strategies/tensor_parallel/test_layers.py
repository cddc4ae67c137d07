"""Divided layers on one worker are the plain layers; what they refuse."""

from __future__ import annotations

import copy
import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fleet.errors import ConfigError, UnsupportedOptionError
from fleet.strategies._shared.random_streams import TRACKER
from fleet.strategies.tensor_parallel.cross_entropy import ParallelCrossEntropy, ParallelMultiLabelCrossEntropy
from fleet.strategies.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from fleet.strategies.tensor_parallel.place import LayerPlace


@pytest.fixture(autouse=True)
def _no_streams() -> None:
    TRACKER.reset()


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_one_worker_has_the_plain_layer(kind: Any) -> None:
    """Surface section 3: with m = 1 each is the plain layer; its bias starts at zero."""
    torch.manual_seed(0)
    layer = kind(8, 6, has_bias=True)
    torch.manual_seed(0)
    plain = nn.Linear(8, 6)
    assert torch.equal(layer.weight, plain.weight)
    assert not layer.bias.any()
    assert not layer.weight.is_distributed
    x = torch.randn(3, 8)
    torch.testing.assert_close(layer(x), F.linear(x, plain.weight))


def test_one_worker_has_the_plain_embedding_and_loss() -> None:
    torch.manual_seed(0)
    layer = VocabParallelEmbedding(10, 4)
    torch.manual_seed(0)
    plain = nn.Embedding(10, 4)
    ids = torch.tensor([[1, 9]])
    assert torch.equal(layer(ids), plain(ids))
    logits, labels = torch.randn(3, 5), torch.tensor([0, -1, 4])
    loss = ParallelCrossEntropy(ignore_index=-1)(logits, labels)
    expected = F.cross_entropy(logits, labels, ignore_index=-1, reduction="none").unsqueeze(-1)
    assert torch.equal(loss, expected)
    with pytest.raises(ConfigError, match="label 5 is outside 0 to 4"):
        ParallelCrossEntropy()(logits, torch.tensor([0, 5, 4]))
    with pytest.raises(ConfigError, match=r"labels of shape \(3,\)"):
        ParallelCrossEntropy()(logits, torch.zeros(4, dtype=torch.long))


def test_weights_come_from_their_own_stream() -> None:
    """Surface section 4: weights are drawn from 'model_parallel_rng', which leaves the global stream alone."""
    TRACKER.add("model_parallel_rng", 7)
    try:
        before = torch.get_rng_state()
        layer = ColumnParallelLinear(8, 6)
        assert torch.equal(torch.get_rng_state(), before)
        torch.manual_seed(7)
        assert torch.equal(layer.weight, nn.Linear(8, 6, bias=False).weight)
    finally:
        TRACKER.reset()


def test_what_initializes_a_weight() -> None:
    assert bool((ColumnParallelLinear(4, 4, nn.init.ones_).weight == 1).all())
    attr = SimpleNamespace(initializer=nn.init.zeros_, name="w", learning_rate=1.0, trainable=False, need_clip=True)
    layer = RowParallelLinear(4, 4, attr)
    assert not layer.weight.any()
    assert not layer.weight.requires_grad
    torch.manual_seed(1)
    default = VocabParallelEmbedding(4, 4, SimpleNamespace(initializer=None))
    torch.manual_seed(1)
    assert torch.equal(default.weight, nn.Embedding(4, 4).weight)


@pytest.mark.parametrize(
    ("attr", "rule"),
    [
        (False, "a callable that fills a tensor"),
        ("xavier", "a callable that fills a tensor"),
        (nn.Linear, "a callable that fills a tensor"),
        (SimpleNamespace(initializer="normal"), "a callable that fills a tensor"),
        (SimpleNamespace(initializer=None, learning_rate=0.1), "learning_rate=0.1.*parameter groups"),
        (SimpleNamespace(initializer=None, regularizer=object()), "regularizer.*parameter groups"),
    ],
)
def test_what_cannot_initialize_a_weight_is_refused(attr: Any, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        ColumnParallelLinear(4, 4, weight_attr=attr)


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "4"])
def test_a_size_is_a_whole_number(size: Any) -> None:
    with pytest.raises(ConfigError, match=r"ColumnParallelLinear\(out_features=.*whole number"):
        ColumnParallelLinear(4, size)


def test_several_labels_a_row_are_refused() -> None:
    with pytest.raises(UnsupportedOptionError, match="Use ParallelCrossEntropy once for each label"):
        ParallelMultiLabelCrossEntropy()


def test_a_layer_can_be_copied_and_saved() -> None:
    layer = ColumnParallelLinear(4, 4)
    copied = copy.deepcopy(layer)
    assert torch.equal(copied(torch.ones(4)), layer(torch.ones(4)))
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded(torch.ones(4)), layer(torch.ones(4)))
    assert "part 0 of 1" in repr(layer)


def test_a_part_that_was_pickled_says_that_its_group_is_gone() -> None:
    with pytest.raises(ConfigError, match="Create the layer after fleet.init"):
        _ = LayerPlace(None, 2, 1).group
