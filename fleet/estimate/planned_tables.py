"""Tables that a job is to have, as text describes them, and what they take on each server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from fleet.common.limited_yaml import MAX_TEXT, LimitedLoader
from fleet.common.plain_files import read_small
from fleet.errors import ConfigError, did_you_mean
from fleet.ps.files.row_file import row_bytes
from fleet.ps.table.accessor import Accessor
from fleet.ps.table.entry import ProbabilityEntry, entry_from_attr
from fleet.ps.table.layout import SparseTableConfig, part_bytes, plan_layout
from fleet.ps.table.rules import Rule
from fleet.ps.table.table_size import TableSize, size_of
from fleet.ps.worker.table_configs import configure_table

_OWN = ("name", "dim", "ids", "admitted", "rule", "accessor", "entry")
_MOST_IDS = 10**15


@dataclass(frozen=True)
class PlannedTable:
    """One table of a job.

    Attributes:
        config: of the table.
        ids: how many ids it will have met.
        rows: how many of them will have a row.
    """

    config: SparseTableConfig
    ids: int
    rows: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in memory, without its place in the index."""
        return sum(part_bytes(self.config))

    def on_server(self, num_servers: int) -> TableSize:
        """Returns its size on one of so many servers."""
        rows = -(-self.rows // num_servers)
        return size_of(self.config, rows, -(-(self.ids - self.rows) // num_servers) if self.waits else 0)

    @property
    def waits(self) -> bool:
        """Whether ids without a row take a place in the index."""
        return self.config.entry is not None and self.config.entry.to_attr().startswith("count_filter")

    def saved_bytes(self, num_servers: int, *, in_snapshot: bool = False) -> int:
        """Returns the bytes of one server's part in a save, or in a snapshot, which keeps the ranks of limits."""
        size, layout = self.on_server(num_servers), plan_layout(self.config)
        ranked = in_snapshot and layout.has_ranks
        return (size.rows + size.waiting) * row_bytes(layout.row_floats, layout.has_statistics, ranked)


def table_of(settings: Mapping[str, Any], number: int = 0) -> PlannedTable:
    """Returns the table that ``settings`` describe.

    Args:
        settings: ``dim`` and ``ids``; ``name``, ``rule`` ("adagrad" by default), ``accessor`` (its kind), ``entry`` (as
            ``count_filter_entry:10``), ``admitted`` (the share of ids that get a row), and the keys of
            ``strategy.sparse_table_configs[name]``.
        number: its name, where none is given.

    Raises:
        ConfigError: a key is unknown or missing, or a value is out of range.

    Example:
        >>> table_of({"dim": 16, "ids": "2e6"}).row_bytes
        128
    """
    name = str(settings.get("name", number))
    label = f"table {name!r}"
    for key in ("dim", "ids"):
        if key not in settings:
            raise ConfigError(f"{label} has no {key}. Write {key}=, as in dim=16,rule=adagrad,ids=20e6.")
    ids = int(_number(label, "ids", settings["ids"], 1, _MOST_IDS))
    accessor, entry = settings.get("accessor"), entry_from_attr(str(settings.get("entry", "none")))
    config = SparseTableConfig(
        name,
        int(_number(label, "dim", settings["dim"], 1, 65536)),
        Rule(str(settings.get("rule", "adagrad"))),
        accessor=None if accessor is None else Accessor(accessor),
        entry=entry,
    )
    rest = {key: value for key, value in settings.items() if key not in _OWN}
    try:
        config = configure_table(config, rest or None)
    except ConfigError as error:
        raise ConfigError(f"{error}{''.join(did_you_mean(key, _OWN) for key in rest)}") from None
    share = entry.probability if isinstance(entry, ProbabilityEntry) else 1.0
    share = _number(label, "admitted", settings.get("admitted", share), 0, 1)
    return PlannedTable(config, ids, round(ids * share))


def tables_of(texts: Sequence[str], file: str | None = None) -> list[PlannedTable]:
    """Returns the tables of command-line arguments (``dim=16,ids=20e6``) and of a YAML file, by name.

    Raises:
        ConfigError: a text, or the file, describes no table.
    """
    described: list[Mapping[str, Any]] = []
    for text in texts:
        pairs = [pair.partition("=") for pair in text.split(",")]
        if not all(equals and key.strip() for key, equals, _ in pairs):
            raise ConfigError(f"--table {text!r}: it is KEY=VALUE with commas, as in dim=16,rule=adagrad,ids=20e6.")
        described.append({key.strip(): _value(f"--table {text!r}", value) for key, _, value in pairs})
    if file is not None:
        try:
            found = _value(f"--tables {file}", read_small(file, MAX_TEXT).decode("utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--tables {file!r} cannot be read: {error}") from None
        if not isinstance(found, Mapping) or not all(isinstance(value, Mapping) for value in found.values()):
            raise ConfigError(f"--tables {file!r}: it maps names to tables, as in ads: {{dim: 16, ids: 20e6}}.")
        described += [{"name": name, **value} for name, value in found.items()]
    return [table_of(settings, number) for number, settings in enumerate(described)]


def _value(label: str, text: str) -> Any:
    try:
        return LimitedLoader(text).get_single_data()
    except yaml.YAMLError as error:
        raise ConfigError(f"{label} cannot be read: {error}.") from None


def _number(label: str, key: str, value: Any, low: float, high: float) -> float:
    try:
        number = float(value)  # YAML reads 20e6 as text
    except (TypeError, ValueError):
        number = low - 1
    if isinstance(value, bool) or not low <= number <= high:
        raise ConfigError(f"{label}: {key} is {value!r}; it takes a number from {low} to {high:g}.")
    return number
