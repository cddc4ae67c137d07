"""RowLayout: where the weights and the optimizer state of a row are, derived once from the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from fleet.common.whole_numbers import count_of
from fleet.errors import ConfigError
from fleet.ps.table.accessor import Accessor, accessor_parameters
from fleet.ps.table.bounds import Bounds
from fleet.ps.table.entry import CountFilterEntry, Entry, ProbabilityEntry
from fleet.ps.table.folder_name import check_table_name
from fleet.ps.table.initializers import Initializer
from fleet.ps.table.rules import Rule

Float32s = npt.NDArray[np.float32]
Int64s = npt.NDArray[np.int64]
CREATE_ON = ("pull", "push")
# Rows are allocated together; an accessor's statistics of each, and its rank.
CHUNK_ROWS, STATISTICS_BYTES, RANK_BYTES = 1024, 24, 8
PENDING, PENDING_COUNT = 0x80000000, 0x7FFFFFFF  # in an index entry: the id waits for admission, and its pushes so far


@dataclass(frozen=True)
class SparseTableConfig:
    """One sparse table.

    Args:
        name: the table's name in messages and files.
        dim: columns of a pulled row.
        rule: how pushes update weights; with an accessor, those of the embedx columns.
        embed_rule: the rule of the embed column of an accessor's row; ``None`` is ``rule``.
        initializer: weights of a new row.
        accessor: statistics per row; ``None`` keeps none.
        entry: which ids are admitted; ``None`` admits all.
        seed: seed of initial weights and of ProbabilityEntry.
        create_on: when an id has its initial weights; its first push makes the row in both cases. ``"pull"``: a pull
            of an id without a row gives them, so that the model trains on the weights it pulled. ``"push"``: such a
            pull gives zeros (Paddle's default); with an accessor the first push updates only the embed column, the
            embedx part is created after it.
        scale_gradient: workers multiply gradients by the number of samples, as Paddle does; the servers do not use it.
        bounds: how many rows a server keeps and where; ``None`` is all of them, in memory.

    Raises:
        ConfigError: a value is out of range or does not fit the others.
    """

    name: str
    dim: int
    rule: Rule = field(default_factory=lambda: Rule("adagrad"))
    embed_rule: Rule | None = None
    initializer: Initializer = field(default_factory=Initializer)
    accessor: Accessor | None = None
    entry: Entry | None = None
    seed: int = 0
    create_on: str = "pull"
    scale_gradient: bool = False
    bounds: Bounds | None = None

    def __post_init__(self) -> None:
        check_table_name(self.name)
        dim = count_of(self.dim)
        if dim is None or dim > 65536:
            raise ConfigError(f"table {self.name!r}: dim is {self.dim!r}; it takes an integer from 1 to 65536.")
        object.__setattr__(self, "dim", dim)
        if self.create_on not in CREATE_ON:
            raise ConfigError(f"table {self.name!r}: create_on is {self.create_on!r}; one of {list(CREATE_ON)}.")
        if not -(2**63) <= self.seed < 2**63:
            raise ConfigError(f"table {self.name!r}: seed is {self.seed!r}; it must fit 64 bits.")
        for rule in (self.rule, self.embed_rule):
            if rule is not None and not rule.spec.sparse:
                raise ConfigError(f"table {self.name!r}: rule {rule.name!r} is for dense tables only.")
        if self.accessor is None and self.embed_rule is not None:
            raise ConfigError(
                f"table {self.name!r}: embed_rule is set; only a table with an accessor has a separate "
                "embed column. Set an accessor, or omit embed_rule."
            )
        if self.accessor is not None:
            self.accessor.check_dim(self.dim)

    @property
    def adds_up(self) -> bool:
        """Whether one push of a sum is the same as a push of each gradient: nothing counts the pushes either."""
        counts = self.bounds is not None and self.bounds.policy == "lfu"
        return self.rule.adds_up and self.accessor is None and self.entry is None and not counts

    def as_dict(self) -> Mapping[str, Any]:
        """Returns the configuration as plain values, for a manifest."""
        entry = self.entry.to_attr() if self.entry is not None else "none"
        embed = self.embed_rule or self.rule
        return {
            "name": self.name,
            "dim": self.dim,
            "seed": self.seed,
            "create_on": self.create_on,
            "entry": entry,
            "rule": {"name": self.rule.name, **self.rule.hyper},
            "embed_rule": {"name": embed.name, **embed.hyper} if self.accessor is not None else None,
            "initializer": [self.initializer.kind, self.initializer.a, self.initializer.b],
            "accessor": None if self.accessor is None else dict(accessor_parameters(self.accessor)),
            **({} if self.bounds is None else {"bounds": dict(self.bounds.as_dict())}),
        }


@dataclass(frozen=True)
class ColumnBlock:
    """Consecutive columns under one rule: ``columns[column : column + width]``, state from float ``state``."""

    rule: Rule
    column: int
    width: int
    state: int

    @property
    def state_width(self) -> int:
        """How many floats of state the block keeps."""
        return self.rule.state_width(self.width)


@dataclass(frozen=True)
class RowLayout:
    """A row: ``num_weights`` floats of weights, then the state of each block; ``row_floats`` in all.

    With ``has_ranks`` 8 bytes follow that say when it was pushed, see [Note: Eviction].
    """

    blocks: tuple[ColumnBlock, ...]
    num_weights: int
    row_floats: int
    num_counters: int
    has_statistics: bool
    has_ranks: bool = False


def plan_layout(config: SparseTableConfig) -> RowLayout:
    """Returns the layout of the rows of ``config``."""
    accessor = config.accessor
    num_counters = 2 if accessor is not None and accessor.pulls_counters else 0
    num_weights = config.dim - num_counters
    spans = [(config.rule, 0, num_weights)]
    if accessor is not None:
        spans = [(config.embed_rule or config.rule, 0, 1)]
        if num_weights > 1:
            spans.append((config.rule, 1, num_weights - 1))
    blocks = []
    state = num_weights
    for rule, column, width in spans:
        blocks.append(ColumnBlock(rule, column, width, state))
        state += rule.state_width(width)
    ranked = config.bounds is not None and (config.bounds.has_limit or config.bounds.rows == "disk")
    return RowLayout(tuple(blocks), num_weights, state, num_counters, accessor is not None, ranked)


def part_bytes(config: SparseTableConfig) -> list[int]:
    """Returns the bytes that a row takes: those of weights and state, of statistics, and of its rank.

    Example:
        >>> part_bytes(SparseTableConfig("ads", 16))
        [128, 0, 0]
    """
    layout = plan_layout(config)
    values = 4 * layout.row_floats
    if config.bounds is not None and config.bounds.rows == "disk":
        # Statistics and ranks follow each row there, and their 8-byte words must stay aligned.
        values = -(-values // 8) * 8
    return [values, STATISTICS_BYTES * layout.has_statistics, RANK_BYTES * layout.has_ranks]


def admission_of(entry: Entry | None) -> tuple[int, int]:
    """Returns (kind, argument): 0 all; 1 count and the count; 2 hash and the bound its upper 32 bits stay below."""
    if isinstance(entry, CountFilterEntry) and entry.count_filter > 1:
        return 1, entry.count_filter
    if isinstance(entry, ProbabilityEntry):
        return 2, round(entry.probability * 2**32)
    return 0, 0
