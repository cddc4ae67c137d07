"""AsyncSender: gradients leave in the background, merged by sum, as ``a_sync_configs`` says.

Each table has a queue. ``put`` blocks while a queue is full; threads take the arrived gradients and push their sum.
With SGD k merged gradients equal k separate updates; rules with state see one larger gradient instead. So a table of
plain SGD is merged even where ``max_merge_var_num`` is 1: what arrived while the sender was busy is one push.

After a large push the sender rests, so that it takes at most a thirteenth of the time: the dense parameters travel as a
whole, whatever the batch, and would cost more than the steps of small batches. That makes gradients older, in
proportion to what an exchange takes; a short exchange is followed by no rest.

A step that pulls rows waits for the servers, so the sender keeps pace with it. One that reads a replica does not, and
would fill the queues with gradients of old rows; :meth:`AsyncSender.keep_up` makes it wait.

Where the servers bound staleness they have to know which steps of this worker are applied completely. Tables leave at
their own pace, so a push does not say; after it the sender reports the last step without waiting gradients.

[Note: From put to push]
Everything here changes under ``_changed``; nothing is sent while it is held. A table belongs to one thread
(``_mine``), so its pushes leave in the order of their steps. The thread waits until one of its tables has a gradient,
collects up to the limit of each (``_collect``) and sends the sums without the lock; ``_busy`` is set from before the
collecting until after the answer, so a flush waits for both. A push carries the step of its last gradient. After a
restart of this worker a server may have had steps up to the ``_boundary``: these gradients leave one by one, or the
server could not recognise them by their step. What fails in a thread is raised by the next call.
"""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from fleet.common.own_thread import OwnThread
from fleet.errors import ConfigError, OptionWarning, PSError
from fleet.ps.client.client import Client, Ticket
from fleet.ps.client.merge import merge_gradients, with_distinct_ids
from fleet.ps.client.shards import Gradient, Rows
from fleet.ps.wire.positions import Positions

Push = Callable[..., Ticket]  # a push to be made, with what takes its answer: ``out`` and ``changed`` of Client.push

_POLL_S = 0.01
# After a push of at least so many bytes of dense gradients the sender rests, for this multiple of the time that the
# exchange took, and at most for the limit: the push may have waited for a server to come back.
_REST_BYTES = 1 << 18
_REST_TIMES = 12.0
_REST_AT_MOST_S = 1.0


class LateGradient(Protocol):
    """A dense gradient that is read when it is put, so that it can be added without a copy."""

    def gradients(self) -> Rows | None:
        """Returns the gradient as a fresh flat array; ``None`` if backward left none."""

    def add_gradients(self, total: Rows) -> None:
        """Adds it to a flat array."""


@dataclass(slots=True)
class Waiting:
    """One gradient, or the sum of several."""

    step: int  # of a sum, the last one
    value: Any  # Gradient or dense rows
    count: int = 1
    first: int = 0  # of a sum, the first one

    def __post_init__(self) -> None:
        self.first = self.first or self.step


class GradientQueue(deque[Waiting]):
    """The gradients of one table that wait."""

    waiting = 0  # how many, counting each one of a sum

    def add(self, item: Waiting) -> None:
        """Appends ``item``."""
        self.append(item)
        self.waiting += 1

    def add_to_last(self, step: int) -> None:
        """Counts one more gradient in the last item, which is a sum and keeps its first step."""
        self[-1].step = step
        self[-1].count += 1
        self.waiting += 1

    def take(self) -> Waiting:
        """Removes and returns the first item."""
        self.waiting -= self[0].count
        return self.popleft()


@dataclass
class StepCount:
    """Which steps of this worker the servers know to be applied completely, where they bound staleness.

    Args:
        put: the last step whose gradients were all put.
        told: the last step that the servers were told of.
    """

    put: int
    told: int
    wanted: int = 0  # a pull waits for the servers to know this one
    sending: dict[int, int] = field(default_factory=dict)  # the first step each thread has taken and not sent yet

    def done(self, queues: Iterable[GradientQueue]) -> int:
        """Returns the last step whose gradients, and all before them, have been sent and answered."""
        firsts = [queue[0].first for queue in queues if queue]
        return min([self.put + 1, *firsts, *self.sending.values()]) - 1


