"""The rows that a publisher keeps in a folder: a mapped base for each server, and the deltas after it.

[Note: Lookups while the folder changes]
``refresh`` reads the manifest, then the files it names that are new, and puts one new state in place when all of them
are read and checked; states are never changed, so a lookup sees one manifest's rows, every delta whole. If the
publisher removes a file before it is read, a newer manifest exists and is read in turn. Files that a state uses stay
mapped after they are removed.

A version is a manifest that never changes, so it is read in the same way. The files of the newest versions are read
before they are asked for: a brake then costs one assignment, whatever the number of rows, which ``turn`` makes even
while ``refresh`` reads. Rows that were read before a brake was pulled are never put in place after it.
"""

from __future__ import annotations

import json
import threading
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet.errors import CheckpointError
from fleet.ps.files.row_file import open_plain
from fleet.ps.publishing.tensor_file import read_tensors
from fleet.ps.publishing.versions import (
    MANIFEST,
    READ_AHEAD,
    Version,
    find_version,
    list_versions,
    read_brake,
    version_folder,
    version_of,
    version_path,
)
from fleet.ps.serving.local_rows import (
    FolderRows,
    LocalState,
    MappedRows,
    Position,
    TableShare,
    check_servers,
    map_file,
)

_MOST_BYTES = 1 << 28
_TRIES = 20
_ENCODINGS = {"float32": "float32", "uint16": "bfloat16", "int8": "int8"}  # of the arrays' dtypes


def is_delta_folder(folder: Path) -> bool:
    """Returns whether a publisher has written to ``folder``."""
    return (folder / MANIFEST).exists()


@dataclass(frozen=True, slots=True)
class _ServerFiles:
    """The files of one server that have been read, oldest first, and their rows by table."""

    entries: tuple[tuple[str, int], ...]  # (file, CRC-32)
    shares: dict[str, TableShare]


_Chains = dict[int, _ServerFiles]
_Read = tuple[bytes, _Chains, dict[int, Position]]  # a manifest's text, its files, and how far they are


class DeltaRows(FolderRows):
    """Reads the folder of ``fleet.ps.publish``, and later the files that were added to it.

    Args:
        folder: where the publisher writes.
        version: the version to stay at, or its name; None: the newest rows. A brake on an older version goes before it.
    """

    def __init__(self, folder: Path, version: str | Version | None = None) -> None:
        self._folder = folder
        self._pinned = None if version is None else find_version(folder, version, "fleet.ps.Reader")
        self._chains: _Chains = {}
        self._ready: dict[Version, _Read] = {}
        self._putting = threading.Lock()
        self._text = b""
        self.state = LocalState()

    def program_of(self, version: Version) -> Path | None:
        """Returns the folder of the program that was marked with ``version``; None without one."""
        return version_folder(self._folder, version.name) if version.model else None

    def versions(self) -> list[Version]:
        """Returns the versions, oldest first."""
        return list_versions(self._folder)

    def must_turn(self) -> bool:
        """Returns whether a brake was pulled or released since the last refresh; it reads one small file."""
        version = self.state.version
        return self._wanted() != (version and version.name)

    def read_ahead(self) -> None:
        """Reads the files of the newest versions, for a brake to find them ready.

        Raises:
            CheckpointError: a file is damaged.
        """
        ready: dict[Version, _Read] = {}
        for version in list_versions(self._folder)[-READ_AHEAD:]:
            ready[version] = self._ready.get(version) or self._read(self._text_of(version.name), version.name)
            self._ready = {**self._ready, **ready}
        self._ready = ready

    def turn(self) -> None:
        """Puts the rows that a brake asks for in place at once, if they were read ahead; any thread may call it."""
        wanted = self._wanted()
        for version, read in self._ready.items() if self.must_turn() else ():
            if version.name == wanted and read[0] == self._text_of(wanted):
                self._put(read, wanted)

    def refresh(self) -> bool:
        """Returns whether there is another state than before; ``state`` is whole either way.

        Raises:
            CheckpointError: the manifest or a file is damaged, or absent.
            ConfigError: a server has not written yet.
        """
        for _ in range(_TRIES):
            version = self._wanted()
            text = self._text_of(version)
            if text == self._text:
                return False
            try:
                if self._put(self._read(text, version), version):
                    return True
            except CheckpointError:
                # Not because the folder went on, or the brake was pulled.
                if version == self._wanted() and text == self._text_of(version):
                    raise
        raise CheckpointError(f"{self._folder}: its files are replaced faster than they can be read.")

    def _wanted(self) -> str | None:
        """Returns the version whose rows lookups must give now; None: the newest rows."""
        pinned = self._pinned
        braked = read_brake(self._folder)
        if pinned is None or braked == pinned.name:
            return braked
        if braked is None:
            return pinned.name
        number = find_version(self._folder, braked, "fleet.ps.Reader").number
        return braked if number < pinned.number else pinned.name

    def _path_of(self, version: str | None) -> Path:
        return self._folder / MANIFEST if version is None else version_path(self._folder, version)

    def _text_of(self, version: str | None) -> bytes:
        path = self._path_of(version)
        if version is not None and not path.exists():
            raise CheckpointError(
                f"{path}: version {version!r} was removed: more than keep= were marked after it. Its rows stay with "
                "readers that have them; a new Reader takes one of the versions that are left."
            )
        with open_plain(path) as file:
            return file.read(_MOST_BYTES)

    def _put(self, read: _Read, version: str | None) -> bool:
        """Makes lookups give these rows; returns False if others are asked for since they were read."""
        text, chains, positions = read
        shares = {(name, server): share for server, chain in chains.items() for name, share in chain.shares.items()}
        dims: dict[str, int] = {}
        for (name, server), share in shares.items():
            dim = share.files[0].dim
            if dims.setdefault(name, dim) != dim:
                raise CheckpointError(
                    f"{self._folder}: server {server} has rows of table {name!r} with {dim} columns, another server "
                    f"with {dims[name]}. Remove the folder; the servers' next deltas write all rows."
                )
        state = LocalState(dims, shares, positions, None if version is None else version_of(json.loads(text)))
        with self._putting:
            if self._wanted() != version:
                return False
            self.state = state  # in one assignment: lookups run in other threads without a lock
            self._chains = chains
            self._text = text
        return True

    def _read(self, text: bytes, version: str | None) -> _Read:
        chains: _Chains = {}
        positions: dict[int, Position] = {}
        for server, state in sorted(_servers_of(self._path_of(version), text).items()):
            chains[server] = self._read_chain(server, [state["base"], *state["deltas"]])
            positions[server] = Position(state["history"], state["watermark"], state["step"], state["pushed_at"])
        return text, chains, positions

    def _read_chain(self, server: int, entries: list[dict[str, Any]]) -> _ServerFiles:
        wanted = tuple((entry["file"], entry["crc32"]) for entry in entries)
        known = _ServerFiles((), {})
        # A chain that continues a known one costs its new files alone; a compacted one is read from its base on.
        for chains in (self._chains, *(chains for _, chains, _ in self._ready.values())):
            one = chains.get(server, known)
            if len(one.entries) > len(known.entries) and wanted[: len(one.entries)] == one.entries:
                known = one
        shares = dict(known.shares)
        for entry in entries[len(known.entries) :]:
            self._add(shares, entry)
        return _ServerFiles(wanted, shares)

    def _add(self, shares: dict[str, TableShare], entry: dict[str, Any]) -> None:
        path = self._folder / entry["file"]
        try:
            with open_plain(path) as file:
                size = file.seek(0, 2)
            is_whole = size == entry["bytes"] and zlib.crc32(map_file(path).data) == entry["crc32"]
            tensors = read_tensors(path) if is_whole else {}
        except (CheckpointError, FileNotFoundError):  # a publisher may remove it between two of these
            if not path.exists():
                raise CheckpointError(
                    f"{path}: the manifest names it, but it is absent. Remove the folder; the servers' next deltas "
                    "write all rows."
                ) from None
            raise
        if not is_whole:
            raise CheckpointError(
                f"{path}: the checksum or the size is wrong ({size} bytes; the manifest says {entry['bytes']}). The "
                "file is damaged. Remove the folder; the servers' next deltas write all rows."
            )
        for name in [key.removesuffix(".keys") for key in tensors if key.endswith(".keys")]:
            try:
                shares[name] = _extended(shares.get(name, TableShare()), name, tensors)
            except (KeyError, ValueError, IndexError) as error:
                raise CheckpointError(f"{path}: its arrays are no rows of table {name!r}: {error}.") from None


