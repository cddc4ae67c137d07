"""split_files: the files of each worker. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence


def split_files(files: Sequence[str], index: int, count: int) -> list[str]:
    """Returns part ``index`` of ``count`` contiguous parts; the first ``len(files) % count`` hold one more.

    Example:
        >>> split_files(["a", "b", "c"], 0, 2), split_files(["a", "b", "c"], 1, 2)
        (['a', 'b'], ['c'])
    """
    each, more = divmod(len(files), count)
    begin = index * each + min(index, more)
    return list(files[begin : begin + each + (index < more)])
