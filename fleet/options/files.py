"""A strategy on disk: YAML, and the protobuf text format of Fleet's own files.

Readers return entries of (option, value, place), where place is ``FILE, line N`` for messages. Writers replace the
file atomically, so that a reader never sees half of it.
"""

from __future__ import annotations

import os
import re
import typing
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import yaml

from fleet.common.limited_yaml import MAX_TEXT, LimitedLoader
from fleet.common.plain_files import read_small, replace_file
from fleet.errors import ConfigError, UnknownOptionError, did_you_mean
from fleet.options.prototxt import TextEntry, Word, format_entries, parse
from fleet.strategies._declare.fields import Config, FieldRule, value_types

if TYPE_CHECKING:
    from fleet.options import Option

PathLike = str | os.PathLike[str]
Entries = list[tuple[str, Any, str]]


def _read_text(path: PathLike) -> str:
    try:
        return read_small(path, MAX_TEXT).decode()
    except OSError as error:
        raise ConfigError(f"{os.fspath(path)} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{os.fspath(path)} is not UTF-8 text: {error.reason} at byte {error.start}.") from error


# ---- YAML -----------------------------------------------------------------------------------------------------------


class _Loader(LimitedLoader):
    """Reads plain data only, reads ``1e-3`` as a number, and refuses a duplicate key."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Returns the mapping of ``node``; raises ConfigError for a repeated key."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    line = key.start_mark.line + 1
                    raise ConfigError(f"{self.name}, line {line}: {key.value!r} appears twice. Remove one of the two.")
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


class _StrategyDumper(yaml.SafeDumper):
    """Quotes text that :class:`_Loader` would read as a number."""


for _kind in (_Loader, _StrategyDumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
    )


def read_yaml(path: PathLike) -> Entries:
    """Returns the options of a YAML file: a mapping of option to value.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or is not a mapping; names the line.
    """
    source = os.fspath(path)
    text = _read_text(path)
    try:
        loader = _Loader(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not YAML: {error}.") from error
    loader.name = source
    try:
        node = loader.get_single_node()
        if node is None:
            return []
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{source}, line {node.start_mark.line + 1}: expected a mapping of option to value.")
        values = loader.construct_mapping(node, deep=True)
        lines = {loader.construct_object(key): key.start_mark.line + 1 for key, _ in node.value}
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{source}, line {line}: this is not YAML: {error.problem}.") from error
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError) as error:  # ValueError: from a value with the wrong tag
        raise ConfigError(f"{source} is not YAML: {error}.") from error
    finally:
        loader.dispose()
    return [(str(name), value, f"{source}, line {lines.get(name, 1)}") for name, value in values.items()]


def write_yaml(path: PathLike, values: Mapping[str, Any]) -> None:
    """Replaces ``path`` with a YAML file of ``values``, in their order."""
    text = yaml.dump(
        dict(values), Dumper=_StrategyDumper, sort_keys=False, default_flow_style=None, allow_unicode=False
    )
    replace_file(path, text)


# ---- protobuf text format -------------------------------------------------------------------------------------------


def write_prototxt(path: PathLike, values: Mapping[str, Any], schema: Mapping[str, Option]) -> None:
    """Replaces ``path`` with a protobuf text file of ``values``, which ``schema`` describes."""
    entries: list[TextEntry] = []
    for name, value in values.items():
        entries += _entries_of(name, schema[name].kind, schema[name].rule, value)
    replace_file(path, format_entries(entries))


def _entries_of(name: str, kind: Any, rule: FieldRule, value: Any) -> list[TextEntry]:
    if isinstance(kind, type) and issubclass(kind, Config):
        inner = [
            entry
            for key, inner_kind in value_types(kind).items()
            if key in value
            for entry in _entries_of(key, inner_kind, kind.rule(key), value[key])
        ]
        return [TextEntry(name, tuple(inner), 0)]
    if _is_map(kind):
        return _map_entries(name, value) or [TextEntry(name, [], 0)]
    if typing.get_origin(kind) is tuple:
        if _is_map(typing.get_args(kind)[0]):
            return [TextEntry(name, [tuple(_map_entries("entry", item)) for item in value], 0)]
        return [TextEntry(name, item, 0) for item in value] or [TextEntry(name, [], 0)]
    names = {number: Word(word) for word, number in (rule.enum or {}).items()}
    return [TextEntry(name, names.get(value, value), 0)]


def _is_map(kind: Any) -> bool:
    return typing.get_origin(kind) is dict


def _map_entries(name: str, value: Mapping[str, Any]) -> list[TextEntry]:
    """Returns a free-form dictionary as a protobuf map: one ``name { key: ... value: ... }`` for each key."""
    return [
        TextEntry(name, (TextEntry("key", key, 0), TextEntry("value", _free_value(item), 0)), 0)
        for key, item in value.items()
    ]


def _free_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple(_map_entries("entry", value))
    return [_free_value(item) for item in value] if isinstance(value, list | tuple) else value


def read_prototxt(path: PathLike, schema: Mapping[str, Option]) -> Entries:
    """Returns the options of a protobuf text file, each with the type that ``schema`` gives.

    Raises:
        ConfigError: the file cannot be read, is not in text format, or holds an unknown name or a wrong type; names
            the line.
    """
    source = os.fspath(path)
    found: Entries = []
    for name, entries in _grouped(parse(_read_text(path), source)).items():
        place = f"{source}, line {entries[0].line}"
        option = schema.get(name)
        value = _value_of(source, name, option.kind, option.rule, entries) if option is not None else None
        # The assignment refuses an unknown name, and knows the names of older releases of Paddle.
        found.append((name, value, place))
    return found


def _grouped(entries: Iterable[TextEntry]) -> dict[str, list[TextEntry]]:
    found: dict[str, list[TextEntry]] = {}
    for entry in entries:
        found.setdefault(entry.name, []).append(entry)
    return found


def _value_of(source: str, name: str, kind: Any, rule: FieldRule, entries: list[TextEntry]) -> Any:
    place = f"{source}, line {entries[-1].line}"
    if isinstance(kind, type) and issubclass(kind, Config):
        return _config_values(source, name, kind, entries)
    if _is_map(kind):
        return _map_of(source, name, [entry for entry in entries if entry.value != []])
    items = [item for entry in entries for item in (entry.value if isinstance(entry.value, list) else [entry.value])]
    if typing.get_origin(kind) is tuple:
        inner = typing.get_args(kind)[0]
        if _is_map(inner):
            return [_map_of(source, name, [TextEntry(name, part.value, part.line) for part in item]) for item in items]
        return [_scalar_of(f"{place}: {name}", inner, rule, item) for item in items]
    if len(entries) > 1:
        raise ConfigError(f"{place}: {name} appears twice and takes one value. Remove one of the two.")
    return _scalar_of(f"{place}: {name}", kind, rule, entries[0].value)


def _config_values(source: str, name: str, kind: type[Config], entries: list[TextEntry]) -> dict[str, Any]:
    """Returns the values of a block; blocks of the same name are merged, as protobuf does."""
    inner: list[TextEntry] = []
    for entry in entries:
        if not isinstance(entry.value, tuple):
            raise ConfigError(f"{source}, line {entry.line}: {name} takes a block, {name} {{ key: value }}.")
        inner += entry.value
    kinds = value_types(kind)
    # Unknown keys are refused with the line of the file, which the assignment later would not know.
    values: dict[str, Any] = {}
    for key, found in _grouped(inner).items():
        if key not in kinds:
            near = did_you_mean(key, kinds)
            raise UnknownOptionError(
                f"{source}, line {found[0].line}: {name} has no key {key!r}.{near} Keys: {', '.join(kinds)}."
            )
        values[key] = _value_of(source, key, kinds[key], kind.rule(key), found)
    return values


def _map_of(source: str, name: str, entries: Iterable[TextEntry]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for entry in entries:
        parts = {part.name: part for part in entry.value} if isinstance(entry.value, tuple) else {}
        if list(parts) != ["key", "value"] or not isinstance(parts["key"].value, str):
            raise ConfigError(f'{source}, line {entry.line}: {name} takes blocks {{ key: "name" value: ... }}.')
        found[str(parts["key"].value)] = _free_of(source, name, parts["value"])
    return found


def _free_of(source: str, name: str, entry: TextEntry) -> Any:
    value = entry.value
    if isinstance(value, tuple):
        return _map_of(source, name, value)
    if isinstance(value, list):
        return [_free_of(source, name, TextEntry("value", item, entry.line)) for item in value]
    if isinstance(value, Word):
        return _scalar_of(f"{source}, line {entry.line}: {name}", bool, FieldRule(), value)
    return value


_TRUE = ("true", "True", "t")
_FALSE = ("false", "False", "f")


def _scalar_of(label: str, kind: Any, rule: FieldRule, value: Any) -> Any:
    """Returns ``value`` as ``kind``; the assignment checks bounds and explains a wrong type."""
    if isinstance(value, Word):
        if kind is bool and value in _TRUE + _FALSE:
            return value in _TRUE
        if rule.enum is not None and value in rule.enum:
            return rule.enum[value]
        if kind is float and value.lstrip("-") in ("inf", "infinity", "nan"):
            return float(value)
        expected = {bool: "true or false", str: "a quoted string"}.get(kind, "a number")
        raise ConfigError(f"{label} is {str(value)!r}; it takes {', '.join(rule.enum) if rule.enum else expected}.")
    if kind is bool and type(value) is int and value in (0, 1):
        return bool(value)
    if isinstance(value, tuple | list):
        raise ConfigError(f"{label} takes one value, not a {'block' if isinstance(value, tuple) else 'list'}.")
    return value
