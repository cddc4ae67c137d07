"""Save and load tables: safe while training runs, readable by any number of servers.

Every server writes its own part: a row file and, once that is durable, a small manifest that names it. Rows are
grouped by virtual range, so that a loader reads only the rows that it will hold::

    {dirname}/{table}/part-{server:03d}.json        manifest: configuration, extents, size
    {dirname}/{table}/part-{server:03d}-{id}.rows   blocks with a checksum each, see fleet.ps.files.row_file

A part replaces an older one of the same server in one step; a crash leaves the old part.

An increment (mode 1) names the saves that it continues, and the ids that were deleted since: it is loaded after one of
these only, see :class:`fleet.ps.table.save_chain.SaveChain`.

Save modes (those of Paddle's CTR accessors)::

    0  every row
    1  delta: score >= base_threshold, delta_score >= delta_threshold, unseen_days <= delta_keep_days;
       the saved delta scores are subtracted from the rows once the part is complete
    2  base: the same without the delta threshold
    3  every row; then every row gets one more unseen day
"""

from __future__ import annotations

import secrets
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fleet.common.plain_files import replacing
from fleet.errors import CheckpointError, ConfigError
from fleet.ps.files.manifest import (
    Extent,
    Manifest,
    Mine,
    Saved,
    blocks_of,
    deleted_of,
    extents_of,
    manifest_path,
    part_number,
    read_manifest,
    read_parts,
    table_folder,
    write_manifest,
)
from fleet.ps.files.row_file import encode_block, open_plain
from fleet.ps.files.text_format import rows_of_text, text_parts
from fleet.ps.table.accessor import accessor_score
from fleet.ps.table.dense_table import DenseTable, DenseTableConfig
from fleet.ps.table.hash import mix, range_of
from fleet.ps.table.layout import Float32s, SparseTableConfig
from fleet.ps.table.rows import RowBlock, join_blocks
from fleet.ps.table.sparse_table import SparseTable
from fleet.ps.table.table_spec import difference_of_shapes

SAVE_MODES = {0: "all", 1: "delta", 2: "base", 3: "batch model"}
_GROUP_BITS = 6  # 64 groups of the 4096 virtual ranges
_ROWS_PER_LOT = 1 << 17


def check_save_mode(mode: int, config: SparseTableConfig | None = None) -> None:
    """Raises ConfigError unless ``mode`` is 0 to 3 and the table keeps the statistics that it needs."""
    if mode not in SAVE_MODES or isinstance(mode, bool):
        raise ConfigError(
            f"save mode {mode!r} is not offered; 0 all, 1 delta, 2 base or 3 batch model. (4 and 5 "
            "belong to the cache of GPU tables.)"
        )
    if config is not None and mode in (1, 2) and config.accessor is None:
        raise ConfigError(
            f"save mode {mode} selects rows of table {config.name!r} by their score, but the table has "
            "no accessor to keep one. Use mode 0, or give the table an accessor."
        )


def save_table(
    table: SparseTable,
    dirname: str | Path,
    *,
    mode: int = 0,
    server: int = 0,
    num_servers: int = 1,
    save_id: str = "",
    stamp: Callable[[], int] | None = None,
) -> Saved:
    """Writes this server's part of a sparse table while pulls and pushes continue.

    Args:
        table: the table.
        dirname: the checkpoint's folder, created if missing.
        mode: see the module's docstring.
        server, num_servers: which part of how many.
        save_id: the same string on all servers of one save and another one for each save, so that an unfinished save
            is refused when loading.
        stamp: called while no push holds ``table.gate``; each block carries the number that it returned when the block
            was copied.

    Raises:
        ConfigError: an unknown mode, or one for which the table keeps no statistics.
        OSError: the disk failed; the previous part is untouched.
    """
    check_save_mode(mode, table.config)
    folder = table_folder(dirname, table.config.name)
    path = _new_part(folder, server, "rows")
    save_id = save_id or secrets.token_hex(8)
    chain = table.chain
    with chain.saving():
        continues, deleted = (chain.saves, chain.deleted.astype("<i8").tobytes()) if mode == 1 else ([], b"")
        with replacing(path) as file:
            writer = _GroupWriter(file)
            for block in table.blocks(stamp=stamp):
                block.ranks = None  # they count the changes of this server alone
                writer.add(_selected(table.config, block, mode))
            extents, rows, num_bytes = writer.finish()
            num_bytes += file.write(deleted)
        manifest = Manifest(
            "sparse", dict(table.config.as_dict()), server, num_servers, save_id, mode, path.name, num_bytes, rows,
            extents, tuple(continues), len(deleted) // 8, zlib.crc32(deleted),
        )  # fmt: skip
        _publish_part(folder, manifest)
        if mode in (1, 2):
            chain.begin_with(save_id)
            # The scores are taken from the file, not from the table: pushes may have raised them since they were saved.
            for _, block in blocks_of(folder, manifest):
                if block.statistics is not None:
                    table.settle(block.keys, block.statistics.delta_scores)
        else:
            chain.add_whole(save_id)
        if mode == 3:
            table.advance_day()
    return Saved(rows, num_bytes, path)


