"""The batches of a dataset, whose rows on parameter servers are requested together with the first lookup."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from fleet.job.running import running_session

_Batch = TypeVar("_Batch")


def with_rows(batches: Iterator[_Batch]) -> Iterator[_Batch]:
    """Yields ``batches``; in a worker of a parameter-server job as ``fleet.prefetch`` does, but never one ahead.

    The loop may be left and go on later, or end a step before it takes the next batch: a dataset that counts what it
    gave would count a batch that was read ahead.
    """
    session = running_session()
    job = None if session is None else session.server_job
    yield from batches if job is None or job.connected is None else job.prefetch(batches, may_read_ahead=False)
