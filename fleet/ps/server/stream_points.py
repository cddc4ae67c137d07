"""What a server knows of the streams that workers read: up to where, and which pushes hold which events.

[Note: An event is trained once]
A push of a worker that reads streams carries, for each partition, where the worker began and the offset after the last
event that its gradients hold up to that step. A server notes it under the journal's lock with the step itself: as the
*point* of each table that the push changed, and as the point of the worker's clock where the push ends a step. Points
are in the record of the push and in snapshots, so rows and points are never apart.

A restarted worker asks every server for the points. Up to the lowest clock among them everything is on all servers.
Points above it are steps that only some servers or tables have; the worker forms exactly these batches again, from one
point to the next, under the same step numbers. Tables that have the step drop it (``fresh_tables``), the others take
it. So each table of each server has each event once.

A partition is read by one worker. Another that takes it over begins where the first one's clock is, and from then on
the first one's pushes are refused: its ``first`` lies below the position of the other.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from fleet.ps.wire.messages import MessageError
from fleet.ps.wire.positions import Positions

CLOCK = -1  # the place of a worker's clock among those of its tables


class Points:
    """The points of one worker: by table, and :data:`CLOCK`, the step and the offsets it reached.

    Example:
        >>> points = Points()
        >>> points.note(3, {"clicks": {"0": (0, 96)}}, tables=[7], ends_step=True)
        >>> points.as_json()
        {'-1': [3, {'clicks': {'0': 96}}], '7': [3, {'clicks': {'0': 96}}]}
    """

    def __init__(self) -> None:
        self._at: dict[int, tuple[int, dict[str, dict[str, int]]]] = {}
        self._moved: dict[tuple[str, str], tuple[int, float]] = {}  # by source and partition: next offset, since when

    def note(self, step: int, positions: Positions, tables: Iterable[int], ends_step: bool) -> None:
        """Notes that ``tables``, and with ``ends_step`` the clock, hold the events up to ``positions``."""
        reached = {
            source: {partition: ends[1] for partition, ends in partitions.items()}
            for source, partitions in positions.items()
        }
        for place in [*tables, CLOCK] if ends_step else tables:
            if step >= self._at.get(place, (0,))[0]:
                self._at[place] = (step, reached)
        self._note_moves(reached)

    def _note_moves(self, reached: dict[str, dict[str, int]]) -> None:
        now = time.monotonic()
        for source, partitions in reached.items():
            for partition, offset in partitions.items():
                if offset > self._moved.get((source, partition), (-1, 0.0))[0]:
                    self._moved[source, partition] = (offset, now)

    def moves(self) -> dict[tuple[str, str], tuple[int, float]]:
        """Returns, by source and partition, the next offset, and when (``time.monotonic``) a push moved it there.

        After a restart of the server it counts as moved when the server read its folder.
        """
        return dict(self._moved)

    def next_of(self, source: str, partition: str) -> int | None:
        """Returns the offset after the last event of the partition that any table has; ``None`` without any event."""
        found = [offsets.get(source, {}).get(partition) for _, offsets in self._at.values()]
        return max((offset for offset in found if offset is not None), default=None)

    def as_json(self) -> dict[str, Any]:
        """Returns JSON values; :meth:`restore` takes them."""
        return {str(place): [step, offsets] for place, (step, offsets) in sorted(self._at.items())}

    def restore(self, fields: dict[str, Any]) -> None:
        """Takes over what :meth:`as_json` returned."""
        self._at = {int(place): (int(step), offsets) for place, (step, offsets) in fields.items()}
        for _, offsets in self._at.values():
            self._note_moves(offsets)


def refuse_overtaken(points: list[Points], rank: int, positions: Positions) -> None:
    """Raises MessageError when another worker has read a partition beyond where ``rank`` began to read it."""
    for source, partitions in positions.items():
        for partition, (first, following) in partitions.items():
            for other, known in enumerate(points):
                reached = known.next_of(source, partition) if other != rank else None
                if reached is not None and reached > first and following > first:
                    raise MessageError(
                        f"worker {rank}: worker {other} has taken over partition {partition} of {source!r} and trained "
                        f"its events up to {reached - 1}; this worker reads it from {first}. Restart this worker: it "
                        "then takes only partitions that nobody reads."
                    )
