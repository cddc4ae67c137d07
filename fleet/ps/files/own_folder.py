"""A server's folder belongs to its user alone; a folder that somebody else has put there is refused."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from fleet.errors import ConfigError


def own_folder(path: Path) -> None:
    """Creates ``path`` with mode 0700 if it is missing, and makes sure that only this user can write it.

    A volume may let the group write (``fsGroup`` of Kubernetes). The owner of a file that this process creates there
    is "this user": a remote file system may use other ids, or no modes.

    Raises:
        ConfigError: it is a link or a file, belongs to another user, or is writable by every user.
        OSError: it cannot be created or written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise _refused(path, "is a symbolic link" if stat.S_ISLNK(found.st_mode) else "is not a folder")
    with tempfile.TemporaryFile(dir=path) as probe:
        made = os.fstat(probe.fileno())
    if found.st_uid != made.st_uid or found.st_mode & ~made.st_mode & stat.S_IWOTH:
        mode = stat.S_IMODE(found.st_mode)
        raise _refused(
            path, f"belongs to user {found.st_uid} and has mode {mode:o}, but this process is user {made.st_uid}"
        )


def _refused(path: Path, what: str) -> ConfigError:
    return ConfigError(
        f"{path} {what}; a parameter server keeps its state in a folder that only its own user may write. Remove it, "
        "or run chmod 700 on it if it is yours, or set FLEET_PS_FOLDER to another path."
    )
