"""The workers of a server: which are alive, how far each has come, which of its changes are applied.

Everything here changes under one lock, the journal's, so that it belongs to a definite log sequence number.

[Note: The life of a worker]
A rank is expected until its first process says HELLO, and active from then on. When it is silent for longer than its
lease it is expired: nobody waits for it, and its next message makes it active again. A goodbye makes it gone. The
process that said HELLO last speaks for the rank; those before it are fenced off. A worker that waits for this server is
busy, and its lease does not run until it is answered. An expired rank may be covered: another worker reads its streams
and pushes in its name, and nobody waits for it either. Its own next process takes the rank back, as from any before it.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fleet.errors import PSError
from fleet.ps.server.key_recorder import GONE, TOUCHED, KeyRecorder, Keys
from fleet.ps.server.stream_points import Points
from fleet.ps.wire.messages import DISAGREE, HOW_WISHED, LOAD_WISH, Buffer, TablePart

_KEPT_FENCED = 64
_KEPT_MARKS = 4096
_SHOWN, _RANKS_SHOWN = 4, 8  # wishes in a message, and ranks with each
MOST_WAITING = 1 << 24  # noted ids; with more, the next delta is whole


class Refused(PSError):
    """The request does not fit the server; the message goes back to the worker."""


class Fenced(PSError):
    """Another process has taken over the worker's rank."""


@dataclass(slots=True)
class Channel:
    """One ordered stream of changes of a worker.

    A channel is first in, first out, and after a reconnect the worker resends from the oldest change that may be
    lost. So every number up to ``last`` was applied, and no window is needed.
    """

    last: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    marks: deque[tuple[int, int]] = field(default_factory=deque)  # (lsn, seq), not yet durable
    durable: int = 0

    def note(self, lsn: int, seq: int) -> None:
        """Notes that change ``seq`` is record ``lsn``."""
        self.last = seq
        self.marks.append((lsn, seq))
        if len(self.marks) > _KEPT_MARKS:  # level 0 never clears marks; with a slow disk every other mark is enough
            self.marks = deque(list(self.marks)[::-2][::-1])

    def durable_seq(self, durable_lsn: int) -> int:
        """Returns the last change that a restart of the server keeps."""
        while self.marks and self.marks[0][0] <= durable_lsn:
            self.durable = self.marks.popleft()[1]
        return self.durable


@dataclass(slots=True)
class Held:
    """A gradient message that waits for the other workers (sync mode), with its body as received."""

    n_tables: int
    flags: int
    body: Buffer
    parts: list[TablePart] | None = None  # the decoded body, where it is known; float32


@dataclass(slots=True)
class Worker:
    """One worker rank. ``state`` is expected, active, expired, covered or gone."""

    rank: int
    client_id: int = 0
    state: str = "expected"
    clock: int = 0  # steps that this worker has pushed completely
    steps: dict[int, int] = field(default_factory=dict)  # last step applied, by table
    channels: dict[int, Channel] = field(default_factory=dict)
    fenced: deque[int] = field(default_factory=lambda: deque(maxlen=_KEPT_FENCED))
    seen: float = 0.0
    deputy: bool = False  # another worker speaks for the rank
    points: Points = field(default_factory=Points)
    busy: int = 0  # requests in progress: the worker waits for the server, not the other way round

    def channel(self, number: int) -> Channel:
        """Returns the channel with this number."""
        return self.channels.get(number) or self.channels.setdefault(number, Channel())


@dataclass(slots=True)
class Published:
    """How far this server's rows have come on their way to a sink, see :mod:`fleet.ps.publishing.publisher`.

    Attributes:
        on: this server publishes.
        history: identity of the journal for sinks; empty until a sink was asked for its position.
        kept_for: boot of the machine and level of the journal at which the history was written.
        confirmed: the last record whose changes the sink is known to hold.
        step: of the last delta that the sink took; -1 before the first.
        whole: the next delta replaces every row.
        writing_whole: such a delta is being made or written.
        loading: rows change without a record; no delta may be made.
        oldest: when the oldest change that is in no delta yet came, unix time; 0 without one.
        writing_since: the same of the delta that is being written.
        most_waiting: ids that are noted at most; beyond that the next delta is whole.
        noted: ids noted since they were last counted.
        counts: deltas, rows and deletions written, and failures to write.
    """

    on: bool = False
    history: str = ""
    kept_for: tuple[str, int] = ("", 0)
    confirmed: int = 0
    step: int = -1
    whole: bool = True
    writing_whole: bool = False
    loading: bool = False
    oldest: float = 0.0
    writing_since: float = 0.0
    most_waiting: int = MOST_WAITING
    noted: int = 0
    counts: dict[str, int] = field(default_factory=lambda: {"deltas": 0, "rows": 0, "deletions": 0, "failures": 0})

    def begin(self, history: str, kept_for: tuple[str, int], lsn: int) -> None:
        """Notes a new history, which begins with record ``lsn``: the next delta is whole, or the sink has one."""
        self.history = history
        self.kept_for = kept_for
        self.confirmed = lsn
        self.whole = self.writing_whole = False

    def lag_s(self) -> float:
        """Returns the age of the oldest change that the sink lacks, in seconds; 0 when it has all."""
        waiting = [since for since in (self.oldest, self.writing_since) if since]
        return max(0.0, time.time() - min(waiting)) if waiting else 0.0


