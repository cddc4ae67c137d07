"""File systems behind one set of calls: the local disk here, Hadoop in :mod:`fleet.utils._hdfs`.

Standard library only.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, NoReturn

from fleet.errors import UnsupportedOptionError
from fleet.utils._fs_base import FS, ExecuteError, FSFileExistsError, FSFileNotExistsError, FSShellCmdAborted, FSTimeOut
from fleet.utils._hdfs import HDFSClient

__all__ = [
    "FS",
    "AFSClient",
    "ExecuteError",
    "FSFileExistsError",
    "FSFileNotExistsError",
    "FSShellCmdAborted",
    "FSTimeOut",
    "HDFSClient",
    "LocalFS",
]


class LocalFS(FS):
    """The local disk (or a network disk that is mounted).

    Example:
        >>> fs = LocalFS()
        >>> fs.touch("done")
        >>> fs.is_file("done")
        True
    """

    def ls_dir(self, fs_path: str) -> tuple[list[str], list[str]]:
        """Returns the names of the folders and of the files in a folder, sorted."""
        if not self.is_dir(fs_path):
            return [], []
        names = sorted(os.listdir(fs_path))
        # isdir() follows links, so a link to a folder is listed as a folder.
        folders = [name for name in names if os.path.isdir(os.path.join(fs_path, name))]
        return folders, [name for name in names if name not in set(folders)]

    def is_file(self, fs_path: str) -> bool:
        """Returns whether a file with this name exists."""
        return os.path.isfile(fs_path)

    def is_dir(self, fs_path: str) -> bool:
        """Returns whether a folder with this name exists."""
        return os.path.isdir(fs_path)

    def is_exist(self, fs_path: str) -> bool:
        """Returns whether anything with this name exists, even a dangling link."""
        return os.path.lexists(fs_path)

    def mkdirs(self, fs_path: str) -> None:
        """Creates a folder and its parents."""
        if self.is_file(fs_path):
            raise FSFileExistsError(f"mkdirs({fs_path!r}): a file with this name exists.")
        os.makedirs(fs_path, exist_ok=True)

    def delete(self, fs_path: str) -> None:
        """Removes a file, a link (not its target), or a folder with its contents."""
        # Links first: rmtree() refuses a link to a folder, and the target must stay.
        if os.path.islink(fs_path) or os.path.isfile(fs_path):
            os.unlink(fs_path)
        elif os.path.isdir(fs_path):
            shutil.rmtree(fs_path)

    def touch(self, fs_path: str, exist_ok: bool = True) -> None:
        """Creates an empty file, or updates the time of an existing one."""
        if self.is_exist(fs_path) and not exist_ok:
            raise FSFileExistsError(f"touch({fs_path!r}, exist_ok=False): it exists.")
        Path(fs_path).touch()

    def rename(self, fs_src_path: str, fs_dst_path: str) -> None:
        """Renames a file or folder; replaces a file with the new name."""
        os.rename(fs_src_path, fs_dst_path)

    def mv(self, src_path: str, dst_path: str, overwrite: bool = False, test_exists: bool = False) -> None:
        """Moves ``src_path`` to the name ``dst_path``; the local disk always checks first, whatever ``test_exists``."""
        self._check_pair("mv", src_path, dst_path, overwrite)
        # os.replace() overwrites a file, but no folder with contents.
        if overwrite and os.path.isdir(dst_path):
            self.delete(dst_path)
        os.replace(src_path, dst_path)

    def upload(self, local_path: str, fs_path: str, multi_processes: int = 5, overwrite: bool = False) -> None:
        """Copies a file or folder to the name ``fs_path``, one after the other."""
        self._check_pair("upload", local_path, fs_path, overwrite)
        # The old target goes first: copytree() refuses a folder that exists.
        if overwrite:
            self.delete(fs_path)
        if os.path.isdir(local_path):
            shutil.copytree(local_path, fs_path)
        else:
            shutil.copyfile(local_path, fs_path)

    def download(self, fs_path: str, local_path: str, multi_processes: int = 5, overwrite: bool = False) -> None:
        """Copies a file or folder to the name ``local_path``, one after the other."""
        self.upload(fs_path, local_path, multi_processes, overwrite)

    def need_upload_download(self) -> bool:
        """Returns False: a program opens local files directly."""
        return False

    def _check_pair(self, call: str, source: str, target: str, overwrite: bool) -> None:
        if not self.is_exist(source):
            raise FSFileNotExistsError(f"{call}({source!r}, ...): there is no such file or folder.")
        if self.is_exist(target) and not overwrite:
            raise FSFileExistsError(f"{call}(..., {target!r}): it exists. Pass overwrite=True to replace it.")
        # With overwrite the target is deleted first, and here it would be the source itself.
        if os.path.realpath(source) == os.path.realpath(target):
            raise FSFileExistsError(f"{call}({source!r}, {target!r}): source and target are the same.")


class AFSClient:
    """Refused: the client of a file system internal to Baidu."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse_afs()


def _refuse_afs() -> NoReturn:
    raise UnsupportedOptionError(
        "AFSClient talks to a file system inside Baidu and is not part of this project. Use HDFSClient or LocalFS."
    )
