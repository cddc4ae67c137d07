"""Paddle multiplies the gradients of rows by the batch size; here it is an option (D.4, decision 8)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fleet.ps.embeddings.embedding import SparseEmbedding, scale_gradient
from fleet.ps.embeddings.served_embedding import serve_embeddings
from fleet.ps.worker.table_configs import configure_table
from fleet.ps.worker.table_plan import plan_tables


class Ones:
    trains = True
    asked = 0

    def rows(self, keys: Any) -> Any:
        return np.ones((len(keys), 3), np.float32)


def test_values_stay_and_gradients_grow() -> None:
    leaf = torch.arange(3.0, requires_grad=True)
    found = scale_gradient(leaf, 4.0)
    assert torch.equal(found, leaf)
    found.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [4, 4, 4]


@pytest.mark.parametrize(("settings", "factor"), [({}, 1), ({"scale_sparse_gradient_with_batch_size": True}, 4)])
def test_rows_count_once_per_sample_where_the_table_says_so(settings: dict[str, Any], factor: int) -> None:
    """D.4: what is pushed for the mean loss of four samples is four times its gradient."""
    model = nn.ModuleDict({"ads": SparseEmbedding(3, combiner="sum"), "words": nn.Embedding(9, 3, sparse=True)})
    serve_embeddings(model)
    plan = plan_tables(
        [model], torch.optim.SGD(model.parameters(), 0.1), configure=lambda config: configure_table(config, settings)
    )
    for part in plan.sparse:
        for module in part.modules:
            module.lookup.source = Ones()
    ids = torch.tensor([[7, 8], [7, 7], [2, 2], [1, 2]])
    (model["ads"](ids) + model["words"](ids[:, 0])).sum(1).mean().backward()
    rows, words = (part.modules[0].lookup.take() for part in plan.sparse)
    assert dict(zip(rows.ids.tolist(), rows.rows[:, 0].tolist(), strict=True)) == {
        1: 0.25 * factor, 2: 0.75 * factor, 7: 0.75 * factor, 8: 0.25 * factor
    }  # fmt: skip
    assert words.rows[:, 0].sum() == factor
