"""StreamDataset: batches of events whose positions travel with the gradients that they make.

[Note: Which events a step holds]
A batch that the loop was given counts with the next step: its events' offsets go with that push, into one record of
the journal. ``ahead`` says how many batches the loop takes before the step of an earlier one; the offsets then follow
so many batches later. A batch is formed from the events that have come, so a restarted worker could cut other batches
than before. That matters only for steps that some servers have and others lack: these batches are formed again
exactly, from the offsets that the servers noted (see :mod:`fleet.ps.server.stream_points`); events beyond them are
kept for later.

[Note: Streams of logical workers]
In a reproducible job a batch must follow from the stream alone, and not from what had come when it was formed. So it is
full, and its events are those of one partition: logical worker v of V takes a batch of partition v, v + V, and so on in
turn. What does not make a round is read again by the next loop.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset, default_collate, get_worker_info

from fleet.common.log import LOGGER
from fleet.dataset.dataset_settings import check_integers
from fleet.dataset.rows_of_batches import with_rows
from fleet.dataset.stream_source import Event, ReplayableSource, StreamReader, StreamSource
from fleet.dataset.workers import batches_in_turns, data_place, listened_batches, whole_rounds
from fleet.errors import CheckpointError, ConfigError, FleetError
from fleet.job.logical_workers import LogicalWorkers
from fleet.job.running import running_logical, running_session

if TYPE_CHECKING:
    from fleet.ps.worker.covered_rank import CoveredRank, LostRanks
    from fleet.ps.worker.stream_progress import StreamProgress

_POLL_S = 0.2
_BLOCKED_S = 1.0
_SHORT_POLL_S = 0.02  # where several ranks wait for events
_SAY_EVERY_S = 30.0
Parse = Callable[[Any], Any]


class _Wait:
    """A wait for events; logs its length every 30 s."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.came = self._reported = time.monotonic()

    def note(self, events: list[Event], partitions: Mapping[int, int]) -> None:
        """Notes the events of a poll."""
        now = time.monotonic()
        if events:
            self.came = self._reported = now
        elif now - self._reported >= _SAY_EVERY_S:
            self._reported = now
            text = "stream %r: no event for %.0f s in partitions %s; still waiting"
            LOGGER.info(text, self._name, now - self.came, sorted(partitions))


