"""Accessor: the traffic that a row counts (shows, clicks, unseen days), and when it grows, is saved, or is deleted.

A table without an accessor keeps weights and optimizer state only. With one, every row carries shows, clicks, a
delta score and its feature slot, and its weights stand in two blocks: ``embed`` (one column, always there) and
``embedx`` (the others, created once the score reaches ``embedx_threshold``)::

    score = (show - click) * nonclk_coeff + click * click_coeff

Unseen days count the saves of mode 3 since the row was last pushed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from fleet.errors import ConfigError, UnsupportedOptionError, did_you_mean

# Accessors whose pulled row starts with show and click.
_WITH_COUNTERS = {
    "CtrCommonAccessor": True,
    "DownpourCtrAccessor": True,
    "CtrDoubleAccessor": True,
    "DownpourCtrDoubleAccessor": True,
    "UnitAccessor": False,
    "DownpourUnitAccessor": False,
    "DownpourDoubleUnitAccessor": False,
}
_REFUSED = {
    "CommMergeAccessor": "it describes dense and barrier tables, which have no rows; sparse tables take the rule 'sum'",
    "CtrDymfAccessor": "rows of varying width exist only for tables in GPU memory, which are not offered",
}
KINDS = ("SparseAccessor", *_WITH_COUNTERS)

# Values of keys that a written-out table configuration omits (D.4).
DOCUMENTED: dict[str, float] = {
    "embedx_threshold": 10.0,
    "nonclk_coeff": 0.1,
    "click_coeff": 1.0,
    "base_threshold": 1.5,
    "delta_threshold": 0.25,
    "delta_keep_days": 16.0,
    "show_click_decay_rate": 0.98,
    "delete_threshold": 0.8,
    "delete_after_unseen_days": 30.0,
}


@dataclass(frozen=True)
class Accessor:
    """How statistics are kept; the defaults are those of an unconfigured table.

    Args:
        kind: ``SparseAccessor`` pulls weights only; the ``Ctr`` and ``Unit`` kinds pull show and click first.
            The ``Unit`` kinds do not divide gradients by shows. Shows and clicks are 64-bit in every kind.
        embedx_threshold: score from which a row has its embedx part; 0 creates it with the row.
        nonclk_coeff, click_coeff: weights of the score.
        base_threshold, delta_threshold, delta_keep_days: filter of save modes 1 and 2.
        show_click_decay_rate: factor on shows and clicks at each shrink.
        delete_threshold, delete_after_unseen_days: rows that a shrink deletes.
        zero_init: the embed column starts at 0 instead of the table's initializer.
        create_by_score: a push creates a missing row only with the probability of the score it carries.

    Raises:
        ConfigError: unknown kind, or a value out of range.
        UnsupportedOptionError: a kind that is known but not offered.
    """

    kind: str = "SparseAccessor"
    embedx_threshold: float = 0.0
    nonclk_coeff: float = 0.1
    click_coeff: float = 1.0
    base_threshold: float = 0.0
    delta_threshold: float = 0.0
    delta_keep_days: float = 16.0
    show_click_decay_rate: float = 1.0
    delete_threshold: float = 0.0
    delete_after_unseen_days: float = 30.0
    zero_init: bool = True
    create_by_score: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.kind, str) and self.kind in _REFUSED:
            raise UnsupportedOptionError(f"the accessor {self.kind!r} is refused: {_REFUSED[self.kind]}.")
        if not isinstance(self.kind, str) or self.kind not in KINDS:
            raise ConfigError(
                f"the accessor {self.kind!r} does not exist; one of {list(KINDS)}."
                + did_you_mean(str(self.kind), KINDS)
            )
        for name in DOCUMENTED:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ConfigError(f"accessor: {name} is {value!r}; it takes a finite number.")
        for name in ("zero_init", "create_by_score"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"accessor: {name} is {getattr(self, name)!r}; it takes True or False.")
        for name in ("delta_keep_days", "delete_after_unseen_days"):
            if getattr(self, name) < 0:
                raise ConfigError(f"accessor: {name} is {getattr(self, name)!r}; it takes days, 0 or more.")
        if not 0.0 <= self.show_click_decay_rate <= 1.0:
            raise ConfigError(
                f"accessor: show_click_decay_rate is {self.show_click_decay_rate!r}; it must lie in [0, 1]."
            )

    @property
    def pulls_counters(self) -> bool:
        """Whether a pulled row starts with show and click."""
        return self.kind in _WITH_COUNTERS

    @property
    def scales_by_show(self) -> bool:
        """Whether rules of the Adagrad family divide a gradient by its shows."""
        return _WITH_COUNTERS.get(self.kind, True)

    def check_dim(self, dim: int, embedx_dim: int | None = None) -> None:
        """Raises ConfigError unless the kind allows ``dim`` pulled columns."""
        least = 3 if self.pulls_counters else 1
        if dim < least:
            raise ConfigError(f"dim is {dim!r}; {self.kind} pulls at least {least} columns.")
        if embedx_dim is not None and embedx_dim != dim - least:
            raise ConfigError(
                f"embedx_dim is {embedx_dim!r}; {self.kind} with dim {dim} has {dim - least} embedx columns."
            )


def documented_accessor(kind: str = "SparseAccessor", **parameters: Any) -> Accessor:
    """Returns the accessor of a written-out table configuration: absent keys take their documented values.

    Example:
        >>> documented_accessor(embedx_threshold=5).delete_threshold
        0.8
    """
    known = [f.name for f in fields(Accessor) if f.name != "kind"]
    for name in parameters:
        if name not in known:
            raise ConfigError(
                f"the accessor parameter {name!r} does not exist; one of {known}." + did_you_mean(name, known)
            )
    return Accessor(kind, **{**DOCUMENTED, **parameters})


def accessor_score(accessor: Accessor, show: Any, click: Any) -> Any:
    """Returns the score of given shows and clicks (numbers or arrays)."""
    return (show - click) * accessor.nonclk_coeff + click * accessor.click_coeff


def accessor_parameters(accessor: Accessor) -> Mapping[str, Any]:
    """Returns the accessor as a plain dictionary, for a manifest."""
    return {f.name: getattr(accessor, f.name) for f in fields(accessor)}
