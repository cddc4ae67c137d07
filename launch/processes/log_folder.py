"""One rule for the files in ``--log_dir``: they are those of one job, the last one started.

What an earlier job left is moved to the folder ``previous`` in it (its own earlier content is removed), or removed with
``--log_overwrite``. A launcher that starts while another one uses the folder, as nodes of one job on one machine do,
moves nothing; its processes write behind what is there. So does a process that is started again within a job.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path

from fleet.launch.processes.logs import no_plain_file, open_log
from fleet.launch.processes.profile_range import FOLDER

PREVIOUS = "previous"
_LOCK = ".launchers"
_PROCESS_FILES = re.compile(
    r"((worker|server)log\.\d+|envlog\.\d+|backup_env\.(server\.)?\d+\.json|endpoints\.log|[\w.-]+\.gpu\.log)"
)
_PROFILE_FILES = re.compile(r"rank\d+\.(trace|steps)\.json|trace\.json|table\.txt")
_LAUNCHER_FILE = re.compile(r"[\w.-]+\.[a-z]{6}\.log")
_LAUNCHER_LINE = b"LAUNCH "


@contextlib.contextmanager
def own_log_folder(folder: Path, *, keep: bool) -> Iterator[None]:
    """Makes ``folder`` this job's; what an earlier job left is moved aside, or removed without ``keep``."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = open_log(folder / _LOCK, os.O_RDWR)
    try:
        if _is_alone(lock):
            _clear(folder, keep=keep)
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_SH)
        yield
    finally:
        os.close(lock)


def _is_alone(lock: int) -> bool:
    """Returns whether no other launcher uses the folder; where files cannot be locked nobody knows."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _clear(folder: Path, *, keep: bool) -> None:
    previous = folder / PREVIOUS
    places = {folder: previous, folder / FOLDER: previous / FOLDER}
    old = {place: _files_of_a_job(place) for place in places}
    if not any(old.values()):
        return
    for place in (folder / FOLDER, *(places.values() if keep else ())):
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
    if folder.name == FOLDER:
        return [path for path in files if _PROFILE_FILES.fullmatch(path.name)]
    return [path for path in files if _PROCESS_FILES.fullmatch(path.name) or _is_launchers(path)]


def _is_launchers(path: Path) -> bool:
    """Returns whether a launcher wrote the file: by its name, JOB.POD.log, and how it begins."""
    if not _LAUNCHER_FILE.fullmatch(path.name):
        return False
    with path.open("rb") as file:
        return file.read(len(_LAUNCHER_LINE)) == _LAUNCHER_LINE
