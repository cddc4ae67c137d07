"""Text rows: a table as lines that people and other programs can read (D.8, the 3.x layout).

One file per server, ``{dirname}/{table}/part-{server:03d}-00000`` (``.gz`` when compressed); the files of all
servers together are the whole embedding. A line is::

    key slot unseen_days delta_score show click embed_w [embed state] embedx_w... [embedx state]

The embed part is the first column; the embedx part and its state are absent while the row has none. State is in
the order of the rule; the step count t of Adam is written as ``beta1^(t+1) beta2^(t+1)``, the factors of its
next step, as Paddle keeps them. Numbers have nine digits, so a table is restored bit for bit. A table without an
accessor writes its pushes as shows, and state that its rule keeps once per row is in both parts.
"""

from __future__ import annotations

import gzip
import math
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from fleet.common.plain_files import replacing
from fleet.errors import CheckpointError
from fleet.ps.files.manifest import Mine, Saved, table_folder
from fleet.ps.files.row_file import open_plain
from fleet.ps.table.layout import Float32s
from fleet.ps.table.rows import MAX_ROW_COUNT, MAX_UNSEEN_DAYS, RowBlock, Statistics
from fleet.ps.table.rules import Rule
from fleet.ps.table.sparse_table import SparseTable

_HEAD = 6
_ROWS_AT_A_TIME = 4096
_NUMBER_BYTES = 64  # the longest number: without a limit a compressed file of 3 MB could hold a line of 3 GB
_PART = re.compile(r"part-[0-9]+-[0-9]+(\.gz)?")
_NUMBER = re.compile(r"part-([0-9]+)")


class _TextRow:
    """Maps the numbers of a line to places in a row: a list of places for each of the two parts."""

    def __init__(self, table: SparseTable) -> None:
        layout = table.layout
        self.width = layout.row_floats
        self.parts: list[list[int]] = []
        self.steps: list[tuple[int, int, Rule]] = []
        spans = [(0, 1)] + ([(1, layout.num_weights)] if layout.num_weights > 1 else [])
        for part, (start, stop) in enumerate(spans):
            block = next(b for b in layout.blocks if b.column <= start < b.column + b.width)
            rule = block.rule
            places = list(range(start, stop))
            for i in range(len(rule.spec.per_dim)):
                first = block.state + i * block.width - block.column
                places += range(first + start, first + stop)
            for i, name in enumerate(rule.spec.per_row):
                place = block.state + len(rule.spec.per_dim) * block.width + i
                if name == "step":
                    # Two numbers of the line for one of the row.
                    self.steps.append((part, len(places), rule))
                    places.append(place)
                places.append(place)
            self.parts.append(places)

    def numbers(self, values: Float32s, part: int) -> npt.NDArray[np.float64]:
        """Returns the numbers of lines for one part of rows ``values``."""
        out = values[:, self.parts[part]].astype(np.float64)
        for of_part, column, rule in self.steps:
            if of_part == part:
                steps = out[:, column].copy()
                out[:, column] = rule["beta1"] ** (steps + 1)
                out[:, column + 1] = rule["beta2"] ** (steps + 1)
        return out

    def fill(self, values: Float32s, part: int, numbers: npt.NDArray[np.float64]) -> None:
        """Writes one part of lines to rows ``values``."""
        numbers = numbers.copy()
        for of_part, column, rule in self.steps:
            if of_part == part:
                steps = _steps_of(numbers[:, column], numbers[:, column + 1], rule)
                numbers[:, column] = steps
                numbers[:, column + 1] = steps
        values[:, self.parts[part]] = numbers


def _steps_of(power1: npt.NDArray[np.float64], power2: npt.NDArray[np.float64], rule: Rule) -> npt.NDArray[np.float64]:
    """Returns t from beta1^(t+1) and beta2^(t+1), by the slower power while it is above zero."""
    steps = np.zeros(len(power1))
    for power, beta in ((power1, rule["beta1"]), (power2, rule["beta2"])):
        if 0.0 < beta < 1.0:
            known = power > 0.0
            steps[known] = np.maximum(steps[known], np.rint(np.log(power[known]) / math.log(beta)) - 1)
    return steps


