"""The gradient of a leaf, by parts."""

from __future__ import annotations

import torch

from fleet.ps.embeddings.leaf_gradient import LeafGradient, LeafPart


def test_parts_are_read_and_cleared_alone() -> None:
    leaf = torch.ones(4, 2, requires_grad=True)
    found = LeafGradient()
    leaf.register_post_accumulate_grad_hook(found.note)
    first, second = LeafPart(found, 0, 1), LeafPart(found, 1, 4)
    total = (leaf * torch.arange(8.0).view(4, 2)).sum()
    total.backward(retain_graph=True)
    assert first.rows().tolist() == [[0, 1]]
    assert second.rows().tolist() == [[2, 3], [4, 5], [6, 7]]
    second.clear()
    assert first.rows().tolist() == [[0, 1]]
    assert not second.rows().any()
    total.backward()
    assert first.rows().tolist() == [[0, 2]]
    assert second.rows().tolist() == [[2, 3], [4, 5], [6, 7]]