class JobState:
    """The workers of a server and its agreements with them.

    Args:
        num_workers: how many ranks there are.
        lock: the journal's lock; ``changed`` is a condition on it.
        name: of the job; state of another job is not taken over.
        lease_s: a worker that is silent for this long counts as dead until it is heard again.
    """

    def __init__(self, num_workers: int, lock: threading.Lock, lease_s: float = 60.0, name: str = "") -> None:
        self.num_workers = num_workers
        self.lease_s = lease_s
        self.name = name
        self.changed = threading.Condition(lock)
        self.over = threading.Condition(lock)  # of those who wait for the end alone: no step wakes them
        self.workers = [Worker(rank) for rank in range(num_workers)]
        self.specs: dict[int, dict[str, Any]] = {}
        self.applied_step = 0
        self.held: dict[int, dict[int, Held]] = {}
        self.barriers: dict[str, int] = {}
        self.keys: dict[str, str] = {}  # of the last barrier of each name: the same for all workers that met there
        self.arrived: dict[tuple[str, int], dict[int, str]] = {}  # the act that each rank at a barrier asks of all
        self.standing: dict[int, tuple[str, float]] = {}  # by rank: the call it stands in, and since when
        self.stuck: dict[int, str] = {}  # by rank: why it waits in vain, until it has been told
        self.recorder = KeyRecorder()
        self.published = Published()
        self.saved: dict[str, dict[str, Any]] = {}  # answers of the latest saves, by save id
        self.origin = ""  # the folder that all tables were last loaded from or saved to
        self.stopped = False

    # -- membership (the caller holds ``changed``) ---------------------------------------------------------------

    def attach(self, rank: int, client_id: int, deputy: str = "") -> bool:
        """Makes process ``client_id`` speak for ``rank``; returns whether it is a new process.

        ``deputy`` is ``"take"`` or ``"keep"`` where another worker covers the rank, at first and on a new connection.

        Raises:
            Fenced: a newer process speaks for the rank.
            Refused: ``deputy``, and the rank's own process may live.
        """
        worker = self.workers[rank]
        if client_id in worker.fenced:
            raise Fenced(f"worker {rank}: a newer process has taken over this rank; this one must end.")
        fresh = worker.client_id != client_id
        if deputy and fresh and (deputy != "take" or worker.state != "expired"):
            raise Refused(f"worker {rank} is {worker.state}: only the rank of a worker that was lost can be covered.")
        # Its last messages may still arrive, and must not make it the holder of the rank again.
        if fresh and worker.client_id:
            worker.fenced.append(worker.client_id)
            # The new process holds no rows yet, so there are none to tell it about.
            self.recorder.end_watch(rank)
        worker.client_id = client_id
        worker.deputy = bool(deputy)
        worker.state = "covered" if deputy else "active"
        worker.seen = time.monotonic()
        self.changed.notify_all()
        return fresh

    def touch(self, worker: Worker, client_id: int) -> None:
        """Notes a sign of life; raises :class:`Fenced` if it is not the process that holds the rank."""
        self.check_holds(worker, client_id)
        worker.seen = time.monotonic()
        if worker.state == "expired":
            worker.state = "covered" if worker.deputy else "active"

    @staticmethod
    def check_holds(worker: Worker, client_id: int) -> None:
        """Raises :class:`Fenced` unless process ``client_id`` holds the rank."""
        if worker.client_id != client_id:
            raise Fenced(f"worker {worker.rank}: a newer process has taken over this rank; this one must end.")

    def expire(self, now: float) -> list[int]:
        """Marks silent workers as expired and returns their ranks."""
        ranks = []
        for worker in self.workers:
            if worker.state in ("active", "covered") and not worker.busy and now - worker.seen > self.lease_s:
                worker.state = "expired"
                # The ids noted for a dead worker would pile up; if it comes back, it pulls its rows anew.
                self.recorder.end_watch(worker.rank)
                ranks.append(worker.rank)
        if ranks:
            self._say_left()
        return ranks

    def leave(self, worker: Worker) -> None:
        """Marks a worker as gone: it said goodbye."""
        worker.state = "gone"
        self.recorder.end_watch(worker.rank)
        self._say_left()

    def stop(self) -> None:
        """Ends the server's work, whatever the workers do."""
        self.stopped = True
        self._say_left()

    def _say_left(self) -> None:
        self.changed.notify_all()
        self.over.notify_all()

    def active(self) -> list[Worker]:
        """Returns the workers that others wait for."""
        return [worker for worker in self.workers if worker.state in ("expected", "active")]

    def ended(self) -> bool:
        """Returns whether the server's work is done."""
        states = {worker.state for worker in self.workers}
        # A goodbye is needed: workers that are merely silent may come back.
        return self.stopped or ("gone" in states and states <= {"gone", "expired", "covered"})

    # -- progress ------------------------------------------------------------------------------------------------

    def min_clock(self) -> int | None:
        """Returns the steps of the slowest worker that can still push, ``None`` if none can."""
        return min((worker.clock for worker in self.stepping()), default=None)

    def slower_than(self, step: int) -> list[int]:
        """Returns the ranks that can still push and have pushed fewer than ``step`` steps."""
        return [worker.rank for worker in self.stepping() if worker.clock < step]

    def fresh_tables(self, worker: Worker, step: int, table_ids: list[int]) -> set[int]:
        """Returns the tables for which step ``step`` of ``worker`` has not been applied; step 0 is always new."""
        return {table for table in table_ids if not step or step > worker.steps.get(table, 0)}

    def note_step(self, worker: Worker, step: int, table_ids: set[int]) -> None:
        """Notes that ``step`` of ``worker`` is applied (or held) for these tables."""
        if step:
            for table in table_ids:
                worker.steps[table] = max(step, worker.steps.get(table, 0))

    # -- publishing ----------------------------------------------------------------------------------------------

    def note_changed(self, table_id: int, keys: Keys, *, gone: bool = False) -> None:
        """Notes ids whose rows have changed, or are ``gone``, for the sink; the array must not change afterwards."""
        published = self.published
        if published.on and len(keys):
            published.oldest = published.oldest or time.time()
            # The next delta carries every row anyway, so no ids are needed for it.
            if published.history and not published.whole:
                self.recorder.mark([GONE if gone else TOUCHED], table_id, keys)
                published.noted += len(keys)
                # The running number includes ids that the sink has taken by now: count those that still wait.
                if published.noted > published.most_waiting:
                    published.noted = self.recorder.count(TOUCHED, GONE)
                    if published.noted > published.most_waiting:
                        published.whole = True
                        self.recorder.drop(TOUCHED, GONE)

    # -- sync mode -----------------------------------------------------------------------------------------------

    def hold(self, rank: int, step: int, held: Held) -> bool:
        """Keeps a gradient until the others' arrive; returns False if the step is applied or held already."""
        if step <= self.applied_step or rank in self.held.get(step, ()):
            return False
        self.held.setdefault(step, {})[rank] = held
        return True

    def stepping(self) -> list[Worker]:
        """Returns the active workers that can still push: a worker at a barrier pushes nothing."""
        standing: set[int] = set().union(*self.arrived.values())  # in one expression: not every caller holds the lock
        return [worker for worker in self.active() if worker.rank not in standing]

    def ready_step(self) -> int | None:
        """Returns the step for which every worker that can push has sent its gradient, ``None`` if no step has all.

        A worker with fewer batches stands at a barrier, and so does not hold the others up.
        """
        step = self.applied_step + 1
        held = self.held.get(step)
        if held is None:
            later = [number for number in self.held if number > step]
            if not later or any(worker.clock < min(later) for worker in self.stepping()):
                return None
            step = min(later)  # no worker is left that will send the steps in between
            held = self.held[step]
        return step if all(worker.rank in held or worker.clock > step for worker in self.stepping()) else None

    def take_held(self, step: int, ranks: list[int]) -> list[Held]:
        """Removes step ``step`` and those before it; returns its gradients in the order of ``ranks``."""
        held = self.held.get(step, {})
        taken = [held[rank] for rank in ranks]
        self.applied_step = step
        for number in [number for number in self.held if number <= step]:
            del self.held[number]
        return taken

    # -- barriers ------------------------------------------------------------------------------------------------

    def arrive(self, name: str, number: int, rank: int, wish: str = "") -> None:
        """Notes that ``rank`` stands at the ``number``-th barrier ``name``, and the act that it asks of all there."""
        if number > self.barriers.get(name, 0):
            self.arrived.setdefault((name, number), {})[rank] = wish
            self.changed.notify_all()

    def absent(self, name: str, number: int) -> list[int]:
        """Returns the ranks that the ``number``-th barrier ``name`` still waits for."""
        standing = self.arrived.get((name, number), {})
        return [worker.rank for worker in self.active() if worker.rank not in standing]

    def note_stuck(self, after_s: float) -> None:
        """Releases all workers when each stands at a barrier, none can open, and the last came ``after_s`` ago."""
        standing = dict(self.standing)
        if not {worker.rank for worker in self.active()} <= standing.keys():
            return
        if time.monotonic() - max(since for _, since in standing.values()) >= after_s:
            self.stuck = dict.fromkeys(standing, self.account())
            # Nobody stands there any more, and the barriers must not open for workers that have left.
            for wishes in self.arrived.values():
                for rank in standing:
                    wishes.pop(rank, None)
            self.changed.notify_all()

    def account(self) -> str:
        """Returns where each worker is, as far as this server knows."""
        found = []
        # A copy: beats call this without the lock, while other workers come and go.
        standing = dict(self.standing)
        for worker in self.workers:
            if worker.rank in standing:
                found.append(f"worker {worker.rank} waits in {standing[worker.rank][0]}")
            elif worker.state == "active":
                found.append(f"worker {worker.rank} is elsewhere, {worker.clock} steps done")
            else:
                found.append(f"worker {worker.rank} is {worker.state}")
        return "; ".join(found)

    def settle_barriers(self) -> dict[str, int]:
        """Opens every barrier at which all active workers stand; returns the numbers of those that opened."""
        opened = {}
        for (name, number), wishes in sorted(self.arrived.items()):
            if all(worker.rank in wishes for worker in self.active()):
                self.pass_barrier(name, number, self._new_key(wishes))
                opened[name] = number
        if opened:
            self.changed.notify_all()
        return opened

    def _new_key(self, wishes: dict[int, str]) -> str:
        """Returns the key of a barrier that opens: who asks for what, where these cannot all be done.

        They cannot where one asks for a load and another does not, or two for different saves to one place. Other saves
        and shrinks go together: a worker that was killed in one repeats it, while the others, who have finished it, are
        at their next.
        """
        ranks: dict[str, list[int]] = {}
        for worker in self.active():  # a worker that was lost at the barrier has no say
            if wish := wishes.get(worker.rank):
                ranks.setdefault(wish, []).append(worker.rank)
        places = [place for wish in ranks if (place := wish.rpartition(HOW_WISHED)[0])]
        clashes = len(set(places)) < len(places)
        if len(ranks) < 2 or not (clashes or any(wish.startswith(LOAD_WISH) for wish in ranks)):
            return secrets.token_hex(8)
        found = [f"{_named(some)} to {wish}" for wish, some in ranks.items()]
        return DISAGREE + "; ".join(found[:_SHOWN]) + "; and others" * (len(found) > _SHOWN)

    def pass_barrier(self, name: str, number: int, key: str) -> None:
        """Notes that the barrier is open, and its key."""
        if number >= self.barriers.get(name, 0):
            self.barriers[name] = number
            self.keys[name] = key
        for place in [p for p in self.arrived if p[0] == name and p[1] <= self.barriers[name]]:
            del self.arrived[place]

    def wait_for(self, predicate: Callable[[], bool], beat: Callable[[], None], beat_s: float = 2.0) -> None:
        """Waits until ``predicate`` holds, calling ``beat`` outside the lock every ``beat_s`` seconds.

        Raises:
            Refused: the server stops.
        """
        while True:
            with self.changed:
                if self.changed.wait_for(lambda: predicate() or self.stopped, beat_s):
                    if predicate():
                        return
                    raise Refused("the parameter server was told to stop.")
            beat()


def _named(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"worker {ranks[0]} asks"
    more = f" and {len(ranks) - _RANKS_SHOWN} more" if len(ranks) > _RANKS_SHOWN else ""
    return f"workers {', '.join(map(str, ranks[:_RANKS_SHOWN]))}{more} ask"