def export_text(table: SparseTable, dirname: str | Path, *, server: int = 0, compress: bool = False) -> Saved:
    """Writes this server's rows as text while training continues; omits rows that wait for admission."""
    folder = table_folder(dirname, table.config.name)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"part-{server:03d}-00000{'.gz' if compress else ''}"
    row = _TextRow(table)
    rows = 0
    with replacing(path) as raw:
        # Without a name and a time in the header, the same rows make the same bytes.
        file: gzip.GzipFile | BinaryIO = gzip.GzipFile("", "wb", 6, raw, mtime=0) if compress else raw
        for block in table.blocks():
            block = block.take(block.admitted)
            file.writelines(_lines_of(row, block))
            rows += len(block)
        if compress:
            file.close()
        num_bytes = raw.tell()
    other = path.with_suffix("") if compress else path.with_name(f"{path.name}.gz")
    other.unlink(missing_ok=True)
    return Saved(rows, num_bytes, path)


def save_text(table: SparseTable, dirname: str | Path, *, server: int = 0, num_servers: int = 1) -> Saved:
    """Writes this server's rows as text, in place of an earlier save of this table in the folder."""
    saved = export_text(table, dirname, server=server)
    folder = table_folder(dirname, table.config.name)
    _remove(server, num_servers, [*folder.glob("part-*.json"), *folder.glob("part-*.rows")])
    if server == 0:
        _remove(-1, num_servers, text_parts(folder))
    return saved


def remove_text(folder: Path, server: int, num_servers: int) -> None:
    """Removes the text of a server's part; server 0 also removes the text of servers beyond ``num_servers``."""
    _remove(server, num_servers, text_parts(folder))


def _remove(server: int, num_servers: int, paths: list[Path]) -> None:
    for path in paths:
        match = _NUMBER.match(path.name)
        if match and (int(match[1]) == server or (int(match[1]) >= num_servers and server <= 0)):
            path.unlink(missing_ok=True)


def _lines_of(row: _TextRow, block: RowBlock) -> Iterator[bytes]:
    n = len(block)
    kept = block.statistics
    zeros = np.zeros(n)
    slots = zeros.astype(int) if kept is None else kept.slots
    shows = block.counts if kept is None else kept.shows
    clicks = zeros if kept is None else kept.clicks
    deltas = zeros if kept is None else kept.delta_scores
    parts = [row.numbers(block.values, part) for part in range(len(row.parts))]
    formats = [" %.9g" * numbers.shape[1] for numbers in parts]
    heads = zip(
        block.keys.tolist(),
        slots.tolist(),
        block.unseen_days.tolist(),
        deltas.tolist(),
        shows.tolist(),
        clicks.tolist(),
        block.has_embedx.tolist(),
        strict=True,
    )
    for i, (key, slot, unseen, delta, show, click, has_embedx) in enumerate(heads):
        line = "%d %d %d %.9g %.17g %.17g" % (key, slot, unseen, delta, show, click)  # noqa: UP031
        for numbers, form in zip(parts[: 2 if has_embedx else 1], formats, strict=False):
            line += form % tuple(numbers[i].tolist())
        yield (line + "\n").encode()


def text_parts(folder: Path) -> list[Path]:
    """Returns the text parts in a table's folder."""
    return sorted(path for path in folder.glob("part-*") if _PART.fullmatch(path.name))


def import_text(table: SparseTable, dirname: str | Path, *, mine: Mine | None = None, folder: str | None = None) -> int:
    """Returns how many rows were put into the table from the text parts of any number of servers.

    Args:
        table: the table; rows of the same keys are replaced, others stay.
        dirname: the checkpoint's folder.
        mine: which of the given keys belong here; ``None`` takes all.
        folder: the folder in it that has the parts; ``None`` is the one of the table's name.

    Raises:
        CheckpointError: no parts, or a line that is not a row of this table (the message names file and line); the
            table is unchanged.
    """
    # Read twice: a wrong line in the last part must leave the table unchanged.
    for _ in rows_of_text(table, dirname, folder=folder):
        pass
    loaded = 0
    for block in rows_of_text(table, dirname, mine=mine, folder=folder):
        table.insert(block)
        loaded += len(block)
    return loaded


