"""ClientConfig: the settings of one worker's lines to the servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fleet.errors import ConfigError
from fleet.ps.client.fence import Fences
from fleet.ps.wire.messages import MAX_BODY_BYTES
from fleet.ps.wire.row_form import check_wire

ONCE = 1 << 15  # from this channel on, every process of a worker numbers its changes from 1


@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """One worker's side.

    Args:
        endpoints: the servers, in the same order on every worker.
        rank: this worker's rank.
        num_workers: the number of workers.
        secret: the job secret, as the servers have it; without one this worker connects to no server.
        job: name of the job, as the servers have it.
        channel: number of this client among those of the same worker process; each is an ordered stream. After a
            restart, numbering continues after the last change of the previous process; from :data:`ONCE` on it starts
            at 1, and changes that were applied are not applied again.
        deadline_s: how long a server may be away before calls fail.
        start_timeout_s: how long to wait for the servers at the start; ``None`` waits forever.
        retry_interval_s: seconds between the lines that say which servers are not ready.
        answer_timeout_s: reconnect when a server sends nothing for this long while an answer is due.
        connect_timeout_s: time limit of one connection attempt.
        wire: the form in which rows travel, see :mod:`fleet.ps.wire.row_form`.
        replay_bytes: bytes of pushes kept to be sent again if a server loses acknowledged ones (levels 0 and 2).
        shares_memory: large bodies go through memory where the server is on this machine, see
            :mod:`fleet.ps.one_machine.shared_bodies`.
        heartbeat: a thread keeps this worker's lease while it computes.
        max_body_bytes: the largest message, as the servers have it.
        deputy: the client pushes in the name of a worker that was lost, as :meth:`Client.deputy` makes it.
        standbys: the standby of each server, in the order of ``endpoints``; empty: there are none.
        places: for each server, the other endpoints where it may be served, where shards can move; empty: they cannot.
        fences: shared by all clients of one process whose servers have standbys.

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
    wire: str = "float32"
    replay_bytes: int = 256 << 20
    shares_memory: bool = True
    heartbeat: bool = True
    max_body_bytes: int = MAX_BODY_BYTES
    deputy: bool = False
    standbys: Sequence[str] = ()
    places: Sequence[Sequence[str]] = ()
    fences: Fences = field(default_factory=Fences)

    def __post_init__(self) -> None:
        check_wire(self.wire)
        if not self.endpoints or len(set(self.endpoints)) != len(self.endpoints):
            raise ConfigError(f"parameter server endpoints {list(self.endpoints)!r}: give each server once.")
        if not 0 <= self.rank < self.num_workers:
            raise ConfigError(f"worker rank {self.rank!r} of {self.num_workers!r}: ranks run from 0.")
        count = len(self.endpoints)
        distinct = len({*self.endpoints, *self.standbys})
        if self.standbys and (len(self.standbys) != count or distinct < 2 * count):
            raise ConfigError(
                f"standbys {list(self.standbys)!r} of the parameter servers {list(self.endpoints)!r}: give each server "
                "one, at an endpoint of its own."
            )
        if self.places and (self.standbys or len(self.places) != count):
            raise ConfigError(
                f"parameter servers {list(self.endpoints)!r} that can move to {list(self.places)!r}: give each the "
                "other endpoints where it may be served, and no standbys."
            )
        for name in ("deadline_s", "retry_interval_s", "answer_timeout_s", "connect_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"parameter server client: {name} is {getattr(self, name)!r}; it must be above 0.")

    def others(self, index: int) -> list[str]:
        """Returns the other endpoints where server ``index`` may be."""
        return [*self.standbys[index : index + 1], *(self.places[index] if self.places else ())]

    @property
    def has_others(self) -> bool:
        """Whether servers may be elsewhere than at their own endpoints."""
        return bool(self.standbys or self.places)
