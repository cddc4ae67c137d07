from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fleet.ps.serving.batch_sizes import other_sizes, resized, wrong_size


@pytest.mark.parametrize(
    ("leaf", "samples", "wanted"),
    [
        ([7, 8, 9], 6, [7, 8, 9, 7, 8, 9]),
        ([7, 8, 9], 1, [7]),
        ([0, 2, 2], 6, [0, 0, 0, 0, 2, 2]),  # offsets
        ([0, 2, 2], 1, [0]),
        ([0, 1, 2, 2, 3, 4], 4, [0, 0, 0, 1, 2, 2, 3, 4]),  # two slots
        ([0, 2, 2, 5], 4, [0, 0, 2, 2, 5]),  # with the end
        ([0, 2, 2, 5], 1, [0, 2]),
        ([5, 6, 7, 8, 9], 6, [5, 6, 7, 8, 9]),  # flat ids
        (4, 6, 4),
    ],
)
def test_batches_of_other_sizes(leaf: Any, samples: int, wanted: Any) -> None:
    assert resized((torch.tensor(leaf),), 3, samples)[0].tolist() == wanted


def test_the_batch_is_what_the_output_has() -> None:
    inputs = torch.arange(7).flip(0), torch.tensor([0, 3, 3])
    found = other_sizes(inputs, {"click": torch.ones(3), "task": "ctr"}, lambda batch: True)
    assert {samples: [len(leaf) for leaf in batch] for samples, batch in found.items()} == {6: [7, 6], 1: [7, 1]}
    assert list(other_sizes(inputs, None, lambda batch: len(batch[1]) == 6)) == [6]
    assert other_sizes(inputs, torch.ones(3), lambda batch: False) == {}


class Shifts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = 1.0

    def forward(self, values: Tensor) -> Tensor:
        return values + self.by


def test_values_are_compared() -> None:
    module = Shifts()
    any_size = {"values": {0: torch.export.Dim.AUTO}}
    program = torch.export.export(module, (torch.ones(3),), dynamic_shapes=any_size)
    others = {6: (torch.full((6,), float("nan")),), 2: (torch.ones(2),)}
    assert wrong_size(module, program, others) is None
    module.by = 2.0
    reason = "the model takes 2 samples, its program does not: it gives other values"
    assert str(wrong_size(module, program, others)).startswith(reason)
