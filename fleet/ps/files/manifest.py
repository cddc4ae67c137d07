"""Manifest: the description of one server's part of a saved table, and the checks before a part is trusted."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt

from fleet.common.plain_files import replace_file
from fleet.errors import CheckpointError
from fleet.ps.files.row_file import LEAST_ROW_BYTES, open_plain, read_block
from fleet.ps.table.folder_name import folder_name
from fleet.ps.table.layout import Int64s
from fleet.ps.table.rows import RowBlock

FORMAT = 1
_NAME = re.compile(r"part-([0-9]{3,9})\.json")
_DATA = re.compile(r"part-([0-9]{3,9})-[0-9a-f]{12}\.(rows|dense)")
_MAX_SERVERS = 1 << 16
_MAX_BYTES = 1 << 28
_SHOWN = 20  # tables in a message


Mine = Callable[[Int64s], npt.NDArray[np.bool_]]  # which of the given keys belong here


@dataclass(frozen=True)
class Saved:
    """The result of a save: how many rows (elements of a dense table) and bytes it wrote, and the row file."""

    rows: int
    num_bytes: int
    path: Path


@dataclass(frozen=True)
class Extent:
    """Consecutive blocks of the row file, with keys in the virtual ranges ``first`` to ``last``."""

    offset: int
    num_bytes: int
    rows: int
    first: int
    last: int


@dataclass(frozen=True)
class Manifest:
    """One part.

    Attributes:
        kind: ``"sparse"`` or ``"dense"``.
        config: the table's configuration in plain values.
        server, num_servers: which part of how many.
        save_id: the same string in all parts of one save.
        mode: the save mode.
        data: name of the file with the rows, beside the manifest.
        num_bytes: its size.
        rows: how many rows (elements of a dense table) it holds.
        extents: where they are.
        continues: of an increment (mode 1), the ids of the saves that it may be loaded after; none: nothing before it.
        deleted: of an increment, how many ids are deleted before its rows are put in; they are at the end of ``data``.
        deleted_crc32: their checksum.
    """

    kind: str
    config: dict[str, Any]
    server: int
    num_servers: int
    save_id: str
    mode: int
    data: str
    num_bytes: int
    rows: int
    extents: tuple[Extent, ...] = ()
    continues: tuple[str, ...] = ()
    deleted: int = 0
    deleted_crc32: int = 0


def table_folder(dirname: str | Path, table: str, *, dense: bool = False) -> Path:
    """Returns the folder of a table inside a checkpoint.

    Raises:
        CheckpointError: it is a symbolic link; a save would remove older parts at its target.
    """
    folder = Path(dirname) / folder_name(table, dense=dense)
    if folder.is_symlink():
        raise CheckpointError(f"{folder}: a symbolic link; a checkpoint holds folders and files only. Remove the link.")
    return folder


def manifest_path(folder: Path, server: int) -> Path:
    """Returns the path of the manifest of a server's part."""
    return folder / f"part-{server:03d}.json"


