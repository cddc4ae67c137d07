"""Two more spellings of a table's settings, read as keys of ``sparse_table_configs``.

Dotted paths into the table's description are the only form that Paddle 2.3 to 2.6 takes, as in ``{"emb":
{"table_parameters.emb.accessor.embed_sgd_param.name": "SparseNaiveSGDRule"}}``. What they do not name keeps the values
of a table without settings. ``fleet_desc_configs`` has short keys that begin with ``sparse_``, and describes a whole
table: settings that it does not name have documented values.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from fleet.errors import ConfigError, OptionWarning, did_you_mean
from fleet.ps.table.accessor import Accessor
from fleet.ps.table.rules import PADDLE_RULES

_ROOT = "table_parameters."
_PARTS = {"embed_": "accessor.embed_sgd_param.", "embedx_": "accessor.embedx_sgd_param."}
# Settings of a part of the rows stand below the kind of its rule, and count for rules of that kind alone.
_KINDS = {
    "naive": (("sgd",), ("learning_rate", "initial_range", "weight_bounds")),
    "adagrad": (
        ("shared_adagrad", "std_adagrad", "adagrad_v2"),
        ("learning_rate", "initial_g2sum", "initial_range", "weight_bounds"),
    ),
    "adam": (
        ("adam", "shared_adam"),
        ("learning_rate", "initial_range", "beta1_decay_rate", "beta2_decay_rate", "ada_epsilon", "weight_bounds"),
    ),
}
_STATISTICS = tuple(f.name for f in fields(Accessor) if f.name not in ("kind", "embedx_threshold", "create_by_score"))
_PATHS = {
    "table_class": "sparse_table_class",
    "accessor.accessor_class": "sparse_accessor_class",
    "accessor.embedx_dim": "embedx_dim",
    "accessor.fea_dim": "fea_dim",
    "accessor.embedx_threshold": "embedx_threshold",
    **{f"accessor.ctr_accessor_param.{key}": key for key in _STATISTICS},
    **{f"{path}name": f"{part}sparse_optimizer" for part, path in _PARTS.items()},
    **{
        f"{path}{kind}.{key}": f"{part}{key}"
        for part, path in _PARTS.items()
        for kind, (_, keys) in _KINDS.items()
        for key in keys
    },
}
_FILES = "it says how Paddle divides a table into files and shards, and saves and speed here do not depend on it"
_GRAPH = "there are no graph tables"
_WITHOUT_EFFECT = {
    "shard_num": _FILES,
    "compress_in_save": _FILES,
    "enable_sparse_table_cache": _FILES,
    "sparse_table_cache_rate": _FILES,
    "sparse_table_cache_file_num": _FILES,
    "shard_merge_rate": _FILES,
    "accessor.ctr_accessor_param.ssd_unseenday_threshold": "tables are in memory",
    "accessor.table_accessor_save_param.num": _FILES,
    "accessor.table_accessor_save_param.param": _FILES,
    "accessor.graph_sgd_param.nodeid_slot": _GRAPH,
    "accessor.graph_sgd_param.feature_learning_rate": _GRAPH,
    "enable_cache": _FILES,
    "cache_rate": _FILES,
    "cache_file_num": _FILES,
    "ssd_unseenday_threshold": "tables are in memory",
    "nodeid_slot": _GRAPH,
    "feature_learning_rate": _GRAPH,
}
_CLASSES = {"DownpourSparseTable": "MemorySparseTable", "DownpourSparseSSDTable": "SSDSparseTable"}
_SLOT_FILTERS = ("converter", "deconverter", "load_filter_slots", "save_filter_slots")
_KEPT_WHOLE = ("sparse_optimizer", "sparse_table_class", "sparse_accessor_class")
# A description without these names has Paddle's own: an accessor that pulls show and click first, and adagrad.
_DESCRIBED = {"sparse_accessor_class": "DownpourCtrAccessor", "sparse_optimizer": "adagrad", "initial_range": 1e-4}


def settings_of_tables(configs: Mapping[str, Any], described: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of each table that ``fleet_desc_configs`` describes, beside ``sparse_table_configs``.

    Raises ConfigError for a table in both.
    """
    uses_cvm = described.get("use_cvm", True)
    tables = {name: settings for name, settings in described.items() if name != "use_cvm"}
    if twice := sorted({*tables} & {*configs}):
        raise ConfigError(
            f"fleet_desc_configs and sparse_table_configs both have {twice[0]!r}. Write it in one of them."
        )
    return {**configs, **{name: _from_description(name, table, uses_cvm) for name, table in tables.items()}}


