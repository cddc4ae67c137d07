"""RedisSink: the rows of a job in Redis, as keys that a server of requests reads with MGET.

Row 7 of table ``ads`` of job ``shop`` is the key ``fleet:shop:ads:7``; its bytes are what ``pack_rows`` makes.
The hash ``fleet:shop:ads`` says how (``values``, ``dim``), and the hash ``fleet:shop:position`` has one field for each
server: JSON with its history, watermark, step, the time of its oldest change, and ``values``. A delta is one
transaction: rows and position change together, and not at all when the position is another than the one the delta
continues.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet.common.extras import install_line
from fleet.errors import ConfigError, PSError
from fleet.ps.publishing.delta import Delta, RowsDelta, check_position, pack_rows
from fleet.ps.publishing.redis_address import without_password
from fleet.ps.publishing.redis_position import read_position
from fleet.ps.server.key_recorder import Keys
from fleet.ps.table.kernels.numba_cache import load_kernels
from fleet.ps.table.partition import servers_of_keys

_ROWS_A_COMMAND = 2048
_TRIES = 50
_TIMEOUT_S = 60.0
_CONNECT_S = 2.0


def check_installed(origin: str) -> None:
    """Raises ConfigError where the extra is absent."""
    if find_spec("redis") is None:
        raise ConfigError(f"{origin}: a sink in Redis needs the package redis; {install_line('redis')}.")


class RedisSink:
    """Writes deltas to Redis.

    Args:
        address: ``redis://host:port/database``, ``rediss://`` or ``unix://``.
        job: the job's name.
        values: how rows are stored.

    Raises:
        ConfigError: the extra is absent, Redis cannot read the address, or the job's name cannot be part of a key.
    """

    def __init__(self, address: str, job: str, values: str) -> None:
        check_installed(address)
        if ":" in job:
            raise ConfigError(
                f"PADDLE_JOB_ID is {job!r}, and the job publishes to Redis: ':' divides the parts of a key there, so "
                "its rows could be taken for those of another job. Use a name without ':'."
            )
        import redis
        from redis.backoff import NoBackoff
        from redis.exceptions import NoPermissionError
        from redis.retry import Retry

        self._write_pairs = load_kernels("redis_pairs", "fleet.ps.publishing", "published rows").write_pairs
        try:
            self._redis: Any = redis.Redis.from_url(
                address,
                socket_timeout=_TIMEOUT_S,
                socket_connect_timeout=_CONNECT_S,
                retry=Retry(NoBackoff(), 0),  # the publisher tries again itself, and asks for the position first
                command_packer=_packer(),
            )
        except ValueError as error:
            raise ConfigError(
                f"the sink {without_password(address)!r}: {error}. Write redis://host:port/database."
            ) from None
        self._watch_error = redis.WatchError
        self._refused: tuple[type[Exception], ...] = (redis.AuthenticationError, NoPermissionError)
        self._values = values
        self._prefix = f"fleet:{job}:"
        self._positions = f"{self._prefix}position"
        self._known: set[str] = set()  # tables whose description is in Redis

    def position(self, server: int) -> tuple[str, int] | None:
        """Returns (history, watermark) of the rows that Redis holds of ``server``.

        Raises:
            ConfigError: Redis holds rows of this job in another form.
            PSError: it wants a password.
        """
        self._known.clear()
        with self._allowed():
            states = self._redis.hgetall(self._positions)
        for text in states.values():
            there = self._read(text)["values"]
            if there != self._values:
                raise ConfigError(
                    f"Redis holds this job's rows as {there}, and these are {self._values}: a reader could not tell "
                    f"them apart. {self._other_place()}"
                )
        return self._held(states.get(str(server).encode()))

    def write(self, delta: Delta) -> None:
        """Writes ``delta`` in one transaction.

        Raises:
            StaleDelta: the position in Redis is another.
            ConfigError: a table's name cannot be part of a key, or its rows are stored in another form.
            PSError: Redis wants another password, or allows this user less.
        """
        for _ in range(_TRIES):
            with self._allowed(), self._redis.pipeline(transaction=True) as pipe:
                pipe.watch(self._positions)
                check_position(delta, self._held(pipe.hget(self._positions, str(delta.server))))
                self._queue_all(pipe, delta)
                with suppress(self._watch_error):  # another server of the job has just written its position
                    pipe.execute()
                    self._known.update(rows.table for rows in delta.tables)
                    return
        raise PSError(f"the positions of job {delta.job!r} in Redis change faster than a delta is written.")

    @contextmanager
    def _allowed(self) -> Iterator[None]:
        try:
            yield
        except self._refused as error:
            raise PSError(
                f"Redis refuses this client: {error}. The address takes redis://user:password@host:port/0"
            ) from None

    def _queue_all(self, pipe: Any, delta: Delta) -> None:
        # All reads come before multi(): from there on the pipe only queues, and answers after the transaction.
        described = [self._described(pipe, rows) for rows in delta.tables]
        gone = [self._gone(pipe, rows, delta) for rows in delta.tables]
        servers = [int(server) for server in pipe.hkeys(self._positions)] if delta.whole else []
        pipe.multi()
        for rows, is_new, keys in zip(delta.tables, described, gone, strict=True):
            self._queue(pipe, rows, keys)
            if is_new:
                fields = {"values": self._values, "dim": rows.values.shape[1]}
                pipe.hset(f"{self._prefix}{rows.table}", mapping=fields)
        for server in servers:
            if server >= delta.num_servers:  # the job had more servers before it was started again
                pipe.hdel(self._positions, str(server))
        state = {
            "history": delta.history,
            "watermark": delta.watermark,
            "step": delta.step,
            "pushed_at": delta.pushed_at,
            "num_servers": delta.num_servers,
            "values": self._values,
        }
        pipe.hset(self._positions, str(delta.server), json.dumps(state))

    def _described(self, pipe: Any, rows: RowsDelta) -> bool:
        """Returns whether Redis has no description of the table yet."""
        if rows.table in self._known:
            return False
        if rows.table == "position" or re.search(r":-?\d+$", rows.table):
            raise ConfigError(
                f"table {rows.table!r} cannot be published to Redis: its keys could be taken for others. Give the "
                "embedding another name, without ':' before a number, and not 'position'."
            )
        found = pipe.hgetall(f"{self._prefix}{rows.table}")
        if not found:
            return True
        there = tuple(found.get(name, b"").decode(errors="replace")[:20] for name in (b"values", b"dim"))
        mine = (self._values, str(rows.values.shape[1]))
        if there != mine:
            raise ConfigError(
                f"Redis holds table {rows.table!r} of this job as {there[0]} rows of dim {there[1]}, these are "
                f"{mine[0]} rows of dim {mine[1]}, and a reader could not tell them apart. {self._other_place()}"
            )
        return False

    def _held(self, text: bytes | None) -> tuple[str, int] | None:
        if text is None:
            return None
        fields = self._read(text)
        return fields["history"], fields["watermark"]

    def _read(self, text: bytes) -> dict[str, Any]:
        try:
            return read_position(text)
        except ValueError:
            raise ConfigError(
                f"Redis holds {text!r:.100} as the position of a server of this job, which no publisher writes. "
                f"{self._other_place()}"
            ) from None

    def _other_place(self) -> str:
        return f"Give the job another name (PADDLE_JOB_ID), another database, or remove the keys {self._prefix}*."

    def _gone(self, pipe: Any, rows: RowsDelta, delta: Delta) -> Keys:
        """Returns the ids to remove; with a whole delta, all of this server's ids in Redis that have no row."""
        if not delta.whole:
            return rows.deleted
        prefix = f"{self._prefix}{rows.table}:"
        pattern = re.sub(r"([\[\]*?\\])", r"\\\1", prefix) + "*"
        start = len(prefix.encode())
        texts = (key[start:] for key in pipe.scan_iter(match=pattern, count=10000))
        there = np.unique(np.array([int(text) for text in texts if re.fullmatch(rb"-?\d+", text)], np.int64))
        mine = servers_of_keys(there, delta.num_servers, rows.routing) == delta.server
        return np.setdiff1d(there[mine], rows.keys)

    def _queue(self, pipe: Any, rows: RowsDelta, gone: Keys) -> None:
        prefix = f"{self._prefix}{rows.table}:".encode()
        for start in range(0, len(rows.keys), _ROWS_A_COMMAND):
            part = slice(start, start + _ROWS_A_COMMAND)
            keys = rows.keys[part]
            packed = pack_rows(rows.values[part], self._values)
            out = np.empty(len(keys) * (len(prefix) + packed.shape[1] + 64), np.uint8)
            size = self._write_pairs(np.frombuffer(prefix, np.uint8), keys, packed, out)
            pipe.execute_command("MSET", _Words(2 * len(keys), out[:size]))
        for start in range(0, len(gone), _ROWS_A_COMMAND):
            keys = gone[start : start + _ROWS_A_COMMAND].tolist()
            pipe.execute_command("UNLINK", *[b"%b%d" % (prefix, key) for key in keys])

    def close(self) -> None:
        """Closes the connections."""
        self._redis.close()


class _Words:
    """The arguments of one command, as Redis reads them."""

    def __init__(self, count: int, data: NDArray[np.uint8]) -> None:
        self.count = count
        self.data = data

    def __repr__(self) -> str:
        """Returns a short text, which errors of the redis package show instead of the rows."""
        return f"<{self.count} words>"


def _packer() -> Any:
    """Returns a serializer of commands; it sends :class:`_Words`, which are bytes already, as they are."""
    from redis import connection

    plain: Any = connection  # it has no types

    class Packer(plain.PythonRespSerializer):  # type: ignore[misc]
        def pack(self, *args: Any) -> list[Any]:
            if not isinstance(args[-1], _Words):
                return list(super().pack(*args))
            (name, words) = args
            head = b"*%d\r\n$%d\r\n%b\r\n" % (1 + words.count, len(name), name.encode())
            return [head, words.data.data]

    return Packer(6000, plain.Encoder("utf-8", "strict", decode_responses=False).encode)