def sum_waiting(client: Client, table_id: int, items: Sequence[Waiting]) -> Gradient | Rows:
    """Returns the sum of ``items``."""
    table = client.tables[table_id]
    if table.dense:
        total = np.array(items[0].value, np.float32) if len(items) > 1 else np.asarray(items[0].value, np.float32)
        for item in items[1:]:
            total += item.value
        return total
    gradients: list[Gradient] = [item.value for item in items]
    if len(gradients) == 1 and gradients[0].distinct:
        return gradients[0]
    if table.keeps_shows or any(
        part is not None for item in gradients for part in (item.shows, item.clicks, item.slots)
    ):
        return merge_gradients(gradients, table.keeps_shows)
    return with_distinct_ids(gradients)


def by_step(taken: Mapping[int, list[Waiting]]) -> dict[int, dict[int, list[Waiting]]]:
    """Returns the collected gradients by the last step of each table's items, in the order of the steps."""
    groups: dict[int, dict[int, list[Waiting]]] = {}
    for table, items in taken.items():
        groups.setdefault(items[-1].step, {})[table] = items
    return dict(sorted(groups.items()))


@dataclass(frozen=True, kw_only=True)
class SenderConfig:
    """The queue keys of ``a_sync_configs``.

    Args:
        max_merge_var_num: the most gradients of a table in one push.
        send_queue_size: the most gradients of a table that may wait; ``put`` blocks beyond.
        send_wait_times: polls of 10 ms without a new gradient before the waiting ones are sent.
        thread_pool_size: sending threads; a table always belongs to the same one, so there are at most as many.
        independent_recv_thread: receive parameters in their own thread, not in the sending thread after a send.
        min_send_grad_num_before_recv: how many gradients are sent between two receives of parameters.

    Raises:
        ConfigError: a value is not an integer of 1 or more.
    """

    max_merge_var_num: int = 1
    send_queue_size: int = 16
    send_wait_times: int = 1
    thread_pool_size: int = 1
    independent_recv_thread: bool = False
    min_send_grad_num_before_recv: int = 1

    @property
    def num_clients(self) -> int:
        """How many clients the threads take, where parameters are received."""
        return self.thread_pool_size + self.independent_recv_thread

    def for_tables(self, count: int) -> SenderConfig:
        """Returns the same queues with at most a thread for each of ``count`` tables; fewer than asked for warn."""
        most = max(count, 1)
        if self.thread_pool_size <= most:
            return self
        warnings.warn(
            f"a_sync_configs['thread_pool_size'] is {self.thread_pool_size}, and a table has one thread: {most} of "
            f"them send, because there are {count} tables. The others would take connections for nothing.",
            OptionWarning,
            stacklevel=2,
        )
        return replace(self, thread_pool_size=most)

    def __post_init__(self) -> None:
        for name in (
            "max_merge_var_num",
            "send_queue_size",
            "send_wait_times",
            "thread_pool_size",
            "min_send_grad_num_before_recv",
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"a_sync_configs[{name!r}] is {value!r}; it must be an integer of 1 or more.")