def _from_description(table: str, settings: Any, uses_cvm: bool) -> dict[str, Any]:
    label = f"fleet_desc_configs[{table!r}]"
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{label} takes a dictionary, got {settings!r}.")
    found: dict[str, Any] = {} if uses_cvm else {"sparse_accessor_class": "SparseAccessor"}
    for key, value in settings.items():
        plain = key if key.endswith(_KEPT_WHOLE) else key.replace("sparse_", "", 1)
        if plain in _SLOT_FILTERS and not value:
            continue
        if plain in _WITHOUT_EFFECT:
            _warn(f"{label}[{key!r}]", _WITHOUT_EFFECT[plain])
            continue
        if uses_cvm or key != "sparse_accessor_class":
            found[plain] = _CLASSES.get(value, value) if key == "sparse_table_class" else value
    return _with_dim(label, {**_DESCRIBED, **found})


def is_dotted(settings: Mapping[str, Any]) -> bool:
    """Returns whether the settings of a table are dotted paths."""
    return any(str(key).startswith(_ROOT) for key in settings)


def from_paths(table: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that the dotted paths name, by the keys of ``sparse_table_configs``.

    Raises ConfigError for a path of another table or into nothing, a key beside them that is no path, and the settings
    of a rule that the part does not have.
    """
    label, start = f"sparse_table_configs[{table!r}]", f"{_ROOT}{table}."
    found: dict[str, Any] = {}
    for path, value in settings.items():
        own = path.removeprefix(start)
        if own == path:
            raise ConfigError(
                f"{label}[{path!r}]: the paths of this table begin with {start!r}. Write all keys as paths."
            )
        if own.rpartition(".")[2] in _SLOT_FILTERS and not any(value if isinstance(value, list | tuple) else [value]):
            continue
        if own in _WITHOUT_EFFECT:
            _warn(f"{label}[{path!r}]", _WITHOUT_EFFECT[own])
            continue
        if own not in _PATHS:
            known = [f"{start}{path}" for path in _PATHS]
            raise ConfigError(
                f"{label}[{path!r}] does not exist.{did_you_mean(path, known)} Paths: {', '.join(known)}."
            )
        _check_kind(label, path, own, settings, start)
        found[_PATHS[own]] = value
    return _with_dim(label, found)


def _check_kind(label: str, path: str, own: str, settings: Mapping[str, Any], start: str) -> None:
    """Raises ConfigError for a setting of another rule than the part has."""
    part = next((prefix for prefix in _PARTS.values() if own.startswith(prefix) and own != f"{prefix}name"), None)
    if part is None:
        return
    kind = own.removeprefix(part).partition(".")[0]
    name = settings.get(f"{start}{part}name")
    if PADDLE_RULES.get(f"{name}", "") not in _KINDS[kind][0]:
        rules = [rule for rule, meant in PADDLE_RULES.items() if meant in _KINDS[kind][0] and rule.endswith("Rule")]
        raise ConfigError(
            f"{label}[{path!r}] belongs to the rules {', '.join(rules)}, and {start}{part}name is {name!r}. Name "
            "one of them there, or omit it."
        )


def _with_dim(label: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings with embedx_dim alone: a row has three numbers besides."""
    if (total := settings.pop("fea_dim", None)) is None:
        return settings
    if isinstance(total, bool) or not isinstance(total, int) or settings.get("embedx_dim", total - 3) != total - 3:
        raise ConfigError(f"{label}: fea_dim is {total!r}; it is embedx_dim + 3.")
    return {**settings, "embedx_dim": total - 3}


def _warn(label: str, reason: str) -> None:
    warnings.warn(f"{label} is accepted and changes nothing: {reason}.", OptionWarning, stacklevel=2)
