"""What goes to which server, and how the answers are put together: the client's half of the partition."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fleet.errors import ConfigError
from fleet.ps.table.dense_table import DenseTableConfig
from fleet.ps.table.layout import SparseTableConfig, plan_layout
from fleet.ps.table.partition import plan_dense_blocks, servers_of_keys
from fleet.ps.table.table_spec import spec_of_config
from fleet.ps.wire.messages import (
    Buffer,
    Header,
    Members,
    MessageError,
    MessageFlag,
    TablePart,
    control_body,
    decode_parts,
    join_parts,
)
from fleet.ps.wire.row_form import wide_parts

Keys = NDArray[np.int64]
Rows = NDArray[np.float32]


class Take(Protocol):
    """Takes values of a dense table as they arrive, from element ``start`` on; they are gone after the call."""

    def __call__(self, values: Rows, start: int = 0) -> None:
        """Takes ``values``."""


Places = NDArray[np.intp] | slice
Target = Rows | tuple[Rows, Places] | Callable[[Rows], None]


@dataclass(slots=True)
class Gradient:
    """What a push carries for one sparse table: one row per id, and optionally shows, clicks and slots per id.

    Ids that are not ``distinct`` must be merged before they are sent.
    """

    ids: Keys
    rows: Rows
    shows: Rows | None = None
    clicks: Rows | None = None
    slots: NDArray[np.uint32] | None = None
    distinct: bool = True


class TableMap:
    """Where one table lives.

    Args:
        table_id: the table's number.
        config: the whole table; a dense one has its total size here.
        num_servers: how many servers share it.
        routing: ``"range"`` or ``"modulo"``, see :func:`fleet.ps.table.partition.servers_of_keys`.
    """

    def __init__(
        self, table_id: int, config: SparseTableConfig | DenseTableConfig, num_servers: int, routing: str = "range"
    ) -> None:
        self.table_id = table_id
        self.config = config
        self.num_servers = num_servers
        self.routing = routing
        self.blocks: list[tuple[int, int]] = []
        self.dim = self.push_dim = 1
        if isinstance(config, DenseTableConfig):
            self.blocks = plan_dense_blocks(config.size, num_servers)
        else:
            self.dim = config.dim
            self.push_dim = plan_layout(config).num_weights

    @property
    def dense(self) -> bool:
        """Whether the table is dense."""
        return isinstance(self.config, DenseTableConfig)

    @property
    def keeps_shows(self) -> bool:
        """Whether rows carry shows and clicks."""
        return isinstance(self.config, SparseTableConfig) and self.config.accessor is not None

    def spec(self, server: int) -> dict[str, Any]:
        """Returns the specification of this server's share."""
        if isinstance(self.config, DenseTableConfig):
            start, stop = self.blocks[server]
            share = {"start": start, "total": self.config.size, "num_servers": self.num_servers}
            return {**spec_of_config(replace(self.config, size=stop - start)), **share}
        return {**spec_of_config(self.config), "routing": self.routing, "num_servers": self.num_servers}

    def split(self, ids: Keys) -> list[Places]:
        """Returns, per server, the places of its ids in ``ids``."""
        if self.num_servers == 1:
            return [slice(None)]
        servers = servers_of_keys(ids, self.num_servers, self.routing).astype(np.int16)
        order = np.argsort(servers, kind="stable")  # a radix sort for 16 bits
        bounds = np.cumsum(np.bincount(servers, minlength=self.num_servers))[:-1]
        return list(np.split(order, bounds))

    def check_ids(self, ids: Keys) -> Keys:
        """Returns ``ids`` contiguous; raises ``ConfigError`` unless they are int64 of one dimension."""
        if self.dense:
            raise ConfigError(f"table {self.table_id} is dense; it has no ids.")
        if not isinstance(ids, np.ndarray) or ids.dtype != np.int64 or ids.ndim != 1:
            raise ConfigError(f"table {self.table_id}: ids are {_kind(ids)}; they must be int64 of one dimension.")
        return np.ascontiguousarray(ids)

    def check_values(self, values: Rows) -> Rows:
        """Returns a dense table's values flat; raises ``ConfigError`` unless they are float32 of its size."""
        assert isinstance(self.config, DenseTableConfig)
        if not isinstance(values, np.ndarray) or values.dtype != np.float32 or values.size != self.config.size:
            raise ConfigError(
                f"table {self.table_id}: values are {_kind(values)}; they must be {self.config.size} float32."
            )
        return np.ascontiguousarray(values).reshape(-1)

    def dense_parts(self, values: Rows | None) -> list[TablePart]:
        """Returns the part of each server; without values, a question for them."""
        parts = []
        for start, stop in self.blocks:
            rows = None if values is None else values[start:stop].reshape(-1, 1)
            parts.append(TablePart(self.table_id, stop - start, 1, rows=rows))
        return parts

    def dense_questions(self, out: Rows | Take | None) -> tuple[Any, list[tuple[TablePart, Target]]]:
        """Returns where the values of a dense table go, and per server the question and the place of its answer.

        Args:
            out: the array for the values, a new one by default; or what takes them.
        """
        if not isinstance(self.config, DenseTableConfig):
            raise ConfigError(f"table {self.table_id} is sparse; pull takes the ids.")
        asked = zip(self.dense_parts(None), self.blocks, strict=True)
        if callable(out):
            return out, [(part, partial(out, start=start)) for part, (start, _) in asked]
        values = np.empty(self.config.size, np.float32) if out is None else self.check_values(out)
        return values, [(part, values[start:stop].reshape(-1, 1)) for part, (start, stop) in asked]

    def question(self, ids: Keys, out: Rows | Take | None = None) -> TablePart:
        """Returns the question for rows; raises ``ConfigError`` unless ids and ``out`` fit the table."""
        ids = self.check_ids(ids)
        if out is not None:
            if callable(out):
                raise ConfigError(f"table {self.table_id} is sparse; out takes an array.")
            if out.dtype != np.float32 or out.shape != (len(ids), self.dim):
                raise ConfigError(
                    f"table {self.table_id}: out is {out.dtype} {out.shape}; it must be float32 {(len(ids), self.dim)}."
                )
        return TablePart(self.table_id, len(ids), self.dim, ids)

    def gradient_part(self, gradient: Gradient | Rows) -> TablePart:
        """Returns what a push or an addition carries; raises ``ConfigError`` unless it is a sparse table's."""
        if self.dense or not isinstance(gradient, Gradient):
            kind = "dense; it takes an array" if self.dense else "sparse; it takes a Gradient"
            raise ConfigError(f"table {self.table_id} is {kind}, received {type(gradient).__name__}.")
        ids = self.check_ids(gradient.ids)
        n = len(ids)
        wanted = {
            "rows": (gradient.rows, np.float32, (n, self.push_dim)),
            "shows": (gradient.shows, np.float32, (n,)),
            "clicks": (gradient.clicks, np.float32, (n,)),
            "slots": (gradient.slots, np.uint32, (n,)),
        }
        for name, (array, dtype, shape) in wanted.items():
            if array is None and name != "rows":
                continue
            if not isinstance(array, np.ndarray) or array.dtype != dtype or array.shape != shape:
                raise ConfigError(
                    f"table {self.table_id}: {name} are {_kind(array)}; they must be {np.dtype(dtype)} {shape}."
                )
        arrays = {
            name: None if array is None else np.ascontiguousarray(array) for name, (array, _, _) in wanted.items()
        }
        return TablePart(self.table_id, n, self.push_dim, ids, **arrays)  # type: ignore[arg-type]


