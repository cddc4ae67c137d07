"""WideDeep and DeepFM against their formulas."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.examples.wide_and_deep.example import example_module

model = example_module("model")

SLOTS = (1, 1, 3)
IDS = torch.tensor([[5, 9, 4, 0, 0], [5, 0, 7, 8, 2**61]])
DENSE = torch.tensor([[0.5, -1.0], [2.0, 0.25]])


def rows_of(net: nn.Module) -> tuple[Tensor, Tensor]:
    """Returns the linear weights and the embeddings per slot, looked up one id at a time."""
    weight = net.rows.table.weight
    first = 0
    per_slot = []
    for width in SLOTS:
        part = IDS[:, first : first + width]
        per_slot.append(
            torch.stack([sum((weight[i % 96 + 1] for i in row if i), torch.zeros(4)) for row in part.tolist()])
        )
        first += width
    rows = torch.stack(per_slot, 1)
    return rows[..., 0], rows[..., 1:]


@pytest.fixture(params=["wide_deep", "deepfm"])
def net(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    made = model.MODELS[request.param](partial(model.HashedEmbedding, 97), SLOTS, 2, dim=3, layers=(4,))
    nn.init.normal_(made.rows.table.weight)
    made.rows.table.weight.data[0] = 0
    return made


def test_logits_follow_the_formula(net: nn.Module) -> None:
    """Issue 4: both models, with a slot that holds several ids."""
    weights, embeddings = rows_of(net)
    linear = net.wide if hasattr(net, "wide") else net.linear
    deep = net.deep(torch.cat([embeddings.flatten(1), DENSE], 1))
    expected = (linear(DENSE) + deep).squeeze(1) + weights.sum(1)
    if isinstance(net, model.DeepFM):
        for i in range(len(SLOTS)):
            for j in range(i):
                expected = expected + (embeddings[:, i] * embeddings[:, j]).sum(1)
    torch.testing.assert_close(net(IDS, DENSE), expected)


def test_padding_is_never_trained_and_gradients_are_sparse(net: nn.Module) -> None:
    net(IDS, DENSE).sum().backward()
    gradient = net.rows.table.weight.grad
    assert gradient.is_sparse
    assert gradient.to_dense()[0].abs().sum() == 0
    used = {int(i) % 96 + 1 for i in IDS.unique().tolist() if i}
    touched = gradient.to_dense().abs().sum(1).nonzero().flatten().tolist()
    assert set(touched) == used


def test_the_default_is_the_published_size() -> None:
    """Issue 4: three layers of 400, rows of 10."""
    net = model.WideDeep(partial(model.HashedEmbedding, 10), (1,) * 26, 13)
    sizes = [tuple(layer.weight.shape) for layer in net.deep if isinstance(layer, nn.Linear)]
    assert sizes == [(400, 273), (400, 400), (400, 400), (1, 400)]
    assert net.rows.table.embedding_dim == 11