def part_number(path: Path) -> int | None:
    """Returns the number of the server whose manifest has this name; ``None`` for another file."""
    match = _NAME.fullmatch(path.name)
    return None if match is None else int(match[1])


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Publishes a part; before this nothing referred to its row file."""
    # The body is a string inside the file: its checksum then covers exact bytes, whatever order a reader keeps keys in.
    body = json.dumps(asdict(manifest), sort_keys=True)
    checksum = zlib.crc32(body.encode())
    replace_file(
        manifest_path(folder, manifest.server), json.dumps({"format": FORMAT, "crc32": checksum, "part": body})
    )


def read_manifest(path: Path) -> Manifest:
    """Returns a checked manifest.

    Raises:
        CheckpointError: the file is damaged or of another format, or names anything but a row file of this server.
    """
    with open_plain(path) as file:
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:  # before json: a forged manifest must not fill the memory
        raise CheckpointError(f"{path}: more than {_MAX_BYTES} bytes, the most a manifest has. The file is damaged.")
    try:
        outer = json.loads(data)
        version = outer["format"]
        body = outer["part"]
        if version != FORMAT:
            raise CheckpointError(f"{path}: a manifest of format {version!r:.40}; this release reads format {FORMAT}.")
        if zlib.crc32(body.encode()) != outer["crc32"]:
            raise CheckpointError(f"{path}: the checksum is wrong. The file is damaged; load another checkpoint.")
        fields = json.loads(body)
        fields["extents"] = tuple(Extent(**extent) for extent in fields["extents"])
        fields["continues"] = tuple(fields["continues"])
        manifest = Manifest(**fields)
        problem = _problem(manifest, path)
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a manifest ({error!s:.200}). The file is damaged.") from None
    if problem:
        raise CheckpointError(f"{path}: {problem}. The file is damaged or forged; load another checkpoint.")
    return manifest


def _problem(part: Manifest, path: Path) -> str:
    """Returns the first impossible value of the manifest at ``path``; empty without one.

    The checksum shows damage, not forgery: anybody can compute one.
    """
    named = _DATA.fullmatch(part.data)
    numbers = [part.server, part.num_servers, part.num_bytes, part.rows, part.mode, part.deleted, part.deleted_crc32]
    if named is None:
        return f"it names the file {part.data!r:.200}; a row file is called part-NNN-xxxxxxxxxxxx.rows, beside it"
    if int(named[1]) != part.server or path.name != manifest_path(path.parent, part.server).name:
        return f"it is the part of server {part.server!r:.40} and names the file {part.data!r}"
    suffix = {"sparse": "rows", "dense": "dense"}[part.kind]
    numbers += [number for extent in part.extents for number in asdict(extent).values()]
    # type() and not isinstance(): True and False are integers to isinstance.
    kinds = {type(number) for number in numbers}
    are_texts = all(isinstance(text, str) for text in (part.save_id, *part.continues))
    if named[2] != suffix or kinds != {int} or not isinstance(part.config, dict) or not are_texts:
        return "a value has the wrong type"
    if min(numbers) < 0 or not 0 < part.num_servers <= _MAX_SERVERS:
        return "a number is out of range"
    # The sum as well as each extent: extents that overlap would make a loader read the same rows again and again.
    of_rows = sum(e.num_bytes for e in part.extents)
    if of_rows + 8 * part.deleted > part.num_bytes or any(
        e.offset + e.num_bytes > part.num_bytes or e.rows * LEAST_ROW_BYTES > e.num_bytes for e in part.extents
    ):
        return "its extents do not fit its size"
    own = [part.config[key] for key in ("start", "total", "crc32")] if part.kind == "dense" else []
    if any(type(number) is not int or number < 0 for number in own) or (own and 4 * part.rows > part.num_bytes):
        return "a number is out of range"
    if part.kind == "dense" and not _are_shapes(part.config.get("shapes", [])):
        return "a value has the wrong type"
    return ""


def _are_shapes(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(shape, list) and all(type(dim) is int and dim >= 0 for dim in shape) for shape in value
    )


def read_parts(folder: Path) -> list[Manifest]:
    """Returns the manifests of a complete save, in server order.

    Raises:
        CheckpointError: no part, an absent part, parts of different saves, or a row file that is absent or of the
            wrong size.
    """
    found = {number: path for path in folder.glob("part-*.json") if (number := part_number(path)) is not None}
    if not found:
        raise CheckpointError(_no_table_message(folder))
    parts = [read_manifest(found[server]) for server in sorted(found)]
    # Servers replace their parts one after the other: a save that was cut off leaves old and new ones side by side.
    saves = sorted({(part.num_servers, part.save_id, part.kind) for part in parts})
    if len(saves) > 1:
        raise CheckpointError(
            f"{folder}: the parts are of different saves: {saves}. A later save was not finished; "
            "save again, or load another checkpoint."
        )
    wanted = parts[0].num_servers
    absent = [f"part-{server:03d}.json" for server in range(wanted) if server not in found]
    if absent:
        more = f" and {len(absent) - 20} more" if len(absent) > 20 else ""
        raise CheckpointError(
            f"{folder}: the save of {wanted} servers is not complete; absent: {', '.join(absent[:20])}{more}."
        )
    for part in parts:
        data = folder / part.data
        size = -1
        if data.is_symlink() or data.exists():
            with open_plain(data) as file:
                size = os.fstat(file.fileno()).st_size
        if size != part.num_bytes:
            raise CheckpointError(
                f"{data}: {'absent' if size < 0 else f'{size} bytes'}; the manifest says "
                f"{part.num_bytes} bytes. The file is damaged; load another checkpoint."
            )
    return parts


def extents_of(part: Manifest, ranges: tuple[int, int] | None) -> list[Extent]:
    """Returns the extents that hold keys of ``ranges``: (first, last + 1) virtual ranges, ``None`` for all."""
    return [e for e in part.extents if ranges is None or (e.first < ranges[1] and ranges[0] <= e.last)]


def deleted_of(folder: Path, part: Manifest) -> Int64s:
    """Returns the ids that an increment deletes, int64 [n].

    Raises:
        CheckpointError: the row file is damaged.
    """
    path = folder / part.data
    with open_plain(path) as file:
        file.seek(part.num_bytes - 8 * part.deleted)
        data = file.read(8 * part.deleted)
    if zlib.crc32(data) != part.deleted_crc32 or len(data) != 8 * part.deleted:
        raise CheckpointError(
            f"{path}: the checksum of its deleted ids is wrong. The file is damaged; load another one."
        )
    return np.frombuffer(data, "<i8").astype(np.int64)


def blocks_of(
    folder: Path, part: Manifest, ranges: tuple[int, int] | None = None, *, row_floats: int | None = None
) -> Iterator[tuple[int, RowBlock]]:
    """Yields each block of a part that may hold keys of ``ranges``, and the byte of the row file where it begins.

    Raises:
        CheckpointError: the row file is damaged, holds other numbers of rows than the manifest says, or rows of
            another width than ``row_floats``.
    """
    path = folder / part.data
    with open_plain(path) as file:
        for extent in extents_of(part, ranges):
            file.seek(extent.offset)
            rows = 0
            while (start := file.tell()) < extent.offset + extent.num_bytes:
                block = read_block(file, path)
                rows += len(block)
                if row_floats is not None and len(block) and block.values.shape[1] != row_floats:
                    raise CheckpointError(
                        f"{path}: rows of {block.values.shape[1]} floats; the table's have {row_floats}. The file is "
                        "damaged; load another checkpoint."
                    )
                yield start, block
            if rows != extent.rows:
                raise CheckpointError(
                    f"{path}: {rows} rows at byte {extent.offset}; the manifest says {extent.rows}. "
                    "The file is damaged; load another checkpoint."
                )


def paddle_model_in(folder: Path) -> str:
    """Returns a sentence that says so when ``folder`` holds a model that Paddle wrote, else an empty text."""
    names = ("__model__", "__params__", "*.pdmodel", "*.pdiparams")  # fleet.save may have written a .pdparams
    found = next((path.name for name in names for path in folder.glob(name)), None)
    if found is None:
        return ""
    return (
        f" {folder} holds a model that Paddle wrote ({found}), which only Paddle reads. Load it there, save its "
        "parameters as numpy arrays, and give them to load_state_dict() here."
    )


def _no_table_message(folder: Path) -> str:
    """Returns the message for a ``folder`` without parts, naming the files or tables that are there instead."""
    given = folder.parent
    if hint := paddle_model_in(folder) or paddle_model_in(given):
        return f"{folder}: no saved table here (no part-NNN.json).{hint}"
    if not given.is_dir():
        return f"{given}: no saved table here. The folder does not exist; check the directory."
    name = unquote(folder.name)
    if name != folder.name and (given / name).is_dir():
        return f"{name!r} in {given} is dense: its parameters have no ids. Name a table of rows."
    if not folder.is_dir():
        tables = sorted(unquote(path.parent.name) for path in given.glob("*/part-000*"))
        some = f"the tables {list(dict.fromkeys(tables))[:_SHOWN]}" if tables else "no tables"
        return (
            f"{given}: no saved table here that is called {name!r}; the folder has {some}. Check the "
            "directory and the table's name."
        )
    names = sorted(path.name for path in folder.iterdir())[:5]
    return f"{folder}: no saved table here (no part-NNN.json). It {f'holds {names}' if names else 'is empty'}."
