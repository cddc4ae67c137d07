"""The rows that a publisher keeps in Redis: each lookup asks for them in one transaction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import numpy as np

from fleet.common.extras import install_line
from fleet.errors import ConfigError, PSError
from fleet.ps.publishing.delta import ENCODINGS, row_bytes, unpack_rows
from fleet.ps.publishing.redis_address import check_database, without_password
from fleet.ps.publishing.redis_position import MAX_SERVERS, read_position
from fleet.ps.serving.local_rows import Found, Position, check_servers, check_table
from fleet.ps.table.layout import Int64s
from fleet.ps.wire.messages import MAX_DIM

_TIMEOUT_S = 10.0
_RETRIES = 5
_POSITION = "position"  # of the key that holds the servers' positions; a sink refuses a table of this name
_T = TypeVar("_T")


class RedisRows:
    """Rows of one job in Redis; nothing is cached, so every lookup gets the newest rows.

    A lookup reads the table's description and its rows in one transaction, and a publisher writes a delta in one: a
    batch sees all of a delta or nothing. A Redis that is away is tried again for about three seconds.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``, as ``redis.Redis.from_url`` takes it.
        job: the job's name, ``None`` where a single job publishes there.
    """

    def __init__(self, url: str, job: str | None) -> None:
        try:
            import redis
            from redis.backoff import ExponentialBackoff
            from redis.exceptions import NoPermissionError
            from redis.retry import Retry
        except ImportError:
            raise ConfigError(
                f"fleet.ps.Reader({without_password(url)!r}) needs the package redis; {install_line('redis')}."
            ) from None
        self._label = without_password(url)
        check_database(f"fleet.ps.Reader({self._label!r})", url)
        self._refused: tuple[type[Exception], ...] = (redis.AuthenticationError, NoPermissionError)
        self._errors: tuple[type[Exception], ...] = (redis.RedisError, OSError)
        try:
            self._redis: Any = redis.Redis.from_url(
                url,
                socket_timeout=_TIMEOUT_S,
                socket_connect_timeout=_TIMEOUT_S,
                retry=Retry(ExponentialBackoff(cap=1.0, base=0.1), _RETRIES),
                retry_on_error=[redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError],
            )
        except ValueError as error:
            raise ConfigError(f"fleet.ps.Reader({self._label!r}): {error}.") from None
        self._is_whole = False  # every server has written once
        self._job = self._find_job() if job is None else job
        self._check_servers()

    @property
    def dims(self) -> Mapping[str, int]:
        """The columns of each table that has rows there now."""
        pattern = f"fleet:{_plain(self._job)}:*"
        dims: dict[str, int] = {}
        for key in self._hashes(pattern):
            name = key.decode().removeprefix(f"fleet:{self._job}:")
            dim = self._ask(partial(self._redis.hget, key, "dim")) or b""
            if name != _POSITION and _dim_of(dim):
                dims[name] = _dim_of(dim)
        return dims

    @property
    def positions(self) -> dict[int, Position]:
        """The position of each server in Redis."""
        names = ("history", "watermark", "step", "pushed_at")
        return {server: Position(*(held[name] for name in names)) for server, held in self._held_positions().items()}

    def refresh(self) -> bool:
        """Returns False: a lookup gets the newest rows in any case. Raises :class:`PSError` when Redis is away."""
        self._ask(self._redis.ping)
        return False

    def lookup(self, table: str, keys: Int64s) -> Found:
        """Returns the rows of ``keys``, zeros for missing rows, and the mask of those found."""
        if not isinstance(table, str) or table == _POSITION:  # its key holds no table
            check_table(self._label, table, self.dims)
        # Until every server has written once, ids of the others would read as zeros without a word.
        if not self._is_whole:
            self._check_servers()
        prefix = f"fleet:{self._job}:{table}"
        with self._redis.pipeline(transaction=True) as pipe:
            pipe.hgetall(prefix)
            if len(keys):
                start = f"{prefix}:".encode()
                pipe.mget([b"%b%d" % (start, key) for key in keys.tolist()])
            meta, *answer = self._ask(pipe.execute)
        if not meta:
            check_table(self._label, table, self.dims)
        dim, encoding = self._described(table, meta)
        rows = answer[0] if answer else []
        found = np.fromiter((row is not None for row in rows), np.bool_, len(rows))
        out = np.zeros((len(keys), dim), np.float32)
        width = row_bytes(dim, encoding)
        held = [row for row in rows if row is not None]
        if any(len(row) != width for row in held):
            raise PSError(
                f"{self._label}: a row of {table!r} has not the {width} bytes of {dim} columns as {encoding}. "
                "Something else than the publisher has written there."
            )
        if held:
            out[found] = unpack_rows(held, dim, encoding)
        return out, found

    def close(self) -> None:
        """Closes the connections."""
        self._redis.close()

    def _held_positions(self) -> dict[int, dict[str, Any]]:
        """Returns the fields of each server's position in Redis."""
        texts = self._ask(lambda: self._redis.hgetall(f"fleet:{self._job}:position"))
        held = {}
        for server, text in texts.items():
            try:
                if not server.isdigit() or int(server[:9]) >= MAX_SERVERS:
                    raise ValueError
                held[int(server)] = read_position(text)
            except ValueError:
                raise PSError(
                    f"{self._label}: fleet:{self._job}:position is not what a publisher writes: {server!r:.20} is "
                    f"{text!r:.200}."
                ) from None
        return held

    def _check_servers(self) -> None:
        held = self._held_positions()
        check_servers(self._label, held, max((one["num_servers"] for one in held.values()), default=0))
        self._is_whole = bool(held)

    def _find_job(self) -> str:
        keys = self._hashes("fleet:*:position")
        names = [key.decode().removeprefix("fleet:").removesuffix(":position") for key in keys]
        jobs = sorted(name for name in names if ":" not in name)  # the others are tables like "ads:position"
        if len(jobs) != 1:
            what = f"has the rows of {jobs}; choose one"
            if not jobs:
                what = "has no rows of a job yet. Servers write within seconds: try again then, or name the job"
            raise ConfigError(f"fleet.ps.Reader({self._label!r}): Redis {what} with job=.")
        return jobs[0]

    def _hashes(self, pattern: str) -> list[bytes]:
        return self._ask(lambda: list(self._redis.scan_iter(match=pattern, count=10000, _type="hash")))

    def _described(self, table: str, meta: Mapping[bytes, bytes]) -> tuple[int, str]:
        dim = _dim_of(meta.get(b"dim", b""))
        encoding = meta.get(b"values", b"").decode(errors="replace")
        if not dim or encoding not in ENCODINGS:
            raise PSError(
                f"{self._label}: fleet:{self._job}:{table} describes no table: {dict(meta)!s:.200}. A table has 1 to "
                f"{MAX_DIM} columns, as one of {', '.join(ENCODINGS)}. Something else than the publisher has written "
                "there."
            )
        return dim, encoding

    def _ask(self, request: Callable[[], _T]) -> _T:
        try:
            return request()
        except self._refused as error:
            raise PSError(
                f"{self._label}: Redis refuses this client: {error}. The address takes redis://user:password@host:port/0."
            ) from None
        except self._errors as error:
            raise PSError(
                f"{self._label}: Redis does not answer: {str(error).rstrip('.')}. Lookups work again once it does."
            ) from None


def _dim_of(text: bytes) -> int:
    """Returns the columns of a table, 0 for a text that is no possible number of columns."""
    dim = int(text) if text.isdigit() and len(text) < 10 else 0
    return dim if dim <= MAX_DIM else 0


def _plain(name: str) -> str:
    """Returns ``name`` as a pattern that matches only itself."""
    return "".join(f"\\{letter}" if letter in "*?[]\\" else letter for letter in name)
