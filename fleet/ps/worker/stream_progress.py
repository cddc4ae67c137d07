"""StreamProgress: how far this worker has read its streams, the positions of the next push, and where to go on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from fleet.errors import ConfigError
from fleet.ps.client.client import Client
from fleet.ps.server.stream_points import CLOCK
from fleet.ps.wire.positions import Positions
from fleet.ps.worker.exchange_modes import Gradients, ServerExchange

Offsets: TypeAlias = dict[str, dict[str, int]]  # by source and partition: the offset after the last event


@dataclass(frozen=True)
class Resumption:
    """Where a restarted worker goes on.

    Args:
        offsets: up to here every table of every server has the events.
        again: steps that only some servers or tables have, ascending, each with the offsets that it reached.
        lost: the reason why the job cannot go on where some servers lack such a step; empty otherwise.
    """

    offsets: Offsets = field(default_factory=dict)
    again: tuple[tuple[int, Offsets], ...] = ()
    lost: str = ""


def resumption_of(welcomes: Sequence[Mapping[str, Any]]) -> Resumption:
    """Returns where the worker goes on, by the welcomes of the servers.

    Example:
        >>> at = lambda step, offset: [step, {"clicks": {"0": offset}}]
        >>> resumption_of([{"points": {"-1": at(3, 96)}}, {"points": {"-1": at(2, 64)}}])
        Resumption(offsets={'clicks': {'0': 64}}, again=((3, {'clicks': {'0': 96}}),), lost='')
    """
    points = [{int(place): point for place, point in welcome.get("points", {}).items()} for welcome in welcomes]
    base, offsets = min((known.get(CLOCK, [0, {}]) for known in points), key=lambda point: int(point[0]))
    later = {int(step): reached for known in points for step, reached in known.values() if step > base}
    passed = max((int(welcome.get("applied_step", 0)) for welcome in welcomes), default=0)
    if later and passed > min(later):
        last = max(later)
        lost = (
            f"step {min(later)} of this worker reached only some parameter servers, and the other workers went on "
            f"without it after its lease. Its events up to {later[last]} are not trained a second time; the servers "
            "that lack them stay without"
        )
        return Resumption(later[last], (), lost)
    return Resumption(offsets, tuple(sorted(later.items())))


class StreamProgress:
    """The offsets that this worker has read, of all its streams.

    Args:
        resumption: where it goes on.
        step: the steps that this worker has pushed, as the servers count them.
    """

    def __init__(self, resumption: Resumption, step: int = 0) -> None:
        self.resumption = resumption
        self.again = [step for step, _ in resumption.again]
        self._step = step
        self._ranges: Positions = {}
        self._ahead: dict[str, int] = {}
        self.is_open = False  # batches were given since the last step
        self.accumulates = False  # several batches made one step
        self._lags: dict[str, Callable[[], Mapping[int, int]]] = {}

    def begin(
        self,
        source: str,
        starts: Mapping[int, int],
        ahead: int = 0,
        lags: Callable[[], Mapping[int, int]] = dict,
    ) -> None:
        """Notes from where the partitions of ``source`` are read, and how many batches the loop takes in advance.

        ``lags`` tells for metrics how many events of each partition wait.

        Raises:
            ConfigError: another dataset of this worker reads a source of this name.
        """
        if source in self._ranges:
            raise ConfigError(
                f"StreamDataset(name={source!r}): another dataset of this process reads a stream of that name, and the "
                "servers tell streams apart by their names. Give each dataset a name of its own."
            )
        self._ranges[source] = {str(partition): (start, start) for partition, start in starts.items()}
        self._ahead[source] = ahead
        self._lags[source] = lags

    def end(self, source: str) -> None:
        """Notes that ``source`` is closed: nobody is asked how many events wait."""
        self._lags.pop(source, None)

    @property
    def has_one_stream(self) -> bool:
        """Whether one dataset reads, so that a step holds no other stream's events."""
        return len(self._ranges) == 1

    def lags(self) -> dict[tuple[str, ...], float]:
        """Returns how many events wait, by source and partition, where the source knows its end."""
        return {
            (source, str(partition)): float(lag)
            for source, of_source in list(self._lags.items())
            for partition, lag in of_source().items()
        }

    def give(self) -> None:
        """Notes that the loop gets a batch."""
        self.accumulates = self.accumulates or self.is_open
        self.is_open = True

    def note(self, source: str, partition: int, following: int) -> None:
        """Notes that the events of the partition before ``following`` belong to the next step."""
        ranges = self._ranges[source]
        ranges[str(partition)] = (ranges[str(partition)][0], following)

    def check_ahead(self) -> None:
        """Raises ConfigError when rows of the next batch are requested and a dataset was not told of such a loop."""
        for source, ahead in self._ahead.items():
            if not ahead:
                raise ConfigError(
                    f"prefetch(): the loop has taken the next batch of the stream {source!r} before the step of this "
                    "one, whose push would count both as trained. Say so: StreamDataset(..., ahead=1)."
                )

    @property
    def may_read_ahead(self) -> bool:
        """Whether every dataset was told that the loop takes a batch in advance."""
        return all(self._ahead.values())

    def step_after_again(self) -> int:
        """Notes that the first of the steps :attr:`again` was repeated; returns the steps that then count as pushed."""
        done = self.again.pop(0)
        return self.again[0] - 1 if self.again else max(self._step, done)

    def put(self, exchange: ServerExchange, client: Client, gradients: Gradients) -> None:
        """Gives ``exchange`` the gradients of one step with its positions; ``client`` counts the steps."""
        exchange.put(gradients, self.positions())
        if self.again:  # the servers have parts of this step: it must not be merged with the next
            exchange.flush()
            client.step = self.step_after_again()

    def positions(self) -> Positions | None:
        """Returns the positions for the next push, which ends a step; ``None`` where no stream is read."""
        self.is_open = False
        return {source: dict(ranges) for source, ranges in self._ranges.items()} or None


def resume(client: Client) -> StreamProgress:
    """Returns the progress of the rank of ``client``, whose next steps get the numbers that they had before."""
    resumption = resumption_of(client.welcomes())
    progress = StreamProgress(resumption, client.step)
    if resumption.again:
        client.step = resumption.again[0][0] - 1
    return progress
