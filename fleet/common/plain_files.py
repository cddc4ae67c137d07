"""Plain files in folders that others may write too: the one way to read, make, extend and replace one.

[Note: Links]
Another user with write access to a folder can put a link there, to a file that only this user may write or read, or a
FIFO, which keeps a reader waiting. So no call here follows a link at the name itself or waits for a FIFO. A new file
has a name that nobody can guess and replaces the old one by a rename, which acts on a link and not on its target. A
file that stays under its name (a log, a lock) must belong to this user.

A link that this user or root has made is what the user means: :func:`replacing` puts the file where it leads.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_PLAIN = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY", "O_CLOEXEC"))
_BUFFER_BYTES = 1 << 20
_STALE_AFTER_S = 3600.0  # a temporary file unwritten for this long belongs to a process that died

AnyPath = str | os.PathLike[str]


class NotPlainError(OSError):
    """The path holds a link, a FIFO or the like, or another user's file; ``strerror`` says which."""


def open_to_read(path: AnyPath) -> BinaryIO:
    """Opens the regular file at ``path`` for reading. Raises NotPlainError, OSError."""
    return open(os.fspath(path), "rb", opener=lambda name, _: _open(name, os.O_RDONLY))


def read_small(path: AnyPath, most_bytes: int) -> bytes:
    """Returns the content of a file that a user has named; a link is followed, because the user chose it.

    Raises NotPlainError; OSError, also for more than ``most_bytes``.
    """
    with open_to_read(os.path.realpath(path)) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes} bytes, the limit here", os.fspath(path))
    return content


def create(path: AnyPath, mode: int = 0o666, buffering: int = _BUFFER_BYTES) -> BinaryIO:
    """Opens a new file for writing. Raises FileExistsError where the name is taken, OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    return open(os.fspath(path), "wb", buffering, opener=lambda name, _: _open(name, flags, mode))


def open_own(path: AnyPath, flags: int, mode: int = 0o666) -> int:
    """Returns a descriptor of this user's file at ``path``, created if absent; ``os.O_TRUNC`` empties it.

    Raises NotPlainError, OSError.
    """
    # Opening with O_TRUNC would empty another user's file before its owner is known, so it is emptied afterwards.
    descriptor = _open(path, flags & ~os.O_TRUNC | os.O_CREAT, mode)
    folder = os.path.dirname(os.path.abspath(path))
    try:
        owner = os.fstat(descriptor).st_uid
        # root may work in a user's folder, as in a container; it trusts the owner of the folder with the files in it.
        if not _is_own(owner, folder) and (os.geteuid() or owner != os.stat(folder).st_uid):
            raise _not_own(path, f"the file belongs to user {owner}")
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def replacing(path: AnyPath, mode: int | None = None, *, is_durable: bool = True) -> Iterator[BinaryIO]:
    """Opens a new file that appears at ``path``, complete, when the context ends; its ``name`` is its temporary path.

    After an error the old file stands, and the new one is gone.

    Args:
        path: a link of another user there is refused.
        mode: the file's permissions; ``None`` keeps those of the replaced file, or applies the umask to a new one.
        is_durable: the file survives a power failure from then on.

    Raises:
        NotPlainError: another user's link, or neither a file nor a link stands there.
        OSError: it cannot be written.
    """
    target = own_target(path)
    # In the same folder, since a rename replaces a file at once only within one file system.
    folder, name = os.path.split(target)
    kept = _mode_of(target) if mode is None else mode
    file = create(os.path.join(folder, f".{name[:200]}.{secrets.token_hex(6)}.tmp"), mode or 0o666)
    try:
        with file:
            if kept is not None and hasattr(os, "fchmod"):
                os.fchmod(file.fileno(), kept)
            yield file
            file.flush()
            # Before the rename: otherwise a power failure could leave the new name with an empty file.
            if is_durable:
                os.fsync(file.fileno())
        os.replace(file.name, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(file.name)
        raise
    if is_durable:
        flush(folder)


def replace_file(path: AnyPath, content: str | bytes, mode: int | None = None, *, is_durable: bool = True) -> None:
    """Replaces the content of ``path`` in one step; texts in UTF-8. Raises as :func:`replacing`."""
    with replacing(path, mode, is_durable=is_durable) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def remove_stale(path: AnyPath) -> None:
    """Removes temporary files beside ``path`` whose processes died while replacing it. Raises OSError."""
    target = Path(path)
    for found in target.parent.iterdir():
        if found.name.startswith(f".{target.name[:200]}.") and found.name.endswith(".tmp"):
            # Another process may replace the file, or remove the same leftovers, at this moment.
            with contextlib.suppress(FileNotFoundError):
                if time.time() - found.lstat().st_mtime > _STALE_AFTER_S:
                    found.unlink()


def flush(path: AnyPath) -> None:
    """Writes the names in a folder, or the content of a file, through to the disk. Raises OSError."""
    if hasattr(os, "O_DIRECTORY"):  # Windows cannot open a folder
        descriptor = os.open(path, os.O_RDONLY | _PLAIN)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def own_target(path: AnyPath) -> str:
    """Returns ``path``, or the target of a link of this user or root. Raises NotPlainError for another user's link."""
    text = os.path.abspath(path)
    try:
        found = os.lstat(text)
    except OSError:
        return text
    if stat.S_ISLNK(found.st_mode):
        if not _is_own(found.st_uid, os.path.dirname(text)):
            raise _not_own(path, f"a symbolic link of user {found.st_uid}, which may lead anywhere")
        return os.path.realpath(text)
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise NotPlainError(errno.EINVAL, "neither a regular file nor a link to one stands there", text)
    return text