def load_table(
    table: SparseTable, dirname: str | Path, *, mine: Mine | None = None, ranges: tuple[int, int] | None = None
) -> int:
    """Loads rows from a save of any number of servers and returns how many; rows that do not belong here are skipped.

    A folder with text parts instead of such a save is read as text.

    Args:
        table: the table; rows of the same keys are replaced, others stay.
        dirname: the checkpoint's folder.
        mine: which of the given keys belong here; ``None`` takes all.
        ranges: (first, last + 1) virtual ranges outside which ``mine`` is False; blocks outside are not read.

    Raises:
        CheckpointError: a file is absent, damaged, or of a table of another shape; the table is unchanged.
    """
    check_table(table, dirname, ranges=ranges)
    return load_checked_table(table, dirname, mine=mine, ranges=ranges)


def check_table(table: SparseTable, dirname: str | Path, *, ranges: tuple[int, int] | None = None) -> None:
    """Reads the save that :func:`load_table` would load, a block at a time; the table is unchanged.

    Raises:
        CheckpointError: a file is absent, damaged, or of a table of another shape.
    """
    _, parts, blocks = _saved_rows(table, dirname, None, ranges)
    for part in parts:
        deleted_of(table_folder(dirname, table.config.name), part)
    for _ in blocks:
        pass


def load_checked_table(
    table: SparseTable, dirname: str | Path, *, mine: Mine | None = None, ranges: tuple[int, int] | None = None
) -> int:
    """Loads a save that :func:`check_table` has read; arguments and result are those of :func:`load_table`.

    Raises:
        CheckpointError: a file has been damaged since; the table may have a part of the rows.
    """
    expected, parts, blocks = _saved_rows(table, dirname, mine, ranges)
    loaded = 0
    # Deletions first: an id that was deleted and has come back since is among the rows.
    for part in parts:
        gone = deleted_of(table_folder(dirname, table.config.name), part)
        table.erase(gone if mine is None else gone[mine(gone)])
    table.reserve(expected)
    for block in blocks:
        table.insert(block)
        loaded += len(block)
    table.chain.begin([part.save_id for part in parts[:1]])
    return loaded


def _saved_rows(
    table: SparseTable, dirname: str | Path, mine: Mine | None, ranges: tuple[int, int] | None
) -> tuple[int, Sequence[Manifest], Iterator[RowBlock]]:
    """Returns how many rows of a save to make room for, its parts, and the rows that belong here, read on the way."""
    folder = table_folder(dirname, table.config.name)
    if not list(folder.glob("part-*.json")) and text_parts(folder):
        return 0, (), rows_of_text(table, dirname, mine=mine)
    parts = read_parts(folder)
    for part in parts:
        _check_fits(manifest_path(folder, part.server), table.config, part)
        _check_continues(folder, table, part)
    expected = sum(extent.rows for part in parts for extent in extents_of(part, ranges))
    width = table.layout.row_floats
    blocks = (block for part in parts for _, block in blocks_of(folder, part, ranges, row_floats=width))
    return expected, parts, (block if mine is None else block.take(mine(block.keys)) for block in blocks)


def _check_continues(folder: Path, table: SparseTable, part: Manifest) -> None:
    held = table.chain.saves
    if part.mode != 1 or set(held) & set(part.continues) or (not held and not part.continues):
        return
    wanted = f"save {part.continues[-1]}" if part.continues else "no other save"
    there = f"save {held[-1]}" if held else "no save"
    raise CheckpointError(
        f"{folder}: save {part.save_id} is an increment (mode 1) that continues {wanted}, and table "
        f"{table.config.name!r} holds {there}. Load the base first (mode 0 or 2), then every "
        "increment after it, each once and in the order in which they were saved."
    )


