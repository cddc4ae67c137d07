"""Row groups of Parquet files as tensors: the schema is checked once, nulls where they are read."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fleet.common.extras import install_line
from fleet.errors import ConfigError, FleetError
from fleet.features.column import Words

if TYPE_CHECKING:
    import pyarrow as pa

OFFSETS = ".offsets"


def import_arrow() -> tuple[Any, Any]:
    """Returns ``pyarrow`` and ``pyarrow.parquet``.

    Raises:
        ConfigError: pyarrow is not installed.
    """
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(f"ParquetDataset needs pyarrow; {install_line('parquet')}.") from error
    return pyarrow, pyarrow.parquet


def found_files(paths: Any) -> list[str]:
    """Returns the files of paths, globs and folders, sorted within each, none twice.

    Raises:
        ConfigError: a path has no files, or a file is named twice.
    """
    files: list[str] = []
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    for path in given:
        text = str(path)
        is_folder = Path(text).is_dir()
        named = _files_below(Path(text)) if is_folder else glob.glob(text, recursive=True)
        if not named and Path(text).is_file():
            named = [text]
        if not named:
            what = "a folder without *.parquet files" if is_folder else "no file"
            raise ConfigError(f"ParquetDataset({text!r}): {what}. Give files, globs or folders that this worker has.")
        files += sorted(named)
    if not files or len({os.path.realpath(file) for file in files}) < len(files):
        raise ConfigError(f"ParquetDataset(paths={paths!r}): no file, or a file twice. Name each file once.")
    return files


def _files_below(folder: Path) -> list[str]:
    found = ((file, file.relative_to(folder).parts) for file in folder.rglob("*.parquet"))
    return [str(file) for file, parts in found if not any(part.startswith(("_", ".")) for part in parts)]


class ParquetFiles:
    """The row groups of some files of one schema, and how the chosen columns become tensors."""

    def __init__(
        self, files: Sequence[str], columns: Sequence[str] | None, fill: Any, read_by_transforms: Sequence[str] = ()
    ) -> None:
        self._pa, self._pq = import_arrow()
        self._fill = fill
        self._transformed = frozenset(read_by_transforms)
        self.groups: list[tuple[str, int, int]] = []  # file, row group, rows
        self._schema: Any = None
        self._metadata: dict[str, Any] = {}
        self._written: dict[str, tuple[int, int]] = {}  # size, and when it was changed last
        self.columns: list[str] = []  # all that are read
        self.chosen: list[str] = []  # without those that only transforms read
        self.kinds: dict[str, str] = {}
        for file in files:
            self._add(file, columns)

    def _add(self, file: str, columns: Sequence[str] | None) -> None:
        try:
            self._written[file] = _written(file)
            with self._pq.ParquetFile(file) as opened:
                schema = opened.schema_arrow
                metadata = opened.metadata
        except (OSError, self._pa.ArrowException) as error:
            raise ConfigError(f"ParquetDataset: {file} cannot be read as Parquet: {error}") from error
        # Chosen columns keep the user's order in batches; those that only transforms read come after them.
        chosen = schema.names if columns is None else list(columns)
        wanted = [*chosen, *sorted(self._transformed.difference(chosen))]
        wrong = [name for name in wanted if name not in schema.names]
        if wrong:
            raise ConfigError(f"ParquetDataset(columns=...): {file} has no {wrong}. It has {schema.names}.")
        fields = self._pa.schema([self._pa.field(name, schema.field(name).type) for name in wanted])
        if self._schema is None:
            self.kinds = {field.name: _kind(self._pa, field.type) for field in fields}
            for field in fields:
                if self.kinds[field.name] != "text" or field.name not in self._transformed:
                    _check_type(self._pa, field, self._fill)
                if field.name + OFFSETS in wanted:
                    raise ConfigError(
                        f"ParquetDataset: a batch names the starts of the bags of {field.name!r} "
                        f"{field.name + OFFSETS!r}, and so is a column. Leave one of the two out with columns=[...]."
                    )
        elif not fields.equals(self._schema):
            raise ConfigError(f"ParquetDataset: {file} has columns {fields}, the first file {self._schema}.")
        self._metadata[file] = metadata
        self._schema = fields
        self.chosen = list(chosen)
        self.columns = wanted
        self.groups += [(file, g, metadata.row_group(g).num_rows) for g in range(metadata.num_row_groups)]

    def read(self, group: int, rows: np.ndarray[Any, Any] | slice) -> dict[str, Any]:
        """Returns the columns of some rows of a row group; a list column also as its ``.offsets``.

        A column is a tensor, or :class:`Words`.

        Raises:
            FleetError: the row group cannot be read, or holds nulls that nothing fills.
        """
        # The file is opened for each group: threads share no reader, and a job may have more files than descriptors.
        # The metadata is not read again.
        file, index, _ = self.groups[group]
        try:
            with self._pq.ParquetFile(
                file, metadata=self._metadata[file], memory_map=True, page_checksum_verification=True
            ) as opened:
                if _written(file) != self._written[file]:
                    raise OSError("its size or the time of its last change is another than it was.")
                table = opened.read_row_group(index, columns=self.columns, use_threads=False)
        except (OSError, self._pa.ArrowException) as error:
            raise FleetError(
                f"ParquetDataset: row group {index} of {file} cannot be read: {error} The file is damaged, or it was "
                "changed or removed after the dataset was made. Write it again, or leave it out."
            ) from error
        table = table.slice(rows.start, rows.stop - rows.start) if isinstance(rows, slice) else table.take(rows)
        found: dict[str, Any] = {}
        for name in self.columns:
            column = table[name].combine_chunks()
            column = column if isinstance(column, self._pa.Array) else self._pa.concat_arrays(column.chunks)
            if self._pa.types.is_list(column.type) or self._pa.types.is_large_list(column.type):
                self._without_nulls(column, name, file, is_list=True)
                if column.null_count:
                    lengths = self._pa.compute.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
                    found[name + OFFSETS] = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
                else:
                    found[name + OFFSETS] = torch.from_numpy(column.offsets.to_numpy().astype(np.int64))
                column = column.flatten()
            column = self._without_nulls(column, name, file)
            found[name] = self._words(column) if self.kinds[name] == "text" else self._tensor(column)
        return found

    def _words(self, column: pa.Array) -> Words:
        if not self._pa.types.is_dictionary(column.type):
            column = column.dictionary_encode()
        words = [word.encode() if isinstance(word, str) else word for word in column.dictionary.to_pylist()]
        return Words(words, column.indices.to_numpy(zero_copy_only=False).astype(np.int64))

    def _without_nulls(self, column: pa.Array, name: str, file: str, *, is_list: bool = False) -> pa.Array:
        if not column.null_count:
            return column
        if self._fill is None:
            raise FleetError(
                f"ParquetDataset: column {name!r} of {file} holds nulls. Give fill=VALUE (a list that is null is then "
                "an empty one), or leave the column out."
            )
        if is_list:
            return column
        if self.kinds[name] == "text":
            plain = column.type.value_type if self._pa.types.is_dictionary(column.type) else column.type
            return column.cast(plain).fill_null(self._pa.scalar("").cast(plain))
        return column.fill_null(self._pa.array([self._fill]).cast(column.type)[0])

    def _tensor(self, column: pa.Array) -> Tensor:
        if self._pa.types.is_unsigned_integer(column.type):
            wide = self._pa.types.is_uint64(column.type)  # the same 64 bits: a hash may be above the largest int64
            column = column.view(self._pa.int64()) if wide else column.cast(self._pa.int64())
        # Arrow packs booleans in bits, which DLPack cannot describe, and an empty column has no memory to share.
        if self._pa.types.is_boolean(column.type) or not len(column):
            return torch.from_numpy(np.array(column.to_numpy(zero_copy_only=False)))
        return torch.from_dlpack(column)  # shares memory; a batch is a copy


def _written(file: str) -> tuple[int, int]:
    """Returns size and time of the last change: another of either and the metadata in memory are of another file."""
    found = os.stat(file)
    return found.st_size, found.st_mtime_ns


def _kind(pa: Any, kind: Any) -> str:
    """Returns the kind of a type's values: int, float, bool, text, or the name of the type."""
    types = pa.types
    if types.is_list(kind) or types.is_large_list(kind):
        kind = kind.value_type
    if types.is_dictionary(kind):
        kind = kind.value_type
    if any(
        is_kind(kind) for is_kind in (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    ):
        return "text"
    if pa.types.is_boolean(kind):
        return "bool"
    return "int" if pa.types.is_integer(kind) else "float" if pa.types.is_floating(kind) else str(kind)


def _check_type(pa: Any, field: Any, fill: Any) -> None:
    kind = field.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = kind.value_type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise ConfigError(
            f"ParquetDataset: column {field.name!r} is {field.type}; numbers, booleans and lists of them become "
            "tensors. Leave the column out with columns=[...], write it as numbers, or make ids of text with "
            "transforms=fleet.features.Transforms([...])."
        )
    if pa.types.is_boolean(kind) and fill not in (None, 0, 1):
        raise ConfigError(f"ParquetDataset(fill={fill!r}): column {field.name!r} is {field.type}, and takes 0 or 1.")
    try:
        pa.array([fill]).cast(kind)  # refuses what would be cut, which pa.scalar does not
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise ConfigError(f"ParquetDataset(fill={fill!r}): column {field.name!r} is {field.type}: {error}") from error
