"""The launcher's own lines, the log folder, the workers' log files, the echo of one of them, and tails for the report.

A worker writes straight into its file, so that a slow terminal never slows training; a thread copies the file of
the echoed worker to standard output as it grows. Bytes stay bytes: partial lines and binary data pass unchanged.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from fleet.common.own_thread import OwnThread
from fleet.common.plain_files import NotPlainError, open_own, open_to_read
from fleet.errors import LaunchError

LOG_MODE = 0o640
PROFILE_FOLDER = "profile"  # in the log folder: the files of --profile
MAX_OPENING_LINES = 5  # of the launcher, before the first line of the script
LEVELS = {"DEBUG": 10, "INFO": 20, "WARNING": 30, "ERROR": 40, "CRITICAL": 50}
_ECHO_PERIOD_S = 0.05
_ECHO_BLOCK_BYTES = 1 << 16  # one write is one step of progress; a slow reader must see several in 5 s
# A reader of standard output that takes nothing for this long is stuck; the log file holds everything anyway.
_STUCK_READER_S = 5.0
PREVIOUS = "previous"
_LOCK = ".launchers"
_PROCESS_FILES = re.compile(
    r"((worker|server)log\.\d+|envlog\.\d+|backup_env\.(server\.)?\d+\.json|endpoints\.log|[\w.-]+\.gpu\.log)"
)
_PROFILE_FILES = re.compile(r"rank\d+\.(trace|steps)\.json|trace\.json|table\.txt")
_LAUNCHER_FILE = re.compile(r"[\w.-]+\.[a-z]{6}\.log")
_LAUNCHER_LINE = b"LAUNCH "


class LaunchLog:
    """Writes ``LAUNCH LEVEL date time,ms text`` to standard error and, once opened, to the pod's own log file.

    Args:
        level: lines below it are dropped: DEBUG, INFO, WARNING, ERROR or CRITICAL.
        verbose: shows on standard error also the lines that otherwise stand in the file alone; DEBUG does so as well.
    """

    def __init__(self, level: str = "INFO", *, verbose: bool = False) -> None:
        self._threshold = LEVELS.get(level.upper(), LEVELS["INFO"])
        self._verbose = (verbose or self._threshold == LEVELS["DEBUG"]) and self._threshold <= LEVELS["INFO"]
        self._num_shown = 0
        self._file_fd: int | None = None
        self._early: list[str] = []

    def open_file(self, path: Path) -> None:
        """Opens the pod's log file; the lines written before go into it first."""
        self._file_fd = open_log(path)
        for line in self._early:
            write_all(self._file_fd, line.encode("utf-8", "backslashreplace"))
        self._early.clear()

    def debug(self, text: str) -> None:
        """Writes a line that only ``--log_level DEBUG`` shows."""
        self.write("DEBUG", text)

    def info(self, text: str) -> None:
        """Writes an ordinary line."""
        self.write("INFO", text)

    def warning(self, text: str) -> None:
        """Writes a line about something the user may want to change."""
        self.write("WARNING", text)

    def error(self, text: str) -> None:
        """Writes a line about the end of the job."""
        self.write("ERROR", text)

    def write(self, level: str, text: str) -> None:
        """Writes ``text`` with the prefix of ``level``; a text of several lines gets one prefix."""
        if LEVELS[level] >= self._threshold:
            self._emit(f"LAUNCH {level} {_timestamp()} {text}\n")

    def plain(self, text: str) -> None:
        """Writes ``text`` without a prefix, whatever the level."""
        self._emit(f"{text}\n")

    def file_only(self, text: str) -> None:
        """Writes an INFO line into the pod's log file alone."""
        self._to_file(f"LAUNCH INFO {_timestamp()} {text}\n")

    def detail(self, text: str, *, prefix: bool = True) -> None:
        """Writes an INFO line for somebody who looks it up: into the file, and when verbose to standard error."""
        line = f"LAUNCH INFO {_timestamp()} {text}\n" if prefix else f"{text}\n"
        (self._emit if self._verbose else self._to_file)(line)

    def opening(self, text: str, *, prefix: bool = True, room: int = 1) -> None:
        """Writes an INFO line before the first one of the script: on standard error while few lines stand there.

        ``room`` says how many more there have to be, this one included.
        """
        is_shown = self._num_shown + room <= MAX_OPENING_LINES and self._threshold <= LEVELS["INFO"]
        if self._verbose or not is_shown:
            self.detail(text, prefix=prefix)
        else:
            self.info(text) if prefix else self.plain(text)

    def count_shown(self, num_lines: int) -> None:
        """Notes lines that others have printed before the first one of the script."""
        self._num_shown += num_lines

    def close(self) -> None:
        """Closes the file; later lines go to standard error only."""
        if self._file_fd is not None:
            os.close(self._file_fd)
            self._file_fd = None

    def _emit(self, line: str) -> None:
        self._num_shown += line.count("\n")
        # A closed terminal must not end a running job.
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(line)
            sys.stderr.flush()
        self._to_file(line)

    def _to_file(self, line: str) -> None:
        if self._file_fd is None:
            self._early.append(line)
            return
        # A full disk must not end a running job; standard error has the line.
        with contextlib.suppress(OSError):
            write_all(self._file_fd, line.encode("utf-8", "backslashreplace"))


