"""Parts of whole tensors, and what remembers them."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fleet.strategies._shared.parameter_layout import Layout, layout_of, layouts_in, set_layout


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 4), st.integers(0, 1), st.lists(st.integers(1, 3), min_size=0, max_size=3), st.integers(1, 3))
def test_parts_join_to_the_whole(parts: int, dim: int, sections: list[int], other: int) -> None:
    """Any number of parts, with and without sections."""
    sizes = tuple(size * parts for size in sections)
    long = sum(sizes) or 2 * parts
    shape = (long, other) if dim == 0 else (other, long)
    whole = torch.arange(long * other).view(shape)
    layouts = [Layout("mp", dim, parts, index, shape, sizes) for index in range(parts)]
    found = [layout.part(whole) for layout in layouts]
    assert all(tuple(part.shape) == layouts[0].shape for part in found)
    assert torch.equal(layouts[0].joined(found), whole)
    assert all(torch.equal(part, layouts[0].part(whole, index)) for index, part in enumerate(found))


def test_sections_are_divided_by_themselves() -> None:
    """Query, key and value in one weight: each worker gets its rows of each."""
    layout = Layout("mp", 0, 2, 1, (12, 1), (4, 4, 4))
    assert layout.part(torch.arange(12).view(12, 1)).flatten().tolist() == [2, 3, 6, 7, 10, 11]


def test_a_layout_is_found_by_parameter_and_by_name() -> None:
    """The second survives a deep copy; Fleet's attributes say that a parameter is divided."""
    inner = nn.Linear(2, 3, bias=False)
    model = nn.Sequential(nn.ReLU(), inner)
    layout = Layout("mp", 0, 2, 0, (6, 2))
    set_layout(inner, "weight", layout)
    assert layout_of(inner.weight) is layout
    assert (inner.weight.is_distributed, inner.weight.split_axis) == (True, 0)
    assert layout_of(nn.Parameter(torch.zeros(1))) is None
    assert layouts_in(model) == layouts_in(copy.deepcopy(model)) == {"1.weight": layout}
    with pytest.raises(AttributeError):
        set_layout(inner, "nothing", layout)
