"""Storage: the folder of a checkpoint, local or remote, and what makes its index appear at once.

[Note: How an index is committed]
A local index goes to a temporary name, is flushed to disk, and renamed over the old one; then the folder is flushed.
An object store shows an object when the whole of it was sent, so the index is sent last. In both, whoever reads finds
the old index or the new one, and every file that it names is complete.
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
from fleet.errors import CheckpointError, ConfigError
from fleet.ps.files.own_folder import PLAIN

_KEEP_SIZE = 1  # of fallocate(2): the file grows as it is written


class Folder(Protocol):
    """A folder of files, in which a file is complete or absent to whoever reads it through an index."""

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
        """Returns a file of which ranges can be read. Raises CheckpointError."""
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
            flush_folder(os.path.dirname(self.path))

    def names(self) -> list[str]:
        """Returns the names in the folder; an absent folder has none."""
        try:
            return os.listdir(self.path)
        except FileNotFoundError:
            return []

    @contextmanager
    def create(self, name: str, num_bytes: int = 0) -> Iterator[Any]:
        """Opens a new file for writing, which is on disk when the context is left."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | PLAIN
        with open(os.open(os.path.join(self.path, name), flags, 0o666), "wb", buffering=0) as file:
            _reserve(file.fileno(), num_bytes)
            yield file
            os.fsync(file.fileno())

    def put(self, name: str, data: bytes) -> None:
        """Makes ``name`` hold ``data`` by one rename."""
        temporary = f".{name}.{os.getpid()}.tmp"
        self.remove(temporary)
        with replaced(os.path.join(self.path, name), os.path.join(self.path, temporary)) as file:
            file.write(data)

    def touch(self, name: str) -> None:
        """Makes an empty file, which need not outlive the machine: training waits for it."""
        os.close(os.open(os.path.join(self.path, name), os.O_WRONLY | os.O_CREAT | PLAIN, 0o666))

    def get(self, name: str) -> bytes:
        """Returns all bytes of a file; a link is an error."""
        with open(os.open(os.path.join(self.path, name), os.O_RDONLY | PLAIN), "rb") as file:
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
                f"checkpoint: {path!r} is a remote folder, which takes fsspec: pip install 'torch-fleet[remote]'."
            ) from error
        try:
            self._files, inner = fsspec.core.url_to_fs(path)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"checkpoint: {path!r} cannot be reached: {error}.") from error
        self.path, self._root = path, inner.rstrip("/")
        self.is_of_this_process = "memory" in _protocols(self._files)

    def prepare(self) -> None:
        """Makes the folder where the store has folders."""
        if "s3" not in _protocols(self._files):  # s3fs would make the bucket, under a name that may be mistyped
            self._files.makedirs(self._root, exist_ok=True)

    def names(self) -> list[str]:
        """Returns the names in the folder; an absent folder has none."""
        self._files.invalidate_cache()
        try:
            found = self._files.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        return [one.rstrip("/").rpartition("/")[2] for one in found if one.rstrip("/") != self._root]

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
        """Returns an object of which ranges are fetched as they are asked for."""
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
        self._files, self._path, self._label = files, path, label
        try:
            self.num_bytes = int(files.size(path))
        except OSError as error:
            raise CheckpointError(f"{label}: {getattr(error, 'strerror', None) or error}.") from error
        self._begin, self._kept = 0, bytearray()

    def range(self, begin: int, end: int) -> memoryview:
        """Fetches the bytes, or the rest of them where they begin in what was fetched last."""
        kept_end = self._begin + len(self._kept)
        known = self._kept[begin - self._begin : end - self._begin] if self._begin <= begin < kept_end else b""
        if len(known) < end - begin:
            try:
                found = self._files.cat_file(self._path, start=begin + len(known), end=end)
            except OSError as error:
                raise CheckpointError(f"{self._label}: {getattr(error, 'strerror', None) or error}.") from error
            if len(found) != end - begin - len(known):
                raise CheckpointError(f"{self._label}: bytes {begin} to {end} were asked for, and some are missing.")
            self._begin, self._kept = begin, bytearray(known + found)  # torch takes writable memory
        return memoryview(self._kept)[begin - self._begin : end - self._begin]

    def release(self, begin: int, end: int) -> None:
        """Does nothing: no more than the last range is kept."""

    def close(self) -> None:
        """Forgets what was fetched."""
        self._kept = bytearray()


def _reserve(descriptor: int, num_bytes: int) -> None:
    """Takes the room of a file before it is written: a full disk shows at once, and ext4 writes a third faster.

    ``os.posix_fallocate`` would write to every page where the file system cannot do it, as NFS 3.
    """
    if sys.platform != "linux" or not num_bytes:
        return
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    sizes = ctypes.c_int64(0), ctypes.c_int64(num_bytes)
    if fallocate(descriptor, _KEEP_SIZE, *sizes) and ctypes.get_errno() in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@contextmanager
def replaced(path: str | os.PathLike[str], temporary: str | os.PathLike[str]) -> Iterator[Any]:
    """Opens the new file ``temporary``, which replaces ``path`` at once and durably when the context is left.

    After an error the old file stands, and the new one is gone.
    """
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | PLAIN, 0o666), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    flush_folder(os.path.dirname(path))


def flush_folder(folder: str | os.PathLike[str]) -> None:
    """Flushes the directory entries of ``folder`` to disk."""
    if hasattr(os, "O_DIRECTORY"):  # Windows cannot open a folder
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Returns whether ``path`` is the address of a remote folder."""
    text = os.fspath(path)
    return "://" in text and not text.startswith("file://")


def open_folder(path: str | os.PathLike[str]) -> LocalFolder | RemoteFolder:
    """Returns the folder that ``path`` names, ``~`` being the user's home. Raises ConfigError."""
    text = os.fspath(path)
    return RemoteFolder(text) if is_remote(text) else LocalFolder(os.path.expanduser(text.removeprefix("file://")))


def explained(error: OSError) -> str:
    """Returns what to do about ``error`` of a write, in one sentence."""
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
    told = error.strerror or f"{error}"
    found = reasons.get(error.errno or 0)
    return f"{told}: {found}" if found else told


def _protocols(files: Any) -> tuple[str, ...]:
    found = files.protocol
    return (found,) if isinstance(found, str) else tuple(found)
