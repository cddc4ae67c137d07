"""RowReplicas: all rows of tables, in the weights of their ``nn.Embedding`` modules, as the servers have them (async).

A lookup while training reads its module's weight and asks nobody. What pushes have changed, of this worker and of
others, is brought from the servers in the background, as the dense parameters are.

[Note: How old a replica may be]
The sending thread asks after its pushes, and then rests nine times as long as the answer took. A lookup that finds its
rows older than :data:`OLD_S` asks itself, and so does the first one after a flush or a barrier: it sees what all
workers pushed before. What arrives waits for the next lookup, in whichever thread of the script it is; the sending
thread writes to no weight.
Lookups without gradients do not read replicas: they evaluate, and no push of this worker would bring changes meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping

from torch import Tensor

from fleet.ps.client.client import Client
from fleet.ps.client.shards import Keys, Rows
from fleet.ps.table.ids import in_pieces

__all__ = ["MOST_WORKERS", "OLD_S", "RowReplicas"]

OLD_S = 0.2
MOST_WORKERS = 4  # each receives what all of them change; with more, the rows of its own batches are fewer
_REST_TIMES = 9.0


class RowReplicas:
    """The rows of some tables in this process.

    Args:
        client: open; it knows the tables. One thread after the other uses it here.
        weights: float32 [n, dim] on the CPU by table, whose ids are 0 to n - 1; they become the servers' rows.
    """

    def __init__(self, client: Client, weights: Mapping[int, Tensor]) -> None:
        self._client = client
        self._rows = {table_id: weight.detach().numpy() for table_id, weight in weights.items()}
        self._asking = threading.Lock()  # answers stay in the order in which the servers gave them
        self._writing = threading.Lock()  # older rows go into the weights before newer ones, whichever threads look up
        self._arrived: deque[dict[int, tuple[Keys, Rows]]] = deque()
        self._received_at = self._expired_at = self._rests_until = 0.0
        self._client.watch(list(self._rows))
        self._ask_all()
        self.bring(float("inf"))

    def receive(self) -> None:
        """Asks for what has changed, unless the last answer is recent; for a thread that does not train."""
        if time.monotonic() > self._rests_until:
            with self._asking:
                self._ask()

    def bring(self, old_s: float = OLD_S) -> None:
        """Brings the weights up to date if they are older than ``old_s`` seconds."""
        if self._received_at < self._expired_at or time.monotonic() - self._received_at > old_s:
            with self._asking:
                self._ask()
        while self._arrived:
            with self._writing:
                for table_id, (ids, rows) in self._arrived.popleft().items() if self._arrived else ():
                    self._rows[table_id][ids] = rows

    def expire(self) -> None:
        """Makes the next lookup ask, also where an answer to an earlier question is still on its way."""
        self._expired_at = time.monotonic()

    def _ask(self) -> None:
        began = time.monotonic()
        lacks, changes = self._client.watch(list(self._rows))
        if lacks:
            self._ask_all()
        else:
            self._arrived.append(changes)
        self._received_at = began
        now = time.monotonic()
        self._rests_until = now + min(_REST_TIMES * (now - began), OLD_S)

    def _ask_all(self) -> None:
        for table_id, weight in self._rows.items():
            for ids in in_pieces(len(weight)):
                rows = self._client.wait(self._client.pull({table_id: ids}, wait_for_others=False))[table_id]
                self._arrived.append({table_id: (ids, rows)})