class _GroupWriter:
    """Collects rows, and writes each lot as one block per group of virtual ranges (and per stamp)."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._waiting: dict[int, list[RowBlock]] = {}
        self._extents: list[Extent] = []
        self._waiting_rows = self._rows = self._offset = 0

    def add(self, block: RowBlock) -> None:
        """Adds the rows of one copied block; they keep its stamp."""
        if len(block):
            self._waiting.setdefault(block.stamp, []).append(block)
            self._waiting_rows += len(block)
        if self._waiting_rows >= _ROWS_PER_LOT:
            self._flush()

    def _flush(self) -> None:
        groups = 2**_GROUP_BITS
        lots = [join_blocks(blocks) for blocks in self._waiting.values()]
        self._waiting = {}
        self._waiting_rows = 0
        orders = []
        bounds = []
        # A stable sort per lot: rows of one stamp keep their order, and each group of a lot becomes one block.
        for lot in lots:
            group = (range_of(mix(lot.keys)) >> (12 - _GROUP_BITS)).astype(np.uint8)
            orders.append(np.argsort(group, kind="stable"))
            bounds.append(np.concatenate(([0], np.cumsum(np.bincount(group, minlength=groups)))))
        for number in range(groups):
            offset = self._offset
            rows = 0
            for lot, order, edges in zip(lots, orders, bounds, strict=True):
                places = order[edges[number] : edges[number + 1]]
                if len(places):
                    self._offset += self._file.write(encode_block(lot.take(places)))
                    rows += len(places)
            if rows:
                width = 12 - _GROUP_BITS
                last = ((number + 1) << width) - 1
                self._extents.append(Extent(offset, self._offset - offset, rows, number << width, last))
                self._rows += rows

    def finish(self) -> tuple[tuple[Extent, ...], int, int]:
        """Writes the remaining rows; returns extents, rows and bytes."""
        self._flush()
        return tuple(self._extents), self._rows, self._offset


def _selected(config: SparseTableConfig, block: RowBlock, mode: int) -> RowBlock:
    accessor = config.accessor
    kept = block.statistics
    if mode in (0, 3) or accessor is None or kept is None:
        return block
    keep = block.admitted & (accessor_score(accessor, kept.shows, kept.clicks) >= accessor.base_threshold)
    keep &= block.unseen_days <= accessor.delta_keep_days
    if mode == 1:
        keep &= kept.delta_scores >= accessor.delta_threshold
    return block.take(keep)


def _check_fits(path: Path, config: SparseTableConfig, part: Manifest) -> None:
    if part.kind != "sparse":
        raise CheckpointError(f"{path}: a {part.kind} table; {config.name!r} is a sparse one.")
    wanted = config.as_dict()
    for key in ("dim", "rule", "embed_rule"):
        have = part.config.get(key) if key == "dim" else _field(part.config.get(key), "name")
        want = wanted[key] if key == "dim" else _field(wanted[key], "name")
        if have != want:
            raise CheckpointError(
                f"{path}: saved with {key} {have!r}; table {config.name!r} has {want!r}. Rows of "
                "another shape cannot be loaded."
            )
    if _field(part.config.get("accessor"), "kind") != _field(wanted["accessor"], "kind"):
        raise CheckpointError(
            f"{path}: saved with accessor {part.config.get('accessor')!r}; table {config.name!r} "
            f"has {wanted['accessor']!r}."
        )


def _field(values: Any, name: str) -> Any:
    return values.get(name) if isinstance(values, dict) else None


def save_dense(
    table: DenseTable,
    dirname: str | Path,
    *,
    start: int = 0,
    total: int | None = None,
    server: int = 0,
    num_servers: int = 1,
    save_id: str = "",
) -> Saved:
    """Writes this server's elements ``start`` on of ``total``, with the state of their rule, from one moment."""
    values, state = table.read_state()
    folder = table_folder(dirname, table.config.name, dense=True)
    path = _new_part(folder, server, "dense")
    data = values.astype("<f4").tobytes() + state.astype("<f4").tobytes()
    with replacing(path) as file:
        file.write(data)
    config = {
        "name": table.config.name,
        "rule": table.config.rule.name,
        "start": start,
        "crc32": zlib.crc32(data),
        "total": table.config.size if total is None else total,
        **({} if table.config.shapes is None else {"shapes": table.config.shapes}),
    }
    _publish_part(folder, Manifest("dense", config, server, num_servers, save_id, 0, path.name, len(data), len(values)))
    return Saved(len(values), len(data), path)


