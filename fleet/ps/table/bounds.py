"""Bounds: how many rows a table keeps, which go first, and where they lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from fleet.errors import ConfigError, UnsupportedOptionError

EVICT_KINDS = ("lru", "lfu", "ttl")
ROWS_KINDS = ("memory", "disk")
_TIMES = "a row's age is kept in the days that fleet.set_date names, because a replay has no clock; write ttl_days"
_NOT_EXACT = dict.fromkeys(("ttl", "ttl_s", "ttl_seconds", "ttl_hours", "ttl_steps"), _TIMES)
_MAX_DAYS = 49151  # more would meet the aging of the 16-bit day


@dataclass(frozen=True)
class Bounds:
    """The limits of one table on each server; without any, a table grows with the ids it sees.

    Args:
        max_rows: after each request a server holds at most so many rows.
        max_bytes: the same, in bytes of rows and index (see ``SparseTable.memory_bytes``).
        evict: which rows go: ``"lru"``, those whose last push is longest ago (the default with a limit);
            ``"lfu"``, those with the fewest pushes, the longest unused first among equals; ``"ttl"``, those not pushed
            for ``ttl_days``, and with a limit the longest unused above it.
        ttl_days: with ``evict="ttl"``: 1 to 49151 days, as ``fleet.set_date`` counts them.
        rows: ``"memory"`` holds all rows in memory, ``"disk"`` what ``memory_bytes`` has room for and the others in a
            mapped file in the server's folder.
        memory_bytes: with ``rows="disk"``: bytes of memory for index, hot rows and mapped pages.

    Raises:
        ConfigError: a value is out of range, or does not fit the others.

    Example:
        >>> Bounds(max_rows=1_000_000).policy
        'lru'
    """

    max_rows: int | None = None
    max_bytes: int | None = None
    evict: str | None = None
    ttl_days: int | None = None
    rows: str = "memory"
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        for key, highest in (
            ("max_rows", 2**36),
            ("max_bytes", 2**50),
            ("ttl_days", _MAX_DAYS),
            ("memory_bytes", 2**50),
        ):
            value = getattr(self, key)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not value >= 1):
                raise ConfigError(f"{key} is {value!r}; it takes an integer of 1 or more.")
            if value is not None and value > highest:
                raise ConfigError(f"{key} is {value!r}; it takes at most {highest}.")
        if self.evict is not None and self.evict not in EVICT_KINDS:
            raise ConfigError(f"evict is {self.evict!r}; one of {list(EVICT_KINDS)}.")
        if not isinstance(self.rows, str) or self.rows not in ROWS_KINDS:
            raise ConfigError(f"rows is {self.rows!r}; one of {list(ROWS_KINDS)}.")
        if self.max_rows is not None and self.max_bytes is not None:
            raise ConfigError("max_rows and max_bytes are both set; a table has one limit. Omit one of the two.")
        if self.evict == "ttl" and self.ttl_days is None:
            raise ConfigError('evict="ttl" has no ttl_days: after how many days without a push a row goes. Set it.')
        if self.ttl_days is not None and self.evict != "ttl":
            raise ConfigError(f'ttl_days is set and evict is {self.evict!r}; it belongs to evict="ttl".')
        if self.evict in ("lru", "lfu") and not self.has_limit:
            raise ConfigError(f"evict={self.evict!r} has no limit to keep; set max_rows or max_bytes.")
        if self.rows == "disk" and self.memory_bytes is None:
            raise ConfigError('rows="disk" needs memory_bytes: how much memory the table may use on each server.')
        if self.rows != "disk" and self.memory_bytes is not None:
            raise ConfigError(
                'memory_bytes is set and rows is "memory"; it belongs to rows="disk". For a limit on a '
                "table in memory set max_bytes."
            )
        if self.rows == "disk" and self.max_bytes is not None:
            raise ConfigError('max_bytes limits a table in memory; with rows="disk" set max_rows.')

    @property
    def has_limit(self) -> bool:
        """Whether there is a number of rows that the table must not exceed."""
        return self.max_rows is not None or self.max_bytes is not None

    @property
    def policy(self) -> str | None:
        """How rows above the limit are chosen: ``"lru"`` or ``"lfu"``; ``None`` without a limit."""
        if not self.has_limit:
            return None
        return "lfu" if self.evict == "lfu" else "lru"

    def as_dict(self) -> Mapping[str, Any]:
        """Returns the limits that are set, as plain values."""
        return {key: value for key, value in asdict(self).items() if value is not None and (key, value) != _USUAL}


_USUAL = ("rows", "memory")
BOUND_KEYS = tuple(field.name for field in fields(Bounds))


def bounds_of(label: str, settings: Mapping[str, Any]) -> Bounds | None:
    """Returns the bounds among ``settings``, ``None`` without any; errors begin with ``label``.

    Raises:
        UnsupportedOptionError: a time to live in another unit.
        ConfigError: a value is out of range, or does not fit the others.
    """
    for key in settings:
        if key in _NOT_EXACT:
            raise UnsupportedOptionError(f"{label}: {key} cannot be honoured: {_NOT_EXACT[key]}.")
    given = {key: settings[key] for key in BOUND_KEYS if settings.get(key) is not None}
    if not given:
        return None
    try:
        bounds = Bounds(**given)
    except ConfigError as error:
        raise ConfigError(f"{label}: {error}") from None
    return None if bounds == Bounds() else bounds
