"""Window: the means of an update, as the gradients of an optimizer hold them so far.

[Note: The mean so far]
An update of K backward passes on N workers is to have the gradient of sum(totals) / sum(counts), and nobody knows the
last count before the last forward. So gradients are the mean so far: ``mean()`` adds up the counts of all workers, its
backward scales the gradients of this pass by 1 / (count so far), and before the first of them arrives it multiplies
those of earlier passes (in ``.grad``, in a window of batches, in a divided model) by old count / new count. Clipping
and ``step()`` find the mean in any case, and gradients have its size, also in 16 bits. A pass that stays on
this worker (``no_sync()``, a batch that completes no update) is scaled by the worker's own first count; the next pass
that exchanges corrects it.

A sum of gradients cannot be taken apart. Several means in an update of several passes are right where their counts are
equal in each pass; otherwise the counts of the whole update must be known before: ``update_count``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fleet.errors import ConfigError
from fleet.strategies._gradients.passes import Forward
from fleet.strategies._shared.parts import local

_LOOKED_AT = 8  # gradients; the smallest of them tells whether they were cleared
_ROUNDING = 1e-4  # between the value that backward began from and the sum of its means, relative
_MIXED = (
    "The losses of this update count differently, or only some of them with update_count, and it has several backward "
    "passes: their gradients are in one sum, which has no divisor that is right for all. Give each of them the count "
    "of the whole update: fleet.mean(total, count, update_count=...), for example the number of labels that count in "
    "all micro-batches of this worker; a term that counts 1 in each pass counts their number."
)
_FOREIGN = (
    "gradients that fleet.mean() did not bring are among those of this update, and a backward pass follows in which "
    "fleet.mean() corrects the gradients of earlier passes: another backward() came in the same update, or gradients "
    "were left from before. Write every loss of the update as fleet.mean(sum, count), a penalty as "
    "fleet.mean(penalty, 1); or give update_count, with which nothing is corrected."
)
OTHER_STATE = (
    "fleet.mean() was called in another state of the update than backward() of its loss: between them no_sync() was "
    "entered or left, or another backward pass came. Call fleet.mean() and backward() of one micro-batch after the "
    "other."
)


def _mark_of(gradient: Tensor) -> tuple[int, int]:
    # Not its id: gradients that a strategy keeps are a new object at each look.
    own = local(gradient)
    return (own._values() if own.is_sparse else own).data_ptr(), own._version


class Sums(NamedTuple):
    """A total and a count: numbers, or on an accelerator tensors, which are read without waiting for it."""

    total: Any
    count: Any

    def plus(self, other: Sums | None) -> Sums:
        """Returns both together."""
        return self if other is None else Sums(self.total + other.total, self.count + other.count)

    @property
    def mean(self) -> Any:
        """The total over the count; 0 where nothing counts."""
        return self.total / divisor(self.count)


def number_in(tensor: Tensor) -> Any:
    """Returns the number in a tensor of one element; on an accelerator a tensor, so that nothing waits for it."""
    return float(tensor.item()) if tensor.device.type == "cpu" else tensor.detach().double().reshape(())


def divisor(count: Any) -> Any:
    """Returns ``count``; 1 where nothing counts: the mean of nothing is 0, and so is its gradient."""
    return torch.where(count == 0, torch.ones_like(count), count) if isinstance(count, Tensor) else count or 1.0


def stays_local(forwards: Sequence[Forward]) -> bool:
    """Returns whether a backward pass through ``forwards`` exchanges no gradients."""
    held = {not made.will_exchange() for made in forwards}
    if len(held) > 1:
        raise ConfigError(
            "fleet.mean(): the loss was computed by several models, and only some of them exchange gradients in this "
            "pass (no_sync(), require_backward_grad_sync). Let all of them do so, or none."
        )
    return True in held


def are_equal(a: Any, b: Any) -> bool:
    """Returns whether two scales are one, apart from rounding."""
    return b is not None and bool(abs(a - b) <= 1e-9 * abs(a))


class Ahead(NamedTuple):
    """A call with update_count: its count and its update's on this worker, its line, and its pass."""

    count: Any
    update_count: Any
    line: str
    number: int


