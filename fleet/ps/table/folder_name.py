"""The name of a table's folder in a save: the table's name, escaped where a save has a file or folder of that name."""

from __future__ import annotations

import re
from urllib.parse import quote

from fleet.errors import ConfigError

_OF_A_SAVE = re.compile(r"\.|\.\.|.*\.(pt|pt2|json)", re.DOTALL)  # buffers.pt, model.pt, export.json and the like
_DENSE = re.compile(r"dense\.[0-9]+")  # the dense parameters of a group of the optimizer
_MOST_BYTES = 255  # of a name on Linux file systems


def folder_name(table: str, *, dense: bool = False) -> str:
    """Returns the name of the folder of ``table``; ``urllib.parse.unquote`` gives the table's name again.

    Args:
        table: the table's name.
        dense: whether the table is dense.

    Example:
        >>> [folder_name(name) for name in ("ads", "a/b", "model.pt", "dense.0")]
        ['ads', 'a%2Fb', 'model%2Ept', 'dense%2E0']
    """
    name = quote(table, safe=" ")
    is_taken = _OF_A_SAVE.fullmatch(table) or (_DENSE.fullmatch(table) and not dense)
    return name.replace(".", "%2E") if is_taken else name


def check_table_name(table: object) -> None:
    """Raises ConfigError unless ``table`` is a name that a folder can have."""
    try:
        size = len(folder_name(table)) if isinstance(table, str) else 0
    except UnicodeEncodeError:  # half of a surrogate pair
        size = 0
    if not 0 < size <= _MOST_BYTES:
        found = f"; it has {size}" if size else ""
        raise ConfigError(
            f"table {table!r:.60}: a table's name is text that the name of a folder can be made from, of at most "
            f"{_MOST_BYTES} bytes{found}. A letter or digit of ASCII takes one, another sign three for each byte of "
            "its UTF-8. Give SparseEmbedding a shorter name=."
        )
