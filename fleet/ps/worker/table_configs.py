"""sparse_table_configs: the keys of Fleet's table description, as a SparseTableConfig."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from fleet.errors import ConfigError, UnsupportedOptionError, did_you_mean
from fleet.ps.table.accessor import Accessor, documented_accessor
from fleet.ps.table.bounds import BOUND_KEYS, bounds_of
from fleet.ps.table.initializers import Initializer
from fleet.ps.table.layout import SparseTableConfig
from fleet.ps.table.rules import PADDLE_RULES, RULES, Rule, rule_from_paddle
from fleet.ps.worker.table_spellings import from_paths, is_dotted

_STATISTICS = tuple(f.name for f in fields(Accessor) if f.name not in ("kind", "zero_init", "create_by_score"))
# What makes a table one of Paddle's: adagrad divides by shows. A rate, bounds or a range alone change no statistics.
_OF_ACCESSOR = (*_STATISTICS, "zero_init", "sparse_accessor_class", "embedx_dim", "sparse_optimizer")
_HYPER = {
    "learning_rate": "learning_rate",
    "initial_g2sum": "initial_g2sum",
    "beta1_decay_rate": "beta1",
    "beta2_decay_rate": "beta2",
    "ada_epsilon": "epsilon",
}
_OPTIMIZER_KEYS = ("sparse_optimizer", "initial_range", "weight_bounds", *(f"sparse_{key}" for key in _HYPER), *_HYPER)
_PREFIXES = ("", "embed_", "embedx_")
_RULE_KEYS = [f"{prefix}{key}" for prefix in _PREFIXES for key in _OPTIMIZER_KEYS]
_CLASSES = ("MemorySparseTable", "MemorySparseGeoTable")
_REFUSED = {
    "sparse_converter": "tables are saved in one format",
    "sparse_deconverter": "tables are saved in one format",
    "load_filter_slots": "a load takes all rows of a table",
    "save_filter_slots": "a save takes the rows that its mode says",
    "sparse_delta_keep_days": "write delta_keep_days",
    "enable_cache": "whole tables are in memory, or their hot rows with rows and memory_bytes",
    "use_gpu_graph": "there are no tables on GPUs",
    "nodeid_slot": "there are no graph tables",
}
_SCALE = "scale_sparse_gradient_with_batch_size"  # Paddle's True is not the default here (a trap of D.4)
_OWN_KEYS = (
    "sparse_table_class",
    "sparse_accessor_class",
    "embedx_dim",
    "zero_init",
    "compress_in_save",
    "shard_num",
    _SCALE,
)


def configure_table(config: SparseTableConfig, settings: Mapping[str, Any] | None) -> SparseTableConfig:
    """Returns ``config`` with the settings that ``strategy.sparse_table_configs`` has for the table.

    Raises:
        ConfigError: unknown key, or a value out of range.
        UnsupportedOptionError: a key that is known and cannot be honoured.

    Example:
        >>> configure_table(SparseTableConfig("ads", 9), {"sparse_optimizer": "adagrad"}).rule.name
        'shared_adagrad'
    """
    if settings is None:
        return config
    if not isinstance(settings, Mapping):
        raise ConfigError(f"sparse_table_configs[{config.name!r}] takes a dictionary, got {settings!r}.")
    bounds = bounds_of(f"sparse_table_configs[{config.name!r}]", settings)
    if bounds is not None and config.bounds is not None and bounds != config.bounds:
        raise ConfigError(
            f"sparse_table_configs[{config.name!r}] has {dict(bounds.as_dict())}, the module of the table "
            f"{dict(config.bounds.as_dict())}. Write the limit in one place."
        )
    config = replace(config, bounds=bounds or config.bounds)
    is_whole = not is_dotted(settings)
    settings = {key: value for key, value in settings.items() if key not in BOUND_KEYS}
    if bounds is not None and not settings:
        return config  # a limit alone changes neither statistics nor rule
    if not is_whole:
        settings = from_paths(config.name, settings)
    _check_keys(config.name, settings)
    accessor = _accessor(config, settings, is_whole=is_whole)
    rule = _rule(config, settings, "embedx_")
    embed = _rule(config, settings, "embed_")
    made = replace(
        config,
        accessor=accessor,
        rule=rule,
        embed_rule=embed if embed != rule else None,
        scale_gradient=settings.get(_SCALE, False),
    )
    return _with_range(made, settings)


def _with_range(config: SparseTableConfig, settings: Mapping[str, Any]) -> SparseTableConfig:
    """Returns ``config`` with the range of initial weights; one for all columns that do not start at 0."""
    plain = settings.get("initial_range")
    of_embed, of_embedx = (settings.get(f"{prefix}initial_range", plain) for prefix in ("embed_", "embedx_"))
    if of_embed is None and of_embedx is None:
        return config
    starts_at_0 = config.accessor is not None and config.accessor.zero_init and "embed_initial_range" not in settings
    if of_embed != of_embedx and not starts_at_0:
        raise UnsupportedOptionError(
            f"sparse_table_configs[{config.name!r}]: initial_range differs between embed and embedx; a table has "
            "one initializer. Give one range."
        )
    bound = _number(config.name, "initial_range", of_embedx)
    return replace(config, initializer=Initializer("uniform", -bound, bound))


def _check_keys(table: str, settings: Mapping[str, Any]) -> None:
    known = [*_OWN_KEYS, *_STATISTICS, *BOUND_KEYS, *_RULE_KEYS]
    for key, value in settings.items():
        label = f"sparse_table_configs[{table!r}][{key!r}]"
        if key in _REFUSED:
            raise UnsupportedOptionError(f"{label} cannot be honoured: {_REFUSED[key]}. Omit it.")
        if key not in known:
            raise ConfigError(f"{label} does not exist.{did_you_mean(key, known)} Keys: {', '.join(known)}.")
        if key == "sparse_table_class" and value not in _CLASSES:
            raise UnsupportedOptionError(
                f'{label} is {value!r}; tables are in memory, {" or ".join(_CLASSES)}, and with rows="disk" partly '
                "on disk."
            )
        if key == _SCALE and not isinstance(value, bool):
            raise ConfigError(f"{label} is {value!r}; it takes True or False.")
        if key in ("shard_num", "compress_in_save"):
            raise UnsupportedOptionError(
                f"{label} cannot be honoured: a save has one checked file of rows per server, whose form does not "
                "depend on it. Omit it."
            )


def _accessor(config: SparseTableConfig, settings: Mapping[str, Any], *, is_whole: bool) -> Accessor | None:
    """Returns the accessor that the settings describe; the module's own where they describe none.

    What is not named has documented values where the settings describe a whole table, and the module's where it has an
    accessor.
    """
    if not any(key in _OF_ACCESSOR or key.startswith(("embed_", "embedx_")) for key in settings):
        return config.accessor
    values = {key: settings[key] for key in (*_STATISTICS, "zero_init") if key in settings}
    kind = settings.get("sparse_accessor_class")
    if config.accessor is None:
        made = documented_accessor if is_whole else Accessor
        accessor = made("SparseAccessor" if kind is None else kind, **values)
    else:
        accessor = replace(config.accessor, **({} if kind is None else {"kind": kind}), **values)
    accessor.check_dim(config.dim, settings.get("embedx_dim"))
    return accessor


def _rule(config: SparseTableConfig, settings: Mapping[str, Any], prefix: str) -> Rule:
    """Returns the rule of one part of the rows; prefixed keys override plain ones, which override the optimizer."""

    def given(key: str) -> Any:
        for name in (f"{prefix}{key}", f"{prefix}sparse_{key}", key, f"sparse_{key}"):
            if name in settings:
                return settings[name]
        return None

    name = settings.get(f"{prefix}sparse_optimizer", settings.get("sparse_optimizer"))
    hyper = {own: _number(config.name, key, given(key)) for key, own in _HYPER.items() if given(key) is not None}
    bounds = given("weight_bounds")
    if bounds is not None:
        if not isinstance(bounds, list | tuple) or len(bounds) != 2:
            raise ConfigError(
                f"sparse_table_configs[{config.name!r}]: weight_bounds is {bounds!r}; it takes two numbers."
            )
        low, high = (_number(config.name, "weight_bounds", value) for value in bounds)
        hyper |= {"lower_bound": low, "upper_bound": high}
    if name is None:
        return config.rule if not hyper else Rule(config.rule.name, {**config.rule.hyper, **hyper})
    if name not in PADDLE_RULES:
        raise ConfigError(
            f"sparse_table_configs[{config.name!r}]: sparse_optimizer is {name!r}; one of {sorted(PADDLE_RULES)}."
            + did_you_mean(str(name), PADDLE_RULES)
        )
    # The documented rate of the rule, not the optimizer's: the table has its own rule.
    defaults = RULES[PADDLE_RULES[name]].defaults
    return rule_from_paddle(name, {key: value for key, value in hyper.items() if key in defaults or _refuse(name, key)})


def _refuse(name: str, key: str) -> bool:
    raise ConfigError(f"sparse_table_configs: the rule {name!r} does not read {key!r}. Omit it.")


def _number(table: str, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"sparse_table_configs[{table!r}]: {key} is {value!r}; it takes a number.")
    return float(value)
