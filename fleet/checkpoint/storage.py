"""Storage: the folder of a checkpoint, local or remote, in which the index appears at once.

[Note: How an index is committed]
A local index goes to a temporary name, is flushed to disk, and renamed over the old one; then the folder is flushed.
An object store shows an object when the whole of it was sent, so the index is sent last. In both, a reader finds the
old index or the new one, and every file that it names is complete.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from fleet.checkpoint.data_files import MappedFile, Ranges
from fleet.common import plain_files
from fleet.common.extras import install_line
from fleet.errors import CheckpointError, ConfigError

_KEEP_SIZE = 1  # of fallocate(2): the file grows as it is written


class Folder(Protocol):
    """A folder of files, each complete or absent for a reader that goes by the index."""

    path: str

    def prepare(self) -> None:
        """Makes the folder. Raises OSError."""
        ...

    def names(self) -> list[str]:
        """Returns the names in the folder; an absent folder has none. Raises OSError."""
        ...

    def create(self, name: str, num_bytes: int = 0) -> contextlib.AbstractContextManager[Any]:
        """Opens a new file of about ``num_bytes`` for writing; leaving the context makes it durable. Raises OSError."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Makes ``name`` hold ``data``, at once and durably. Raises OSError."""
        ...

    def get(self, name: str) -> bytes:
        """Returns all bytes of a file. Raises FileNotFoundError, OSError."""
        ...

    def open_ranges(self, name: str) -> Ranges:
        """Opens a file for reading ranges of it. Raises CheckpointError."""
        ...

    def remove(self, name: str) -> None:
        """Removes a file if it is there. Raises OSError."""
        ...


class LocalFolder:
    """A folder of this machine, or of a file system that several share."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(path)

    def prepare(self) -> None:
        """Makes the folder and those above it; where it is new, a power cut does not undo that."""
        if not os.path.isdir(self.path):
            os.makedirs(self.path, exist_ok=True)
            plain_files.flush(os.path.dirname(self.path))

    def names(self) -> list[str]:
        """Returns the names in the folder; an absent folder has none."""
        try:
            return os.listdir(self.path)
        except FileNotFoundError:
            return []

    @contextmanager
    def create(self, name: str, num_bytes: int = 0) -> Iterator[Any]:
        """Opens a new file for writing, which is on disk when the context is left."""
        with plain_files.create(os.path.join(self.path, name), buffering=0) as file:
            _reserve(file.fileno(), num_bytes)
            yield file
            os.fsync(file.fileno())

    def put(self, name: str, data: bytes) -> None:
        """Makes ``name`` hold ``data`` by one rename."""
        plain_files.replace_file(os.path.join(self.path, name), data)

    def touch(self, name: str) -> None:
        """Makes an empty file, which need not outlive the machine: training waits for it."""
        os.close(plain_files.open_own(os.path.join(self.path, name), os.O_WRONLY))

    def get(self, name: str) -> bytes:
        """Returns all bytes of a file; a link is an error."""
        with plain_files.open_to_read(os.path.join(self.path, name)) as file:
            return file.read()

    def open_ranges(self, name: str) -> Ranges:
        """Maps a file."""
        return MappedFile(Path(self.path, name), f"{self.path}/{name}")

    def remove(self, name: str) -> None:
        """Removes a file if it is there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.path, name))