class Counted(NamedTuple):
    """The sums of passes: on this worker for passes that did not exchange, on all workers for the others."""

    alone: Sums | None = None
    everywhere: Sums | None = None


class Call:
    """One call of ``mean()`` with a graph.

    Attributes:
        own: this worker's total and count.
        averaged: the number by which strategies divide the sum of the gradients.
        windows: the windows of the optimizers whose parameters the loss reaches.
        forwards: the forwards of models that exchange gradients.
        everywhere: total and count of all workers; ``None`` in a pass that does not exchange.
        pending: the window's sums on this worker alone; ``waiting``: their sum over all workers.
        ahead: the count of the whole update on all workers, where the script has given it; ``given``: its own part.
        value: the result of ``mean()``.
        scale: the scale of its gradient in the first backward pass through it.
    """

    def __init__(self, own: Sums, averaged: float, windows: Sequence[Window], forwards: Sequence[Forward]) -> None:
        self.own = own
        self.averaged = averaged
        self.windows = windows
        self.forwards = forwards
        self.everywhere: Sums | None = None
        self.pending = windows[0].counted.alone
        self.waiting: Sums | None = None
        self.ahead: Any = None
        self.given: Ahead | None = None
        self.value: Any = 0.0
        self.scale: Any = 0.0

    def counted_after(self, before: Counted) -> Counted:
        """Returns what is counted after this call; raises ConfigError where passes came in between."""
        if self.everywhere is None:
            return Counted(self.own.plus(before.alone), before.everywhere)
        if before.alone is not None and before.alone != self.pending:  # windows of one pass are alike
            raise ConfigError(OTHER_STATE)
        waiting = None if before.alone is None else self.waiting
        return Counted(None, self.everywhere.plus(waiting).plus(before.everywhere))

    def scale_alone(self) -> Any:
        """Returns the scale where no other call counts: ``torch.autograd.grad``."""
        counted = self.own if self.everywhere is None else self.everywhere
        return self.averaged / divisor(counted.count if self.ahead is None else self.ahead)

    def end_pass(self) -> None:
        """Tells the windows that the pass has come to its end."""
        for window in self.windows:
            window.end_pass()


def _unlike_ahead(line: str, found: float, said: str) -> str:
    return (
        f"{line}: the calls of fleet.mean() of this update counted {found:.6g} in all and gave {said} as update_count; "
        "nothing was updated. update_count is the sum of count over all calls of this worker for this loss until "
        "step(), the same number in each of them; fleet adds up the workers."
    )