def check_owner(folder: AnyPath) -> None:
    """Raises NotPlainError where ``folder``, which exists, or a link that leads to it, belongs to another user."""
    # The link and its target: the owner of either can swap the folder.
    for found in (os.lstat(folder), os.stat(folder)):
        if not _is_own(found.st_uid, folder):
            raise _not_own(folder, f"the folder belongs to user {found.st_uid}")


def _open(path: AnyPath, flags: int, mode: int = 0o666) -> int:
    try:
        descriptor = os.open(path, flags | _PLAIN, mode)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):  # a link; a FIFO that nobody reads
            raise
        raise _not_plain(path, error.errno) from None
    # The open file is checked and not the name, which may point elsewhere a moment later.
    found = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(found):
        os.close(descriptor)
        if stat.S_ISDIR(found):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        raise _not_plain(path, errno.EINVAL)
    # O_NONBLOCK kept the call from waiting for a FIFO; reads and writes of the file itself must wait.
    if hasattr(os, "O_NONBLOCK"):
        os.set_blocking(descriptor, True)
    return descriptor


def _not_plain(path: AnyPath, number: int) -> NotPlainError:
    what = "a symbolic link, which may lead anywhere" if os.path.islink(path) else "not a regular file"
    return NotPlainError(number, f"{what}; put the file itself there", os.fspath(path))


def _not_own(path: AnyPath, what: str) -> NotPlainError:
    text = f"{what}, and this process is user {os.geteuid()}; remove it if it is not wanted, or name another path"
    return NotPlainError(errno.EPERM, text, os.fspath(path))


def _is_own(owner: int, folder: AnyPath) -> bool:
    """Returns whether ``owner`` is this user or root. Remote file systems may map ids, which a new file shows."""
    if not hasattr(os, "geteuid") or owner in (0, os.geteuid()):
        return True
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            return os.fstat(probe.fileno()).st_uid == owner
    except OSError:
        return False


def _mode_of(path: str) -> int | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    is_own = stat.S_ISREG(found.st_mode) and _is_own(found.st_uid, os.path.dirname(path))
    return stat.S_IMODE(found.st_mode) & 0o777 if is_own else None
