"""FolderLock: one process at a time works on the folder of a server's state."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from fleet.common.plain_files import NotPlainError, open_own
from fleet.errors import PSError
from fleet.ps.files.own_folder import own_folder

if sys.platform != "win32":  # Windows has no POSIX locks: there nothing is locked
    import fcntl

_POLL_S = 0.1


class FolderLock:
    """Holds a folder until :meth:`release`, or until the process dies.

    Two servers in one folder would truncate each other's journal, and both would lose pushes.

    Args:
        folder: created when missing.
        patience_s: how long to wait for a process that is about to end.

    Raises:
        ConfigError: the folder does not belong to this user alone.
        PSError: another process holds it.
        OSError: the folder cannot be created or written.
    """

    def __init__(self, folder: Path, patience_s: float = 5.0) -> None:
        self._path = folder / ".lock"
        self._fd = -1
        self.renew(patience_s)

    def renew(self, patience_s: float = 0.0) -> None:
        """Takes the folder, again if somebody has removed it together with the lock; raises as the class does."""
        folder = self._path.parent
        own_folder(folder)
        # The name still leads to the locked file, so the lock in hand guards the folder.
        if self._fd >= 0 and self._path.exists() and os.path.samestat(os.fstat(self._fd), self._path.stat()):
            return
        self.release()
        try:
            self._fd = open_own(self._path, os.O_RDWR, 0o600)
        except NotPlainError as error:
            raise PSError(f"{self._path}: {error.strerror}: no parameter server made it.") from None
        deadline = time.monotonic() + patience_s
        while not self._take():
            if time.monotonic() > deadline:
                self.release()
                raise PSError(
                    f"another process uses {folder}, the folder of this parameter server. A server of this number "
                    "is already running: stop it, or give this job its own FLEET_PS_FOLDER."
                )
            time.sleep(_POLL_S)

    def _take(self) -> bool:
        if sys.platform != "win32":
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # children do not inherit it
            except (BlockingIOError, PermissionError):
                return False
            except OSError:
                pass  # a file system without locks
        return True

    def release(self) -> None:
        """Releases the folder."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
