"""FS: the calls of every file system, and their errors. Standard library only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from fleet.common.file_shard import split_files
from fleet.errors import FleetError


class ExecuteError(FleetError):
    """A command of the file system failed."""


class FSFileExistsError(FleetError, FileExistsError):
    """The target exists and must not be overwritten."""


class FSFileNotExistsError(FleetError, FileNotFoundError):
    """The source does not exist."""


class FSTimeOut(FleetError, TimeoutError):
    """An operation did not succeed within the client's time limit; the last failure is its cause."""


class FSShellCmdAborted(ExecuteError):
    """The command was aborted (exit status 134); it is not retried."""


class FS(ABC):
    """The operations of every file system. Paths are strings; a listing holds names, not paths."""

    @abstractmethod
    def ls_dir(self, fs_path: str) -> tuple[list[str], list[str]]:
        """Returns the names of the folders and of the files in a folder; two empty lists when it does not exist."""

    def list_dirs(self, fs_path: str) -> list[str]:
        """Returns the names of the folders in a folder."""
        return self.ls_dir(fs_path)[0]

    @abstractmethod
    def is_file(self, fs_path: str) -> bool:
        """Returns whether a file with this name exists."""

    @abstractmethod
    def is_dir(self, fs_path: str) -> bool:
        """Returns whether a folder with this name exists."""

    @abstractmethod
    def is_exist(self, fs_path: str) -> bool:
        """Returns whether anything with this name exists."""

    @abstractmethod
    def mkdirs(self, fs_path: str) -> None:
        """Creates a folder and its parents; raises FSFileExistsError when a file with this name exists."""

    @abstractmethod
    def delete(self, fs_path: str) -> None:
        """Removes a file, or a folder with its contents; a missing one is not an error."""

    @abstractmethod
    def touch(self, fs_path: str, exist_ok: bool = True) -> None:
        """Creates an empty file; raises FSFileExistsError when it exists and ``exist_ok`` is False."""

    @abstractmethod
    def mv(self, src_path: str, dst_path: str, overwrite: bool = False, test_exists: bool = False) -> None:
        """Moves ``src_path`` to the name ``dst_path``.

        Raises FSFileNotExistsError without a source, FSFileExistsError when the target exists and ``overwrite`` is
        False.
        """

    @abstractmethod
    def upload(self, local_path: str, fs_path: str, multi_processes: int = 5, overwrite: bool = False) -> None:
        """Copies a local file or folder to ``fs_path``; same errors as :meth:`mv`."""

    @abstractmethod
    def download(self, fs_path: str, local_path: str, multi_processes: int = 5, overwrite: bool = False) -> None:
        """Copies a file or folder to the local ``local_path``; same errors as :meth:`mv`."""

    @abstractmethod
    def need_upload_download(self) -> bool:
        """Returns whether files must be copied here before a program can open them."""

    @staticmethod
    def _split_files(files: Sequence[str], trainer_id: int, trainers: int) -> list[str]:
        return split_files(files, trainer_id, trainers)
