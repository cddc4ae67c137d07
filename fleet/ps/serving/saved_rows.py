"""The rows of a full save, mapped: a folder that ``fleet.save_persistables`` or ``save_inference_model`` wrote."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fleet.errors import CheckpointError
from fleet.ps.files.manifest import Manifest, blocks_of, read_parts, table_folder
from fleet.ps.files.row_file import values_offset
from fleet.ps.files.text_format import text_parts
from fleet.ps.serving.local_rows import FolderRows, LocalState, MappedRows, Position, TableShare, map_file
from fleet.ps.table.layout import SparseTableConfig, plan_layout
from fleet.ps.table.table_spec import config_of_spec


def is_save(folder: Path) -> bool:
    """Returns whether ``folder`` has tables of a save: folders with ``part-NNN.json``, or parts of text."""
    return any(True for _ in folder.glob("*/part-*"))


class SavedRows(FolderRows):
    """Reads a save, and again when another one has replaced it.

    Rows are mapped, except those of a table whose accessor pulls show and click: they are copied into memory, with
    the counters before the weights.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[str, list[Manifest]] = {}
        self.state = LocalState()

    def refresh(self) -> bool:
        """Returns whether there is a newer state than before; ``state`` is whole either way.

        Raises:
            CheckpointError: a save that is damaged, unfinished, or has no rows to look up.
        """
        tables: dict[str, list[Manifest]] = {}
        for folder in sorted(path for path in self._folder.iterdir() if path.is_dir()):
            if not any(True for _ in folder.glob("part-*")):
                continue
            if not any(True for _ in folder.glob("part-*.json")) and text_parts(folder):
                raise CheckpointError(f"{folder}: a save as text, which is not looked up. Save with text=False.")
            parts = read_parts(folder)
            if parts[0].kind == "sparse":
                tables[str(parts[0].config.get("name"))] = parts
        if not tables:
            raise CheckpointError(f"{self._folder}: no sparse table here; the save holds dense tables only.")
        if tables == self._read:
            return False
        self.state = _state_of(self._folder, tables)
        self._read = tables
        return True


def _state_of(folder: Path, tables: dict[str, list[Manifest]]) -> LocalState:
    dims: dict[str, int] = {}
    shares: dict[tuple[str, int], TableShare] = {}
    positions: dict[int, Position] = {}
    for name, parts in tables.items():
        for part in parts:
            if part.mode == 1:
                raise CheckpointError(
                    f"{folder}: table {name!r} was saved in mode 1, which holds only the rows that changed. Serve a "
                    "save of mode 0."
                )
            config = config_of_spec({**part.config, "kind": "sparse"})
            assert isinstance(config, SparseTableConfig)
            dims[name] = config.dim
            shares[name, part.server] = _share_of(folder, config, part)
            positions[part.server] = Position(part.save_id, 0)
    return LocalState(dims, shares, positions)


def _share_of(folder: Path, config: SparseTableConfig, part: Manifest) -> TableShare:
    layout = plan_layout(config)
    path = table_folder(folder, config.name)
    octets = map_file(path / part.data)
    # Each list begins with an empty array: a part may have no rows, and concatenate() refuses empty lists.
    keys = [np.empty(0, np.int64)]
    offsets = [np.empty(0, np.int64)]
    copied = [np.empty((0, config.dim), np.float32)]
    for start, block in blocks_of(path, part, row_floats=layout.row_floats):
        keys.append(block.keys[block.admitted])
        if layout.num_counters and block.statistics is not None:
            counters = np.stack([block.statistics.shows, block.statistics.clicks], axis=1).astype(np.float32)
            copied.append(np.concatenate([counters, block.values[:, : layout.num_weights]], axis=1)[block.admitted])
        else:
            # The rows stay in the file; only where each begins is kept.
            first = start + values_offset(len(block))
            offsets.append(first + 4 * layout.row_floats * np.flatnonzero(block.admitted))
    ids = np.concatenate(keys)
    if layout.num_counters:
        octets = np.concatenate(copied).view(np.uint8).reshape(-1)
        offsets = [4 * config.dim * np.arange(len(ids))]
    return TableShare().extended(ids, np.concatenate(offsets), MappedRows(octets, config.dim))