def _extended(share: TableShare, name: str, tensors: dict[str, NDArray[Any]]) -> TableShare:
    keys, values, deleted = (tensors[f"{name}.{part}"] for part in ("keys", "values", "deleted"))
    encoding = _ENCODINGS[values.dtype.name]
    n, dim = values.shape
    scales = tensors[f"{name}.scales"] if encoding == "int8" else None
    if keys.shape != (n,) or (scales is not None and scales.shape != (n,)) or deleted.ndim != 1 or dim < 1:
        raise ValueError(f"{keys.shape} keys for {values.shape} values")
    if share.files and share.files[0].dim != dim:
        raise ValueError(f"{dim} columns after {share.files[0].dim}")
    octets = values.reshape(-1).view(np.uint8)
    rows = MappedRows(octets, dim, encoding, scales=scales)
    offsets = dim * values.itemsize * np.arange(n, dtype=np.int64)
    return share.extended(np.asarray(keys, np.int64), offsets, rows, np.asarray(deleted, np.int64))


def _servers_of(path: Path, text: bytes) -> dict[int, dict[str, Any]]:
    """Returns the checked state of each server in the manifest.

    Raises:
        CheckpointError: it is no manifest, or its deltas do not follow each other.
        ConfigError: it lacks the rows of a server.
    """
    try:
        manifest = json.loads(text)
        if manifest["format"] != 1:
            raise CheckpointError(f"{path}: a manifest of format {manifest['format']!r:.40}; this release reads 1.")
        servers = {int(server): state for server, state in manifest["servers"].items()}
        for server, state in servers.items():
            _check_state(path, server, state)
        count = manifest["num_servers"]
        if type(count) is not int:
            raise ValueError(f"num_servers is {count!r:.40}")
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: not a manifest of published rows ({type(error).__name__}: {error!s:.200}). The file is damaged, "
            "or another program's."
        ) from None
    check_servers(str(path), servers, count)
    return servers


def _check_state(path: Path, server: int, state: dict[str, Any]) -> None:
    entries = [state["base"], *state["deltas"]]
    for entry in entries:
        kinds = [type(entry[key]) for key in ("file", "bytes", "crc32", "previous", "watermark")]
        if kinds != [str, int, int, int, int] or Path(entry["file"]).name != entry["file"]:
            raise ValueError(f"an entry of server {server} is {entry}")
    reached = [entry["watermark"] for entry in entries]
    if [entry["previous"] for entry in entries[1:]] != reached[:-1] or reached[-1] != state["watermark"]:
        raise CheckpointError(f"{path}: the deltas of server {server} do not follow each other. The file is damaged.")
    kinds = [type(state[key]) for key in ("history", "step")]
    if kinds != [str, int] or not isinstance(state["pushed_at"], int | float):
        raise ValueError(f"the position of server {server} is {state}")
