"""Boxes of whole tensors: layouts, who holds what, and how holders divide bytes."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from fleet.checkpoint.boxes import HeldBox, copy_from, divided_among, held_boxes, holders_of, row_range, whole_shape
from fleet.checkpoint.index import Piece
from fleet.job.axes import Axes
from fleet.strategies._shared.parameter_layout import Layout


@pytest.mark.parametrize("sections", [(), (6, 4, 2)])
@pytest.mark.parametrize("dim", [0, 1])
def test_parts_of_a_layout_are_boxes_of_the_whole(dim: int, sections: tuple[int, ...]) -> None:
    whole = torch.arange(144.0).view(12, 12)
    made = torch.full_like(whole, -1)
    for index in range(2):
        layout = Layout("mp", dim, 2, index, (12, 12), sections)
        part = layout.part(whole)
        assert whole_shape(part, layout) == (12, 12)
        for box in held_boxes(part, layout):
            place = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.view.shape, strict=True))
            assert bool((made[place] == -1).all())
            made[place] = box.view
    assert torch.equal(made, whole)


@pytest.mark.parametrize("seed", range(60))
def test_holders_divide_a_list_into_rows_once_each(seed: int) -> None:
    drawn = random.Random(seed)
    shapes = [[drawn.randint(0, 5) for _ in range(drawn.randint(0, 3))] for _ in range(drawn.randint(1, 6))]
    boxes = [HeldBox((0,) * len(shape), torch.zeros(shape)) for shape in shapes]
    number = drawn.randint(1, 5)
    rows: dict[int, list[int]] = {}
    most = 0
    for rank in range(number):
        size = 0
        for place, box in divided_among(boxes, rank, number):
            begin = box.offsets[0] if box.offsets else 0
            rows.setdefault(place, []).extend(range(begin, begin + (len(box.view) if box.view.dim() else 1)))
            size += box.view.numel() * 4
        most = max(most, size)
    for place, shape in enumerate(shapes):
        full = list(range(shape[0])) if shape else [0]
        assert sorted(rows.get(place, [])) == full, "each row is written by one holder"
    total = sum(box.view.numel() * 4 for box in boxes)
    widest = max((box.view[:1].numel() if box.view.dim() else 1) * 4 for box in boxes)
    assert most <= total / number + widest, "no holder writes more than its share and one row"


def test_holders_follow_from_the_axes() -> None:
    axes = Axes({"pp": 2, "dp": 2, "sharding": 2, "mp": 2}, 5)
    plain = torch.zeros(4, 4)
    layout = Layout("mp", 0, 2, 1, (8, 4))
    stage = axes.ranks("dp", "sharding", "mp")
    assert holders_of(axes, plain, None, False) == stage
    assert holders_of(axes, plain, layout, False) == axes.ranks("dp", "sharding")
    assert holders_of(axes, plain, layout, False, owned=True) == axes.ranks("dp")
    assert holders_of(axes, plain, None, False, owned=True) == axes.ranks("dp", "mp")
    assert holders_of(axes, torch.zeros(3), layout, False) == stage, "what has another shape is not divided"
    assert holders_of(Axes({}, 0), plain, None, False) == (0,)


def test_experts_have_the_holders_of_their_grid() -> None:
    axes = Axes({"dp": 4}, 1, experts={"moe_sharding": 2, "ep": 2})
    assert holders_of(axes, torch.zeros(2), None, True) == axes.ranks("moe_sharding") == (1, 3)
    assert holders_of(axes, torch.zeros(2), None, True, owned=True) == (1,)
    assert holders_of(axes, torch.zeros(2), None, False) == (0, 1, 2, 3)


def test_what_a_piece_and_boxes_have_in_common_is_copied() -> None:
    whole = torch.arange(48.0).view(8, 6)
    for top, left, height, width in itertools.product((0, 3), (0, 2), (1, 4), (2, 4)):
        piece = Piece("", 0, (top, left), (height, width))
        found = whole[top : top + height, left : left + width].contiguous()
        target = torch.full((4, 3), -1.0)
        box = HeldBox((2, 1), target)
        count = copy_from(piece, found, [box])
        expected = torch.full((8, 6), -1.0)
        expected[top : top + height, left : left + width] = found
        assert torch.equal(target, expected[2:6, 1:4])
        assert count == int((target >= 0).sum())
        rows = row_range(piece, box)
        assert (rows is None) == (count == 0)
        if rows is not None:
            assert rows == (max(2 - top, 0), min(6 - top, height))


def test_a_number_is_a_box_without_rows() -> None:
    held = held_boxes(torch.tensor(3.0))
    assert [box.offsets for box in held] == [()]
    assert row_range(Piece("", 0, (), ()), held[0]) == (0, 1)
    assert copy_from(Piece("", 0, (), ()), torch.tensor(5.0), held) == 1
    assert held[0].view.item() == 5.0
    assert held_boxes(torch.zeros(0, 3))[0].view.shape == (0, 3), "an empty tensor is there too"
