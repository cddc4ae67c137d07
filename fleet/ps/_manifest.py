"""Manifest: what one server's part of a saved table holds, and the checks before a part is trusted."""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fleet.errors import CheckpointError
from fleet.ps._row_file import write_atomically

FORMAT = 1
_NAME = re.compile(r"part-(\d{3,})\.json")


@dataclass(frozen=True)
class Extent:
    """Blocks that stand together in the row file and whose keys lie in virtual ranges ``first`` to ``last``."""

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
        save_id: the same text in all parts of one save.
        mode: the save mode.
        data: name of the file with the rows, beside the manifest.
        num_bytes: its size.
        rows: how many rows (elements of a dense table) it holds.
        extents: where they stand.
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


def table_folder(dirname: str | Path, table: str) -> Path:
    """Returns the folder of a table inside a checkpoint."""
    return Path(dirname) / (quote(table, safe=" ") if table not in (".", "..") else table.replace(".", "%2E"))


def manifest_path(folder: Path, server: int) -> Path:
    """Returns where the manifest of a server's part stands."""
    return folder / f"part-{server:03d}.json"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Publishes a part; until now nothing referred to its row file."""
    body = json.dumps(asdict(manifest), sort_keys=True)
    text = json.dumps({"format": FORMAT, "crc32": zlib.crc32(body.encode()), "part": body})
    write_atomically(manifest_path(folder, manifest.server), text.encode())


def read_manifest(path: Path) -> Manifest:
    """Returns a checked manifest.

    Raises:
        CheckpointError: the file is damaged or of another format.
    """
    try:
        outer = json.loads(path.read_text())
        version, crc, body = outer["format"], outer["crc32"], outer["part"]
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: not a manifest ({error}). The file is damaged.") from None
    if version != FORMAT:
        raise CheckpointError(f"{path}: a manifest of format {version!r}; this release reads format {FORMAT}.")
    if zlib.crc32(str(body).encode()) != crc:
        raise CheckpointError(f"{path}: the checksum is wrong. The file is damaged; load another checkpoint.")
    fields = json.loads(body)
    fields["extents"] = tuple(Extent(**extent) for extent in fields["extents"])
    return Manifest(**fields)


def read_parts(folder: Path) -> list[Manifest]:
    """Returns the manifests of a complete save, in server order.

    Raises:
        CheckpointError: no part, an absent part, parts of different saves, or a row file that is absent or of the
            wrong size.
    """
    found = {int(match[1]): path for path in folder.glob("part-*.json") if (match := _NAME.fullmatch(path.name))}
    if not found:
        raise CheckpointError(f"{folder}: no saved table here (no part-NNN.json).{_what_is_there(folder)}")
    parts = [read_manifest(found[server]) for server in sorted(found)]
    saves = sorted({(part.num_servers, part.save_id, part.kind) for part in parts})
    if len(saves) > 1:
        raise CheckpointError(
            f"{folder}: the parts are of different saves: {saves}. A later save was not finished; "
            "save again, or load another checkpoint."
        )
    wanted = parts[0].num_servers
    absent = [f"part-{server:03d}.json" for server in range(wanted) if server not in found]
    if absent:
        raise CheckpointError(f"{folder}: the save of {wanted} servers is not complete; absent: {', '.join(absent)}.")
    for part in parts:
        data = folder / part.data
        size = data.stat().st_size if data.is_file() else -1
        if size != part.num_bytes:
            raise CheckpointError(
                f"{data}: {'absent' if size < 0 else f'{size} bytes'}; the manifest says "
                f"{part.num_bytes} bytes. The file is damaged; load another checkpoint."
            )
    return parts


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


def _what_is_there(folder: Path) -> str:
    if hint := paddle_model_in(folder) or paddle_model_in(folder.parent):
        return hint
    if not folder.is_dir():
        return " The folder does not exist; check the directory and the table's name."
    names = sorted(path.name for path in folder.iterdir())[:5]
    return f" It holds {names}." if names else " It is empty."
