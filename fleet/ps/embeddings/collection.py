"""SparseEmbeddings: the embeddings of a model's features, looked up in one call and one message to each server."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fleet.common.outside_graphs import outside_graphs
from fleet.errors import ConfigError
from fleet.ps.client.shards import Keys, Rows
from fleet.ps.embeddings.embedding import IdsOfCall, SparseEmbedding
from fleet.ps.embeddings.feature_ids import FeatureIds, IdsAndOffsets, by_name
from fleet.ps.embeddings.lookup import distinct_together, prefetch_together, request_together
from fleet.ps.embeddings.served_weight import as_plain
from fleet.ps.embeddings.shared_leaf import FoundRows, WatchedRows, look_up_together

Counts: TypeAlias = "Tensor | Mapping[str, Tensor] | None"
_SETTINGS = [name for name in inspect.signature(SparseEmbedding.__init__).parameters if name != "self"]


class SparseEmbeddings(nn.Module):
    """Maps the ids of many features to rows, each feature's to those of a table of its own, at the price of few.

    A model with 26 :class:`fleet.SparseEmbedding` sends 26 messages a step and computes 26 lookups. This module holds
    them by name and looks up all of them at once: one message to each server, and one operation of torch for the tables
    of the same width and combiner. The results and the training are bit for bit those of the modules alone; the tables
    are named ``<name of this module>.<feature>``, saved, loaded and configured as theirs.

    Args:
        tables: by feature, the columns of a row, or the arguments of its :class:`fleet.SparseEmbedding`. Features with
            the same ``name`` share a table.
        defaults: arguments of :class:`fleet.SparseEmbedding` for all features that were given none of that name.

    Shapes: those of each feature's :class:`fleet.SparseEmbedding`. ``collection["user"]`` is that module.

    Raises:
        ConfigError: an argument is not one of :class:`fleet.SparseEmbedding`, or a feature has no usable name.

    Example:
        >>> fields = SparseEmbeddings({"user": 4, "words": {"dim": 4, "combiner": "mean"}})
        >>> found = fields({"user": torch.tensor([7, 10**15]), "words": [[1, 2, 3], []]})
        >>> {name: tuple(rows.shape) for name, rows in found.items()}
        {'user': (2, 4), 'words': (2, 4)}
    """

    def __init__(self, tables: Mapping[str, int | Mapping[str, Any]], **defaults: Any) -> None:
        super().__init__()
        if not isinstance(tables, Mapping) or not tables:
            raise ConfigError(
                f"SparseEmbeddings({tables!r:.100}) takes the tables by feature, as in {{'user': 16, 'item': 16}}."
            )
        _check_settings("", defaults)
        for name, given in tables.items():
            self._check_name(name)
            self.add_module(name, _made(name, _settings(name, given, defaults)))
            if self[name].name is None:  # until the table has the name of the module in the model
                self[name].lookup.label = f"SparseEmbedding {name!r}"
        self._combines = {name: self[name].combiner != "none" for name in self}

    def __getitem__(self, name: str) -> SparseEmbedding:
        """Returns the module of a feature."""
        found = self._modules.get(name)
        if found is None:
            raise KeyError(f"{name!r} is no feature of this collection; it has {list(self)}.")
        return found  # type: ignore[return-value]

    def __iter__(self) -> Iterator[str]:
        """Yields the names of the features."""
        return iter(self._modules)

    def __len__(self) -> int:
        """Returns the number of features."""
        return len(self._modules)

    @outside_graphs
    def forward(self, ids: FeatureIds, *, show: Counts = None, click: Counts = None) -> dict[str, Tensor]:
        """Returns, by feature, what its :class:`fleet.SparseEmbedding` returns for its ids.

        Args:
            ids: by feature a tensor or a list as for :class:`fleet.SparseEmbedding`; a pair of flat ids and offsets (as
                ``nn.EmbeddingBag``; of a dataset's batch ``offsets[:-1]``); or a jagged tensor of torch, [batch, j].
                Or TorchRec's ``KeyedJaggedTensor``.
                Jagged ids without a combiner give the rows one after the other, [n, dim].
            show, click: one number per sample, for all features whose rows have an accessor; or by feature.

        Returns:
            The features of ``ids``, in the order of the collection.

        Raises:
            ConfigError: a feature has no table, or its ids do not fit it.
        """
        given = by_name(ids, self._combines, "SparseEmbeddings")
        counts = self._counts("show", show), self._counts("click", click)
        modules = [self[name] for name in given]
        _check_ends(ids, given, self._combines)
        if not all(map(_has_own_forward, modules)):
            return {name: self[name](*own, **_of(counts, name)) for name, own in given.items()}
        calls = [
            (module, _apart(module, name, own, counts[0].get(name), counts[1].get(name)))
            for module, (name, own) in zip(modules, given.items(), strict=True)
        ]
        return dict(zip(given, _look_up(calls), strict=True))

    def prefetch(self, ids: FeatureIds) -> None:
        """Asks the servers for the rows of the next batch, as :meth:`fleet.SparseEmbedding.prefetch` does.

        All features are asked for in one message to each server.

        Args:
            ids: of the next batch, as in :meth:`forward`.

        Raises:
            ConfigError: in sync mode, and with ``a_sync_configs["max_staleness"] = 0``.

        Example:
            >>> fields = SparseEmbeddings({"user": 4, "item": 4})
            >>> ids = torch.tensor([7, 8])
            >>> fields.prefetch({"user": ids, "item": ids})
        """
        given = by_name(ids, self._combines, "SparseEmbeddings")
        _check_ends(ids, given, self._combines)
        prefetch_together(
            [(self[name].lookup, _apart(self[name], name, own, counts=False).keys) for name, own in given.items()]
        )

    def load(self, dirname: str, name: str | None = None) -> int:
        """Reads the rows of all features from a save into this process, for prediction; returns how many were read.

        Args:
            dirname: the folder of ``fleet.save_persistables`` or ``save_inference_model``.
            name: the collection's name in the model that was trained, such as ``"fields"``; its tables are
                ``fields.user`` and so on. Features that were given a ``name`` of their own are found by that.

        Raises:
            ConfigError: the collection is connected to servers; they load with ``fleet.load_model``.
            CheckpointError: the save lacks a table, is damaged, or rows have another shape; the collection is
                unchanged.

        Example:
            >>> fields = SparseEmbeddings({"user": 4, "item": 4})
            >>> fields.load("model", "fields")  # doctest: +SKIP
        """
        tables = {feature: self[feature].name or (f"{name}.{feature}" if name else feature) for feature in self}
        found = {feature: self[feature].read(dirname, table) for feature, table in tables.items()}
        for feature, (local, _) in found.items():
            self[feature].use_rows(local)
        return sum({tables[feature]: loaded for feature, (_, loaded) in found.items()}.values())

    # -- inside --------------------------------------------------------------------------------------------------

    def _check_name(self, name: object) -> None:
        if not isinstance(name, str) or not name or "." in name:
            raise ConfigError(
                f"SparseEmbeddings: a feature is named {name!r}; it takes a string without a dot, because the name is "
                "a part of the table's."
            )
        if hasattr(self, name):
            raise ConfigError(
                f"SparseEmbeddings: a feature is named {name!r}, as an attribute of every torch.nn.Module; rename it, "
                f"for example to {name + '_id'!r}. Its table may keep the name: {{'dim': ..., 'name': {name!r}}}."
            )

    def _counts(self, label: str, given: Counts) -> Mapping[str, Tensor]:
        if given is None:
            return {}
        if isinstance(given, Mapping):
            unknown = given.keys() - self._modules.keys()
            if unknown:
                raise ConfigError(
                    f"SparseEmbeddings({label}=...) has {sorted(unknown)}; the features are {list(self)}."
                )
            return given
        found = {name: given for name in self if self[name].keeps_counts}
        if not found:
            raise ConfigError(
                f"SparseEmbeddings was called with {label}=, but the rows of none of its features keep it. Give them "
                "an accessor or a ShowClickEntry."
            )
        return found


_Call: TypeAlias = tuple[SparseEmbedding, IdsOfCall]
_Found: TypeAlias = tuple[Rows, Keys, NDArray[np.int32]]  # of distinct ids, these ids, the place of each id among them


def _check_ends(ids: FeatureIds, given: Mapping[str, IdsAndOffsets], combines: Mapping[str, bool]) -> None:
    """Refuses offsets that end with the number of ids, as those of a dataset: they would make a sample too many.

    They are noticed beside tensors whose first dimension is the number of samples.
    """
    if not isinstance(ids, Mapping):  # its offsets are those of the samples
        return
    pairs = [name for name in given if combines[name] and isinstance(ids[name], tuple) and given[name][1] is not None]
    # An exported program whose sizes were looked at would take no others.
    if not pairs or torch.compiler.is_exporting():
        return
    sizes = {len(own) for name in given if isinstance(own := ids[name], Tensor) and not own.is_nested and own.ndim}
    for name in pairs:
        values, offsets = given[name]
        assert offsets is not None
        samples = offsets.numel() - 1
        if sizes == {samples} and int(offsets.reshape(-1)[-1]) == len(values):
            raise ConfigError(
                f"SparseEmbeddings: of the feature {name!r}: {samples + 1} offsets, the last of which is the number of "
                f"ids, but the other features have {samples} samples. Offsets say where each sample begins; leave out "
                "the end of the last one: offsets[:-1]."
            )


def _apart(module: Any, name: str, own: IdsAndOffsets, *counts: Tensor | None, **wanted: bool) -> IdsOfCall:
    try:
        found: IdsOfCall = module.take_apart(*own, *counts, **wanted)
    except ConfigError as error:
        raise ConfigError(f"SparseEmbeddings: of the feature {name!r}: {error}") from None
    return found


def _look_up(calls: Sequence[_Call]) -> list[Tensor]:
    found = _rows_of(calls)
    groups: dict[tuple[str, int, torch.device, bool], list[int]] = defaultdict(list)
    records = torch.is_grad_enabled()
    with as_plain():
        for number, (module, _) in enumerate(calls):
            weight = module.own_weight
            trained = records and weight.requires_grad
            groups[module.combiner, found[number][0].shape[1], weight.device, trained].append(number)
    results: dict[int, Tensor] = {}
    for (combiner, _, device, trained), numbers in groups.items():
        each = [
            FoundRows(calls[number][1].bags, calls[number][1].present, found[number][0], found[number][2])
            for number in numbers
        ]
        watched = [_watched(*calls[number], found[number]) for number in numbers] if trained else None
        for number, result in zip(numbers, look_up_together(each, combiner, device, watched), strict=True):
            results[number] = calls[number][0].scaled(result)
    return [results[number] for number in range(len(calls))]


def _rows_of(calls: Sequence[_Call]) -> list[_Found]:
    found: list[_Found | None] = []
    for module, call in calls:
        module.find_source()
        found.append(module.lookup.arrived(call.keys))
    rest = [number for number, arrived in enumerate(found) if arrived is None]
    distinct = distinct_together([calls[number][1].keys for number in rest])
    asked = [(calls[number][0].lookup, keys) for number, (keys, _) in zip(rest, distinct, strict=True)]
    requested = request_together(asked, False)
    for number, (lookup, keys), (_, inverse), coming in zip(rest, asked, distinct, requested, strict=True):
        rows = None if coming is None else coming.take()
        found[number] = (lookup.ask(keys) if rows is None else rows, keys, inverse)
    return found  # type: ignore[return-value]


def _watched(module: SparseEmbedding, call: IdsOfCall, found: _Found) -> WatchedRows:
    lookup = module.lookup
    return lookup, lookup.gradient_of(found[1], found[2], call.shows, call.clicks), module.find_source()


def _has_own_forward(module: nn.Module) -> bool:
    """Returns whether nobody would notice that the module is not called.

    :func:`fleet.ps.export` puts modules of its own in the place of embeddings; a script may have hooks.
    """
    return type(module) is SparseEmbedding and not (
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _of(counts: Sequence[Mapping[str, Tensor]], name: str) -> dict[str, Tensor | None]:
    return {label: each.get(name) for label, each in zip(("show", "click"), counts, strict=True)}


def _settings(name: str, given: object, defaults: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(given, Mapping):
        _check_settings(f" for {name!r}", given)
        made = {**defaults, **given}
    else:
        made = {**defaults, "dim": given}
    if "dim" not in made:
        raise ConfigError(
            f"SparseEmbeddings: {name!r} has no dim, the number of columns of its rows, as in {{{name!r}: 16}} or "
            f"{{{name!r}: {{'dim': 16, 'padding_idx': 0}}}}."
        )
    return made


def _made(name: str, settings: Mapping[str, Any]) -> SparseEmbedding:
    try:
        return SparseEmbedding(**settings)
    except ConfigError as error:
        raise ConfigError(f"SparseEmbeddings: of the feature {name!r}: {error}") from None


def _check_settings(where: str, given: Mapping[Any, Any]) -> None:
    unknown = [name for name in given if name not in _SETTINGS]
    if unknown:
        raise ConfigError(
            f"SparseEmbeddings was given {', '.join(map(repr, unknown))}{where}; it takes the arguments of "
            f"fleet.SparseEmbedding: {', '.join(_SETTINGS)}."
        )