class Window:
    """The passes since the last update, as the gradients of one optimizer hold them; see [Note: The mean so far].

    Args:
        gradients: returns the gradients, wherever they are.

    Attributes:
        passes: the number of backward passes.
        counted: their sums.
        is_in_pass: whether the latest pass has not ended.
        is_foreign: whether there are gradients of a loss without a mean.
    """

    def __init__(self, gradients: Callable[[], Iterable[Tensor]]) -> None:
        self._gradients = gradients
        self.end_update()

    def end_update(self) -> None:
        """Forgets every pass: the gradients were applied, or are gone."""
        self.passes = 0
        self.counted = Counted()
        self._kept = (0, self.counted, 0)
        self._scale: Any = None  # of the sums in the gradients
        self._is_ahead = False
        self.is_foreign = False
        self._zeros: tuple[int, int] | None = None
        self._given: list[Ahead] = []
        self._calls: set[Call] = set()
        self._weights: list[Any] = []  # of every mean
        self._start_pass(-1, None)

    def is_divided_twice(self) -> bool:
        """Returns whether every mean of several passes has a weight of one over their number."""
        return self.passes > 1 and all(abs(float(weight) * self.passes - 1) < 1e-6 for weight in self._weights)

    def end_batch(self) -> None:
        """Ends a batch that completes no update, whose gradients ``zero_grad()`` does not clear."""
        self._kept = (self.passes, self.counted, len(self._given))

    def noted(self) -> Tensor | None:
        """Returns the sums and the scale of waiting batches, to go on with them after a resume; ``None`` without."""
        alone = self.counted.alone
        scale = self._scale
        return None if alone is None else torch.tensor([*alone, scale], dtype=torch.float64)

    def restore(self, noted: Tensor) -> None:
        """Goes on with the waiting batches that :meth:`noted` described."""
        total, count, scale = noted.tolist()
        self.end_update()
        # The waiting batches count as one pass: their gradients are one sum with one scale.
        self.passes = 1
        self.counted = Counted(Sums(total, count))
        self._scale = scale
        self.end_batch()

    def drop_batch(self) -> None:
        """Forgets the passes since :meth:`end_batch`, whose gradients were cleared."""
        passes, counted, given = self._kept
        if not passes:
            self.end_update()
        del self._given[given:]
        self.passes = passes
        self.counted = counted
        self._start_pass(-1, None)

    def has_counted(self, call: Call) -> bool:
        """Returns whether a pass of ``call`` has come."""
        return call in self._calls

    def has_gradients(self) -> bool:
        """Returns whether there is any gradient; a script may have cleared them by hand, also with zeros."""
        # Where rows of this worker count nothing, the pass itself left zeros: they say nothing while nobody writes.
        smallest = self._smallest_gradient()
        return smallest is not None and (_mark_of(smallest) == self._zeros or self._is_any_not_zero(smallest))

    def _smallest_gradient(self) -> Tensor | None:
        """Returns the smallest of the first gradients, which is quick to look at and nearly always answers."""
        return min(islice(self._gradients(), _LOOKED_AT), key=Tensor.numel, default=None)

    def _is_any_not_zero(self, smallest: Tensor) -> bool:
        return bool(local(smallest).any()) or any(bool(local(gradient).any()) for gradient in self._gradients())

    def end_pass(self) -> None:
        """Marks gradients that the pass left at zero, so that :meth:`has_gradients` knows them again."""
        self.is_in_pass = False
        smallest = self._smallest_gradient()
        is_zero = smallest is not None and not self._is_any_not_zero(smallest)
        self._zeros = _mark_of(smallest) if smallest is not None and is_zero else None

    def check_given(self) -> None:
        """Raises ConfigError where the counts of an update's calls do not add up to their update_count."""
        losses: dict[Any, list[Ahead]] = {}
        lines: dict[str, list[Ahead]] = {}
        for one in self._given:
            losses.setdefault((one.line, float(one.update_count)), []).append(one)
            lines.setdefault(one.line, []).append(one)
        for (line, expected), calls in losses.items():
            found = sum(float(one.count) for one in calls)
            times = max(1, round(found / expected)) if expected else 1  # several losses may count alike
            if abs(found - times * expected) > _ROUNDING * max(found, expected):
                raise ConfigError(_unlike_ahead(line, found, f"{expected:.6g}"))
        # Each call gave its own count as that of the update. With one pass both are the same; with several the mean
        # would be one over calls, not over rows.
        for line, given in lines.items():
            calls = [one for one in given if one.count > 0]
            each = all(abs(float(one.count - one.update_count)) <= _ROUNDING * one.count for one in calls)
            if each and len({one.number for one in calls}) > 1:
                found = sum(float(one.count) for one in calls)
                raise ConfigError(_unlike_ahead(line, found, "its own count in each call"))

    def enter(self, call: Call, gradient: Tensor, task: int, root: Any) -> Any:
        """Counts ``call`` in the backward pass ``task``; returns the scale of its gradient.

        Args:
            call: it brings a gradient.
            gradient: of its value.
            task: the number that the engine gives to a pass.
            root: the value that backward began from, where it is known.

        Raises:
            ConfigError: the sum of this pass and of earlier ones has no scale.
        """
        if call in self._calls:  # backward runs through it again
            return call.scale if self.passes == 1 or self._scale is None else self._scale
        is_first = task != self._task
        # The first call of a pass rescales the earlier gradients. Further calls of the pass can only agree with it.
        if is_first:
            if self.is_in_pass:
                self._drop_failed()
            self._check_latest()
            if not self.passes:
                self.is_foreign = any(bool(local(gradient).any()) for gradient in self._gradients())
            self._start_pass(task, root)
            self.passes += 1
        if call.ahead is not None:
            scale = call.averaged / divisor(call.ahead)
            is_right = self._is_ahead or self.passes == 1
            self._is_ahead = True
            if call.given is not None:
                self._given.append(call.given._replace(number=self.passes))
        else:
            counted = call.counted_after(self._before)
            scale = self._scale_of(call, counted)
            is_right = not self._is_ahead and (is_first or self._may_differ(call) or are_equal(scale, self._scale))
            if is_right and is_first:
                self._multiply(call, scale)
                self._scale = scale
                self.counted = counted
        if not is_right:
            raise ConfigError(_MIXED)
        call.scale = scale
        self._calls.add(call)
        weight = number_in(gradient)
        self._weights.append(weight)
        self._latest.append((call, weight))
        return scale

    def _start_pass(self, task: int, root: Any) -> None:
        self._task = task
        self.is_in_pass = False
        self._root = root
        self._before = self.counted
        self._latest: list[tuple[Call, Any]] = []  # with the gradients that reached their values

    def _drop_failed(self) -> None:
        """Forgets a pass that an error broke off."""
        self.passes -= 1
        self.counted = self._before
        del self._weights[len(self._weights) - len(self._latest) :]
        self._calls -= {call for call, _ in self._latest}
        self._latest = []

    def _scale_of(self, call: Call, counted: Counted) -> Any:
        # A local pass keeps the scale of the first: the exchange that follows corrects all of them together.
        if call.everywhere is None and self._scale is not None and self.passes > 1 and not self._has_counted_nothing():
            return self._scale
        of_all = counted.alone if call.everywhere is None else counted.everywhere
        assert of_all is not None
        return call.averaged / divisor(of_all.count)

    def _has_counted_nothing(self) -> bool:
        """Returns whether the gradients of the passes before are known to be zeros, which fit any scale."""
        alone, everywhere = self._before
        return everywhere is None and alone is not None and isinstance(alone.count, float) and alone.count == 0

    def _may_differ(self, call: Call) -> bool:
        """Returns whether the pass of ``call`` may be the only one of the update."""
        return self.passes == 1 and call.everywhere is not None

    def _multiply(self, call: Call, scale: Any) -> None:
        # A pass that stays on this worker keeps the scale; the next exchange corrects it, see [Note: The mean so far].
        if self.passes == 1 or self._scale is None or call.everywhere is None:
            return
        if self.is_foreign:
            raise ConfigError(f"fleet.mean(): {_FOREIGN}")
        factor = scale / self._scale
        with torch.no_grad():
            for gradient in self._gradients():
                local(gradient).mul_(factor)

    def _check_latest(self) -> None:
        """Raises ConfigError unless the latest pass, which another follows, had means that can be added to."""
        if self._is_ahead or not self._latest:
            return
        if any(not are_equal(call.scale, self._scale) for call, _ in self._latest):
            raise ConfigError(_MIXED)
        if self._root is None:
            return
        terms = [weight * call.value for call, weight in self._latest]
        if bool(abs(self._root - sum(terms)) > _ROUNDING * (abs(self._root) + sum(map(abs, terms)))):
            raise ConfigError(
                f"backward() began from {float(self._root):.6g}, of which fleet.mean() gave {float(sum(terms)):.6g}, "
                "and another backward pass follows before step(): fleet.mean() corrects the gradients of earlier "
                "passes, and those of the other terms are among them. Write every term as fleet.mean(sum, count), a "
                "penalty as fleet.mean(penalty, 1), with update_count where they count differently."
            )
