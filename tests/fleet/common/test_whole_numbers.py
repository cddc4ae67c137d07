"""Counts in any type of integer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fleet.common.whole_numbers import count_of


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3), np.array(3), torch.tensor(3)])
def test_integers_of_every_type_are_counts(value: Any) -> None:
    found = count_of(value)
    assert type(found) is int
    assert found == 3


@pytest.mark.parametrize(
    "value",
    [0, -1, 3.0, np.float32(3), True, np.True_, np.array(True), torch.tensor(True), torch.tensor([3, 4]), "3", None],
)
def test_anything_else_is_none(value: Any) -> None:
    assert count_of(value) is None
