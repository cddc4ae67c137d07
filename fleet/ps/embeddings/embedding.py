"""SparseEmbedding: an embedding whose rows live in a table of the parameter servers, for ids without bound."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fleet.common.outside_graphs import outside_graphs
from fleet.common.whole_numbers import count_of
from fleet.errors import CheckpointError, ConfigError, OptionWarning
from fleet.ps.embeddings.bags import COMBINERS, Bags, bags_of, combined, flat_ids, keys_of_slots
from fleet.ps.embeddings.jagged_ids import JaggedIds
from fleet.ps.embeddings.lookup import LocalRows, RowLookup, RowSource
from fleet.ps.embeddings.served_weight import WatchesWeight, as_plain
from fleet.ps.table.accessor import Accessor
from fleet.ps.table.bounds import bounds_of
from fleet.ps.table.entry import CountFilterEntry, Entry, ProbabilityEntry, ShowClickEntry
from fleet.ps.table.initializers import Initializer
from fleet.ps.table.layout import SparseTableConfig, plan_layout
from fleet.ps.table.rules import Rule
from fleet.ps.table.table_spec import config_of_spec

Ids = Tensor | Sequence[Any]
_INT64 = (-(2**63), 2**63 - 1)


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.factor, None


def scale_gradient(tensor: Tensor, factor: float) -> Tensor:
    """Returns ``tensor`` with the same values; backward multiplies its gradient by ``factor``.

    Example:
        >>> leaf = torch.ones(2, requires_grad=True)
        >>> scale_gradient(leaf, 3.0).sum().backward()
        >>> leaf.grad.tolist()
        [3.0, 3.0]
    """
    scaled: Tensor = _Scale.apply(tensor, factor)  # type: ignore[no-untyped-call]
    return scaled


@dataclass(slots=True)
class IdsOfCall:
    """What one forward looks up: its bags, and of the ids that are not padding their places, keys and counts.

    ``present`` is ``None`` where all ids are present.
    """

    bags: Bags
    present: np.ndarray | None
    keys: np.ndarray
    shows: np.ndarray | None = None
    clicks: np.ndarray | None = None


class SparseEmbedding(WatchesWeight):
    """Maps int64 ids, any 64-bit number, to rows of a table that grows with the ids it sees.

    The rows live on the parameter servers once ``fleet.init_worker()`` has run; before that the module computes the
    same initial rows in this process, to try it out. Each step pulls every distinct id of the batch once, and
    ``optimizer.step()`` pushes the sum of its gradients. The servers update the rows by the rule of the optimizer
    group that holds ``weight``, an empty parameter that stands for the table.

    Args:
        dim: columns of a row (with the two counters of a Ctr accessor).
        name: name of the table; modules with the same name share it. By default the module's name in the model.
        combiner: ``"none"`` gives a row per id, ``"sum"`` and ``"mean"`` one per sample.
        num_slots: the number of features in the ids, side by side; all share the table.
        separate_slots: the same id has another row in each slot; with one slot it changes nothing and warns.
        padding_idx: an id that reads as zeros, is ignored by a combiner, and is not trained.
        entry: which ids are worth a row, ``fleet.CountFilterEntry`` and its siblings; ``None`` admits all.
        initializer: weights of a new row; uniform in [-1e-4, 1e-4) by default.
        accessor: statistics of each row, see :class:`fleet.ps.Accessor`; ``None`` keeps none.
        rule: the servers' update rule; ``None`` takes the optimizer's.
        seed: initial rows are a pure function of (seed, id, column).
        slot: the number that rows of an accessor remember as their feature slot.
        max_rows, max_bytes, evict, ttl_days, rows, memory_bytes: how many rows each server keeps, which go first, and
            where they lie, see :class:`fleet.ps.Bounds`. Without any of them the table grows with the ids it sees.

    Shapes (``s`` = num_slots, absent when it is 1):
        ids [...] with combiner none -> [..., dim]; ids [batch, length] or [batch, s, length] with a combiner ->
        [batch, dim] or [batch, s, dim]; flat ids with ``offsets`` (as ``nn.EmbeddingBag``), or a list of one list
        (or tensor) of ids per sample and slot, or a jagged tensor of torch, with a combiner -> [batch, dim] or
        [batch, s, dim]. A list without a combiner gives the rows one after the other, [n, dim].

    Raises:
        ConfigError: an argument is wrong, or ids are not integers of a valid shape.

    Example:
        >>> embedding = SparseEmbedding(4, name="ads", combiner="sum")
        >>> embedding([[7, 10**15], []]).shape
        torch.Size([2, 4])
    """

    MARK = "stands_for_rows"  # on the empty parameter
    _dtype = torch.float32  # of results; servers take modules of float32 alone
    fixed = frozenset(("weight", "dim", "name", "entry", "slot", "rule"))

    def __init__(
        self,
        dim: int,
        name: str | None = None,
        *,
        combiner: str = "none",
        num_slots: int = 1,
        separate_slots: bool = False,
        padding_idx: int | None = None,
        entry: Entry | None = None,
        initializer: Initializer | None = None,
        accessor: Accessor | None = None,
        rule: Rule | None = None,
        seed: int = 0,
        slot: int | None = None,
        max_rows: int | None = None,
        max_bytes: int | None = None,
        evict: str | None = None,
        ttl_days: int | None = None,
        rows: str = "memory",
        memory_bytes: int | None = None,
    ) -> None:
        super().__init__()
        limits = {"max_rows": max_rows, "max_bytes": max_bytes, "evict": evict, "ttl_days": ttl_days, "rows": rows}
        self._bounds = bounds_of("SparseEmbedding", {**limits, "memory_bytes": memory_bytes})
        _check_columns(dim, name)
        _check_form(name, combiner, num_slots, separate_slots, entry)
        for label, value, low, high in (("padding_idx", padding_idx, *_INT64), ("slot", slot, 0, 2**32 - 1)):
            if value is not None:
                _check_number(label, value, low, high)
        _check_number("seed", seed, *_INT64)
        _check_kind("initializer", Initializer, initializer)
        _check_kind("accessor", Accessor, accessor)
        _check_kind("rule", Rule, rule)
        if isinstance(entry, ShowClickEntry) and accessor is None:
            accessor = Accessor()
        self.dim = dim
        self.name = name
        self.combiner = combiner
        self.num_slots = int(num_slots)
        self.separate_slots = separate_slots
        self.padding_idx = padding_idx
        self.entry = entry
        self.slot = slot
        self.rule = rule
        self._accessor = accessor
        self._scales = False
        self._initializer = initializer or Initializer()
        self._seed = seed
        self.dim = self.table_config(Rule("sgd")).dim
        self.weight = nn.Parameter(torch.empty(0, self.dim))
        setattr(self.weight, self.MARK, True)
        self.lookup = self._new_lookup()
        self.watch_weight()

    def table_config(self, rule: Rule, name: str | None = None, accessor: Accessor | None = None) -> SparseTableConfig:
        """Returns the table this module needs.

        Args:
            rule: the update rule of a module that was given none.
            name: the table's name of a module that was given none.
            accessor: statistics for a module that asks for none.
        """
        return SparseTableConfig(
            self.name or name or "embedding",
            self.dim,
            self.rule or rule,
            initializer=self._initializer,
            accessor=self._accessor or accessor,
            entry=self.entry,
            seed=self._seed,
            bounds=self._bounds,
        )

    def use_table(self, config: SparseTableConfig) -> None:
        """Attaches the module to a table that was configured elsewhere, for example by ``sparse_table_configs``."""
        self.served_table = config.name
        self._accessor = config.accessor
        self._scales = config.scale_gradient
        self._bounds = config.bounds
        self.lookup = self._new_lookup(config)

    @outside_graphs
    def forward(
        self,
        ids: Ids,
        offsets: Tensor | None = None,
        *,
        show: Tensor | None = None,
        click: Tensor | None = None,
    ) -> Tensor:
        """Returns the rows of ``ids``, or their sum or mean per sample.

        Args:
            ids: int64 tensor, a list of one list or tensor of ids per sample (and slot), or with a combiner a jagged
                tensor.
            offsets: where each sample (and slot) begins in flat ids; of a dataset's batch ``offsets[:-1]``.
            show, click: one number per sample, which the rows of an accessor add up; needed with ShowClickEntry.
        """
        return self.scaled(self._combined(self.take_apart(ids, offsets, show, click)))

    def prefetch(self, ids: Ids, offsets: Tensor | None = None) -> None:
        """Asks the servers for the rows of the next batch, so that they travel while this one is computed.

        The next forward with the same ids takes them. Call it before ``optimizer.step()``: the rows are then those from
        before that step, one step older than without it, which ``max_staleness`` counts. A forward with other ids, or
        after another step, asks again. In geo mode only rows that this worker has not seen are asked for.

        Args:
            ids, offsets: of the next batch, as in :meth:`forward`.

        Raises:
            ConfigError: in sync mode, and with ``a_sync_configs["max_staleness"] = 0``.

        Example:
            >>> embedding = SparseEmbedding(4, name="ads")
            >>> batches = [torch.tensor([7, 8]), torch.tensor([8, 9])]
            >>> for batch, following in zip(batches, [*batches[1:], None]):
            ...     rows = embedding(batch)
            ...     if following is not None:
            ...         embedding.prefetch(following)
        """
        self.lookup.prefetch(self.take_apart(ids, offsets, counts=False).keys)

    def keys_of(self, ids: Tensor | JaggedIds) -> np.ndarray:
        """Returns the keys that a forward with ``ids`` looks up, also of flat ids whose offsets are elsewhere."""
        values = ids.values if isinstance(ids, JaggedIds) else ids
        if self.separate_slots:
            starts = ids.starts() if isinstance(ids, JaggedIds) and self.combiner != "none" else None
            return self.take_apart(values, starts, counts=False).keys
        flat = flat_ids(values)
        return flat if self.padding_idx is None else flat[flat != self.padding_idx]

    def load(self, dirname: str, name: str | None = None) -> int:
        """Reads the rows of a save into this process, for prediction; returns how many were read.

        Args:
            dirname: the folder of ``fleet.save_persistables`` or ``save_inference_model``.
            name: the table's name if the module was given none.

        Raises:
            ConfigError: the module is connected to servers; they load with ``fleet.load_model``.
            CheckpointError: the save has no such table, is damaged, or its rows have another shape; the module is
                unchanged.
        """
        local, loaded = self.read(dirname, self.name or name or "embedding")
        self.use_rows(local)
        return loaded

    def lookup_rows(self, ids: Tensor) -> Tensor:
        """Returns the rows of ``ids`` as they are now, float32 [..., dim], without recording gradients."""
        bags = bags_of(ids.reshape(-1), None, "none", 1)
        with torch.no_grad():
            return self._combined(self._present(bags, bags.ids)).view(*ids.shape, self.dim)

    def extra_repr(self) -> str:
        """Returns the main arguments."""
        return f"{self.dim}, name={self.name!r}, combiner={self.combiner!r}, num_slots={self.num_slots}"

    # -- for SparseEmbeddings ------------------------------------------------------------------------------------

    def read(self, dirname: str, table: str) -> tuple[LocalRows, int]:
        """Returns the rows of a table that was saved, and their number; see :meth:`load`."""
        if self.lookup.source is not None and self.lookup.source.trains:
            raise ConfigError("SparseEmbedding.load() is for prediction; the rows of this module are on servers.")
        from fleet.ps.files.manifest import read_parts, table_folder
        from fleet.ps.files.table_files import load_checked_table

        part = read_parts(table_folder(dirname, table))[0]
        if part.kind != "sparse":
            raise CheckpointError(f"table {table!r} in {dirname} is {part.kind}; name one of a SparseEmbedding.")
        config = config_of_spec({**part.config, "kind": "sparse"})
        if not isinstance(config, SparseTableConfig) or config.dim != self.dim:
            raise CheckpointError(f"table {table!r} in {dirname} does not hold rows of dim {self.dim}: {config}.")
        local = LocalRows(config)
        loaded = load_checked_table(local.table, dirname)  # nobody sees the table before it is whole
        return local, loaded

    def use_rows(self, local: LocalRows) -> None:
        """Looks up rows that :meth:`read` has returned."""
        self.use_table(local.config)
        self.lookup.source = local

    def take_apart(
        self,
        ids: Ids,
        offsets: Tensor | None = None,
        show: Tensor | None = None,
        click: Tensor | None = None,
        *,
        counts: bool = True,
    ) -> IdsOfCall:
        """Returns what a forward with these arguments looks up.

        Args:
            ids, offsets, show, click: of :meth:`forward`.
            counts: whether the numbers of shows and clicks matter.

        Raises:
            ConfigError: an argument does not fit the module.
        """
        bags = bags_of(ids, offsets, self.combiner, self.num_slots)
        keys = keys_of_slots(bags, self.num_slots) if self.separate_slots else bags.ids
        return self._present(bags, keys, *(self._counts(bags, show, click) if counts else ()))

    def find_source(self) -> RowSource:
        """Returns where the rows are: in this process until the module is connected to servers."""
        if self.lookup.source is None:
            self.lookup.source = LocalRows(self.table_config(Rule("sgd")))
        return self.lookup.source

    def scaled(self, found: Tensor) -> Tensor:
        """Returns the result of a forward; its gradient counts once per sample where the table says so."""
        if found.dtype is not self._dtype:
            found = found.to(self._dtype)
        return scale_gradient(found, len(found)) if self._scales else found

    @property
    def keeps_counts(self) -> bool:
        """Whether the table keeps shows and clicks."""
        return self._accessor is not None

    # -- inside --------------------------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        found = super()._apply(fn, recurse)
        with as_plain():
            self._dtype = self.weight.dtype
        return found

    def _present(self, bags: Bags, keys: np.ndarray, shows: Any = None, clicks: Any = None) -> IdsOfCall:
        present = bags.without(self.padding_idx)
        if present is not None:
            keys = keys[present]
            shows, clicks = (None if a is None else a[present] for a in (shows, clicks))
        return IdsOfCall(bags, present, np.ascontiguousarray(keys), shows, clicks)

    def _new_lookup(self, config: SparseTableConfig | None = None) -> RowLookup:
        config = config or self.table_config(Rule("sgd"))
        counters = plan_layout(config).num_counters
        return RowLookup(
            f"SparseEmbedding {config.name!r}",
            num_counters=counters,
            keeps_shows=config.accessor is not None,
            slot=self.slot,
        )

    def _combined(self, call: IdsOfCall) -> Tensor:
        with as_plain():
            device = self.weight.device
            is_trained = self.weight.requires_grad
        self.find_source()
        rows, places = self.lookup.find(call.keys, device, call.shows, call.clicks, trained=is_trained)
        return combined(call.bags, call.present, rows, places, self.combiner)

    def _counts(self, bags: Bags, show: Tensor | None, click: Tensor | None) -> tuple[Any, Any]:
        if show is None and click is None and not isinstance(self.entry, ShowClickEntry):
            return None, None
        if isinstance(self.entry, ShowClickEntry) and (show is None or click is None):
            raise ConfigError(
                f"{self.lookup.label} has {self.entry.to_attr()!r}; call it with show= and click=, one "
                "number per sample."
            )
        if (show is not None or click is not None) and self._accessor is None:
            raise ConfigError(
                f"{self.lookup.label} was called with show= or click=, but its rows keep neither. Give it "
                "an accessor or a ShowClickEntry."
            )
        return tuple(None if a is None else bags.spread(a, self.num_slots) for a in (show, click))  # type: ignore[return-value]


def _check_columns(dim: object, name: object) -> None:
    """Refuses a number of rows beside the columns, as Paddle and ``nn.Embedding`` take one."""
    size = [dim, name] if isinstance(name, int) else dim
    if isinstance(size, list | tuple):
        given = repr(dim) if size is dim else f"dim={dim!r}, name={name!r}"
        raise ConfigError(
            f"SparseEmbedding({given}) takes the columns of a row alone: its table grows with its ids. Leave the "
            f"number of rows out: fleet.SparseEmbedding({size[-1] if size else 8!r})."
        )


def _check_form(name: object, combiner: str, num_slots: object, separate_slots: object, entry: object) -> None:
    if combiner not in COMBINERS:
        raise ConfigError(f"SparseEmbedding(combiner={combiner!r}) takes one of {list(COMBINERS)}.")
    if count_of(num_slots) is None:
        raise ConfigError(f"SparseEmbedding(num_slots={num_slots!r}) takes an integer of 1 or more.")
    if name is not None and (not isinstance(name, str) or not name):
        raise ConfigError(f"SparseEmbedding(name={name!r}) takes a string, or None for the module's name.")
    if entry is not None and not isinstance(entry, CountFilterEntry | ProbabilityEntry | ShowClickEntry):
        raise ConfigError(f"SparseEmbedding(entry={entry!r}) takes fleet.CountFilterEntry or one of its siblings.")
    if not isinstance(separate_slots, bool):
        raise ConfigError(f"SparseEmbedding(separate_slots={separate_slots!r}) takes True or False.")
    if separate_slots and num_slots == 1:
        warnings.warn(
            "SparseEmbedding(separate_slots=True) changes nothing with num_slots=1: there is one slot. Give num_slots, "
            "or leave it out.",
            OptionWarning,
            stacklevel=3,
        )


def _check_kind(label: str, kind: type, made: object) -> None:
    if made is not None and not isinstance(made, kind):
        raise ConfigError(
            f"SparseEmbedding({label}={made!r}) takes fleet.ps.{kind.__name__}(...), or None for the default."
        )


def _check_number(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"SparseEmbedding({name}={value!r}) takes an integer from {low} to {high}.")
