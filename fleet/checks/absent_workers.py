"""AbsentWorkers: an error where a worker waits at the servers for a worker that waits for it in a call of all.

[Note: Who can never step]
In sync mode a step waits at the servers for the steps of all workers. One of these may have finished its batches and
wait in a call that all must make (metrics, all_reduce, a checkpoint), which this worker reaches after its step: both
would wait until a time limit. It is an error only where no step can come:

- The other has been in one call for ``STUCK_S`` seconds, seen at two looks at least, and the server waits for it at
  both, in the same step of this worker. A worker that is on its way to the call has sent its step before, so the server
  has stopped waiting for it. A worker in ``barrier_worker()`` is in no such call, and the servers do not wait for it.
- The other waits there in its main thread, and this worker at the server in its own. A call in another thread, of
  metrics for example, holds no step up: the main thread trains on. Where a thread beside the main one waits for the
  server, or has made such calls on this worker, it may come to that call later; so that is no proof either.
- The other still answers, or has just told that it waits: a post that a killed worker left in the store is no proof.
- The mode is sync: in the others a queue sends steps while the main thread waits.

Before the workers have joined each other, at the first call of all, there is no roll call in which one could look.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fleet.errors import RendezvousError
from fleet.job.whereabouts import named, user_line

if TYPE_CHECKING:
    from fleet.job.job import Job
    from fleet.job.roll_call import RollCall

STUCK_S = 2.0


class AbsentWorkers:
    """Looks after the workers for which a server lets this one wait.

    Args:
        job: of this worker.
        is_sync: whether only the main thread of a worker can send the step that the servers wait for.
    """

    def __init__(self, job: Job, is_sync: bool) -> None:
        self._job = job
        self._is_sync = is_sync
        self._since: dict[tuple[int, str, int], float] = {}  # rank, its call, the step of this worker

    def look_after(self, ranks: Sequence[int]) -> None:
        """Raises RendezvousError when one of ``ranks``, for which this worker waits, can never come."""
        roll_call = self._job.roll_call
        if roll_call is not None:
            roll_call.check_restarted(ranks)
            if self._is_sync and threading.current_thread() is threading.main_thread():
                self._check_stuck(roll_call, ranks)

    def _check_stuck(self, roll_call: RollCall, ranks: Sequence[int]) -> None:
        now = time.monotonic()
        found = roll_call.waiting(ranks)
        seen = [(rank, place, self._job.num_steps) for rank, place in found.items() if rank in ranks]
        self._since = {one: self._since.get(one, now) for one in seen}
        stuck = [rank for rank, place, step in seen if now - self._since[rank, place, step] >= STUCK_S]
        if not stuck or not roll_call.still_wait(stuck):
            return
        places = "\n".join(f"  {named([rank])}: waits in {found[rank]}" for rank in stuck)
        text = (
            f"{self._job.who} {user_line()} waits at the parameter servers for {named(stuck)}, and in a call that "
            f"all workers must make {named(stuck)} waits for this worker, so neither can go on:\n{places}\nIn sync "
            "mode the steps of the others wait for each worker. Call fleet.barrier_worker() after the last batch, "
            "before a call that all must make (fleet.metrics, fleet.all_reduce, Checkpoint.save()); or give all "
            'workers the same number of batches, which Checkpoint needs: rest="drop" or "repeat" of '
            "fleet.ParquetDataset."
        )
        roll_call.refuse(stuck, text)
        raise RendezvousError(text)