def _timestamp() -> str:
    now = time.time()
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(now))},{int(now % 1 * 1000):03d}"


def open_log(path: Path, how: int = os.O_WRONLY | os.O_APPEND) -> int:
    """Opens ``path`` with mode 0640, for appending, because data-loader children write to it too.

    Raises:
        LaunchError: it is a link, a FIFO or the like: somebody has put it there, and may have chosen where it leads.
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return open_own(path, how, LOG_MODE)
    except (NotPlainError, IsADirectoryError) as error:
        raise no_plain_file(path, f"{error.strerror}") from None


def no_plain_file(path: Path, found: str = "a symbolic link") -> LaunchError:
    """Returns the error for a file in the log folder that no launcher has written."""
    return LaunchError(
        f"{path}: {found}. The launcher writes in --log_dir to plain files and folders of its own user. Remove it, or "
        "choose a --log_dir that nobody else can write."
    )


def mark_start(fd: int, name: str) -> None:
    """Writes a line that parts the output of process ``name`` from the earlier lines of the file."""
    if os.fstat(fd).st_size:
        write_all(fd, f"\nLAUNCH INFO {_timestamp()} {name} starts; what stands above is from before\n".encode())


def write_all(fd: int, data: bytes) -> None:
    """Writes every byte of ``data`` to ``fd``."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def is_one_place(*fds: int) -> bool:
    """Returns whether all of ``fds`` write to one terminal, file or pipe."""
    try:
        return len({(found.st_dev, found.st_ino) for found in map(os.fstat, fds)}) == 1
    except OSError:
        return False


def read_tail(path: Path, *, from_bytes: int = 0, limit_bytes: int = 65536) -> str:
    """Returns the end of ``path`` as text: the bytes after ``from_bytes``, at most the last ``limit_bytes``.

    ``from_bytes`` keeps the lines of an earlier run out of the report when the file is appended to. Bytes that are
    not UTF-8 come back escaped; a missing file gives an empty string.
    """
    try:
        with open_to_read(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(min(from_bytes, size), size - limit_bytes))
            return file.read(limit_bytes).decode("utf-8", "backslashreplace")
    except OSError:
        return ""


