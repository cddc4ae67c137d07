"""YAML that takes time and memory in proportion to its text: no billion laughs, endless digits or deep nesting."""

from __future__ import annotations

from typing import Any

import yaml

MAX_TEXT = 1 << 22  # characters
MAX_VALUES = 100_000
MAX_DEPTH = 64
MAX_DIGITS = 100


class LimitedLoader(yaml.SafeLoader):
    """Reads plain data; raises ``yaml.YAMLError`` for anything larger than a sensible file.

    Example:
        >>> yaml.load("amp: true", LimitedLoader)
        {'amp': True}
    """

    def __init__(self, text: str) -> None:
        if len(text) > MAX_TEXT:
            raise yaml.YAMLError(f"{len(text)} characters; at most {MAX_TEXT} are read")
        self._depth = 0
        super().__init__(text)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Returns the next node; refuses deep nesting before Python's recursion limit ends the process."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _error(f"values are nested more than {MAX_DEPTH} deep", self.peek_event())  # type: ignore[no-untyped-call]
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def compose_document(self) -> yaml.Node | None:
        """Returns the next document; every alias counts as the values it refers to."""
        node = super().compose_document()
        if node is not None:
            _measure(node, 1, {})
        return node

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Returns a 64-bit integer."""
        # Reading a number takes time quadratic in its digits.
        if len(node.value) <= MAX_DIGITS:
            try:
                value = int(super().construct_yaml_int(node))
            except ValueError as error:
                raise _error(f"{error}", node) from None
            if -(2**63) <= value < 2**64:
                return value
        raise _error(f"the number {node.value[:40]} does not fit 64 bits", node)


LimitedLoader.add_constructor("tag:yaml.org,2002:int", LimitedLoader.construct_yaml_int)


def _measure(node: yaml.Node, depth: int, known: dict[int, tuple[int, int] | None]) -> tuple[int, int]:
    """Returns the number of values in ``node`` with its aliases expanded, and their depth."""
    found = known.get(id(node), (0, 0))
    if found is None:
        raise _error("a value contains itself through an alias", node)
    count, height = found
    if not count:
        # None marks a node under way: to meet it again below itself is a cycle.
        known[id(node)] = None
        count = 1
        if depth > MAX_DEPTH:
            raise _error(f"values are nested more than {MAX_DEPTH} deep", node)
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        items = node.value if isinstance(node, yaml.SequenceNode) else [item for pair in pairs for item in pair]
        for item in items:
            more, below = _measure(item, depth + 1, known)
            count += more
            height = max(height, below)
            if count > MAX_VALUES:
                raise _error(f"with its aliases it has more than {MAX_VALUES} values", node)
        known[id(node)] = count, height = count, height + 1
    if depth + height > MAX_DEPTH + 1:
        raise _error(f"values are nested more than {MAX_DEPTH} deep", node)
    return count, height


def _error(problem: str, at: Any) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, at.start_mark)