class AsyncSender:
    """Pushes in the background.

    Args:
        clients: one open client with known tables per sending thread, each on its own channel; one more at the end
            when parameters are received in their own thread.
        config: the queues.
        receive: called with a client whenever parameters are due; ``None`` receives none.
        exchange: makes a push after which parameters are due and takes them from its answer, where one thread does
            both; by default ``receive`` is called then.
        additive: tables for which one update with a sum equals separate updates. While ``max_merge_var_num`` is 1, one
            push carries everything that waits for them.
    """

    def __init__(
        self,
        clients: Sequence[Client],
        config: SenderConfig,
        receive: Callable[[Client], None] | None = None,
        additive: Collection[int] = (),
        exchange: Callable[[Client, Push], None] | None = None,
    ) -> None:
        wanted = config.thread_pool_size if receive is None else config.num_clients
        if len(clients) != wanted:
            raise ConfigError(f"AsyncSender: {len(clients)} clients for {wanted} threads; give each thread its own.")
        self.config = config
        self._clients = list(clients)
        self._receive = receive
        self._exchange = exchange
        self._additive = frozenset(additive)
        self._changed = threading.Condition()
        self._queues = {table: GradientQueue() for table in sorted(clients[0].tables)}
        shares = [list(self._queues)[index :: config.thread_pool_size] for index in range(config.thread_pool_size)]
        self._mine = [{table: self._queues[table] for table in share} for share in shares]  # by thread
        self._busy = [False] * config.thread_pool_size
        self._sent = 0  # gradients since parameters were received
        self._resting_until = [0.0] * config.thread_pool_size
        steps = max((client.step for client in clients), default=0)
        self._count = StepCount(put=steps, told=steps) if clients[0].staleness is not None else None
        self._positions: deque[tuple[int, Positions]] = deque()  # of streams, by step, from the last one told on
        self._stopping = self._flushing = self._aborted = False
        self._threads = [
            OwnThread(self._send_loop, index, name=f"sender {index}", say=self._say, then=self._wake)
            for index in range(config.thread_pool_size)
        ]
        if config.independent_recv_thread and receive is not None:
            self._threads.append(OwnThread(self._receive_loop, -1, name="receiver", say=self._say, then=self._wake))
        for thread in self._threads:
            thread.start()

    def put(
        self,
        gradients: Mapping[int, Gradient | Rows | LateGradient],
        *,
        step: int,
        positions: Positions | None = None,
    ) -> None:
        """Queues the gradients of one step; blocks while a queue is full. The arrays must not change afterwards.

        With ``positions`` of streams the servers are told of complete steps as where they bound staleness.

        Raises:
            PSError: a server is lost; raised at the next call after the failure.
        """
        with self._changed:
            if positions is not None:
                self._positions.append((step, positions))
                if self._count is None:
                    self._count = StepCount(put=step - 1, told=step - 1)
            for table_id, value in gradients.items():
                queue = self._queues.get(table_id)
                if queue is None:
                    raise ConfigError(f"table {table_id!r} is not known to this worker.")
                while queue.waiting >= self.config.send_queue_size and not (self._has_failed() or self._stopping):
                    self._changed.wait()
                self._check()
                self._append(table_id, queue, value, step)
            self._note_put(step)

    def keep_up(self) -> None:
        """Waits until all steps are sent and received for, where nothing is to wait in the queues.

        Gradients wait there on purpose while a thread rests, and with a larger ``max_merge_var_num``.

        Raises:
            PSError: a server is lost.
        """
        if self.config.max_merge_var_num > 1 or (not self._has_failed() and self._rests()):
            return
        with self._changed:
            self._changed.wait_for(lambda: self._has_failed() or self._stopping or not self._waits() or self._rests())
            self._check_threads()

    def _rests(self) -> bool:
        now = time.monotonic()
        for queues, until in zip(self._mine, self._resting_until, strict=True):
            if until > now and not self._full(queues):
                return True
        return False

    def _waits(self) -> bool:
        return any(self._queues.values()) or any(self._busy)

    def need(self, step: int, wanted: int) -> None:
        """Notes that every step up to ``step`` was put, and sends those up to ``wanted`` without a rest."""
        with self._changed:
            self._check()
            if self._count is not None:
                self._count.wanted = max(self._count.wanted, wanted)
            self._note_put(step)

    def _note_put(self, step: int) -> None:
        if self._count is not None:
            self._count.put = max(self._count.put, step)
            if self._has_news() or self._is_needed():
                self._changed.notify_all()

    def _append(self, table_id: int, queue: GradientQueue, value: Gradient | Rows | LateGradient, step: int) -> None:
        if isinstance(value, Gradient | np.ndarray):
            queue.add(Waiting(step, value))
        # Added in place: a dense gradient is as large as the parameters, and a copy per step would cost more than the
        # sum.
        elif queue and self._takes_more(table_id, queue[-1]):
            value.add_gradients(queue[-1].value)
            queue.add_to_last(step)
        elif (found := value.gradients()) is not None:
            queue.add(Waiting(step, found))
        if queue.waiting == 1 or queue.waiting >= self._limit(table_id):  # a sender waits for either
            self._changed.notify_all()

    def waiting(self) -> dict[int, int]:
        """Returns, per table, how many gradients are in its queue."""
        with self._changed:
            return {table_id: queue.waiting for table_id, queue in self._queues.items()}

    def flush(self) -> None:
        """Waits until everything that was put is applied on the servers."""
        with self._changed:
            self._flushing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._has_failed() or not (self._waits() or self._has_news()))
            self._flushing = False
            self._check_threads()

    def stop(self) -> None:
        """Sends what waits and ends the threads; the clients stay open."""
        try:
            if not self._has_failed():
                self.flush()
        finally:
            with self._changed:
                self._stopping = True
                self._changed.notify_all()
            for thread in self._threads:
                thread.join()

    def abort(self) -> None:
        """Ends the threads without sending what waits, and closes the clients."""
        with self._changed:
            self._stopping = self._aborted = True
            for queue in self._queues.values():
                while queue:
                    queue.take()
            self._changed.notify_all()
        for client in self._clients:
            client.close()  # a thread that waits for a server ends
        for thread in self._threads:
            thread.join()

    # -- threads -------------------------------------------------------------------------------------------------

    def _has_failed(self) -> bool:
        return self._aborted or any(thread.failure is not None for thread in self._threads)

    def _check_threads(self) -> None:
        if self._aborted:
            raise PSError("this sender has been stopped.")
        for thread in self._threads:
            thread.check()

    def _check(self) -> None:
        self._check_threads()
        if self._stopping:
            raise PSError("this sender has been stopped.")

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _say(self, sentence: str) -> None:
        if not self._aborted:  # else its client was closed for it to end
            logging.getLogger("FLEET").error(sentence)

    def _send_loop(self, index: int) -> None:
        client = self._clients[index]
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._has_work(index) or self._stopping)
                if self._stopping and not self._has_work(index):
                    return
                self._busy[index] = True
                taken = self._collect(index, self._boundary(client))
                if taken and self._count is not None:
                    # The queues do not show these steps any more, and done() must not count them before they are
                    # answered.
                    self._count.sending[index] = min(item.first for items in taken.values() for item in items)
                self._changed.notify_all()
            began = time.monotonic()
            self._send(index, client, taken)
            self._rest(index, began, taken)
            with self._changed:
                self._busy[index] = False
                self._changed.notify_all()

    def _send(self, index: int, client: Client, taken: Mapping[int, list[Waiting]]) -> None:
        """Pushes collected gradients, and receives parameters if that is due."""
        count = sum(item.count for items in taken.values() for item in items)
        groups = by_step(taken)
        # Only one thread sends where there is an exchange, so no other one changes the count.
        last = max(groups, default=0) if self._exchange is not None and self._receive_due(count) else 0
        for step, group in groups.items():
            total = {table: sum_waiting(client, table, items) for table, items in group.items()}
            positions = self._positions_at(step)
            push = partial(client.push, total, step=step, ends_step=self._count is None, positions=positions)
            if step == last and self._exchange is not None:
                self._exchange(client, push)
            else:
                client.wait(push())
        self._tell(index, client)
        with self._changed:
            self._sent += count
            is_due = self._receive_due() and not self.config.independent_recv_thread
            if is_due:
                self._sent = 0
        if is_due and not last and self._receive is not None:
            self._receive(client)

    def _has_work(self, index: int) -> bool:
        return any(self._mine[index].values()) or (index == 0 and self._has_news())

    def _has_news(self) -> bool:
        """Returns whether steps are complete and the servers do not know it yet."""
        return self._count is not None and self._count.done(self._queues.values()) > self._count.told

    def _is_needed(self) -> bool:
        """Returns whether a pull waits for gradients that have not been sent."""
        return self._count is not None and self._count.done(self._queues.values()) < self._count.wanted

    def _tell(self, index: int, client: Client) -> None:
        """Tells the servers the last step that they have completely, where staleness is bounded."""
        if self._count is None:
            return
        with self._changed:
            self._count.sending.pop(index, None)
            done = self._count.done(self._queues.values())
            if done <= self._count.told:
                return
            self._count.told = done
            # The entry at or before ``done`` stays: it holds for the steps up to the next entry.
            while len(self._positions) > 1 and self._positions[1][0] <= done:
                self._positions.popleft()
        client.wait(client.push({}, step=done, positions=self._positions_at(done)))

    def _positions_at(self, step: int) -> Positions | None:
        """Returns the stream positions of the gradients up to ``step``; ``None`` where no stream is read."""
        with self._changed:
            return next((positions for put, positions in reversed(self._positions) if put <= step), None)

    def _collect(self, index: int, boundary: Mapping[int, int]) -> dict[int, list[Waiting]]:
        """Takes the gradients of one push per table; waits for more as the configuration says."""
        polls = 0
        mine = self._mine[index]
        merges = self.config.max_merge_var_num > 1
        while polls < self.config.send_wait_times and not (self._is_urgent() or self._full(mine)):
            # Without merging, a rest is the only reason to wait for more gradients.
            wait_s = _POLL_S if merges else self._resting_until[index] - time.monotonic()
            if wait_s <= 0:
                break
            before = sum(queue.waiting for queue in mine.values())
            self._changed.wait_for(lambda: self._is_urgent() or self._full(mine), wait_s)
            arrived = sum(queue.waiting for queue in mine.values()) > before
            polls = 0 if arrived or not merges else polls + 1
        taken = {}
        for table, queue in mine.items():
            room = self._limit(table)
            items: list[Waiting] = []
            while queue and queue[0].count <= room and (not items or queue[0].step > boundary.get(table, 0)):
                room -= queue[0].count
                items.append(queue.take())
                if items[0].step <= boundary.get(table, 0):
                    break  # a server may have had this step before a restart and must recognise it
            if items:
                taken[table] = items
        return taken

    def _is_urgent(self) -> bool:
        return self._flushing or self._stopping or self._is_needed()

    def _rest(self, index: int, began: float, sent: Mapping[int, list[Waiting]]) -> None:
        """Notes until when this thread rests."""
        dense = sum(
            item.value.nbytes for items in sent.values() for item in items if isinstance(item.value, np.ndarray)
        )
        if dense >= _REST_BYTES:
            now = time.monotonic()
            self._resting_until[index] = now + min(_REST_TIMES * (now - began), _REST_AT_MOST_S)

    def _limit(self, table_id: int) -> int:
        """Returns how many gradients of a table one push may carry."""
        merge = self.config.max_merge_var_num
        return self.config.send_queue_size if merge == 1 and table_id in self._additive else merge

    def _takes_more(self, table_id: int, last: Waiting) -> bool:
        """Returns whether another gradient may be added to the last waiting one."""
        if last.count >= self._limit(table_id):
            return False
        # A sum has begun behind the boundary.
        return last.count > 1 or last.step > self._boundary(self._clients[0]).get(table_id, 0)

    def _full(self, queues: Mapping[int, GradientQueue]) -> bool:
        """Returns whether a push is full; tables whose gradients leave one by one decide, if there are any."""
        waiting = [(self._limit(table), queue.waiting) for table, queue in queues.items() if queue]
        strict = [pair for pair in waiting if pair[0] == 1]
        return all(count >= limit for limit, count in strict or waiting)

    @staticmethod
    def _boundary(client: Client) -> dict[int, int]:
        """Returns, per table, the last step that some server had before this worker was restarted."""
        steps: dict[int, int] = {}
        for welcome in client.welcomes():
            for table, step in welcome["steps"].items():
                steps[int(table)] = max(int(step), steps.get(int(table), 0))
        return steps

    def _receive_due(self, more: int = 0) -> bool:
        """Returns whether parameters are due once ``more`` gradients are sent."""
        return self._receive is not None and self._sent + more >= self.config.min_send_grad_num_before_recv

    def _receive_loop(self, index: int) -> None:
        assert self._receive is not None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._receive_due() or self._stopping)
                if self._stopping:
                    return
                self._sent = 0
            self._receive(self._clients[index])


