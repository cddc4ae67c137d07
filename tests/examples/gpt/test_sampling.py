"""Text from a model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.examples.gpt.example import example_module

sampling = example_module("sampling")


class Successor(nn.Module):
    """Is sure that the byte after b is b + 1; keeps the longest input it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.longest = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.longest = max(self.longest, tokens.shape[1])
        return 50.0 * nn.functional.one_hot((tokens + 1) % 256, 256).float()


def test_a_sample_continues_the_prompt_and_sees_length_bytes() -> None:
    model = Successor()
    assert sampling.sample(model, "ab", 5, length=3) == "abcdefg"
    assert model.longest == 3
    assert not model.training


def test_the_seed_decides_the_sample() -> None:
    model = nn.Sequential(nn.Embedding(256, 4), nn.Linear(4, 256))
    texts = [sampling.sample(model, "a", 20, 8, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
