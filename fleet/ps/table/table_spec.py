"""Table configurations as plain JSON values, for messages, journals and snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fleet.errors import ConfigError
from fleet.ps.table.accessor import Accessor
from fleet.ps.table.bounds import Bounds
from fleet.ps.table.dense_table import DenseTableConfig
from fleet.ps.table.entry import entry_from_attr
from fleet.ps.table.initializers import Initializer
from fleet.ps.table.layout import SparseTableConfig
from fleet.ps.table.rules import RULES, Rule

__all__ = ["config_of_spec", "difference_of_specs", "spec_of_config"]


def spec_of_config(config: SparseTableConfig | DenseTableConfig) -> dict[str, Any]:
    """Returns ``config`` as JSON values; :func:`config_of_spec` makes an equal configuration of it."""
    if isinstance(config, DenseTableConfig):
        return {"kind": "dense", "name": config.name, "size": config.size, "rule": _rule_spec(config.rule)}
    fields = dict(config.as_dict())
    return {
        **fields,
        "kind": "sparse",
        "rule": _rule_spec(config.rule),
        "embed_rule": None if config.embed_rule is None else _rule_spec(config.embed_rule),
    }


def config_of_spec(spec: Mapping[str, Any]) -> SparseTableConfig | DenseTableConfig:
    """Returns the configuration that ``spec`` describes.

    Raises:
        ConfigError: a field is missing or wrong.
    """
    try:
        rule = _rule(spec["rule"])
        if spec["kind"] == "dense":
            return DenseTableConfig(spec["name"], spec["size"], rule)
        if spec["kind"] != "sparse":
            raise ConfigError(f"a table of kind {spec['kind']!r}; kinds are 'sparse' and 'dense'.")
        accessor = spec["accessor"]
        return SparseTableConfig(
            name=spec["name"],
            dim=spec["dim"],
            rule=rule,
            embed_rule=None if spec["embed_rule"] is None else _rule(spec["embed_rule"]),
            initializer=Initializer(*spec["initializer"]),
            accessor=None if accessor is None else Accessor(**accessor),
            entry=entry_from_attr(spec["entry"]),
            seed=spec["seed"],
            create_on=spec["create_on"],
            bounds=Bounds(**spec["bounds"]) if "bounds" in spec else None,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"a table specification that cannot be read: {error!r}.") from None


def difference_of_specs(known: Mapping[str, Any], spec: Mapping[str, Any]) -> str:
    """Returns what two specifications of a table disagree about, as text.

    Example:
        >>> difference_of_specs({"size": 4}, {"size": 5})
        'size is 4 there and 5 here'
    """
    names = sorted(name for name in {*known, *spec} if known.get(name) != spec.get(name))
    return ", ".join(f"{name} is {known.get(name)!r} there and {spec.get(name)!r} here" for name in names)


def _rule_spec(rule: Rule) -> dict[str, Any]:
    defaults = RULES[rule.name].defaults
    return {"name": rule.name, **{key: value for key, value in rule.hyper.items() if value != defaults[key]}}


def _rule(fields: Mapping[str, Any]) -> Rule:
    hyper = dict(fields)
    return Rule(hyper.pop("name"), hyper)
