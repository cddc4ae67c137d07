"""YAML by kubectl's rules: a string there is a string here, in both directions.

[Note: Two readings of YAML]
PyYAML and kubectl differ in which unquoted words are numbers: 12:30:00 is 45000 for PyYAML and a string for kubectl;
1e-3 is a string for PyYAML and a number for kubectl, which then refuses it as the value of a variable. So the reader
follows kubectl's rules, and the writer quotes each string that either of them could read as something else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import yaml

from fleet.common.limited_yaml import LimitedLoader
from fleet.errors import ConfigError

_INT = "tag:yaml.org,2002:int"
_FLOAT = "tag:yaml.org,2002:float"
_DROPPED = (_INT, _FLOAT, "tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value")
_INT_WORD = re.compile(r"[-+]?(?:0b[01_]+|0o?[0-7_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)")
_FLOAT_WORD = re.compile(
    r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_OTHER_WORDS = frozenset(("y", "n", "yes", "no", "on", "off", "true", "false", "null", "~", "=", "<<"))


class _DocumentLoader(LimitedLoader):
    """Refuses a duplicate name in a mapping; one of the two would be dropped."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the name {key.value!r} appears twice in one mapping", key.start_mark
                    )
                seen.add(key.value)
        made: dict[Any, Any] = super().construct_mapping(node, deep)
        return made


_DocumentLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in pairs if tag not in _DROPPED]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_DocumentLoader.add_implicit_resolver(_INT, re.compile(f"(?:{_INT_WORD.pattern})$"), list("-+0123456789"))
_DocumentLoader.add_implicit_resolver(_FLOAT, re.compile(f"(?:{_FLOAT_WORD.pattern})$"), list("-+.0123456789"))


class _Dumper(yaml.SafeDumper):
    """Writes the same object twice rather than an alias."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    ambiguous = text.lower() in _OTHER_WORDS or _INT_WORD.fullmatch(text) or _FLOAT_WORD.fullmatch(text)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'" if ambiguous else None)


_Dumper.add_representer(str, _represent_text)


def read_documents(text: str, label: str) -> list[Any]:
    """Returns the non-empty documents of ``text``; raises ConfigError that begins with ``label``."""
    try:
        documents = [document for document in _documents(text) if document is not None]
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{label} is not YAML: {error}") from error
    return documents


def _documents(text: str) -> Iterator[Any]:
    loader: Any = _DocumentLoader(text)
    try:
        while loader.check_data():
            yield loader.get_data()
    finally:
        loader.dispose()


def write_documents(documents: Iterable[Any]) -> str:
    """Returns ``documents`` as one YAML text; fields keep their order."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120, explicit_start=True)
