"""RowReplicas: all rows of tables, in the weights of their ``nn.Embedding`` modules, as the servers have them.

A lookup while training reads its module's weight and asks nobody. What pushes have changed, of this worker and of
others, is brought from the servers: with the answer to each push (sync), or in the background, as the dense parameters
are (async).

[Note: How old a replica may be]
Async: the answer to a push of the sending thread has the changed rows; the next ones do not for three times as long as
that took. Where threads share the work, one asks after its pushes, and rests nine times as long. A lookup that
finds its rows older than ``old_s`` asks itself. Arrived rows wait for the next lookup, in any thread of the
script; the sending thread writes to no weight. Sync: the answer to a push has all that the step changed, and
nobody steps without this worker unless it stands at a barrier.

In both, the first lookup after a flush or a barrier asks: it sees all earlier pushes of all workers. Lookups without
gradients do not read replicas: they evaluate, and no push of this worker would bring changes until they are done.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from fleet.ps.client.client import Client, TakeChanged
from fleet.ps.client.shards import Keys, Rows
from fleet.ps.embeddings.served_embedding import ServedEmbedding
from fleet.ps.table.ids import in_pieces
from fleet.ps.wire.messages import MessageError
from fleet.ps.worker.table_plan import TablePlan

OLD_S = 0.2
_MOST_WORKERS = 4  # each receives the changes of all; with more workers, the rows of one's batches are fewer
_REST_TIMES = 9.0
_PUSH_REST_TIMES = 3.0  # the push takes most of that time; after a large one the sender rests for longer


def make_replicas(
    client: Client, plan: TablePlan, old_s: float = math.inf, before_lookup: Callable[[], None] = lambda: None
) -> RowReplicas | None:
    """Makes modules whose rows come from the servers unchanged read them from their own weights.

    Returns ``None`` where there is no such module, or where pulls of single rows cost less. The other arguments are
    those of :class:`RowReplicas`.
    """
    if client.config.num_workers > _MOST_WORKERS:
        return None
    found = {}
    for part in plan.sparse:
        if len(part.modules) != 1 or part.group is None or part.config.accessor or part.config.entry:
            continue
        module = part.modules[0]
        if isinstance(module, ServedEmbedding) and module.read_weight() is not None:
            found[part.table_id] = module
    return RowReplicas(client, found, old_s, before_lookup) if found else None


class RowReplicas:
    """The rows of some tables in this process.

    Args:
        client: open; it knows the tables. One thread after the other uses it here.
        modules: by table, the module whose weight is the replica, float32 [n, dim] on the CPU, with the ids 0 to
            n - 1; the weights become the servers' rows.
        old_s: a lookup asks if it finds the rows older.
        before_lookup: called first.
    """

    def __init__(
        self,
        client: Client,
        modules: Mapping[int, ServedEmbedding],
        old_s: float,
        before_lookup: Callable[[], None],
    ) -> None:
        self._client = client
        self._modules = list(modules.values())
        self._weights: dict[int, Tensor] = {}  # and no arrays of them: share_memory_() gives a tensor other memory
        for table_id, module in modules.items():
            assert module.lookup.whole is not None
            self._weights[table_id] = module.lookup.whole.detach()
            module.lookup.bring = self._bring_for_lookup
        self._old_s = old_s
        self._before_lookup = before_lookup
        self._asking = threading.Lock()  # answers stay in the order in which the servers gave them
        self._writing = threading.Lock()  # older rows go in before newer ones, also if several threads look up
        self._arrived: deque[dict[int, tuple[Keys, Rows]]] = deque()
        self._received_at = self._expired_at = self._rests_until = 0.0
        self._is_incomplete = False
        self._read_all()

    @property
    def is_due(self) -> bool:
        """Whether the last answer to a thread that does not train is old enough for another question."""
        return time.monotonic() > self._rests_until

    def receive(self) -> None:
        """Asks for the changed rows if they are due; for a thread that does not train."""
        if self.is_due:
            with self._asking:
                self._ask()

    @contextmanager
    def receiving(self) -> Iterator[TakeChanged]:
        """Yields what takes the answers to a push that is made and waited for inside, by a thread that does not train.

        What arrives waits for the next lookup.
        """
        with self._asking:
            began = time.monotonic()
            yield self._take
            if self._is_incomplete:
                self._ask_anew()
            self._note_answer(began, _PUSH_REST_TIMES)

    def bring(self, old_s: float) -> None:
        """Brings the weights up to date if they are older than ``old_s`` seconds."""
        if self._received_at < self._expired_at or time.monotonic() - self._received_at > old_s:
            with self._asking:
                self._ask()
        self._write()

    @contextmanager
    def pushing(self) -> Iterator[TakeChanged]:
        """Yields what takes the answers to a push that is made and waited for inside; the weights have their rows then.

        Other threads ask nothing until the end: an answer to them might hold older rows.
        """
        with self._asking:
            yield self._take
            if self._is_incomplete:
                self._ask_anew()
        self._write()

    def _take(self, changes: Mapping[int, tuple[Keys, Rows]]) -> None:
        for table_id, (_, rows) in changes.items():
            if table_id not in self._weights or rows.shape[1] != self._weights[table_id].shape[1]:
                raise MessageError(f"unexpected rows of table {table_id} in the answer to a push.")
        # Copies: the buffer of the answer is used again for the next one.
        self._arrived.append({table_id: (ids.copy(), rows.copy()) for table_id, (ids, rows) in changes.items()})
        # A server that came back, or one whose rows are more than one message holds, leaves a table out.
        self._is_incomplete |= len(changes) < len(self._weights)

    def expire(self) -> None:
        """Makes the next lookup ask, also where an answer to an earlier question is still on its way."""
        self._expired_at = time.monotonic()

    def leave(self) -> None:
        """Makes lookups ask this worker again."""
        for module in self._modules:
            module.lookup.whole = module.lookup.bring = None

    def _write(self) -> None:
        while self._arrived:
            with self._writing:
                # Asked again: another thread may have written the last ones while this one waited for the lock.
                for table_id, (ids, rows) in self._arrived.popleft().items() if self._arrived else ():
                    self._weights[table_id].numpy()[ids] = rows

    def _bring_for_lookup(self, now: bool) -> None:
        if not now:
            self._before_lookup()
        self.bring(0.0 if now else self._old_s)

    def _read_all(self) -> None:
        with self._asking:
            self._ask_anew()
            self._received_at = time.monotonic()
        self.bring(math.inf)

    def _ask_anew(self) -> None:
        # The watch comes first: changes during the reading of the rows are noted for the next question.
        self._client.watch(list(self._weights))
        self._ask_all()
        self._is_incomplete = False

    def _ask(self) -> None:
        began = time.monotonic()
        lacks, changes = self._client.watch(list(self._weights))
        if lacks:
            self._ask_all()
        else:
            self._arrived.append(changes)
        self._note_answer(began, _REST_TIMES)

    def _note_answer(self, began: float, times: float) -> None:
        """Notes that the rows are those of ``began``; the next question waits ``times`` as long as this one took."""
        self._received_at = began
        now = time.monotonic()
        self._rests_until = now + min(times * (now - began), OLD_S)

    def _ask_all(self) -> None:
        for table_id, weight in self._weights.items():
            for ids in in_pieces(len(weight)):
                rows = self._client.wait(self._client.pull({table_id: ids}, wait_for_others=False))[table_id]
                self._arrived.append({table_id: (ids, rows)})
