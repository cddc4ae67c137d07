"""ServerConfig: the settings of one parameter server, and how many connections it can take."""

from __future__ import annotations

import resource
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fleet.errors import ConfigError
from fleet.ps.publishing.publication import Publication
from fleet.ps.wire.messages import MAX_BODY_BYTES

MODES = ("sync", "async")
USUAL_CONNECTIONS = 1024
RESERVED = 192  # newcomers, journal, snapshots, saves, metrics, libraries


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """One server.

    Args:
        endpoint: where to listen, ``host:port`` or ``unix:/path``, as the workers write it.
        num_workers: how many worker ranks the job has.
        mode: ``"sync"`` averages the gradients of a step over the workers and applies them once; ``"async"``
            applies each push when it arrives (geo workers use it too).
        staleness: a pull for step t waits until every worker has pushed t - staleness steps; ``None`` never waits.
            Sync mode waits for the step itself.
        index: this server's number, for messages.
        secret: the job secret; a server does not start without one.
        job: name of the job, for the folder.
        folder: where journal and snapshots live; ``None`` keeps nothing, with level 0.
        level: of the journal, see :mod:`fleet.ps.server.journal`; ``None`` is 1 with a folder and 0 without.
        skips_damage: goes on with the whole records before a damaged place of the folder, instead of raising.
        snapshot_bytes: a snapshot is written when the journal has grown by this much.
        snapshot_interval_s: longest time between snapshots; ``None`` sets no limit.
        summary_interval_s: time between lines about rows, memory, rates and queues while rows move; ``None`` logs none.
        lease_s: nobody waits for a worker that is silent for this long, until it is heard again.
        handshake_timeout_s: how long a newcomer may take to prove the secret.
        transfer_timeout_s: how long one message may take once its first byte has come.
        max_connections: further connections are turned away; ``None`` is 1,024, or fewer where the limit on open
            files is low.
        max_body_bytes: the largest message.
        publish: where changed rows go for serving; ``None``: nowhere. Needs a journal.
        peer: the endpoint of this server's standby, or of the server whose standby this one is; empty: neither.
        standby: this one is the standby; of a shard that can move: another process serves it at first.
        places: of shards that can move, the endpoint of each on every server process, ``places[process][index]``;
            empty: this server stays where it is.

    Raises:
        ConfigError: a value is out of range.
    """

    endpoint: str = "127.0.0.1:0"
    num_workers: int = 1
    mode: str = "async"
    staleness: int | None = None
    index: int = 0
    secret: bytes | None = None
    job: str = ""
    folder: Path | None = None
    level: int | None = None
    skips_damage: bool = False
    snapshot_bytes: int = 1 << 30
    snapshot_interval_s: float | None = None
    summary_interval_s: float | None = 60.0
    lease_s: float = 60.0
    handshake_timeout_s: float = 5.0
    transfer_timeout_s: float = 30.0
    max_connections: int | None = None
    max_body_bytes: int = MAX_BODY_BYTES
    publish: Publication | None = None
    peer: str = ""
    standby: bool = False
    places: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"parameter server mode {self.mode!r}: it is one of {list(MODES)}.")
        if self.num_workers < 1:
            raise ConfigError(f"parameter server: num_workers is {self.num_workers!r}; it must be 1 or more.")
        if self.staleness is not None and self.staleness < 0:
            raise ConfigError(f"parameter server: staleness is {self.staleness!r}; it must be 0 or more, or None.")
        for name in ("lease_s", "handshake_timeout_s", "transfer_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"parameter server: {name} is {getattr(self, name)!r}; it must be above 0.")
        if self.max_connections is not None and self.max_connections < 1:
            raise ConfigError(f"parameter server: max_connections is {self.max_connections!r}; it must be 1 or more.")
        if not 0 < self.max_body_bytes < 1 << 32:
            raise ConfigError(f"parameter server: max_body_bytes is {self.max_body_bytes!r}; it must be below 4 GiB.")
        if (self.peer or self.places) and (self.folder is None or self.journal_level != 1):
            what = "a shard that can move writes" if self.places else "a server and its standby write"
            raise ConfigError(
                f"parameter server {self.index}: {what} a journal of level 1, and this one has level "
                f"{self.journal_level} and the folder {self.folder}. Set FLEET_PS_FOLDER to a folder."
            )
        if not self.places and (self.peer == self.endpoint or (self.standby and not self.peer)):
            raise ConfigError(
                f"parameter server {self.index}: the endpoints of a server and its standby are {self.endpoint!r} and "
                f"{self.peer!r}; they are two. List another one for each server in FLEET_PS_STANDBY_ENDPOINTS."
            )
        if self.publish is not None and not self.journal_level:
            raise ConfigError(
                f"{self.publish.origin}: rows are published to {self.publish.address}, and the servers keep no journal "
                "(level 0), so after a restart nothing could say which rows the sink lacks. Set FLEET_PS_FOLDER to a "
                "folder that a restarted server finds again, and FLEET_PS_LEVEL to 1 or 2 if it is set."
            )

    @property
    def journal_level(self) -> int:
        """The effective level."""
        if self.level is not None:
            return self.level
        return 0 if self.folder is None else 1


def connections_allowed(asked: int | None) -> int:
    """Returns the limit on connections: ``asked``, or :data:`USUAL_CONNECTIONS` as far as open files allow.

    Raises the soft limit of this process where it is too low, up to the hard one.

    Raises:
        ConfigError: the limit allows fewer than asked, or none.
    """
    wanted = USUAL_CONNECTIONS if asked is None else asked
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _is_below(soft, wanted + RESERVED):
        raised = hard if _is_below(hard, wanted + RESERVED) else wanted + RESERVED
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if not _is_below(soft, wanted + RESERVED):
        return wanted
    room = soft - RESERVED
    if asked is not None or room < 1:
        raise ConfigError(
            f"parameter server: {wanted} connections are requested (FLEET_PS_MAX_CONNECTIONS), but this process may "
            f"open {soft} files, {RESERVED} of them for other things: {max(room, 0)} connections at most. Raise "
            f"the limit (ulimit -n {wanted + RESERVED}; LimitNOFILE of a service; --ulimit nofile of a container), or "
            "request fewer."
        )
    return room


def _is_below(limit: int, needed: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < needed
