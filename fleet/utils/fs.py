"""File systems behind one set of calls: the local disk, and Hadoop through ``hadoop fs``, started without a shell.

Standard library only.

[Note: What is retried]
A command of Hadoop that fails is retried a few times, and the whole operation until the client's time limit, because a
busy name node refuses at random. Permanent failures are not retried: an absent source, an existing target, missing
permissions, an abort (exit status 134), and an answer of ``-test``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from fleet.common.file_shard import split_files
from fleet.errors import ConfigError, FleetError, UnsupportedOptionError
from fleet.launch.processes.redact import redact_arguments

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
_ABORTED = 134
T = TypeVar("T")


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


@dataclass(frozen=True)
class _Done:
    returncode: int
    stdout: str
    complaints: str  # standard error without the log lines that Hadoop writes when all is well


class _NotAgain(ExecuteError):
    """A failure that a retry cannot fix."""


class HDFSClient(FS):
    """Hadoop's file system through ``hadoop_home/bin/hadoop``.

    Args:
        hadoop_home: folder of the Hadoop installation.
        configs: Hadoop properties, such as ``{"fs.default.name": ..., "hadoop.job.ugi": ...}``; each becomes ``-D``.
        time_out: milliseconds an operation may take with all its retries.
        sleep_inter: milliseconds between two attempts of an operation.
        retry_times: how often one command is retried within an attempt.
        retry_sleep_s: seconds between these retries.

    Raises:
        ConfigError: there is no ``bin/hadoop`` in ``hadoop_home``, or an argument has the wrong type.
        ExecuteError: a command failed and cannot succeed later (missing permissions).
        FSTimeOut: a command kept failing until the time limit.
        FSShellCmdAborted: Hadoop was aborted.

    Example:
        >>> client = HDFSClient(hadoop_home, {"fs.default.name": "hdfs://name-node:9000", "hadoop.job.ugi": "user,pw"})
        >>> client.ls_dir("/data")
        (['train'], ['README'])
    """

    def __init__(
        self,
        hadoop_home: str,
        configs: Mapping[str, str] | None,
        time_out: int = 5 * 60 * 1000,
        sleep_inter: int = 1000,
        *,
        retry_times: int = 5,
        retry_sleep_s: float = 3.0,
    ) -> None:
        if configs is not None and not isinstance(configs, Mapping):
            raise ConfigError(
                f"HDFSClient(configs=...) is a {type(configs).__name__}; it takes a dictionary of Hadoop properties."
            )
        for name, value in (("time_out", time_out), ("sleep_inter", sleep_inter), ("retry_times", retry_times)):
            if type(value) is not int or value < 0:
                raise ConfigError(f"HDFSClient({name}={value!r}) takes an integer of at least 0.")
        program = os.path.join(hadoop_home, "bin", "hadoop")
        if not os.access(program, os.X_OK):
            raise ConfigError(f"HDFSClient(hadoop_home={hadoop_home!r}): {program!r} is not an executable.")
        self._configs = {str(key): str(value) for key, value in (configs or {}).items()}
        self._base = [program, "fs", *[f"-D{key}={value}" for key, value in self._configs.items()]]
        self._time_out_s = time_out / 1000
        self._sleep_s = sleep_inter / 1000
        self._retry_times = retry_times
        self._retry_sleep_s = retry_sleep_s

    # ---- looking -------------------------------------------------------------------------------------------------

    def is_exist(self, fs_path: str) -> bool:
        """Returns whether anything with this name exists."""
        return self._operation(lambda end: self._test("-e", fs_path, end))

    def is_dir(self, fs_path: str) -> bool:
        """Returns whether a folder with this name exists."""
        return self._operation(lambda end: self._test("-d", fs_path, end))

    def is_file(self, fs_path: str) -> bool:
        """Returns whether a file with this name exists."""
        return self._operation(lambda end: self._test("-e", fs_path, end) and not self._test("-d", fs_path, end))

    def ls_dir(self, fs_path: str) -> tuple[list[str], list[str]]:
        """Returns the names of the folders and of the files in a folder; two empty lists when it does not exist."""
        rows = self._rows(fs_path)
        folders = [_base_name(path) for kind, _, path in rows if kind == "d"]
        return folders, [_base_name(path) for kind, _, path in rows if kind != "d"]

    def list_files_info(self, path_list: Sequence[str]) -> list[dict[str, str | int]]:
        """Returns ``{"path": ..., "size": bytes}`` of every file among the given paths and in the given folders."""
        rows = [row for path in path_list for row in self._rows(path)]
        return [{"path": path, "size": size} for kind, size, path in rows if kind != "d"]

    def cat(self, fs_path: str) -> str:
        """Returns the text of a file; empty when it does not exist."""
        if not self.is_file(fs_path):
            return ""
        return self._operation(lambda end: self._command(["-cat", fs_path], end).stdout)

    # ---- changing ------------------------------------------------------------------------------------------------

    def mkdirs(self, fs_path: str) -> None:
        """Creates a folder and its parents."""
        if self.is_file(fs_path):
            raise FSFileExistsError(f"mkdirs({fs_path!r}): a file with this name exists.")
        self._operation(lambda end: self._command(["-mkdir", "-p", fs_path], end))

    def delete(self, fs_path: str) -> None:
        """Removes a file, or a folder with its contents; a missing one is not an error."""

        def remove(end: float) -> None:
            if self._test("-e", fs_path, end):
                self._command(["-rm", "-r", fs_path], end)

        self._operation(remove)

    def touch(self, fs_path: str, exist_ok: bool = True) -> None:
        """Creates an empty file; an existing one is not changed."""
        if self.is_exist(fs_path):
            if not exist_ok:
                raise FSFileExistsError(f"touch({fs_path!r}, exist_ok=False): it exists.")
            return
        self._operation(lambda end: self._command(["-touchz", fs_path], end))

    def rename(self, fs_src_path: str, fs_dst_path: str) -> None:
        """Renames a file or folder without checks."""
        self.mv(fs_src_path, fs_dst_path, test_exists=False)

    def mv(self, src_path: str, dst_path: str, overwrite: bool = False, test_exists: bool = True) -> None:
        """Moves ``src_path`` to the name ``dst_path``; ``test_exists=False`` skips the two checks before it."""
        if overwrite and self.is_exist(dst_path):
            self.delete(dst_path)
        if test_exists:
            self._check_pair("mv", src_path, self.is_exist(src_path), dst_path, self.is_exist(dst_path))
        try:
            self._operation(lambda end: self._command(["-mv", src_path, dst_path], end))
        except FSFileNotExistsError:
            # An attempt that seemed to fail may have moved it, and then its retry finds no source.
            if self.is_exist(src_path) or not self.is_exist(dst_path):
                raise

    def upload(self, local_path: str, fs_path: str, multi_processes: int = 5, overwrite: bool = False) -> None:
        """Copies a local file or folder to the name ``fs_path``; a folder's entries are copied in parallel."""
        _check_threads(multi_processes)
        if not os.path.exists(local_path):
            raise FSFileNotExistsError(f"upload({local_path!r}, ...): there is no such file or folder.")
        self._make_room("upload", fs_path, self.is_exist(fs_path), overwrite, self.delete)
        if not os.path.isdir(local_path):
            self._put(local_path, fs_path)
            return
        self.mkdirs(fs_path)
        names = sorted(os.listdir(local_path))
        _in_parallel(
            multi_processes,
            [partial(self._put, os.path.join(local_path, name), f"{fs_path}/{name}") for name in names],
        )

    def upload_dir(self, local_dir: str, dest_dir: str, overwrite: bool = False) -> None:
        """Copies a local folder into the folder ``dest_dir``, under its own name."""
        self.upload(local_dir, f"{dest_dir.rstrip('/')}/{_base_name(local_dir)}", overwrite=overwrite)

    def download(self, fs_path: str, local_path: str, multi_processes: int = 5, overwrite: bool = False) -> None:
        """Copies a file or folder to the local name ``local_path``; a folder's entries are copied in parallel."""
        _check_threads(multi_processes)
        if not self.is_exist(fs_path):
            raise FSFileNotExistsError(f"download({fs_path!r}, ...): there is no such file or folder.")
        self._make_room("download", local_path, os.path.lexists(local_path), overwrite, _delete_local)
        if not self.is_dir(fs_path):
            self._get(fs_path, local_path)
            return
        os.makedirs(local_path, exist_ok=True)
        names = [name for kind in self.ls_dir(fs_path) for name in kind]
        _in_parallel(
            multi_processes,
            [partial(self._get, f"{fs_path}/{name}", os.path.join(local_path, name)) for name in names],
        )

    def need_upload_download(self) -> bool:
        """Returns True: a program opens copies."""
        return True

    # ---- commands ------------------------------------------------------------------------------------------------

    def _check_pair(self, call: str, source: str, has_source: bool, target: str, has_target: bool) -> None:
        if not has_source:
            raise FSFileNotExistsError(f"{call}({source!r}, ...): there is no such file or folder.")
        if has_target:
            raise FSFileExistsError(f"{call}(..., {target!r}): it exists. Pass overwrite=True to replace it.")

    def _make_room(self, call: str, target: str, exists: bool, overwrite: bool, delete: Callable[[str], None]) -> None:
        if exists and not overwrite:
            raise FSFileExistsError(f"{call}(..., {target!r}): it exists. Pass overwrite=True to replace it.")
        if exists:
            delete(target)

    def _put(self, local_path: str, fs_path: str) -> None:
        self._operation(lambda end: self._command(["-put", "-f", local_path, fs_path], end))

    def _get(self, fs_path: str, local_path: str) -> None:
        # An attempt that failed leaves a part of the file, and -get has no -f in Hadoop 2.7.
        def make_room() -> None:
            if os.path.lexists(local_path):
                _delete_local(local_path)

        self._operation(lambda end: self._command(["-get", fs_path, local_path], end, make_room))

    def _rows(self, fs_path: str) -> list[tuple[str, int, str]]:
        """Returns kind ("d" or "-"), size in bytes and full path of each entry of a listing."""
        if not self.is_exist(fs_path):
            return []
        text = self._operation(lambda end: self._command(["-ls", fs_path], end).stdout)
        rows = [line.split(None, 7) for line in text.splitlines()]
        return [(row[0][0], int(row[4]), row[7]) for row in rows if len(row) == 8 and row[0][0] in "d-"]

    def _operation(self, act: Callable[[float], T]) -> T:
        """Runs ``act`` until it succeeds or the client's time limit, which is passed to ``act``."""
        end = time.monotonic() + self._time_out_s
        last: ExecuteError | None = None
        while last is None or time.monotonic() + self._sleep_s < end:
            if last is not None:
                time.sleep(self._sleep_s)
            try:
                return act(end)
            except (_NotAgain, FSShellCmdAborted):
                raise
            # The command under way hit the limit; the failure before it says more about the cause.
            except FSTimeOut:
                if last is None:
                    raise
                break
            except ExecuteError as error:
                last = error
        raise FSTimeOut(f"{last} It kept failing for {self._time_out_s:g} s.") from last

    def _test(self, flag: str, fs_path: str, end: float) -> bool:
        """Runs ``hadoop fs -test``: 0 is yes; 1 without a complaint is no; anything else is a failure."""
        done = self._run(["-test", flag, fs_path], end)
        if done.returncode == 0:
            return True
        if done.returncode == 1 and not done.complaints:
            return False
        raise self._failure(["-test", flag, fs_path], done)

    def _command(self, arguments: list[str], end: float, before_try: Callable[[], None] = lambda: None) -> _Done:
        for attempt in range(self._retry_times + 1):
            before_try()
            done = self._run(arguments, end)
            if done.returncode == 0:
                return done
            failure = self._failure(arguments, done)
            # The subclasses are permanent failures.
            if type(failure) is not ExecuteError or attempt == self._retry_times:
                break
            if time.monotonic() + self._retry_sleep_s >= end:
                break
            time.sleep(self._retry_sleep_s)
        raise failure

    def _run(self, arguments: list[str], end: float) -> _Done:
        left_s = end - time.monotonic()
        try:
            done = subprocess.run(
                [*self._base, *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=max(left_s, 0.001),
            )
        except subprocess.TimeoutExpired:
            raise FSTimeOut(f"{self._shown(arguments)} did not end within {self._time_out_s:g} s.") from None
        lines = [line for line in done.stderr.splitlines() if line.strip() and not _is_log_line(line)]
        return _Done(done.returncode, done.stdout, "\n".join(lines))

    def _failure(self, arguments: list[str], done: _Done) -> Exception:
        text = f"{self._shown(arguments)} ended with {done.returncode}: {done.complaints[-500:] or 'no message'}."
        if done.returncode in (_ABORTED, -6):
            return FSShellCmdAborted(text)
        if "No such file or directory" in done.complaints:
            return FSFileNotExistsError(text)
        if "File exists" in done.complaints:
            return FSFileExistsError(text)
        if "Permission denied" in done.complaints:
            return _NotAgain(text)
        return ExecuteError(text)

    def _shown(self, arguments: list[str]) -> str:
        """Returns the command for a message, without the values of secret properties."""
        return " ".join(["hadoop fs", *redact_arguments(self._base[2:]), *arguments])


def _delete_local(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def _is_log_line(line: str) -> bool:
    return any(f" {level} " in line for level in ("INFO", "WARN", "DEBUG")) or line.startswith("SLF4J")


def _base_name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _check_threads(num_threads: int) -> None:
    if type(num_threads) is not int or num_threads < 1:
        raise ConfigError(f"multi_processes={num_threads!r} takes an integer of at least 1.")


def _in_parallel(num_threads: int, calls: Sequence[Callable[[], None]]) -> None:
    """Runs ``calls`` with at most ``num_threads`` at a time; the first error is raised when all have ended."""
    with ThreadPoolExecutor(num_threads) as pool:
        for future in [pool.submit(call) for call in calls]:
            future.result()
