"""Sources of streams: partitions of records that can be read again from any offset."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

from fleet.dataset.dataset_settings import check_integers
from fleet.errors import ConfigError

_IDLE_S = 0.02
_EVENTS_PER_TURN = 64


class Event(NamedTuple):
    """One record, and its place in the stream."""

    partition: int
    offset: int
    record: Any


class StreamReader(Protocol):
    """Reads some partitions of a source."""

    def poll(self, timeout_s: float) -> list[Event] | None:
        """Returns the next events, none if none come within ``timeout_s``, and ``None`` at the end of the stream.

        The offsets of a partition ascend; they may have gaps.
        """

    def lag(self, following: Mapping[int, int]) -> int | None:
        """Returns how many events wait behind the offsets; ``None`` where the source does not know."""

    def close(self) -> None:
        """Releases what the reader holds."""


@runtime_checkable
class StreamSource(Protocol):
    """A stream with a ``name``, under which the servers keep its positions."""

    name: str

    def partitions(self) -> int:
        """Returns how many partitions there are, numbered from 0."""

    def open(self, starts: Mapping[int, int | None]) -> StreamReader:
        """Returns a reader of these partitions, each from its offset on; ``None`` stands for the source's start."""


class ReplayableSource:
    """A source made of a function that opens a partition at an offset.

    Args:
        open_partition: called with a partition and an offset; returns an iterator of (offset, record), from that offset
            on, ascending. It yields ``None`` where nothing has come yet, instead of blocking; its end is the end of the
            partition. With a method ``end(partition)``, which returns the offset after the last event so far, lags are
            known.
        partitions: how many there are.
        name: under which the servers keep the positions.
        at_once: how many events one poll reads of each partition: no more than a batch needs, so that events that are
            there need not wait for an iterator that blocks.

    Raises:
        ConfigError: an argument is of another kind.

    Example:
        >>> events = ["a", "b", "c"]
        >>> source = ReplayableSource(lambda partition, start: enumerate(events[start:], start))
        >>> source.open({0: 1}).poll(1.0)
        [Event(partition=0, offset=1, record='b'), Event(partition=0, offset=2, record='c')]
    """

    def __init__(
        self,
        open_partition: Callable[[int, int], Iterator[tuple[int, Any] | None]],
        partitions: int = 1,
        name: str = "stream",
        at_once: int = _EVENTS_PER_TURN,
    ) -> None:
        if not callable(open_partition):
            raise ConfigError(
                f"StreamDataset(source={open_partition!r}): a source is a KafkaSource, an object with name, "
                "partitions() and open(starts), or a function (partition, offset) -> iterator of (offset, record)."
            )
        check_integers("StreamDataset", partitions=(partitions, 1))
        self.name = name
        self._open = open_partition
        self._end: Callable[[int], int] | None = getattr(open_partition, "end", None)
        self._partitions = partitions
        self._at_once = min(at_once, _EVENTS_PER_TURN)

    def partitions(self) -> int:
        """Returns how many partitions there are."""
        return self._partitions

    def open(self, starts: Mapping[int, int | None]) -> StreamReader:
        """Returns a reader that takes turns between the partitions."""
        iterators = {p: iter(self._open(p, start or 0)) for p, start in starts.items()}
        return _TurnReader(iterators, self.name, self._end, self._at_once)


class _TurnReader:
    def __init__(
        self,
        iterators: dict[int, Iterator[tuple[int, Any] | None]],
        name: str,
        end: Callable[[int], int] | None,
        at_once: int,
    ) -> None:
        self._iterators = iterators
        self._name = name
        self._end = end
        self._at_once = at_once

    def poll(self, timeout_s: float) -> list[Event] | None:
        """Returns some events of each partition; waits as long as all of them have nothing."""
        deadline = time.monotonic() + timeout_s
        # A few of each partition in turn: one partition with many events must not keep the others waiting.
        while self._iterators:
            events = [event for partition in list(self._iterators) for event in self._next_of(partition)]
            if events or time.monotonic() >= deadline:
                return events
            if self._iterators:
                time.sleep(min(_IDLE_S, timeout_s))
        return None

    def _next_of(self, partition: int) -> Iterator[Event]:
        for _ in range(self._at_once):
            try:
                item = next(self._iterators[partition])
            except StopIteration:
                del self._iterators[partition]
                return
            if item is None:
                return
            try:
                offset, record = item
            except (TypeError, ValueError):
                raise ConfigError(
                    f"stream {self._name!r}, partition {partition}: the source gave {item!r}, not (offset, record)."
                ) from None
            yield Event(partition, offset, record)

    def lag(self, following: Mapping[int, int]) -> int | None:
        """Returns how far the offsets are from the ends; ``None`` where the source has no method ``end``."""
        end = self._end
        return None if end is None else sum(max(0, end(p) - offset) for p, offset in following.items())

    def close(self) -> None:
        """Closes the iterators that can be closed."""
        # Generators have close(), which runs their finally blocks; other iterators need none.
        for iterator in self._iterators.values():
            getattr(iterator, "close", lambda: None)()
        self._iterators = {}
