"""ClientConfig: how one worker speaks to its parameter servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fleet.errors import ConfigError
from fleet.ps.wire.messages import MAX_BODY_BYTES

__all__ = ["ONCE", "ClientConfig"]

ONCE = 1 << 15  # channels from here on: every process of a worker numbers its changes from 1


@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """One worker's side.

    Args:
        endpoints: the servers, in the same order on every worker.
        rank: this worker's rank.
        num_workers: how many there are.
        secret: the job secret, as the servers have it; without one no server is connected to.
        job: name of the job, as the servers have it.
        channel: number of this client among those of the same worker process; each is an ordered stream. A process
            that comes back goes on after the last change of the one before; from :data:`ONCE` on it starts at 1, and
            changes that were applied are not applied again.
        deadline_s: how long a server may be away before calls fail.
        start_timeout_s: how long to wait for the servers at the start, ``None`` for ever.
        retry_interval_s: seconds between the lines that say which servers are not ready.
        answer_timeout_s: a server that sends nothing for so long, while an answer is due, is connected to anew.
        connect_timeout_s: limit of one attempt to connect.
        bfloat16: rows travel as bfloat16, half the bytes.
        replay_bytes: how much is kept to be sent again if a server loses what it has acknowledged (levels 0 and 2).
        heartbeat: a thread keeps this worker's lease while it computes.
        max_body_bytes: the largest message, as the servers have it.

    Raises:
        ConfigError: a value is out of range.
    """

    endpoints: Sequence[str]
    rank: int = 0
    num_workers: int = 1
    secret: bytes | None = None
    job: str = ""
    channel: int = 0
    deadline_s: float = 120.0
    start_timeout_s: float | None = None
    retry_interval_s: float = 3.0
    answer_timeout_s: float = 30.0
    connect_timeout_s: float = 5.0
    bfloat16: bool = False
    replay_bytes: int = 256 << 20
    heartbeat: bool = True
    max_body_bytes: int = MAX_BODY_BYTES

    def __post_init__(self) -> None:
        if not self.endpoints or len(set(self.endpoints)) != len(self.endpoints):
            raise ConfigError(f"parameter server endpoints {list(self.endpoints)!r}: give each server once.")
        if not 0 <= self.rank < self.num_workers:
            raise ConfigError(f"worker rank {self.rank!r} of {self.num_workers!r}: ranks run from 0.")
        for name in ("deadline_s", "retry_interval_s", "answer_timeout_s", "connect_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"parameter server client: {name} is {getattr(self, name)!r}; it must be above 0.")
