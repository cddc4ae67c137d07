"""Which rows of an epoch each worker reads: a pure function of what remains, the number of workers and the rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Span = tuple[int, int]  # places [start, stop) in the order of the epoch


def rows_of(spans: Sequence[Span]) -> int:
    """Returns how many rows the spans hold."""
    return sum(stop - start for start, stop in spans)


def _part(spans: Sequence[Span], start: int, stop: int) -> Iterator[Span]:
    """Yields the spans of rows ``start`` to ``stop``, counted over all of ``spans``."""
    before = 0
    for first, end in spans:
        low, high = max(start - before, 0), min(stop - before, end - first)
        if low < high:
            yield first + low, first + high
        before += end - first


@dataclass(frozen=True, slots=True)
class RowDivision:
    """What remains of an epoch, cut into one run of rows a worker.

    Attributes:
        spans: what remains, in the order of the epoch.
        size: workers.
        rest: "uneven", "drop" or "repeat": what is done with rows that do not divide.
    """

    spans: tuple[Span, ...]
    size: int
    rest: str

    def bounds(self, rank: int) -> Span:
        """Returns the rows of a worker, counted over what remains; with "repeat" they can pass the end."""
        each, over = divmod(rows_of(self.spans), self.size)
        if self.rest == "uneven":
            return rank * each + min(rank, over), (rank + 1) * each + min(rank + 1, over)
        each += self.rest == "repeat" and over > 0
        return rank * each, (rank + 1) * each

    def share(self, rank: int) -> list[Span]:
        """Returns the spans that a worker reads; repeated rows are the first of what remains."""
        start, stop = self.bounds(rank)
        total = rows_of(self.spans)
        found: list[Span] = []
        while start < stop:
            lap = start // total * total
            found += _part(self.spans, start - lap, min(stop - lap, total))
            start = min(stop, lap + total)
        return found

    def after(self, rows: int, least: int) -> tuple[Span, ...]:
        """Returns what remains when every worker has read ``rows`` rows; nothing when none has ``least`` more."""
        bounds = [self.bounds(rank) for rank in range(self.size)]
        if all(stop - start - rows < least for start, stop in bounds):
            return ()
        return tuple(span for rank in range(self.size) for span in self.left(rank, rows))

    def left(self, rank: int, rows: int) -> list[Span]:
        """Returns what a worker that has read ``rows`` rows has left, each row of all workers once.

        The last worker's holds what "drop" leaves out here, which another number can divide.
        """
        total, (start, stop) = rows_of(self.spans), self.bounds(rank)
        left = list(_part(self.spans, start + rows, min(stop, total)))
        return left + list(_part(self.spans, stop, total)) if rank == self.size - 1 else left
