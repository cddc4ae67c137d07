"""Configuration as data: every option and every key states its type, default, bounds and meaning once.

A configuration is a frozen dataclass made of :func:`setting` fields. Its validation, its error messages, the YAML
form, the documentation table and the "what happens to this key" record all come from those fields.

Example:
    >>> @dataclass(frozen=True, kw_only=True)
    ... class MergeConfig(Config, option="gradient_merge_configs"):
    ...     k_steps: int = setting(1, "micro-steps per update", at_least=1)
    >>> MergeConfig().updated({"k_steps": 4}).k_steps
    4
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, Protocol, TypeVar

from fleet.errors import ConfigError, UnknownOptionError, did_you_mean

ConfigT = TypeVar("ConfigT", bound="Config")


class Values(Protocol):
    """The options as a strategy reads them: ``options["fuse_grad_size_in_MB"]``, ``options["amp_configs"]``."""

    def __getitem__(self, name: str) -> Any:
        """Returns the value of the option, a Config for a group."""

    def is_set(self, name: str) -> bool:
        """Returns whether the user assigned the option."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the options that the user assigned."""


@dataclass(frozen=True, kw_only=True)
class FieldRule:
    """The bounds, the meaning and the outcome of a value.

    Exactly one of ``no_meaning`` and ``refused`` may hold a reason: an option with ``no_meaning`` is accepted with
    one warning, an option with ``refused`` raises when the plan is made and its value is not the default.
    """

    meaning: str = ""
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[Any, ...] | None = None
    enum: Mapping[str, int] | None = None  # names of the numbers, for the protobuf text form
    no_meaning: str | None = None
    refused: str | None = None
    shows: str | None = None  # of a top-level option: reads as this key of a group where that is set, "option.key"

    @property
    def outcome(self) -> str:
        """Returns ``"implemented"``, ``"no meaning"`` or ``"refused"``."""
        return "no meaning" if self.no_meaning else "refused" if self.refused else "implemented"

    def check(self, label: str, value: Any) -> None:
        """Raises ConfigError when ``value`` is outside the bounds or not among the choices."""
        choices = tuple(self.enum.values()) if self.enum is not None else self.choices
        if choices is not None:
            self._check_choice(label, choices, value)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int | float) and not isinstance(number, bool):
                self._check_number(label, number)

    @staticmethod
    def _check_choice(label: str, choices: tuple[Any, ...], value: Any) -> None:
        for item in value if isinstance(value, tuple) else (value,):
            if item not in choices:
                names = ", ".join(repr(choice) for choice in choices)
                raise ConfigError(f"{label} is {item!r}; it takes one of {names}.")

    def _check_number(self, label: str, number: float) -> None:
        if not math.isfinite(number):
            raise ConfigError(f"{label} is {number!r}; it takes a finite number.")
        bounds = [
            (self.at_least is not None and number < (self.at_least or 0), f"at least {self.at_least}"),
            (self.at_most is not None and number > (self.at_most or 0), f"at most {self.at_most}"),
            (self.above is not None and number <= (self.above or 0), f"greater than {self.above}"),
            (self.below is not None and number >= (self.below or 0), f"less than {self.below}"),
        ]
        for broken, rule in bounds:
            if broken:
                raise ConfigError(f"{label} is {number!r}; it must be {rule}.")


