"""The engine: gradients of micro-batches through stages equal one backward of the mean over the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fleet.strategies.pipeline.micro_batches import plan_weights
from tests.helpers.stages import QueueLink, StageWork, make_places, run_stages, split_chunks


def parts_of(count: int, width: int = 3) -> list[nn.Module]:
    torch.manual_seed(count)
    return [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count)]


def gradients(parts: list[nn.Module]) -> list[Tensor]:
    found = [p.grad for part in parts for p in part.parameters()]
    for part in parts:
        part.zero_grad()
    return [grad.clone() for grad in found if grad is not None]


@settings(max_examples=40, deadline=None)
@given(
    num_stages=st.integers(1, 4),
    num_micro=st.integers(1, 9),
    last_rows=st.integers(1, 2),
    num_chunks=st.integers(1, 2),
    mode=st.sampled_from(["1F1B", "F-then-B"]),
)
@example(num_stages=4, num_micro=2, last_rows=1, num_chunks=1, mode="1F1B")
@example(num_stages=2, num_micro=4, last_rows=2, num_chunks=2, mode="1F1B")
@example(num_stages=4, num_micro=9, last_rows=1, num_chunks=2, mode="1F1B")
def test_gradients_are_those_of_the_mean(
    num_stages: int, num_micro: int, last_rows: int, num_chunks: int, mode: str
) -> None:
    """Sections 7.1, 7.2: any number of micro-batches and stages, also fewer than stages, and a smaller last one."""
    num_chunks = 1 if num_stages == 1 else num_chunks
    parts = parts_of(num_stages * num_chunks)
    x, y = torch.randn(2 * (num_micro - 1) + last_rows, 3), torch.randn(2 * (num_micro - 1) + last_rows, 3)
    nn.functional.mse_loss(nn.Sequential(*parts)(x), y).backward()
    expected = gradients(parts)

    labels = list(y.split(2))
    weights = plan_weights(labels)
    works = [
        StageWork(chunks, x.split(2), lambda out, micro: nn.functional.mse_loss(out, labels[micro]) * weights[micro])
        for chunks in split_chunks(parts, num_stages)
    ]
    places = make_places(num_stages, num_chunks, mode)
    for _ in range(2):  # the second step knows the headers of the first
        run_stages(places, works, num_micro, signature=last_rows)
        for found, wanted in zip(gradients(parts), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
    if num_chunks == 1 and mode == "1F1B":
        assert [work.most_live for work in works] == [min(num_stages - s, num_micro) for s in range(num_stages)]


class Branches(nn.Module):
    """Turns (x, mask, number, gate) into the same structure, with other shapes by micro-batch."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.linear, self.first = nn.Linear(3, 3), first

    def forward(self, given: Any) -> dict[str, Any]:
        if self.first:
            given = {"x": given, "mask": given[:, :1] > 0, "other": (3, 0.5, True, None), "ids": torch.arange(2)}
        assert given["other"] == (3, 0.5, True, None)
        assert given["mask"].dtype == torch.bool
        assert given["ids"].tolist() == [0, 1]
        moved = self.linear(given["x"]) * given["mask"] * given["other"][0] * given["other"][1]
        return {**given, "x": moved.tanh()}


@pytest.mark.parametrize("signature", [1, None])
def test_structures_pass_and_shapes_may_change(signature: int | None) -> None:
    """Section 7.3, and more: dictionaries, tuples, numbers, None, integer and bool tensors; each shape another."""
    torch.manual_seed(0)
    parts = [Branches(first=stage == 0) for stage in range(3)]
    inputs = [torch.randn(rows, 3) for rows in (2, 4, 4, 1)]

    def value(out: Any, micro: int) -> Tensor:
        loss: Tensor = out["x"].square().sum()
        return loss

    chain = nn.Sequential(*parts)
    for x in inputs:
        value(chain(x), 0).backward()
    expected = gradients(list(parts))
    works = [StageWork([part], inputs, value) for part in parts]
    places = make_places(3)
    for _ in range(2):
        run_stages(places, works, 4, signature=signature)
        for found, wanted in zip(gradients(list(parts)), expected, strict=True):
            torch.testing.assert_close(found, wanted)


