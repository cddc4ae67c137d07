"""The size of a value that was read, with shared parts counted at each place, where a converter would write them again.

A file of a few bytes can name one list twice in the next, forty times over: 2^40 entries.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from fleet.checkpoint.index import MOST_DEPTH
from fleet.errors import CheckpointError

_PLAIN = (str, bytes, int, float, type(None))
_PER_BYTE = 16  # entries for each byte of the file
_ALWAYS = 1 << 20  # entries that every file may have


def most_of(num_bytes: int) -> int:
    """Returns the most entries, characters or bytes to which a file of ``num_bytes`` may unfold."""
    return _PER_BYTE * num_bytes + _ALWAYS


def check_unfolded(found: Any, num_bytes: int, label: str) -> None:
    """Raises CheckpointError, with ``label``, where ``found`` is far larger than a file of ``num_bytes``.

    It goes through lists, tuples, sets, dictionaries, and objects with ``arguments`` and a ``state``, each object once.
    """
    sizes: dict[int, tuple[int, int]] = {}  # by id: the number of entries that an object unfolds to, and their depth
    begun: set[int] = set()  # ids of the objects around the present one
    # A stack of its own and no recursion: the file decides about the depth, and Python's stack would end first.
    todo = [found]
    while todo:
        one = todo[-1]
        if id(one) in sizes:  # its parent names it several times
            todo.pop()
            continue
        size = 1
        depth = 0
        waiting = []
        for each in _inside(one):
            if isinstance(each, _PLAIN):
                size += _own_size(each)
            elif id(each) in sizes:
                size += sizes[id(each)][0]
                depth = max(depth, sizes[id(each)][1])
            elif id(each) in begun:
                raise CheckpointError(f"{label}: a value is inside itself, which no state is.")
            else:
                waiting.append(each)
        if waiting:
            begun.add(id(one))
            todo += waiting
        else:
            begun.discard(id(one))
            sizes[id(one)] = size, depth + 1
            todo.pop()
    size, depth = sizes[id(found)]
    if depth > MOST_DEPTH:
        raise CheckpointError(f"{label}: its values lie {depth} deep in each other; a state has {MOST_DEPTH} levels.")
    if size > most_of(num_bytes):
        raise CheckpointError(
            f"{label}: its {num_bytes} bytes name the same values again and again and would unfold to {size} entries, "
            f"of which {most_of(num_bytes)} are read. No state is written like that; do not use the file."
        )


def _inside(one: Any) -> Collection[Any]:
    if isinstance(one, Mapping):
        return [*one.keys(), *one.values()]
    if isinstance(one, list | tuple | set | frozenset):
        return one
    return (one.arguments, one.state) if hasattr(one, "arguments") else ()


def _own_size(one: Any) -> int:
    if isinstance(one, str | bytes):
        return 1 + len(one)
    return 1 + one.bit_length() // 8 if isinstance(one, int) else 1
