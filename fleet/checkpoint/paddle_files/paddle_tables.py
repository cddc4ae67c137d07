"""Saves of Paddle's parameter server (2.4 to 2.6): sparse tables row for row, and dense parameters.

[Note: What the servers write]
``fleet.save_persistables(exe, dirname, mode=...)`` gives each table a folder of its number, sparse tables first::

    dirname/000/part-SSS-NNNNN[.gz]   rows of shard NNNNN, written by server SSS; a key is in shard key % 1000
    dirname/001/part-SSS[.gz]         dense parameters, a number a line, all parameters in the order of their names

Modes 0 and 3 compress the rows, modes 1 and 2 do not; a row is a line as in :mod:`fleet.ps.files.text_format`, in all
modes. Empty shards are written, too, so a missing file means missing rows. Numbers have six digits. There is no
manifest, and a save into a folder of another mode or number of servers leaves the older files beside the new ones.
"""

from __future__ import annotations

import gzip
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from fleet.checkpoint.paddle_files.paddle_pickle import PaddleState
from fleet.errors import CheckpointError
from fleet.ps.files.row_file import open_plain
from fleet.ps.files.text_format import import_text, text_parts
from fleet.ps.table.sparse_table import SparseTable

_SHARDS = 1000
_SPARSE = re.compile(r"part-([0-9]+)-([0-9]+)(?:\.gz)?")
_DENSE = re.compile(r"part-([0-9]+)(?:\.gz)?")
_MOST_LINE = 1 << 16
_SHOWN = 5


def load_paddle_table(table: SparseTable, dirname: str | Path, table_id: int = 0, *, num_shards: int = _SHARDS) -> int:
    """Loads a sparse table that servers of Paddle saved, in mode 0 to 3, and returns how many rows it had.

    Weights, states of the rule, shows, clicks, days and slots are those of the file. Rows of the same keys are
    replaced, others stay, so the changes of a mode 1 can follow a mode 0 or 2.

    Args:
        table: a table of the saved one's dim and rules, with an accessor, which every table of Paddle has.
        dirname: the folder that was saved to.
        table_id: the table's number; sparse tables count from 0.
        num_shards: ``shard_num`` of the table in Paddle.

    Raises:
        CheckpointError: files are missing, are there twice or are damaged, or hold rows of another shape; the table is
            unchanged.

    Example:
        >>> config = ps.SparseTableConfig("ads", 8, ps.rule_from_paddle("SparseAdamSGDRule"), accessor=ps.Accessor())
        >>> table = ps.SparseTable(config)
        >>> fleet.checkpoint.load_paddle_table(table, "paddle_model")
        1220
        >>> ps.save_table(table, "model")  # fleet.init_server("model", var_names=["ads"]) starts from it
    """
    if table.config.accessor is None:
        raise CheckpointError(
            f"table {table.config.name!r} has no accessor, so shows, clicks and days of Paddle's rows would be lost. "
            "Give it one: SparseTableConfig(..., accessor=Accessor())."
        )
    folder = _folder(dirname, table_id)
    _check_shards(folder, text_parts(folder), num_shards)
    return import_text(table, dirname, folder=folder.name)


def paddle_dense(dirname: str | Path, shapes: Mapping[str, Sequence[int]], table_id: int = 1) -> PaddleState:
    """Returns the dense parameters that servers of Paddle saved, for :func:`paddle_state`.

    The state of their rule is left where it is: a dense table of Paddle counts one step of Adam for each shard, so its
    count is not that of the steps.

    Args:
        dirname: the folder that was saved to.
        shapes: every parameter by its name in Paddle, with its shape there: ``{"fc_0.w_0": (8, 1), "fc_0.b_0": (1,)}``.
        table_id: the table's number; the dense table comes after the sparse ones.

    Raises:
        CheckpointError: files are missing, are there twice or are damaged, or hold another number of elements.

    Example:
        >>> dense = fleet.checkpoint.paddle_dense("paddle_model", {"fc_0.w_0": (8, 1), "fc_0.b_0": (1,)})
        >>> model.load_state_dict(fleet.checkpoint.paddle_state(dense, model=model))
        <All keys matched successfully>
    """
    folder = _folder(dirname, table_id)
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    most = sum(sizes.values()) + 1  # one more is enough to see that they do not fit
    values = np.concatenate([_numbers(path, most) for path in _dense_parts(folder)])
    if sum(sizes.values()) != len(values):
        held = f"{len(values)} elements" if len(values) < most else f"{most} elements or more"
        raise CheckpointError(
            f"{folder} holds {held}; shapes has {sum(sizes.values())}: {dict(shapes)!r:.200}. It must "
            "list every dense parameter, with its shape in Paddle."
        )
    state = PaddleState()
    start = 0
    for name in sorted(shapes):
        state[name] = torch.from_numpy(values[start : start + sizes[name]].copy()).reshape(tuple(shapes[name]))
        start += sizes[name]
    return state


def _folder(dirname: str | Path, table_id: int) -> Path:
    folder = Path(dirname) / f"{table_id:03d}"
    if folder.is_symlink() or not folder.is_dir():
        there = sorted(path.name for path in Path(dirname).glob("[0-9][0-9][0-9]"))
        raise CheckpointError(
            f"{folder} is no folder. Servers of Paddle save table {table_id} there; tables here: {there or 'none'}. "
            "(In geo mode Paddle saves no sparse table.)"
        )
    return folder


def _check_shards(folder: Path, paths: list[Path], num_shards: int) -> None:
    """Raises CheckpointError unless each shard is there once."""
    seen: dict[int, str] = {}
    for path in paths:
        match = _SPARSE.fullmatch(path.name)
        if match is None:
            continue
        if int(match[2]) in seen:
            raise CheckpointError(
                f"{folder} has shard {int(match[2])} twice: {seen[int(match[2])]} and {path.name}. Two saves (of other "
                "modes or numbers of servers) went to this folder; remove the files of the older one."
            )
        seen[int(match[2])] = path.name
    missing = sorted(set(range(num_shards)) - set(seen))
    beyond = sorted(set(seen) - set(range(num_shards)))
    if missing or beyond:
        what = f"lacks {len(missing)} of {num_shards} shards" if missing else f"has more than {num_shards} shards"
        raise CheckpointError(
            f"{folder} {what}: {(missing or beyond)[:_SHOWN]}. Bring the files of all servers here; where shard_num of "
            "the table was another in Paddle, give num_shards."
        )


def _dense_parts(folder: Path) -> list[Path]:
    found: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):
        match = _DENSE.fullmatch(path.name)
        if match is None:
            raise CheckpointError(f"{path} is no file of a dense table (part-SSS). Is {folder.name} a sparse one?")
        if int(match[1]) in found:
            raise CheckpointError(f"{folder} has server {int(match[1])} twice. Remove the file of the older save.")
        found[int(match[1])] = path
    if not found or list(sorted(found)) != list(range(len(found))):
        raise CheckpointError(f"{folder} has the parts of servers {sorted(found)}; bring those of all servers here.")
    return [found[server] for server in sorted(found)]


def _numbers(path: Path, most: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Returns the first number of each of at most ``most`` lines, float32."""
    values: list[float] = []
    number = 0
    try:
        with open_plain(path) as raw, gzip.open(raw) if path.suffix == ".gz" else raw as file:
            while len(values) < most and (line := file.readline(_MOST_LINE)):
                number += 1
                if line.strip():
                    values.append(float(line.split(None, 1)[0]))
    except (OSError, EOFError, ValueError, zlib.error) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}, line {number}: {error}. The file is damaged.") from None
    return np.array(values, np.float32)
