"""Table configurations as plain JSON values, for messages, journals and snapshots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from fleet.errors import ConfigError
from fleet.ps.table.accessor import Accessor
from fleet.ps.table.bounds import Bounds
from fleet.ps.table.dense_table import DenseTableConfig
from fleet.ps.table.entry import entry_from_attr
from fleet.ps.table.initializers import Initializer
from fleet.ps.table.layout import SparseTableConfig
from fleet.ps.table.rules import RULES, Rule

Shapes = Sequence[Sequence[int]]
_LONGEST = 200  # characters of a shape in a message


def spec_of_config(config: SparseTableConfig | DenseTableConfig) -> dict[str, Any]:
    """Returns ``config`` as JSON values; :func:`config_of_spec` makes an equal configuration of it."""
    if isinstance(config, DenseTableConfig):
        spec = {"kind": "dense", "name": config.name, "size": config.size, "rule": _rule_spec(config.rule)}
        return spec if config.shapes is None else {**spec, "shapes": list(config.shapes), "names": list(config.names)}
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
            shapes = spec.get("shapes")  # left out where they do not fit into a message
            shapes = None if shapes is None else tuple(map(tuple, shapes))
            return DenseTableConfig(spec["name"], spec["size"], rule, shapes, tuple(spec.get("names", ())))
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


def check_spec(table_id: int, known: Mapping[str, Any], spec: Mapping[str, Any]) -> None:
    """Raises ConfigError unless ``spec`` can be read and describes the same table as ``known``."""
    config_of_spec(spec)
    if difference := difference_of_specs(known, spec):
        raise ConfigError(
            f"table {table_id} exists with another specification: {difference}. All workers must build the same model. "
            "To change it, restart the servers; with FLEET_PS_FOLDER, save, start them with an empty folder, and load "
            "the save."
        )


def difference_of_specs(known: Mapping[str, Any], spec: Mapping[str, Any]) -> str:
    """Returns what two specifications of a table disagree about, as text; "" for nothing.

    Shapes that one of them does not know, and the names of parameters, are not compared.

    Example:
        >>> difference_of_specs({"size": 4}, {"size": 5})
        'size is 4 there and 5 here'
    """
    fields = sorted(name for name in {*known, *spec} - {"shapes", "names"} if known.get(name) != spec.get(name))
    found = [f"{name} is {known.get(name)!r} there and {spec.get(name)!r} here" for name in fields]
    other = difference_of_shapes(known.get("shapes"), spec.get("shapes"), spec.get("names", ()))
    return ", ".join([*found, other] if other else found)


def difference_of_shapes(there: Shapes | None, here: Shapes | None, names: Sequence[str] = ()) -> str:
    """Returns the first parameter whose shape differs, as text; "" where all are equal or one side knows none.

    Example:
        >>> difference_of_shapes([[6, 4], [6]], [[4, 6], [4]], ["fc.weight", "fc.bias"])
        "parameter 0 ('fc.weight') is [6, 4] there and [4, 6] here"
    """
    if there is None or here is None:
        return ""
    for number, (known, own) in enumerate(zip_longest(there, here)):
        if known is None or own is None or list(known) != list(own):
            name = f" ({names[number]!r})" if number < len(names) and names[number] else ""
            return f"parameter {number}{name} is {_shown(known)} there and {_shown(own)} here"
    return ""


def _shown(shape: Sequence[int] | None) -> str:
    return "absent" if shape is None else f"{list(shape)}"[:_LONGEST]


def _rule_spec(rule: Rule) -> dict[str, Any]:
    defaults = RULES[rule.name].defaults
    return {"name": rule.name, **{key: value for key, value in rule.hyper.items() if value != defaults[key]}}


def _rule(fields: Mapping[str, Any]) -> Rule:
    hyper = dict(fields)
    return Rule(hyper.pop("name"), hyper)