class LogEcho:
    """Copies the lines appended to ``path`` to ``output_fd`` from a thread until :meth:`finish`.

    Args:
        path: the log file of the echoed worker; it must exist.
        from_bytes: where to begin; the lines of an earlier run before it are not shown again.
        output_fd: where the bytes go; the launcher's standard output.
    """

    def __init__(self, path: Path, *, from_bytes: int, output_fd: int = 1) -> None:
        with open_to_read(path) as file:
            self._source_fd = os.dup(file.fileno())
        os.lseek(self._source_fd, from_bytes, os.SEEK_SET)
        self._output_fd = output_fd
        self._stopping = threading.Event()
        self._progress_at = time.monotonic()
        self._thread = OwnThread(self._run, name="log-echo")
        self._thread.start()

    def __enter__(self) -> LogEcho:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.finish()

    def finish(self) -> None:
        """Returns once the last byte of the file has been copied, or the reader took nothing for 5 s."""
        self._stopping.set()
        self._progress_at = time.monotonic()
        while self._thread.is_alive() and time.monotonic() - self._progress_at < _STUCK_READER_S:
            self._thread.join(0.1)

    def _run(self) -> None:
        try:
            while True:
                # Read before the copy: lines that were written before finish() are still copied.
                last_round = self._stopping.is_set()
                if not self._copy_new_bytes() or last_round:
                    return
                self._stopping.wait(_ECHO_PERIOD_S)
        finally:
            os.close(self._source_fd)

    def _copy_new_bytes(self) -> bool:
        """Copies to the current end of the file; returns False when nobody reads the output any more."""
        while data := os.read(self._source_fd, _ECHO_BLOCK_BYTES):
            view = memoryview(data)
            while view:
                try:
                    view = view[os.write(self._output_fd, view) :]
                    self._progress_at = time.monotonic()
                except BlockingIOError:
                    # Another program has left the terminal in non-blocking mode.
                    time.sleep(0.01)
                except OSError:
                    return False
        return True


@contextlib.contextmanager
def own_log_folder(folder: Path, *, keep: bool) -> Iterator[Path]:
    """Yields ``folder``, or a free one in it while other launchers use it, as this launcher's own.

    Files of an earlier job are moved aside, or removed without ``keep``.
    """
    for number in itertools.count(1):
        place = folder if number == 1 else folder / f"launcher-{number}"
        if place.is_symlink() and number > 1:
            raise no_plain_file(place)
        place.mkdir(parents=True, exist_ok=True)
        lock = open_log(place / _LOCK, os.O_RDWR)
        try:
            is_free, is_known = _take(lock)
            if is_free:
                if is_known:
                    _clear(place, keep=keep)
                yield place
                return
        finally:
            os.close(lock)


def _take(lock: int) -> tuple[bool, bool]:
    """Returns whether this launcher may use the folder, and whether it is sure that no other one does.

    Where files cannot be locked nobody knows, and launchers share it.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False, True
    except OSError:
        return True, False
    return True, True


def _clear(folder: Path, *, keep: bool) -> None:
    previous = folder / PREVIOUS
    places = {folder: previous, folder / PROFILE_FOLDER: previous / PROFILE_FOLDER}
    old = {place: _files_of_a_job(place) for place in places}
    if not any(old.values()):
        return
    for place in (folder / PROFILE_FOLDER, *(places.values() if keep else ())):
        if place.is_symlink():
            raise no_plain_file(place)
    for place, aside in places.items():
        for path in _files_of_a_job(aside) if keep else old[place]:
            path.unlink()
        for path in old[place] if keep else ():
            aside.mkdir(parents=True, exist_ok=True)
            path.rename(aside / path.name)


def _files_of_a_job(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    files = [path for path in folder.iterdir() if path.is_file() and not path.is_symlink()]
    if folder.name == PROFILE_FOLDER:
        return [path for path in files if _PROFILE_FILES.fullmatch(path.name)]
    return [path for path in files if _PROCESS_FILES.fullmatch(path.name) or _is_launchers(path)]


def _is_launchers(path: Path) -> bool:
    """Returns whether a launcher wrote the file: by its name, JOB.POD.log, and how it begins."""
    if not _LAUNCHER_FILE.fullmatch(path.name):
        return False
    with open_to_read(path) as file:
        return file.read(len(_LAUNCHER_LINE)) == _LAUNCHER_LINE