def setting(default: Any, meaning: str, **rules: Any) -> Any:
    """Returns a dataclass field with a default, a meaning and the rules of :class:`FieldRule`.

    A list default is stored as a tuple; a :class:`Config` subclass as default makes a nested configuration.
    """
    metadata = {"rule": FieldRule(meaning=meaning, **rules)}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=tuple(default) if isinstance(default, list) else default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Config:
    """A frozen group of settings; ``option`` is its name in user code."""

    option: ClassVar[str] = ""
    owner: ClassVar[str] = ""  # of a group of top-level options: the strategy that reads it
    in_ps_job: ClassVar[bool] = True  # of a group of top-level options: whether a parameter-server job reads it
    read_by_models: ClassVar[bool] = False  # of a strategy that is off: a model may still read it, and is asked

    def __init_subclass__(cls, option: str = "", owner: str = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if option:
            cls.option = option
        cls.owner = owner

    def __post_init__(self) -> None:
        """Converts and checks every field; a subclass that adds rules across fields calls this first."""
        for key, kind in value_types(type(self)).items():
            # Past the frozen dataclass: the value is converted once, before anybody reads it.
            value = converted(self.label(key), kind, getattr(self, key))
            object.__setattr__(self, key, value)
            self.rule(key).check(self.label(key), value)

    @classmethod
    def problem(cls, options: Any, world_size: int) -> str | None:
        """Returns why a group of top-level options cannot be honoured on ``world_size`` workers, or ``None``."""
        return None

    @classmethod
    def notes(cls, options: Any, world_size: int) -> tuple[str, ...]:
        """Returns warnings about settings of a group of top-level options that change nothing here."""
        return ()

    @classmethod
    def rule(cls, key: str) -> FieldRule:
        """Returns the rule of ``key``."""
        rule: FieldRule = cls.__dataclass_fields__[key].metadata["rule"]
        return rule

    @classmethod
    def key_names(cls) -> tuple[str, ...]:
        """Returns the names of the settings in the order they are declared."""
        return tuple(value_types(cls))

    @classmethod
    def label(cls, key: str) -> str:
        """Returns how a user writes ``key``, for messages."""
        return f"{cls.option}[{key!r}]" if cls.option else f"DistributedStrategy.{key}"

    def updated(self: ConfigT, changes: Mapping[str, Any]) -> ConfigT:
        """Returns a copy with ``changes`` merged in; keys that are not named keep their values.

        Raises UnknownOptionError for a key that does not exist and ConfigError for a wrong value.
        """
        known = ", ".join(self.key_names())
        if not isinstance(changes, Mapping):
            raise ConfigError(f"{self.option} takes a dictionary, got {changes!r}. Keys: {known}.")
        merged: dict[str, Any] = {}
        for key, value in changes.items():
            if key not in self.key_names():
                near = did_you_mean(str(key), self.key_names())
                raise UnknownOptionError(f"{self.option} has no key {key!r}.{near} Keys: {known}.")
            current = getattr(self, key)
            nested = isinstance(current, Config) and not isinstance(value, Config)
            if isinstance(current, dict) and isinstance(value, Mapping) and not isinstance(value, Replacement):
                value = {**current, **value}
            merged[key] = current.updated(value) if nested else value
        return dataclasses.replace(self, **merged)

    def as_dict(self) -> dict[str, Any]:
        """Returns a fresh dictionary of every key, nested settings as dictionaries and tuples as lists."""
        return {key: plain(getattr(self, key)) for key in self.key_names()}

    def changes(self) -> dict[str, Any]:
        """Returns, as :meth:`as_dict` does, the keys that do not hold their defaults."""
        default = default_of(type(self))
        found = {}
        for key in self.key_names():
            value = getattr(self, key)
            usual = getattr(default, key)
            if value != usual:
                found[key] = value.changes() if isinstance(value, Config) else plain(value)
        return found


class Replacement(dict[str, Any]):
    """A dictionary that takes the place of the one before it; others are merged over that."""


@cache
def _value_types(config: Any) -> Mapping[str, Any]:
    hints = typing.get_type_hints(config)
    return {f.name: hints[f.name] for f in dataclasses.fields(config)}


@cache
def _default_of(config: Any) -> Any:
    return config()


def value_types(config: type[Config]) -> Mapping[str, Any]:
    """Returns the annotated type of every setting of ``config``, in the order they are declared."""
    group: Any = config  # type checkers take a class whose instances are unhashable for unhashable itself
    return _value_types(group)


def default_of(config: type[ConfigT]) -> ConfigT:
    """Returns the settings with their defaults, one object for all who compare with it."""
    group: Any = config
    made: ConfigT = _default_of(group)
    return made


def plain(value: Any) -> Any:
    """Returns ``value`` made of dictionaries, lists and scalars only, sharing nothing with the configuration."""
    if isinstance(value, Config):
        return value.as_dict()
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


def type_name(kind: Any) -> str:
    """Returns ``kind`` in the words of the documentation."""
    if typing.get_origin(kind) is tuple:
        return f"list of {type_name(typing.get_args(kind)[0])}"
    if isinstance(kind, type) and issubclass(kind, Config):
        return "dict"
    return "dict" if typing.get_origin(kind) is dict else str(getattr(kind, "__name__", kind))


def converted(label: str, kind: Any, value: Any) -> Any:
    """Returns ``value`` as ``kind`` (bool, int, float, str, tuple of one of them, dict, a Config), or raises."""
    if isinstance(kind, type) and issubclass(kind, Config):
        if isinstance(value, kind):
            return value
        return kind().updated(value)
    if typing.get_origin(kind) is tuple:
        return _converted_list(label, typing.get_args(kind)[0], value)
    if kind is bool and not isinstance(value, bool):
        raise ConfigError(f"{label} takes True or False, got {value!r}.")
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    is_bool_for_number = isinstance(value, bool) and kind in (int, float)
    bare = dict if typing.get_origin(kind) is dict else kind
    if is_bool_for_number or not isinstance(value, bare):
        raise ConfigError(f"{label} takes {_TYPE_WORDS[bare]}, got {value!r}.")
    if bare is dict:
        _check_plain(label, value)
        return plain(value)
    return bare(value)  # an IntEnum becomes its number


_TYPE_WORDS = {int: "an integer", float: "a number", str: "a string", dict: "a dictionary", bool: "True or False"}


def _check_plain(label: str, value: Any) -> None:
    """Raises ConfigError unless ``value`` consists of dictionaries, lists, strings, finite numbers and booleans."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ConfigError(f"{label} has the key {key!r}; its keys are strings.")
            _check_plain(f"{label}[{key!r}]", item)
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            _check_plain(f"{label}[{place}]", item)
    elif type(value) not in (bool, int, float, str) or (type(value) is float and not math.isfinite(value)):
        raise ConfigError(f"{label} is {value!r}; it takes strings, finite numbers, booleans, lists and dictionaries.")


def _converted_list(label: str, kind: Any, value: Any) -> tuple[Any, ...]:
    if isinstance(value, str) or not isinstance(value, list | tuple):
        raise ConfigError(f"{label} takes a list, got {value!r}.")
    return tuple(converted(f"{label}[{place}]", kind, item) for place, item in enumerate(value))
