"""Publication: tables, their sink and how often they go there, by ``fleet.ps.publish`` or by the option ``publish``."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from fleet.common.addresses import hide_user
from fleet.errors import ConfigError
from fleet.ps.publishing.delta import Delta, Sink, check_encoding, check_position
from fleet.ps.publishing.redis_address import check_database

# Of fleet.ps.publish(): a script may call it before fleet.init(), so no session can hold it yet.
_asked: list[Publication] = []


@dataclass(frozen=True, kw_only=True)
class Publication:
    """Where a server's rows go.

    Args:
        sink: ``redis://host:port/database``, ``folder:/path`` or a path, a function of a delta, or a sink.
        every_s: seconds from one delta to the next.
        values: how rows are stored, ``"float32"``, ``"bfloat16"`` or ``"int8"``; functions get float32.
        tables: names of the sparse tables; None: all.
        origin: how the user wrote it, for messages.

    Raises:
        ConfigError: a value is wrong.
    """

    sink: Any
    every_s: float = 1.0
    values: str = "float32"
    tables: frozenset[str] | None = None
    origin: str = "fleet.ps.publish()"

    def __post_init__(self) -> None:
        every_s = self.every_s
        if isinstance(every_s, bool) or not isinstance(every_s, int | float) or not 0 < every_s < threading.TIMEOUT_MAX:
            raise ConfigError(f"{self.origin}: every_s is {every_s!r}; it takes a number of seconds above 0.")
        check_encoding(f"{self.origin}: values", self.values)
        if isinstance(self.sink, str):
            _check_address(self.origin, self.sink)
        elif not callable(self.sink) and not _is_sink(self.sink):
            raise ConfigError(
                f"{self.origin}: the sink is {self.sink!r}; it takes 'redis://host:port/0', 'folder:/path', a path, a "
                "function of a delta, or an object with position(), write() and close()."
            )
        if not isinstance(self.sink, str) and self.values != "float32":
            raise ConfigError(
                f"{self.origin}: values is {self.values!r} and the sink is a function; it gets float32 rows and can "
                "store them with fleet.ps.publishing.delta.pack_rows. Leave values at 'float32'."
            )

    def check_versions(self) -> None:
        """Raises :class:`ConfigError` unless the sink, a folder, can keep versions."""
        if not isinstance(self.sink, str) or "://" in self.sink:
            raise ConfigError(
                f"{self.origin}: rows go to {self.address}, which has the newest rows alone; versions are kept in a "
                'folder, as by fleet.ps.publish("rows"). Elsewhere save with fleet.save_persistables and go back with '
                "fleet.load_model."
            )

    @property
    def address(self) -> str:
        """The sink, for messages; without a password."""
        if not isinstance(self.sink, str):
            return getattr(self.sink, "__name__", type(self.sink).__name__)
        return hide_user(self.sink) if "://" in self.sink else self.sink


def _is_sink(sink: object) -> bool:
    return all(callable(getattr(sink, name, None)) for name in ("position", "write", "close"))


def _check_address(origin: str, address: str) -> None:
    scheme, colon, rest = address.partition("://")
    if address.startswith("folder:"):
        if not address.removeprefix("folder:"):
            raise ConfigError(f"{origin}: the sink is 'folder:'; a path follows it, such as folder:/mnt/rows.")
        if colon:
            raise ConfigError(f"{origin}: the sink is {address!r}; a path follows the colon, such as folder:/mnt/rows.")
    elif not address:
        raise ConfigError(f"{origin}: the sink is ''; it takes 'redis://host:port/0', 'folder:/path' or a path.")
    elif colon and scheme not in ("redis", "rediss", "unix"):
        raise ConfigError(
            f"{origin}: the sink is {address!r}; the schemes are redis://, rediss:// (TLS), unix:// (a socket of "
            "Redis) and folder:. For anything else give a function of a delta."
        )
    elif colon and not rest:
        raise ConfigError(f"{origin}: the sink is {address!r}; write the host, such as redis://localhost:6379/0.")
    elif colon:
        check_database(origin, address)


def publish(
    sink: str | os.PathLike[str] | Callable[[Delta], object] | Sink,
    every_s: float = 1.0,
    values: str = "float32",
    tables: Iterable[str] | None = None,
) -> None:
    """Sends the rows that training changes to ``sink`` while it trains; called on every role, before the servers start.

    Every ``every_s`` seconds each server hands over the rows of its sparse tables that changed, with the journal record
    up to which they are complete. A sink that is away or slow holds nobody: changes merge by id until it takes them.
    Servers need ``FLEET_PS_FOLDER``: after a restart they continue where the sink stands. Workers hold no tables and
    only look whether ``tables`` exist.

    Args:
        sink: ``"redis://host:port/database"`` (extra ``redis``), ``"folder:/path"`` or a path, or a function that is
            called with each :class:`~fleet.ps.publishing.delta.Delta` and may raise to get it again, merged with newer
            rows. A restarted server begins with a whole delta for a function.
        every_s: seconds between deltas.
        values: how Redis and folders store rows: ``"float32"``, ``"bfloat16"``, or ``"int8"`` with a float32 scale for
            each row.
        tables: names of the tables; all sparse tables when None.

    Raises:
        ConfigError: a value is wrong, or publish was called before.

    Example:
        >>> fleet.ps.publish("redis://localhost:6379/0", every_s=1.0, values="int8")    # doctest: +SKIP
    """
    if _asked:
        raise ConfigError("fleet.ps.publish() was called twice; one job publishes to one sink.")
    # A text is an iterable of its letters, none of which is a table.
    if isinstance(tables, str):
        raise ConfigError(f"fleet.ps.publish(tables={tables!r}) takes a list of names; write [{tables!r}].")
    names = list(tables) if isinstance(tables, Iterable) else tables
    if names is not None and not (isinstance(names, list) and names and all(isinstance(name, str) for name in names)):
        raise ConfigError(f"fleet.ps.publish(tables={names!r}) takes names of sparse tables, at least one.")
    chosen = None if names is None else frozenset(names)
    sink = os.fspath(sink) if isinstance(sink, os.PathLike) else sink
    _asked.append(Publication(sink=sink, every_s=every_s, values=values, tables=chosen))


def take_asked() -> Publication | None:
    """Returns the publication that :func:`publish` was called for, and forgets it."""
    return _asked.pop() if _asked else None


def refuse_asked() -> None:
    """Raises ConfigError where :func:`publish` was called, and forgets the call."""
    if take_asked() is not None:
        raise ConfigError(
            "fleet.ps.publish() was called, and this job has no parameter servers whose rows it could publish. Remove "
            "the call, or start the job with servers: python -m fleet.launch --server_num=1 --worker_num=1 train.py, "
            "and fleet.init() without is_collective."
        )


def open_sink(publication: Publication, job: str) -> Sink:
    """Returns the sink; it connects when it is first asked.

    Raises:
        ConfigError: the extra of the sink is absent, or its address is wrong.
    """
    sink = publication.sink
    if not isinstance(sink, str):
        own: Sink = sink if _is_sink(sink) else _Function(sink)
        return own
    if "://" in sink:
        from fleet.ps.publishing.redis_sink import RedisSink

        return RedisSink(sink, job, publication.values)
    from fleet.ps.publishing.folder_sink import FolderSink

    return FolderSink(sink.removeprefix("folder:"), job, publication.values)


class _Function:
    """A sink that calls a function; it knows its position as long as the process lives."""

    def __init__(self, function: Callable[[Delta], object]) -> None:
        self._function = function
        self._positions: dict[int, tuple[str, int]] = {}

    def position(self, server: int) -> tuple[str, int] | None:
        """Returns the position of the last delta that the function accepted."""
        return self._positions.get(server)

    def write(self, delta: Delta) -> None:
        """Calls the function."""
        check_position(delta, self._positions.get(delta.server))
        self._function(delta)
        self._positions[delta.server] = (delta.history, delta.watermark)

    def close(self) -> None:
        """Leaves the function alone."""