def joined(parts: Iterable[tuple[TableMap, TablePart]]) -> list[tuple[TableMap, TablePart]]:
    """Returns sparse parts with those of one width, routing and set of fields as one part, beside one of its tables."""
    alike: dict[tuple[object, ...], tuple[TableMap, list[TablePart]]] = {}
    for table, part in parts:
        fields = (part.rows is None, part.shows is None, part.clicks is None, part.slots is None)
        kind = (table.dim, table.push_dim, table.keeps_shows, table.routing, *fields)
        alike.setdefault(kind, (table, []))[1].append(part)
    return [(table, join_parts(some)) for table, some in alike.values()]


def split(table: TableMap, part: TablePart) -> list[tuple[TablePart, Places]]:
    """Returns the share of each server in a sparse part, and the places of its rows there; ``table`` is one of its."""
    assert part.ids is not None
    return [(part if isinstance(places, slice) else _share(part, places), places) for places in table.split(part.ids)]


def _share(part: TablePart, places: NDArray[np.intp]) -> TablePart:
    share = part.picked(part.table_id, places)
    if part.members is not None:
        # The places are in order, so the share has its tables in the order of the part.
        counts = np.diff(np.searchsorted(places, part.members.ends), prepend=0)
        tables = tuple(one for one, count in zip(part.members.tables, counts.tolist(), strict=True) if count)
        share.table_id = tables[0] if tables else part.table_id
        share.members = Members(tables, np.cumsum(counts[counts > 0])) if len(tables) > 1 else None
    return share


