"""What goes to which server, and how the answers are put together: the client's half of the partition."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from fleet.ps.wire.messages import Buffer, Header, MessageError, MessageFlag, TablePart, control_body, decode_parts
from fleet.ps.wire.row_form import wide_parts

Keys = NDArray[np.int64]
Rows = NDArray[np.float32]


class Take(Protocol):
    """Takes values of a dense table as they arrive, from element ``start`` on; they are gone after the call."""

    def __call__(self, values: Rows, start: int = 0) -> None:
        """Takes ``values``."""


Target = Rows | tuple[Rows, NDArray[np.intp] | slice] | Callable[[Rows], None]


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

    def split(self, ids: Keys) -> list[NDArray[np.intp] | slice]:
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

    def questions(self, ids: Keys | None, out: Rows | Take | None) -> tuple[Any, list[list[tuple[TablePart, Target]]]]:
        """Returns where the answer to a pull goes, and per server the questions and the places of their answers.

        Args:
            ids: int64; ``None`` for a dense table.
            out: the array for the answer, a new one by default; of a dense table, or what takes it.
        """
        if ids is None:
            if not isinstance(self.config, DenseTableConfig):
                raise ConfigError(f"table {self.table_id} is sparse; pull takes the ids.")
            if callable(out):
                asked = zip(self.dense_parts(None), self.blocks, strict=True)
                return out, [[(part, partial(out, start=start))] for part, (start, _) in asked]
            values = np.empty(self.config.size, np.float32) if out is None else self.check_values(out)
            blocks = zip(self.dense_parts(None), self.blocks, strict=True)
            return values, [[(part, values[start:stop].reshape(-1, 1))] for part, (start, stop) in blocks]
        ids = self.check_ids(ids)
        if callable(out):
            raise ConfigError(f"table {self.table_id} is sparse; out takes an array.")
        rows = np.empty((len(ids), self.dim), np.float32) if out is None else out
        if rows.dtype != np.float32 or rows.shape != (len(ids), self.dim):
            raise ConfigError(
                f"table {self.table_id}: out is {rows.dtype} {rows.shape}; it must be float32 {(len(ids), self.dim)}."
            )
        questions: list[list[tuple[TablePart, Target]]] = []
        for places in self.split(ids):
            own = np.ascontiguousarray(ids[places])
            is_asked = len(own) or self.num_servers == 1
            questions.append([(TablePart(self.table_id, len(own), self.dim, own), (rows, places))] if is_asked else [])
        return rows, questions

    def change_parts(self, value: Gradient | Rows) -> list[TablePart]:
        """Returns the part of each server for a change; raises ``ConfigError`` for that of another kind of table."""
        if isinstance(value, Gradient):
            return self.gradient_parts(value)
        if not self.dense:
            raise ConfigError(f"table {self.table_id} is sparse; it takes a Gradient, received {type(value).__name__}.")
        return self.dense_parts(self.check_values(value))

    def gradient_parts(self, gradient: Gradient) -> list[TablePart]:
        """Returns the part of each server for a push or an addition."""
        ids = self.check_ids(gradient.ids)
        n = len(gradient.ids)
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
        parts = []
        for places in self.split(ids):
            picked = {
                name: None if array is None else np.ascontiguousarray(array[places])
                for name, (array, _, _) in wanted.items()
            }
            own = np.ascontiguousarray(ids[places])
            parts.append(TablePart(self.table_id, len(own), self.push_dim, own, **picked))  # type: ignore[arg-type]
        return parts


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