def rows_of_text(
    table: SparseTable, dirname: str | Path, *, mine: Mine | None = None, folder: str | None = None
) -> Iterator[RowBlock]:
    """Yields the rows that :func:`import_text` would put into the table; raises the same errors."""
    parts = table_folder(dirname, table.config.name if folder is None else folder)
    paths = text_parts(parts)
    if not paths:
        raise CheckpointError(f"{parts}: no text parts here (part-NNN-NNNNN, or the same with .gz).")
    row = _TextRow(table)
    for path in paths:
        for block in _blocks_of_text(path, row, table):
            yield block if mine is None else block.take(mine(block.keys))


def _blocks_of_text(path: Path, row: _TextRow, table: SparseTable) -> Iterator[RowBlock]:
    lines: list[list[str]] = []
    number = 0
    most = _NUMBER_BYTES * (_HEAD + sum(map(len, row.parts)))
    try:
        with open_plain(path) as raw, gzip.open(raw) if path.suffix == ".gz" else raw as file:
            while data := file.readline(most + 1):
                number += 1
                if len(data) > most:
                    raise CheckpointError(f"{path}:{number}: a row of this table has at most {most} bytes as text.")
                if (line := data.decode("ascii")).strip():
                    lines.append(line.split())
                    _check_line(f"{path}:{number}", lines[-1], row)
                if len(lines) == _ROWS_AT_A_TIME:
                    yield _block_of(f"{path}, up to line {number}", lines, row, table)
                    lines = []
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}, after line {number}: {error}. The file is damaged.") from None
    if lines:
        yield _block_of(f"{path}, up to line {number}", lines, row, table)


def _check_line(where: str, tokens: list[str], row: _TextRow) -> None:
    short = _HEAD + len(row.parts[0])
    allowed = {short, short + sum(map(len, row.parts[1:]))}
    if len(tokens) not in allowed:
        raise CheckpointError(
            f"{where}: {len(tokens)} numbers; a row of this table has {' or '.join(map(str, sorted(allowed)))}."
        )


def _block_of(where: str, lines: list[list[str]], row: _TextRow, table: SparseTable) -> RowBlock:
    n = len(lines)
    short = _HEAD + len(row.parts[0])
    try:
        keys = np.array([_key_of(tokens[0]) for tokens in lines], np.int64)
        head = np.array([tokens[1:short] for tokens in lines], np.float64)
        full = np.array([len(tokens) > short or len(row.parts) == 1 for tokens in lines], bool)
        rest = np.array([tokens[short:] for tokens in lines if len(tokens) > short], np.float64)
    except (ValueError, OverflowError) as error:
        raise CheckpointError(f"{where}: {error}. The file is damaged.") from None
    values = np.zeros((n, row.width), np.float32)
    row.fill(values, 0, head[:, _HEAD - 1 :])
    if len(row.parts) > 1 and full.any():
        filled = values[full]
        row.fill(filled, 1, rest)
        values[full] = filled
    unseen = np.clip(head[:, 1], 0, MAX_UNSEEN_DAYS).astype(np.int64)
    counts = np.clip(head[:, 3], 0, MAX_ROW_COUNT).astype(np.int64)
    kept = None
    if table.layout.has_statistics:
        kept = Statistics(head[:, 3], head[:, 4], head[:, 2].astype(np.float32), head[:, 0].astype(np.uint32))
    return RowBlock(keys, unseen, counts, np.ones(n, bool), full, values, kept)


def _key_of(token: str) -> int:
    # Keys from 2**63 up, which other programs write unsigned, are the negative ones of the same 64 bits.
    key = int(token)
    if not -(2**63) <= key < 2**64:
        raise ValueError(f"the key {token} does not fit 64 bits")
    return key if key < 2**63 else key - 2**64
