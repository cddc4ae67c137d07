"""DistributedStrategy: the one object whose switches become wrappers around torch modules and optimizers.

Nothing here is written per option: names, types, defaults, bounds and meanings come from the registry of
``fleet.strategies``. A wrong type, an unknown key or a value out of range raises before anything changes.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fleet.errors import OptionWarning, UnknownOptionError, did_you_mean
import fleet.strategies  # fills the registry
from fleet.strategies._base import GROUPS, REGISTRY, switch_rule
from fleet.strategies._config import Config, Rule, converted, plain, value_types

# Names of older releases -> what replaced them (requirements 003-12 to 003-15).
RENAMED = {
    "exec_strategy": "execution_strategy",
    "forward_recompute": "recompute",
    "recompute_checkpoints": "recompute_configs (key 'checkpoints')",
    "use_local_sgd": "localsgd",
    "use_dgc": "dgc",
    "use_amp": "amp",
    "mode_type": "mode",
}
# Fleet's own code spells these with an underscore too.
ALIASES = {
    "_fuse_grad_size_in_TFLOPS": "fuse_grad_size_in_TFLOPS",
    "_calc_comm_same_stream": "calc_comm_same_stream",
    "is_with_coordinator": "with_coordinator",
}


@dataclass(frozen=True)
class Option:
    """One top-level option: its name, the type of its value, its default, its rule, and who declares it."""

    name: str
    kind: Any
    default: Any
    rule: Rule
    owner: str


def schema() -> dict[str, Option]:
    """Returns every option by name: the switches, their ``_configs``, and the groups of further settings."""
    found: dict[str, Option] = {}
    for name, strategy in REGISTRY.items():
        if not strategy.always:
            found[name] = Option(name, bool, strategy.default, switch_rule(strategy), name)
        if strategy.Config is not None:
            key = f"{name}_configs"
            rule = Rule(meaning=f"Settings of '{name}'.")
            found[key] = Option(key, strategy.Config, strategy.Config(), rule, name)
    owners = {s.Settings: name for name, s in REGISTRY.items() if s.Settings is not None}
    for group in GROUPS:
        default = group()
        for key, kind in value_types(group).items():
            found[key] = Option(key, kind, getattr(default, key), group.rule(key), owners.get(group, group.__name__))
    return found


class DistributedStrategy:
    """Holds every option of a job; assign the ones you want, the rest keep their defaults.

    Reading a ``*_configs`` option returns a fresh dictionary; assigning one merges the given keys over the current
    values. Assigning an option that has no meaning on torch warns once with the reason; one that cannot be honoured
    is refused with the reason by ``fleet.init`` or ``fleet.distributed_*``.

    Raises:
        UnknownOptionError: the option or key does not exist; the message names the nearest one.
        ConfigError: the value has the wrong type or is out of range.

    Example:
        >>> strategy = DistributedStrategy()
        >>> strategy.fuse_grad_size_in_MB = 16
        >>> strategy.gradient_scale_configs = {"scale_strategy": "sum"}
    """

    _values: dict[str, Any]
    _assigned: dict[str, None]

    def __init__(self) -> None:
        object.__setattr__(self, "_values", {name: option.default for name, option in schema().items()})
        object.__setattr__(self, "_assigned", {})

    def __setattr__(self, name: str, value: Any) -> None:
        option = _option(name)
        if isinstance(value, SettingsObject):
            value = value.config()
        current = self._values[option.name]
        if isinstance(current, Config) and not isinstance(value, Config):
            new: Any = current.updated(value)
            _warn_about_keys(type(current), value)
        else:
            new = converted(f"DistributedStrategy.{option.name}", option.kind, value)
            option.rule.check(f"DistributedStrategy.{option.name}", new)
        strategy = REGISTRY.get(option.name)
        for other, changes in (strategy.also_sets if strategy else {}).items():
            self._values[other] = self._values[other].updated(changes)
        if option.rule.no_meaning:
            _warn(f"DistributedStrategy.{option.name}", option.rule.no_meaning)
        self._values[option.name] = new
        self._assigned[option.name] = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_values" not in self.__dict__:
            raise AttributeError(name)
        option = _option(name)
        value = self._values[option.name]
        if isinstance(value, Config) and option.name in SettingsObject.kinds:
            return SettingsObject.kinds[option.name](value)
        return plain(value)

    def __getitem__(self, name: str) -> Any:
        """Returns the stored value of an option: a scalar, a tuple, or a frozen Config."""
        return self._values[_option(name).name]

    def is_set(self, name: str) -> bool:
        """Returns whether the option was assigned, even to its default."""
        return _option(name).name in self._assigned

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *self._values})

    def __iter__(self) -> Iterator[str]:
        """Iterates over the names of all options."""
        return iter(self._values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DistributedStrategy) and self._values == other._values

    __hash__ = None  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedStrategy:
        twin = type(self)()
        twin.__setstate__(copy.deepcopy((self._values, self._assigned), memo))
        return twin

    def __copy__(self) -> DistributedStrategy:
        return copy.deepcopy(self)

    def __getstate__(self) -> tuple[dict[str, Any], dict[str, None]]:
        return dict(self._values), dict(self._assigned)

    def __setstate__(self, state: tuple[dict[str, Any], dict[str, None]]) -> None:
        object.__setattr__(self, "_values", dict(state[0]))
        object.__setattr__(self, "_assigned", dict(state[1]))

    def __repr__(self) -> str:
        from fleet._options_text import strategy_table

        return strategy_table(self)

    def to_dict(self, *, all_options: bool = False) -> dict[str, Any]:
        """Returns the assigned options (or all of them) as plain dictionaries, lists and scalars."""
        names = self._values if all_options else self._assigned
        return {name: plain(self._values[name]) for name in names}

    def update(self, changes: Mapping[str, Any]) -> None:
        """Assigns every option of ``changes``, or none of them when one is wrong."""
        trial = copy.deepcopy(self)
        for name, value in changes.items():
            setattr(trial, name, value)
        self.__setstate__(trial.__getstate__())

    @classmethod
    def load(cls, path: str) -> DistributedStrategy:
        """Returns the strategy that a YAML file describes; see :meth:`update` for the errors."""
        from fleet._options_files import read_yaml

        strategy = cls()
        strategy.update(read_yaml(path))
        return strategy

    def save(self, path: str) -> None:
        """Writes the assigned options as YAML."""
        from fleet._options_files import write_yaml

        write_yaml(path, self.to_dict())

    def save_to_prototxt(self, path: str) -> None:
        """Writes the assigned options in protobuf text format."""
        from fleet._options_files import write_prototxt

        write_prototxt(path, self.to_dict())

    def load_from_prototxt(self, path: str) -> None:
        """Merges the options of a protobuf text file into this object."""
        from fleet._options_files import read_prototxt

        self.update(read_prototxt(path, self))


class SettingsObject:
    """A group of settings with attributes, for the options Fleet models as objects (``build_strategy``)."""

    kinds: dict[str, type[SettingsObject]] = {}
    option = ""

    def __init_subclass__(cls, option: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.option = option
        SettingsObject.kinds[option] = cls

    def __init__(self, config: Config | None = None) -> None:
        object.__setattr__(self, "_config", config if config is not None else schema()[self.option].default)

    def config(self) -> Config:
        """Returns the settings as a frozen Config."""
        config: Config = self.__dict__["_config"]
        return config

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, "_config", self.config().updated({name: value}))
        _warn_about_keys(type(self.config()), {name: value})

    def __getattr__(self, name: str) -> Any:
        config = self.__dict__.get("_config")
        if config is None or name.startswith("__"):
            raise AttributeError(name)
        if name not in config.keys():
            near = did_you_mean(name, config.keys())
            raise UnknownOptionError(f"{self.option} has no attribute {name!r}.{near}")
        return plain(getattr(config, name))


class BuildStrategy(SettingsObject, option="build_strategy"):
    """The graph-pass switches of ``strategy.build_strategy``."""


class ExecutionStrategy(SettingsObject, option="execution_strategy"):
    """The executor settings of ``strategy.execution_strategy``."""


def _option(name: str) -> Option:
    known = schema()
    name = ALIASES.get(name, name)
    if name in known:
        return known[name]
    if name in RENAMED:
        raise UnknownOptionError(f"DistributedStrategy.{name} is the old name; write {RENAMED[name]} instead.")
    raise UnknownOptionError(f"DistributedStrategy has no option {name!r}.{did_you_mean(name, known)}")


def _warn_about_keys(config: type[Config], changes: Mapping[str, Any]) -> None:
    for key, value in changes.items():
        rule = config.rule(key)
        if rule.no_meaning:
            _warn(config.label(key), rule.no_meaning)
        kind = value_types(config)[key]
        if isinstance(kind, type) and issubclass(kind, Config) and isinstance(value, Mapping):
            _warn_about_keys(kind, value)


def _warn(label: str, reason: str) -> None:
    warnings.warn(f"{label} is accepted and changes nothing: {reason}", OptionWarning, stacklevel=4)
