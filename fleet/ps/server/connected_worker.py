"""ConnectedWorker: who speaks on one connection, as its server knows it."""

from __future__ import annotations

from fleet.ps.server.job_state import Worker
from fleet.ps.server.late_answers import LateAnswer
from fleet.ps.wire.sealed import Sealed


class ConnectedWorker:
    """One connection, and the worker or reader that speaks on it."""

    def __init__(self, connection: Sealed) -> None:
        self.connection = connection
        self.worker: Worker | None = None
        self.channel = 0
        self.client_id = 0
        self.reads = ""  # the form in which rows go to a reader; empty: not one
        self.epoch = 0  # of the shard from which the reader reads
        self.late: LateAnswer | None = None  # of its last push that had to wait for a step