class HalfAsyncSender:
    """Half-async mode: the gradients of ``num_batches`` batches are summed, pushed and waited for, then received.

    Args:
        client: an open client with known tables.
        num_batches: batches per push.
        receive: called after each push.
    """

    def __init__(self, client: Client, num_batches: int, receive: Callable[[Client], None] | None = None) -> None:
        if num_batches < 1:
            raise ConfigError(f"half-async: num_batches is {num_batches!r}; it must be 1 or more.")
        self._client = client
        self._num_batches = num_batches
        self._receive = receive
        self._waiting: dict[int, list[Waiting]] = {}
        self._positions: Positions | None = None
        self._batches = 0

    def put(self, gradients: Mapping[int, Gradient | Rows], positions: Positions | None = None) -> None:
        """Adds the gradients of one batch; with the last of a group it waits until the servers have applied them."""
        self._positions = positions
        for table_id, value in gradients.items():
            self._waiting.setdefault(table_id, []).append(Waiting(0, value))
        self._batches += 1
        if self._batches == self._num_batches:
            self.flush()

    def flush(self) -> None:
        """Pushes what waits."""
        if not self._batches:
            return
        client = self._client
        # Emptied before the push: after a failure the next flush must not push the same gradients again.
        waiting = self._waiting
        self._waiting = {}
        self._batches = 0
        merged = {table: sum_waiting(client, table, items) for table, items in waiting.items()}
        client.wait(client.push(merged, positions=self._positions))
        if self._receive is not None:
            self._receive(client)