class RemoteFolder:
    """A folder that fsspec reaches: ``s3://bucket/run``, ``gs://bucket/run``, ``memory://run``.

    Raises:
        ConfigError: fsspec, or its package for this kind of address, is not installed, or the address is wrong.
    """

    def __init__(self, path: str) -> None:
        try:
            import fsspec
        except ImportError as error:
            raise ConfigError(
                f"checkpoint: {path!r} is a remote folder, which takes fsspec; {install_line('remote')}."
            ) from error
        try:
            self._files, inner = fsspec.core.url_to_fs(path)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"checkpoint: {path!r} cannot be reached: {error}.") from error
        self.path = path
        self._root = inner.rstrip("/")
        self.is_of_this_process = "memory" in _protocols(self._files)

    def prepare(self) -> None:
        """Makes the folder where the store has folders."""
        if "s3" not in _protocols(self._files):  # s3fs would make the bucket, under a name that may be mistyped
            self._files.makedirs(self._root, exist_ok=True)

    def names(self) -> list[str]:
        """Returns the names in the folder; an absent folder has none."""
        # fsspec keeps listings, and the files of other workers appear while this one waits for them.
        self._files.invalidate_cache()
        try:
            paths = self._files.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        # Some stores list the folder itself, as an empty object.
        return [path.rstrip("/").rpartition("/")[2] for path in paths if path.rstrip("/") != self._root]

    @contextmanager
    def create(self, name: str, num_bytes: int = 0) -> Iterator[Any]:
        """Opens a new object for writing, which is in the store when the context is left."""
        file = self._files.open(self._at(name), "wb")
        try:
            yield file
        except BaseException:
            with contextlib.suppress(Exception):
                file.discard() if hasattr(file, "discard") else None
            with contextlib.suppress(Exception):
                self.remove(name)  # a store may show an object from the moment that it is opened
            raise
        file.close()

    def put(self, name: str, data: bytes) -> None:
        """Sends an object."""
        self._files.pipe_file(self._at(name), data)

    def get(self, name: str) -> bytes:
        """Returns all bytes of an object."""
        found: bytes = self._files.cat_file(self._at(name))
        return found

    def open_ranges(self, name: str) -> Ranges:
        """Opens an object whose ranges are fetched on request."""
        self._files.invalidate_cache()  # another process may have written it
        return _RemoteFile(self._files, self._at(name), f"{self.path}/{name}")

    def remove(self, name: str) -> None:
        """Removes an object if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._at(name))

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"


class _RemoteFile:
    """Ranges of one object; those of a reader lie side by side, so a range is kept until another is asked for."""

    def __init__(self, files: Any, path: str, label: str) -> None:
        self._files = files
        self._path = path
        self._label = label
        try:
            self.num_bytes = int(files.size(path))
        except OSError as error:
            raise CheckpointError(f"{label}: {getattr(error, 'strerror', None) or error}.") from error
        self._begin = 0
        self._kept = bytearray()

    def range(self, begin: int, end: int) -> memoryview:
        """Fetches the bytes, except those at their beginning that the last range had already."""
        kept_end = self._begin + len(self._kept)
        known = self._kept[begin - self._begin : end - self._begin] if self._begin <= begin < kept_end else b""
        if len(known) < end - begin:
            try:
                found = self._files.cat_file(self._path, start=begin + len(known), end=end)
            except OSError as error:
                raise CheckpointError(f"{self._label}: {getattr(error, 'strerror', None) or error}.") from error
            if len(found) != end - begin - len(known):
                raise CheckpointError(f"{self._label}: bytes {begin} to {end} were asked for, and some are missing.")
            self._begin = begin
            self._kept = bytearray(known + found)  # torch takes writable memory
        return memoryview(self._kept)[begin - self._begin : end - self._begin]

    def release(self, begin: int, end: int) -> None:
        """Does nothing: no more than the last range is kept."""

    def close(self) -> None:
        """Frees the last range."""
        self._kept = bytearray()


def _reserve(descriptor: int, num_bytes: int) -> None:
    """Reserves the room of a file before it is written: a full disk shows at once, and ext4 writes a third faster.

    ``os.posix_fallocate`` would write to every page where the file system cannot do it, as NFS 3.
    """
    if sys.platform != "linux" or not num_bytes:
        return
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    sizes = ctypes.c_int64(0), ctypes.c_int64(num_bytes)
    if fallocate(descriptor, _KEEP_SIZE, *sizes) and ctypes.get_errno() in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Returns whether ``path`` is the address of a remote folder."""
    text = os.fspath(path)
    return "://" in text and not text.startswith("file://")


def open_folder(path: str | os.PathLike[str]) -> LocalFolder | RemoteFolder:
    """Returns the folder that ``path`` names, ``~`` being the user's home. Raises ConfigError."""
    text = os.fspath(path)
    return RemoteFolder(text) if is_remote(text) else LocalFolder(os.path.expanduser(text.removeprefix("file://")))


def explained(error: OSError) -> str:
    """Returns the reason of ``error``, raised by a write, and its remedy in one sentence."""
    reasons = {
        errno.ENOSPC: "the disk is full; free space or name another folder",
        errno.EDQUOT: "the quota of this user is used up; free space or name another folder",
        errno.EROFS: "the file system is read-only; name another folder",
        errno.EACCES: "this user may not write there; change its mode or name another folder",
        errno.EFBIG: "the file is larger than this user, or the file system, may write; raise the limit (ulimit -f)",
        errno.EIO: "the disk reported an error; look at the system's log, and name a folder on another disk",
        errno.ENOTDIR: "a file stands where the folder was; remove it or name another folder",
        errno.ENOENT: "the folder was removed while it was being written; the next save makes it again",
    }
    text = error.strerror or f"{error}"
    remedy = reasons.get(error.errno or 0)
    return f"{text}: {remedy}" if remedy else text


def _protocols(files: Any) -> tuple[str, ...]:
    return (files.protocol,) if isinstance(files.protocol, str) else tuple(files.protocol)
