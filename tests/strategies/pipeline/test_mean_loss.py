"""A loss_fn that is no mean over rows is named, once; one that is, or that cannot be judged, passes in silence."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleet.errors import OptionWarning
from fleet.strategies._shared.random_streams import TRACKER
from fleet.strategies.pipeline.descriptions import StagedLayers
from fleet.strategies.pipeline.step import PipelineStep

ROWS, TOKENS, CLASSES = 4, 3, 5
ONE = torch.arange(ROWS * TOKENS).view(ROWS, TOKENS) % CLASSES
PADDED = ONE.masked_fill(torch.arange(ROWS * TOKENS).view(ROWS, TOKENS) < 4, -100)  # 2 and 6 count
NONE = ONE.masked_fill(torch.arange(ROWS)[:, None] < 2, -100)  # the first micro-batch has no label that counts


def per_token(reduction: str = "mean", **given: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns the cross entropy over tokens."""
    return lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction=reduction, **given)


def over_all(out: Tensor, y: Tensor) -> Tensor:
    """Returns the mean with a divisor that the shape decides."""
    return F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="sum") / y.numel()


def classes_first(out: Tensor) -> Tensor:
    return out.transpose(1, 2)


class Noisy(nn.Module):
    """Draws random numbers, and counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        with TRACKER.rng_state("noise"):
            return over_all(out + torch.rand(()), y) + torch.rand(()) + F.dropout(out).mean()


class Kept:
    """A loss that adds what the forward of the micro-batch has left, and forgets it, as with a gate of experts."""

    def __init__(self) -> None:
        self.left: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.left = x.sum().detach()
        return x

    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        left, self.left = self.left, None
        return over_all(out, y) if left is None else over_all(out, y) + left


def steps(
    loss_fn: Any, labels: list[Tensor], *, size: int = 2, last: Any = torch.tanh, looks: bool = True
) -> list[str]:
    """Runs a step for each of ``labels`` without stages; returns what was said."""
    torch.manual_seed(0)
    layers = StagedLayers([nn.Linear(2, CLASSES), last], 1, 0, loss_fn=loss_fn)
    layers.mean_loss._said = not looks
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for y in labels:
            step = PipelineStep(layers, lambda _, value, is_last: layers(value), None, 4, size)
            step.compute([torch.randn(len(y), TOKENS, 2), y])
    assert {found.category for found in caught} <= {OptionWarning}
    return [str(found.message) for found in caught]


PAIR = r"gives [\d.]+ for the first two micro-batches together, and [\d.na]+ is the mean of their own losses"


@pytest.mark.parametrize(
    ("loss_fn", "labels", "seen"),
    [
        (per_token("sum"), ONE, rf"<lambda> \(test_mean_loss.py:\d+\) {PAIR}"),
        (per_token(), PADDED, PAIR),
        (per_token(), NONE, PAIR),
        (per_token(weight=torch.arange(1.0, CLASSES + 1)), ONE, PAIR),
        ([over_all, per_token("sum")], ONE, PAIR),
        (partial(lambda out, y, p: out.norm(p), p=2), ONE, PAIR),
    ],
)
def test_what_is_no_mean_over_rows_is_said_once(loss_fn: Any, labels: Tensor, seen: str) -> None:
    """Sums, means over the labels that count or weigh, norms: two micro-batches are compared."""
    (said,) = steps(loss_fn, [labels] * 4)
    assert re.search(seen, said)
    assert "Return (sum of the loss, number of what counts)" in said


@pytest.mark.parametrize(
    "loss_fn", [nn.CrossEntropyLoss(), F.cross_entropy, partial(F.cross_entropy, label_smoothing=0.1)]
)
def test_labels_that_count_are_counted_in_every_step(loss_fn: Any) -> None:
    """torch's own loss: the step in which the numbers first differ is not one whose values are compared."""
    assert steps(loss_fn, [ONE, ONE, PADDED[:2].repeat(2, 1)], last=classes_first) == []
    (said,) = steps(loss_fn, [ONE, ONE, PADDED, PADDED], last=classes_first)
    assert "labels that are not -100, and the micro-batches of a batch have 2, 6 of them" in said
    (said,) = steps(nn.CrossEntropyLoss(ignore_index=3), [ONE], size=1, last=classes_first)
    assert "labels that are not 3, and the micro-batches of a batch have 3, 2, 2, 3 of them" in said


@pytest.mark.parametrize(
    ("loss_fn", "labels", "size"),
    [
        (over_all, PADDED, 2),
        (over_all, ONE[:3], 2),  # a smaller last micro-batch counts by its rows
        (per_token(), ONE[:3], 2),
        (per_token("sum"), ONE, ROWS),  # one micro-batch is the batch
        (lambda out, y: (out.flatten(1).mean(1) - out.mean()).sum(), ONE, 2),  # about 0, of rounding alone
    ],
)
def test_means_over_rows_pass(loss_fn: Any, labels: Tensor, size: int) -> None:
    """No word of a loss that fits, for an uneven last micro-batch either."""
    assert steps(loss_fn, [labels] * 4, size=size) == []


def test_narrow_losses_may_round() -> None:
    """A loss in bfloat16, or rounded to it, has its rounding."""
    for loss_fn in (lambda out, y: over_all(out, y).bfloat16(), lambda out, y: over_all(out, y).bfloat16().float()):
        assert steps(loss_fn, [ONE] * 8) == []


def test_what_depends_on_more_than_its_arguments_is_left_alone() -> None:
    """Random numbers, buffers and a kept loss: nothing is said, and the calls that look leave no trace."""
    found = []
    for looks in (True, False):
        TRACKER.reset()
        TRACKER.add("noise", 5)
        noisy = Noisy()
        assert steps(noisy, [ONE] * 4, looks=looks) == []
        found.append([noisy.calls.clone(), torch.rand(()), TRACKER.get_states_tracker()["noise"]["cpu"]])
    TRACKER.reset()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    kept = Kept()
    assert steps(kept, [ONE] * 4, last=kept.forward) == []


def test_the_calls_that_look_record_no_gradients() -> None:
    """Three further calls in steps 1, 2, 4 and 8."""
    graphs: list[bool] = []

    def noted(out: Tensor, y: Tensor) -> Tensor:
        graphs.append(out.requires_grad or torch.is_grad_enabled())
        return over_all(out, y)

    assert steps(noted, [ONE] * 9) == []
    assert (graphs.count(True), graphs.count(False)) == (18, 12)


@pytest.mark.parametrize(
    "last",
    [
        lambda out: (out, torch.zeros(())),
        lambda out: (out, torch.zeros(CLASSES)),
        lambda out: (out.transpose(0, 1), None),
    ],
)
def test_outputs_without_rows_in_front_are_not_joined(last: Any) -> None:
    """A scalar, a vector over experts or tokens in dim 0 cannot be joined by rows: the loss is not judged."""
    assert steps(lambda out, y: out[0].sum() + y.sum(), [ONE] * 2, last=last) == []


def test_a_function_that_refuses_the_pair_is_left_alone() -> None:
    """loss_fn need not take any other number of rows."""

    def fixed(out: Tensor, y: Tensor) -> Tensor:
        if len(out) != 2:
            raise ValueError("two rows")
        return out.sum()

    assert steps(fixed, [ONE] * 2) == []
