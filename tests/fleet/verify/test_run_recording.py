"""What a loss was made of."""

import torch

from fleet.verify.run_recording import _nodes


def test_a_loss_that_adds_up_its_samples_says_so() -> None:
    scores, labels = torch.randn(4, 3, requires_grad=True), torch.tensor([0, 1, 2, 0])
    summed = torch.nn.functional.cross_entropy(scores, labels, reduction="sum")
    assert any(node.endswith(" sum") for node in _nodes([summed / 2]))
    assert not any(node.endswith(" sum") for node in _nodes([torch.nn.functional.cross_entropy(scores, labels)]))