def load_dense(table: DenseTable, dirname: str | Path, *, start: int = 0, total: int | None = None) -> None:
    """Fills the table with its elements from a save of any number of servers; state per element comes with them.

    Step counts of several servers become the largest one.

    Raises:
        CheckpointError: a file is absent, damaged, or does not hold these elements, or the parameters of the save have
            other shapes where both are known; the table is unchanged.
    """
    table.set_state(*read_dense(table.config, dirname, start=start, total=total))


def read_dense(
    config: DenseTableConfig, dirname: str | Path, *, start: int = 0, total: int | None = None
) -> tuple[Float32s, Float32s]:
    """Returns the values and the state that :func:`load_dense` would give a table.

    Raises:
        CheckpointError: as for :func:`load_dense`.
    """
    folder = table_folder(dirname, config.name, dense=True)
    size = config.size
    spec = config.rule.spec
    per_dim = len(spec.per_dim)
    values = np.zeros((1 + per_dim, size), np.float32)
    state = np.zeros(len(spec.per_row), np.float32)
    for part in read_parts(folder):
        _check_fits_dense(manifest_path(folder, part.server), config, part, size if total is None else total)
        saved, extra = _dense_of(folder, part, per_dim, len(state))
        origin = part.config["start"]
        first = max(start, origin)
        last = min(start + size, origin + part.rows)
        if first < last:
            values[:, first - start : last - start] = saved[:, first - origin : last - origin]
        state = np.maximum(state, extra)
    return values[0].copy(), np.concatenate((values[1:].reshape(-1), state))


def _check_fits_dense(path: Path, config: DenseTableConfig, part: Manifest, total: int) -> None:
    difference = difference_of_shapes(part.config.get("shapes"), config.shapes, config.names)
    if part.kind != "dense" or part.config["rule"] != config.rule.name or part.config["total"] != total:
        first = f" First of all, {difference}." if difference else ""
        raise CheckpointError(
            f"{path}: a {part.kind} table of {part.config.get('total')} elements under rule "
            f"{part.config.get('rule')!r}; {config.name!r} has {total} under {config.rule.name!r}.{first}"
        )
    if difference:
        raise CheckpointError(
            f"{path}: saved from a model whose parameters have other shapes: of {config.name!r}, {difference}. Load a "
            "save of this model, or build the model that was saved."
        )


def _dense_of(folder: Path, part: Manifest, per_dim: int, per_row: int) -> tuple[Float32s, Float32s]:
    with open_plain(folder / part.data) as file:
        data = file.read()
    if zlib.crc32(data) != part.config["crc32"] or len(data) != 4 * ((1 + per_dim) * part.rows + per_row):
        raise CheckpointError(
            f"{folder / part.data}: the checksum or the size is wrong. The file is damaged; load another checkpoint."
        )
    array = np.frombuffer(data, "<f4").astype(np.float32)
    split = (1 + per_dim) * part.rows
    return array[:split].reshape(1 + per_dim, part.rows), array[split:]


def _new_part(folder: Path, server: int, suffix: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for abandoned in folder.glob(f".part-{server:03d}-*.tmp"):
        abandoned.unlink(missing_ok=True)
    return folder / f"part-{server:03d}-{secrets.token_hex(6)}.{suffix}"


def _publish_part(folder: Path, manifest: Manifest) -> None:
    """Makes this part the server's current one and removes row files that no manifest names any longer."""
    write_manifest(folder, manifest)
    for old in folder.glob(f"part-{manifest.server:03d}-*"):
        if old.suffix in (".rows", ".dense") and old.name != manifest.data:
            old.unlink(missing_ok=True)
    # Parts of a save by more servers would make this one look unfinished. Their manifests may be forged, so only files
    # of the part's own name are removed, none that a manifest names.
    for path in folder.glob("part-*.json"):
        if (number := part_number(path)) is not None and number >= manifest.num_servers and _is_old(path, manifest):
            for old in (*folder.glob(f"part-{number:03d}-*.rows"), *folder.glob(f"part-{number:03d}-*.dense"), path):
                old.unlink(missing_ok=True)


def _is_old(path: Path, manifest: Manifest) -> bool:
    """Returns whether the part at ``path`` is from another save than ``manifest``, or cannot be loaded."""
    try:
        other = read_manifest(path)
    except CheckpointError:
        return True
    return (other.save_id, other.num_servers) != (manifest.save_id, manifest.num_servers)