class StreamDataset(IterableDataset[Any]):
    """Batches of a stream; in a job with parameter servers each event is trained once, whatever is killed.

    Partitions are divided over the workers, or over the logical workers of a job with ``strategy.reproducible``: worker
    r of n reads r, r + n, and so on. The servers keep the positions
    with the rows, under the name of the source. A worker that was killed and restarted goes on after the last event
    that the servers have, in sync and async mode alike (the journal has to be on: FLEET_PS_FOLDER). Without servers,
    :meth:`state_dict` belongs into ``fleet.elastic.Checkpoint(data=...)``.

    Args:
        source: a :class:`KafkaSource`, an object like it (``name``, ``partitions()``, ``open(starts)``), or a function
            ``(partition, offset)`` that returns an iterator of (offset, record) from that offset on.
        parse: makes a sample of a record: numbers, tensors, arrays, or tuples and dictionaries of them. ``None`` leaves
            the record out.
        batch_size: samples in a batch.
        name: of a function: the name under which the servers keep the positions; a source has a name.
        partitions: of a function: how many there are.
        max_wait_s: a batch that has begun is given after so many seconds although it is not full; ``None`` waits.
        timeout_s: the iteration ends when no event has come for so many seconds; ``None`` waits forever, and says so
            every 30 s.
        ahead: batches that the loop takes before the step of an earlier one, as a loop with ``prefetch`` does.
        collate: makes a batch of samples; torch's ``default_collate`` if not given.

    Raises:
        ConfigError: an argument is wrong, there are fewer partitions than workers, or with ``strategy.reproducible``
            batches would depend on when events come.

    Example:
        >>> lines = [f"{user} {click}" for user, click in [(7, 1), (9, 0), (7, 0)]]
        >>> dataset = fleet.StreamDataset(
        ...     lambda partition, start: enumerate(lines[start:], start),
        ...     lambda line: tuple(map(int, line.split())),
        ...     batch_size=2,
        ... )
        >>> [user.tolist() for user, click in dataset]
        [[7, 9], [7]]
    """

    says_next_batch = True  # to checkpoints, see BatchLoops

    _is_closed = _has_warned = False

    def __init__(
        self,
        source: StreamSource | Callable[[int, int], Iterator[tuple[int, Any] | None]],
        parse: Parse,
        *,
        batch_size: int,
        name: str | None = None,
        partitions: int = 1,
        max_wait_s: float | None = None,
        timeout_s: float | None = None,
        ahead: int = 0,
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        check_integers("StreamDataset", batch_size=(batch_size, 1), ahead=(ahead, 0))
        _check_seconds(max_wait_s=max_wait_s, timeout_s=timeout_s)
        for called, value in (("parse", parse), ("collate", collate)):
            if not callable(value):
                raise ConfigError(f"StreamDataset({called}={value!r}): it is a function.")
        if isinstance(source, StreamSource):
            if name is not None or partitions != 1:
                raise ConfigError(
                    f"StreamDataset(name={name!r}, partitions={partitions!r}): a source has its own name and "
                    f"partitions. Leave them out; for another name write {type(source).__name__}(..., name=...)."
                )
            self._source = source
        else:
            self._source = ReplayableSource(source, partitions, "stream" if name is None else name, batch_size)
        self.name = self._source.name
        self._parse = parse
        self._collate = collate
        self._batch_size = batch_size
        self._max_wait_s = max_wait_s
        self._timeout_s = timeout_s
        self._ahead = ahead
        self._reader: StreamReader | None = None
        self._progress: StreamProgress | None = None
        self._again: deque[Mapping[int, int]] = deque()  # of batches to form again: the offsets they reach
        self._read: dict[int, int] = {}  # by partition: the offset after the last event that a batch holds
        self._counted: dict[int, int] = {}  # the same of the batches that count as trained
        self._given: deque[dict[int, int]] = deque()  # of the batches that the loop holds in advance
        self._pending: deque[Event] = deque()
        self._loaded: dict[int, int] = {}
        self._poll_most_s = _POLL_S
        self._size = 1  # workers among whom the partitions are divided
        self._lost: LostRanks | None = None
        self._covered: CoveredRank | None = None  # the rank whose partitions these are; None: this worker's own
        self._shares: dict[CoveredRank, StreamDataset] = {}
        self._partitions: dict[int, StreamDataset] = {}  # of the logical workers, while a loop runs
        self._rounds = 0  # that the logical workers were given

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None:
            raise ConfigError(
                "StreamDataset: DataLoader(num_workers=...) reads batches in advance in other processes, and the "
                "positions of this one would not say which of them were trained. Use num_workers=0; batches are read "
                "while the step before them is computed on the servers."
            )
        logical = running_logical()
        if logical is None:
            yield from with_rows(listened_batches(self, self._in_turn()))
        else:
            yield from batches_in_turns(self, logical, self._of_logical_workers(logical))

    def _in_turn(self) -> Iterator[Any]:
        """Yields the batches for the loop, those of ranks that were lost among them."""
        self._begin()
        turns: dict[StreamDataset, Iterator[list[Any] | None]] = {self: self._batches()}
        share = self
        while turns:
            if not share._holds_step():
                share = self._next_turn(turns, share)
            try:
                samples = next(turns[share])
            except StopIteration:
                del turns[share]
                share = next(iter(turns), self)
                continue
            if samples is not None:
                if self._lost is not None:
                    self._lost.current = share._covered  # the next push is in the name of this rank
                # Before yield: the loop may step and push before it comes back here.
                share._count_given()
                yield self._collated(samples)

    def _collated(self, samples: list[Any]) -> Any:
        if self._collate is not default_collate:
            return self._collate(samples)
        try:
            return default_collate(samples)
        except Exception as error:
            raise FleetError(
                f"stream {self.name!r}, up to the offsets {self._read}: {len(samples)} samples do not make a batch: "
                f"{str(error).rstrip('.')}. What parse returns must be of one shape (give collate= otherwise), and "
                "integers must fit int64: make an id from 2^63 up the negative number of the same bits, id - (1 << 64)."
            ) from error

    # -- partitions of workers that were lost, see fleet.ps.worker.covered_rank ------------------------------------

    def _holds_step(self) -> bool:
        """Returns whether a batch was given whose gradients are not pushed: the next must be of the same rank."""
        return self._lost is not None and self._progress is not None and self._progress.is_open

    def _next_turn(self, turns: dict[StreamDataset, Iterator[list[Any] | None]], share: StreamDataset) -> StreamDataset:
        """Adds ranks that were lost, drops those that are back, and returns whose turn it is after ``share``."""
        own = self._progress
        if self._lost is None or own is None or not own.has_one_stream or own.accumulates:
            return share
        covered = {found: self._shares.get(found) or self._share_of(found) for found in self._lost.look()}
        for gone in [each for found, each in self._shares.items() if found not in covered]:
            gone.close()
            turns.pop(gone, None)
        for found, each in covered.items():
            if found not in self._shares:
                turns[each] = each._batches()
        self._shares = covered
        for each in turns:
            each._poll_most_s = _POLL_S if len(turns) == 1 else _SHORT_POLL_S
        order = list(turns)
        return order[(order.index(share) + 1) % len(order)] if share in turns else order[0]

    def _share_of(self, covered: CoveredRank) -> StreamDataset:
        """Returns a dataset of the partitions of a rank that this worker covers."""
        share = self._like()
        share._covered = covered
        share._lost = self._lost
        share._open(range(covered.rank, self._source.partitions(), self._size), covered.progress)
        return share

    def _like(self) -> StreamDataset:
        """Returns a dataset like this one for some of its partitions."""
        limits: dict[str, Any] = {"max_wait_s": self._max_wait_s, "timeout_s": self._timeout_s}
        return StreamDataset(self._source, self._parse, batch_size=self._batch_size, collate=self._collate, **limits)

    # -- logical workers, see [Note: Streams of logical workers] -----------------------------------------------------

    def _of_logical_workers(self, logical: LogicalWorkers) -> Iterator[Any]:
        """Yields the batches of the logical workers of this process in turn, as long as all in the job have one."""
        count = self._check_logical(logical)
        mine = [range(rank, count, logical.num) for rank in logical.ranks]
        shares = {partition: self._like() for several in mine for partition in several}
        for partition, share in shares.items():
            share._loaded = self._counted
            share._open(range(partition, partition + 1), None)
        self._partitions = shares
        try:
            for found in whole_rounds([partial(self._next_of, several, logical) for several in mine], "StreamDataset"):
                for place, (batch, _) in enumerate(found, 1):
                    if place == len(found):  # a state holds whole rounds
                        self._counted = self._counted | {p: at for _, reached in found for p, at in reached.items()}
                        self._rounds += 1
                    yield batch
            logical.draw_from(logical.seed, "between", logical.round)
        finally:
            for share in shares.values():
                share.close()
            if self._partitions is shares:
                self._partitions = {}

    def _check_logical(self, logical: LogicalWorkers) -> int:
        """Returns the number of partitions; raises ConfigError where batches would follow from more than the stream."""
        self._check_open()
        for name, value in (("max_wait_s", self._max_wait_s), ("ahead", self._ahead)):
            if value:
                why = "a batch would follow from when events come" if name == "max_wait_s" else "each batch is a turn"
                raise ConfigError(
                    f"stream {self.name!r}: StreamDataset({name}={value!r}) with 'reproducible': {why}. Leave it out."
                )
        count = self._source.partitions()
        if count < logical.num:
            raise ConfigError(
                f"stream {self.name!r} has {count} partitions and the job {logical.num} logical workers: logical "
                f"worker {count} would have no events. Give the stream {logical.num} partitions or more, or, before "
                f"the training begins, set reproducible_configs['logical_workers'] to {count}."
            )
        return count

    def _next_of(self, partitions: range, logical: LogicalWorkers) -> tuple[Any, dict[int, int]] | None:
        """Returns the next batch of a logical worker and the offset it reaches; ``None`` where it would not be full."""
        partition = partitions[self._rounds % len(partitions)]
        share = self._partitions[partition]
        # What parse and collate draw follows from the batch.
        logical.draw_from(logical.seed, "data", self.name, partition, share._read.get(partition, 0))
        samples: list[Any] = []
        deque(share._next_batch(share._begin(), samples), maxlen=0)
        return None if len(samples) < self._batch_size else (share._collated(samples), dict(share._read))

    # -- start -----------------------------------------------------------------------------------------------------

    def _begin(self) -> StreamReader:
        """Opens the source where this worker goes on; later iterations continue."""
        self._check_open()
        if self._reader is not None:
            return self._reader
        session = running_session()
        rank, size = data_place()
        count = self._source.partitions()
        if count < size:
            raise ConfigError(
                f"stream {self.name!r} has {count} partitions and the job {size} workers: worker {count} would have no "
                f"events. Give the stream {size} partitions or more, or start fewer workers."
            )
        self._size = size
        server_job = None if session is None else session.server_job
        connection = None if server_job is None else server_job.running().connection
        progress = None if connection is None else connection.read_streams()
        # With ahead, a batch of one rank could come before the step of another's: a push names one rank only.
        if connection is not None and not self._ahead:
            self._lost = connection.lost_ranks
        return self._open(range(rank, count, size), progress)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConfigError(f"stream {self.name!r}: the dataset was closed. Make another one to read on.")

    def _open(self, mine: range, progress: StreamProgress | None) -> StreamReader:
        starts: dict[int, int | None] = {p: self._loaded.get(p) for p in mine}
        if progress is not None:
            # The servers know better than a loaded state: they have the steps since it was saved.
            known = _whole(progress.resumption.offsets.get(self.name, {}))
            starts.update({p: known[p] for p in mine if p in known})
            reached = [_whole(offsets.get(self.name, {})) for _, offsets in progress.resumption.again]
            self._again.extend({p: offset for p, offset in step.items() if p in mine} for step in reached)
            progress.begin(self.name, {p: start or 0 for p, start in starts.items()}, self._ahead, self.lags)
            self._progress = progress
            if progress.resumption.lost:
                LOGGER.warning("%s.", progress.resumption.lost)
        self._read = {p: start for p, start in starts.items() if start is not None}
        self._counted = dict(self._read)
        self._reader = self._source.open(starts)
        return self._reader

    # -- batches ---------------------------------------------------------------------------------------------------

    def _batches(self) -> Iterator[list[Any] | None]:
        """Yields the samples of each batch, and ``None`` when a poll has not filled it; ends with the stream."""
        reader = self._begin()
        while True:
            samples = self._next_again(reader) if self._again else (yield from self._next_batch(reader, []))
            if samples is None:
                return
            if samples:
                yield samples

    def _next_batch(self, reader: StreamReader, samples: list[Any]) -> Generator[None, None, list[Any] | None]:
        """Fills ``samples`` with the next batch, as events come, and returns them; ``None`` at the end."""
        wait = _Wait(self.name)
        began = wait.came
        while len(samples) < self._batch_size:
            if self._pending:
                self._take(self._pending.popleft(), samples)
                continue
            now = time.monotonic()
            if samples and self._max_wait_s is not None and now - began >= self._max_wait_s:
                break
            limit_s = self._poll_s(bool(samples), now - began)
            events = reader.poll(limit_s)
            self._note_blocking(time.monotonic() - now, limit_s)
            if events is None or (not events and self._is_over(time.monotonic() - wait.came)):
                break
            wait.note(events, self._read)
            self._pending.extend(events)
            if events and not samples:
                began = wait.came
            # Not filled yet: the shares of other ranks get their turn.
            if len(self._pending) < self._batch_size - len(samples):
                yield None
        return samples or None

    def _note_blocking(self, waited_s: float, limit_s: float) -> None:
        """Warns once that a source which blocks keeps the limits from acting."""
        if waited_s > limit_s + _BLOCKED_S and not self._has_warned and (self._max_wait_s or self._timeout_s):
            self._has_warned = True
            text = (
                "stream %r: the source blocked for %.1f s, so neither max_wait_s nor timeout_s could act. Let it yield "
                "None where nothing has come yet."
            )
            LOGGER.warning(text, self.name, waited_s)

    def _poll_s(self, has_begun: bool, waited_s: float) -> float:
        limit = self._max_wait_s if has_begun else self._timeout_s
        most = self._poll_most_s
        return most if limit is None else min(most, max(limit - waited_s, 0.001))

    def _is_over(self, waited_s: float) -> bool:
        return self._timeout_s is not None and waited_s >= self._timeout_s

    def _next_again(self, reader: StreamReader) -> list[Any]:
        """Returns the samples of a batch that some servers have: exactly its events, whatever else comes."""
        upto = self._again.popleft()
        samples: list[Any] = []
        kept: deque[Event] = deque()
        wait = _Wait(self.name)
        while any(self._read.get(p, 0) < offset for p, offset in upto.items()):
            if not self._pending:
                events = reader.poll(_POLL_S)
                if events is None:
                    raise CheckpointError(
                        f"stream {self.name!r} ends before the offsets {dict(upto)} that the servers have: it is "
                        "another stream, or has lost events. Give it another name to begin anew."
                    )
                wait.note(events, upto)
                self._pending.extend(events)
                continue
            event = self._pending.popleft()
            if event.offset < upto.get(event.partition, 0):
                self._take(event, samples)
            else:
                if event.partition in upto:  # the log may have lost the last of its events to a compaction
                    self._read[event.partition] = max(upto[event.partition], self._read.get(event.partition, 0))
                kept.append(event)
        self._pending.extendleft(reversed(kept))  # in front, so that each partition keeps its order
        return samples

    def _take(self, event: Event, samples: list[Any]) -> None:
        following = self._read.get(event.partition, 0)
        if type(event.offset) is not int or event.offset < following:
            raise ConfigError(
                f"stream {self.name!r}, partition {event.partition}: the source gave offset {event.offset!r} where "
                f"{following} or a higher one is due. Offsets are integers that ascend, and a source opened at an "
                "offset gives no earlier ones."
            )
        try:
            sample = self._parse(event.record)
        except Exception as error:
            place = f"stream {self.name!r}, partition {event.partition}, offset {event.offset}"
            raise FleetError(f"{place}: parse raised {error!r}. Return None to leave such records out.") from error
        self._read[event.partition] = event.offset + 1
        if sample is not None:
            samples.append(sample)

    def _count_given(self) -> None:
        """Notes the batch that the loop gets; with ``ahead`` the one so many before it counts as trained next."""
        self._given.append(dict(self._read))
        if len(self._given) > self._ahead:
            self._counted = self._given.popleft()
            if self._progress is not None:
                self._progress.give()
                for partition, following in self._counted.items():
                    self._progress.note(self.name, partition, following)

    # -- facts and state -------------------------------------------------------------------------------------------

    def lag(self) -> int | None:
        """Returns how many events of this worker's partitions wait to be trained; ``None`` where that is unknown."""
        if self._partitions:
            lags = self.lags()
            return sum(lags.values()) if len(lags) == len(self._partitions) else None
        return None if self._reader is None else self._reader.lag(self._counted)

    def lags(self) -> dict[int, int]:
        """Returns :meth:`lag` of each partition that the source knows the end of."""
        counted = self._counted
        readers = {p: share._reader for p, share in list(self._partitions.items())}
        readers = readers or dict.fromkeys(list(counted), self._reader)
        found = {p: reader.lag({p: counted.get(p, 0)}) for p, reader in readers.items() if reader is not None}
        return {partition: lag for partition, lag in found.items() if lag is not None}

    def state_dict(self) -> dict[str, Any]:
        """Returns the positions after the batches that the loop was given, for a job without servers."""
        state = {"name": self.name, "positions": {str(p): offset for p, offset in self._counted.items()}}
        return state if running_logical() is None else {**state, "rounds": self._rounds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on at the positions of :meth:`state_dict`, except where the servers have newer ones.

        Raises:
            CheckpointError: the state is of another stream.
            ConfigError: this dataset is being read.
        """
        if self._reader is not None or self._partitions:
            raise ConfigError(f"stream {self.name!r}: load_state_dict() comes before the first batch.")
        if state.get("name") != self.name:
            raise CheckpointError(
                f"the state is of stream {state.get('name')!r}, this is {self.name!r}. Give the source the same name."
            )
        self._loaded = _whole(state["positions"])
        if (logical := running_logical()) is not None:
            self._counted = {p: at for p, at in self._loaded.items() if p % logical.num in logical.ranks}
            self._rounds = state.get("rounds", 0)

    @staticmethod
    def joined_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the states of all workers as one, which any number of workers can load."""
        positions = {p: offset for state in states for p, offset in state["positions"].items()}
        return {**states[0], "positions": positions}

    def close(self) -> None:
        """Closes the source; the dataset cannot be read afterwards."""
        self._is_closed = True
        self._pending.clear()
        for share in self._shares.values():
            share.close()
        if self._progress is not None:
            self._progress.end(self.name)
        if self._reader is not None:
            self._reader.close()


def _whole(offsets: Mapping[str, int]) -> dict[int, int]:
    return {int(partition): offset for partition, offset in offsets.items()}


def _check_seconds(**seconds: Any) -> None:
    for name, value in seconds.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
            raise ConfigError(f"StreamDataset({name}={value!r}): it is a number of seconds above 0, or None.")
