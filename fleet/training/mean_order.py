"""MeanOrder: the workers call fleet.mean from the same lines, in the same order and as often."""

from __future__ import annotations

import functools
import json
import math
import os
import sys
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fleet.errors import ConfigError
from fleet.job.whereabouts import line_text, named, user_frame

if TYPE_CHECKING:
    from fleet.job.job import Job

_CALL = "fleet.mean() or the backward() after it"
_LONGEST = 64  # means and passes since the last update, as in an evaluation
_MARKS = 1 << 20  # a sum of squares of marks of many workers is exact in a float64


class MeanOrder:
    """Compares which mean the workers are at, by its line and its number since the last update.

    If the means and passes since the last update have not come in this order before, the workers meet before the next
    mean or backward pass that exchanges gradients: the meeting names the lines of all workers before torch's exchanges
    are mixed up. Every exchange carries marks: the number of workers that count something, the sum of their marks, and
    the sum of the squares; by these every worker knows whether all marks are equal. On an accelerator, where nothing
    waits for sums, a mean of unlike marks is NaN. A worker that counts nothing may do so from any line.

    Args:
        job: the workers.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        # By the axes of the exchange: the number of means since the last update, and the order of means ("m") and
        # backward passes ("b") since then.
        self._numbers: dict[Sequence[str], int] = {}
        self._orders: dict[Sequence[str], str] = {}
        self._seen: set[tuple[Sequence[str], str]] = set()
        self._met: dict[Sequence[str], int] = {}
        # The latest mean: its mark, its number, whether it counts, its file and line.
        self._latest: tuple[Any, ...] = (0, 0, False, "", 0)

    def end_update(self) -> None:
        """Numbers the means anew."""
        self._numbers.clear()
        self._orders.clear()

    def marks(self, axes: Sequence[str], count: Any) -> list[Any]:
        """Returns the marks that a mean of ``count`` adds to its exchange along ``axes``."""
        frame = user_frame(sys._getframe(1))
        file = frame.f_code.co_filename
        line = frame.f_lineno
        self._numbers[axes] = number = self._numbers.get(axes, 0) + 1
        mark = (_mark_of(file) + 8191 * line + 131 * number) % _MARKS
        counts = count > 0
        self._latest = (mark, number, counts, file, line)
        if self._is_new(axes, "m"):
            self._compare("fleet.mean(), call", axes)
        return [counts, counts * mark, counts * mark * mark]

    def agreed(self, sums: Any, axes: Sequence[str]) -> Any:
        """Returns ``sums``, the last three of marks; raises ConfigError where marks differ, or returns NaN."""
        # By Cauchy and Schwarz, n times the sum of squares equals the square of the sum only for equal marks.
        workers, marks, squares = sums[-3:]
        if isinstance(sums, Tensor):
            return sums * torch.where(workers * squares == marks * marks, 1.0, math.nan)
        if workers * squares != marks * marks:
            self._compare("fleet.mean(), call", axes)
        return sums

    def before_backward(self, axes: Sequence[str]) -> None:
        """Raises ConfigError unless a backward pass begins on all workers that exchange gradients along ``axes``."""
        if self._job.axes.group(*axes) is not None and self._is_new(axes, "b"):
            self._compare("backward(), after call", axes)

    def _is_new(self, axes: Sequence[str], event: str) -> bool:
        """Notes a mean or a pass; returns whether those since the last update have an order not seen before."""
        order = self._orders.get(axes, "")
        if len(order) == _LONGEST:
            return False
        self._orders[axes] = order + event
        known = len(self._seen)
        self._seen.add((axes, order + event))
        return len(self._seen) > known

    def _compare(self, what: str, axes: Sequence[str]) -> None:
        """Raises ConfigError unless all workers along ``axes`` are at ``what``, those that count at one mean."""
        job = self._job
        mark, number, counts, *place = self._latest
        self._met[axes] = met = self._met.get(axes, 0) + 1
        ranks = job.axes.ranks(*axes)
        assert job.roll_call is not None
        said = json.dumps([what, mark, bool(counts), f"{what} {number} since the last update, {line_text(*place)}"])
        rows = [json.loads(text) for text in job.roll_call.meet_some(ranks, met, _CALL, said)]
        if len({row[0] for row in rows}) > 1 or len({row[1] for row in rows if row[2]}) > 1:
            places: dict[str, list[int]] = {}
            for rank, (*_, place) in zip(ranks, rows, strict=True):
                places.setdefault(place, []).append(rank)
            listed = "\n".join(f"  {named(where, job.axes.described)}: {place}" for place, where in places.items())
            raise ConfigError(
                f"The workers call fleet.mean() in another order, or another number of times:\n{listed}\n"
                "Every worker calls the same means from the same lines in the same order. A term that a worker has "
                "nothing for counts nothing there: fleet.mean(0 * model(x).sum(), 0), in place of a branch around it."
            )


@functools.cache
def _mark_of(file: str) -> int:
    return zlib.crc32(os.path.basename(file).encode())
