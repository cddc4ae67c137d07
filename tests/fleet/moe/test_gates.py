"""Gates (surface 12): weights, capacities, losses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fleet.errors import ConfigError
from fleet.moe.gates import BaseGate, GShardGate, NaiveGate, SwitchGate, limited


def with_scores(gate: NaiveGate, scores: Tensor) -> NaiveGate:
    """Makes the scores of token ``i`` (a unit vector) row ``i`` of ``scores``."""
    gate.gate.weight.data.copy_(scores.T)
    gate.gate.bias.data.zero_()
    return gate


def test_limits_keep_the_first_tokens() -> None:
    """Surface 12: capacity per expert; what does not fit is -1, also after tokens of workers before this one."""
    chosen = torch.tensor([[0, 1], [0, 2], [-1, 0], [1, 0]])
    assert limited(chosen, torch.tensor([0, 0, 0, 9]), 2).tolist() == [[0, 1], [0, 2], [-1, -1], [1, -1]]
    assert limited(chosen, torch.tensor([1, 2, 0, 9]), 2).tolist() == [[0, -1], [-1, 2], [-1, -1], [-1, -1]]


def test_naive() -> None:
    """Surface 12: raw scores, no softmax."""
    scores = torch.tensor([[3.0, 1.0, 2.0], [0.0, -1.0, 5.0]])
    value, chosen = with_scores(NaiveGate(2, 3, 1), scores)(torch.eye(2))
    assert (value.tolist(), chosen.tolist()) == ([[3.0, 2.0], [5.0, 0.0]], [[0, 2], [2, 0]])
    with pytest.raises(ConfigError, match="there are 3 experts"):
        NaiveGate(2, 3, 1, topk=4)
    assert BaseGate(2, 3).tot_expert == 6


def test_gshard() -> None:
    """Surface 12 and P20: mean(fraction * probability) * total ** 2; the second expert is dropped at random."""
    scores = torch.tensor([[2.0, 1.0, 0.0], [2.0, 1.0, 0.0]])
    gate = with_scores(GShardGate(2, 3, 1, random_routing=False), scores)
    value, chosen = gate(torch.eye(2))
    assert chosen.tolist() == [[0, 1], [0, 1]]
    loss = gate.get_loss(clear=False)
    assert loss is not None
    expected = (torch.tensor([1.0, 1.0, 0.0]) * scores.softmax(-1).mean(0)).mean() * 9
    torch.testing.assert_close(loss, expected)
    assert gate.has_loss
    loss.backward()
    assert gate.gate.weight.grad is not None
    assert gate.gate.weight.grad.any()
    low = with_scores(GShardGate(2, 3, 1), torch.tensor([[2.0, -1.0, -2.0], [2.0, 0.6, 0.0]]))
    assert low(torch.eye(2))[1].tolist() == [[0, -1], [0, 1]]
    with pytest.raises(ConfigError, match="Set 2"):
        GShardGate(2, 3, 1, topk=1)


def test_switch() -> None:
    """Surface 12: softmax, one expert, sum(fraction * probability) * total over the tokens that found a place."""
    scores = torch.tensor([[2.0, 0.0], [2.0, 0.0], [2.0, 0.0], [0.0, 2.0]])
    gate = with_scores(SwitchGate(4, 2, 1, switch_eps=0.0, capacity=(0.5, 2.4)), scores)
    value, chosen = gate(torch.eye(4))
    assert chosen.tolist() == [[0], [0], [-1], [1]]
    probability = scores.softmax(-1)
    torch.testing.assert_close(value.flatten(), probability.max(-1).values)
    expected = (torch.tensor([2.0, 1.0]) / 3 * probability.sum(0) / 3).sum() * 2
    loss = gate.get_loss()
    assert loss is not None
    torch.testing.assert_close(loss, expected)
    assert gate.get_loss() is None
    assert gate.eval()(torch.eye(4))[1].tolist() == [[0], [0], [0], [1]]
    gate.train().switch_eps = 0.1
    assert gate(torch.eye(4))[0].shape == (4, 1)
    with pytest.raises(ConfigError, match="Set 1"):
        SwitchGate(2, 3, 1, topk=2)