def shares_of_pull(
    asked: Iterable[tuple[TableMap, Keys | None, Rows | Take | None]], num_servers: int
) -> tuple[dict[int, Any], list[list[tuple[TablePart, Target]]]]:
    """Returns the results of a pull by table, and per server the questions and the places of their answers.

    Args:
        asked: a table, its ids (``None`` for a dense one), and an array for the result or what takes dense values.
        num_servers: that share the tables.
    """
    results: dict[int, Any] = {}
    shares: list[list[tuple[TablePart, Target]]] = [[] for _ in range(num_servers)]
    wanted: list[tuple[TableMap, TablePart]] = []
    for table, ids, out in asked:
        if ids is None:
            results[table.table_id], questions = table.dense_questions(out)
            for share, question in zip(shares, questions, strict=True):
                share.append(question)
            continue
        part = table.question(ids, out)
        if out is None:
            wanted.append((table, part))
        else:
            results[table.table_id] = out
            _ask(shares, table, part, out)
    for table, part in joined(wanted):
        # The results are views of one array, so the answer for all tables is copied once.
        rows = np.empty((part.n, part.dim), np.float32)
        ends = [part.n] if part.members is None else part.members.ends.tolist()
        for table_id, start, end in zip(part.table_ids, [0, *ends], ends, strict=False):
            results[table_id] = rows[start:end]
        _ask(shares, table, part, rows)
    return results, shares


def _ask(shares: list[list[tuple[TablePart, Target]]], table: TableMap, part: TablePart, rows: Any) -> None:
    for share, (own, places) in zip(shares, split(table, part), strict=True):
        # A single server is asked for no row, too: its answer says which step it has reached.
        if own.n or len(shares) == 1:
            share.append((own, (rows, places)))


def shares_of_change(values: Iterable[tuple[TableMap, Gradient | Rows]], num_servers: int) -> list[list[TablePart]]:
    """Returns per server what a push, an addition or a setting of ``values`` carries, dense tables first."""
    shares: list[list[TablePart]] = [[] for _ in range(num_servers)]
    sparse: list[tuple[TableMap, TablePart]] = []
    for table, value in values:
        if isinstance(value, Gradient) or not table.dense:
            sparse.append((table, table.gradient_part(value)))
            continue
        for share, part in zip(shares, table.dense_parts(table.check_values(value)), strict=True):
            share.append(part)
    for table, whole in joined((table, part) for table, part in sparse if part.n):
        for share, (part, _) in zip(shares, split(table, whole), strict=True):
            share.append(part)
    return [[part for part in share if part.n] for share in shares]


def body_of_specs(specs: Mapping[str, dict[str, Any]]) -> bytes:
    """Returns the message that creates tables; many thousand parameters go without their names, or shapes too."""
    for left_out in ((), ("names",)):
        with suppress(MessageError):
            return control_body({"tables": {key: _without(spec, left_out) for key, spec in specs.items()}})
    return control_body({"tables": {key: _without(spec, ("names", "shapes")) for key, spec in specs.items()}})


def _without(spec: dict[str, Any], left_out: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in spec.items() if name not in left_out}


def rows_of_answer(header: Header, body: Buffer) -> list[TablePart]:
    """Returns the parts of an answer with float32 rows; they may be views of ``body``."""
    bfloat16 = bool(header.flags & MessageFlag.BFLOAT16)
    parts = decode_parts(body, header.n_tables, bfloat16)
    for part in parts:
        if part.rows is None:
            raise MessageError(f"an answer for table {part.table_id} without rows.")
    return wide_parts(parts) if bfloat16 else parts


def _kind(value: Any) -> str:
    return f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else f"of type {type(value).__name__}"