def test_only_tensors_cross_the_wire_once_shapes_are_known() -> None:
    """Section 16: per boundary and micro-batch one activation each way; one header per shape, in the first step."""
    parts = parts_of(2)
    inputs = [torch.randn(2, 3)] * 5 + [torch.randn(1, 3)]
    works = [StageWork([part], inputs, lambda out, micro: out.sum()) for part in parts]
    places = make_places(2)
    (forward,), (backward,) = places[0].links_out.values(), places[1].links_out.values()
    assert isinstance(forward, QueueLink)
    assert isinstance(backward, QueueLink)
    run_stages(places, works, 6)
    payload = 5 * 24 + 12
    header_bytes = 8 * 6  # kind, type, gradient, two dimensions and their number
    assert sum(forward.sent_bytes) == payload + 2 * header_bytes + 6 * 8
    assert sum(backward.sent_bytes) == payload
    forward.sent_bytes.clear()
    run_stages(places, works, 6)
    assert sum(forward.sent_bytes) == payload
    forward.sent_bytes.clear()
    run_stages(places, works, 6, signature=None)
    assert sum(forward.sent_bytes) == payload + 2 * header_bytes + 6 * 8


def test_a_shape_that_depends_on_values_is_named() -> None:
    """Section 7.3, cached header and another shape: an error on the sender, which names enable_dynamic_shape."""

    class Drops(nn.Module):
        rows = 2

        def forward(self, x: Tensor) -> Tensor:
            return x[: self.rows] * 1

    drops = Drops()
    works = [StageWork([part], [torch.randn(2, 3)], lambda out, micro: out.sum()) for part in (drops, nn.Linear(3, 1))]
    places = make_places(2)
    run_stages(places, works, 1)
    drops.rows = 1
    with pytest.raises(ValueError, match=r"(?s)enable_dynamic_shape"):
        run_stages(places[:1], works[:1], 1)


def test_frozen_first_stage_gets_no_gradient_messages() -> None:
    """Section 7.3: gradients go back only for tensors that need one."""
    parts = parts_of(2)
    parts[0].requires_grad_(False)
    works = [StageWork([part], [torch.randn(2, 3)] * 3, lambda out, micro: out.sum()) for part in parts]
    places = make_places(2)
    run_stages(places, works, 3)
    (backward,) = places[1].links_out.values()
    assert isinstance(backward, QueueLink)
    assert backward.sent_bytes == []
    assert len(gradients(parts)) == 2


def test_an_error_names_stage_and_micro_batch() -> None:
    """Study 6, failure: what a stage was doing when it failed."""

    def fails(out: Tensor, micro: int) -> Tensor:
        if micro == 1:
            raise ArithmeticError("no")
        return out.sum()

    works = [StageWork([part], [torch.randn(2, 3)] * 3, fails) for part in parts_of(1)]
    with pytest.raises(ArithmeticError) as caught:
        run_stages(make_places(1), works, 3)
    assert caught.value.__notes__ == ["Stage 0 was in the forward of micro-batch 1."]


def test_nothing_is_kept_after_a_step() -> None:
    """Study 7, activations kept between steps: none."""
    import gc
    import weakref

    kept: list[weakref.ref[Tensor]] = []

    class Notes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.linear(x)
            kept.append(weakref.ref(out))
            return out

    works = [StageWork([part], [torch.randn(2, 3)] * 5, lambda out, micro: out.sum()) for part in (Notes(), Notes())]
    run_stages(make_places(2), works, 5)
    gc.collect()
    assert [ref() is None for ref in kept] == [True] * 10
