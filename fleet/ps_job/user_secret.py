"""The job secret: FLEET_JOB_SECRET, or on one machine a secret of this user, in a file that only the user can read.

The first process that needs the file makes it; later ones find it, and so do all later jobs of this user.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path

from fleet.env import Environment
from fleet.errors import ConfigError
from fleet.ps.wire.auth import check_secret
from fleet.ps.wire.transport import stays_here

NAME = "job-secret"
SECRET_BYTES = 32


def read_job_secret(environment: Environment, endpoints: Sequence[str]) -> bytes:
    """Returns the secret for a connection to the servers at ``endpoints``.

    Without FLEET_JOB_SECRET it is this user's secret, where all servers are on this machine: no other machine has it.

    Raises:
        ConfigError: there is no secret and a server is on another machine, or the user's secret cannot be kept.
    """
    text = (environment.raw("FLEET_JOB_SECRET") or "").strip().encode()
    remote = next((endpoint for endpoint in endpoints if not stays_here(endpoint)), None)
    if not text and remote is None:
        return read_user_secret(environment)
    return check_secret(remote or next(iter(endpoints), ""), text)


def read_user_secret(environment: Environment) -> bytes:
    """Returns the secret in the folder FLEET_SECRET_FOLDER (``~/.fleet``); makes folder and secret where they lack.

    Raises:
        ConfigError: folder or file are links, belong to another user or are open to others, or cannot be made.
    """
    text = environment.raw("FLEET_SECRET_FOLDER")
    try:
        folder = Path(text).expanduser() if text else Path.home() / ".fleet"
        with contextlib.suppress(FileExistsError):
            os.makedirs(folder.parent, exist_ok=True)
            os.mkdir(folder, 0o700)
        # Everything below goes through this descriptor: a folder that is swapped after the check is not used.
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _check_own(os.fstat(descriptor), folder)
            return _read(descriptor, folder) or _make(descriptor, folder)
        finally:
            os.close(descriptor)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home
        raise ConfigError(
            f"FLEET_JOB_SECRET is not set, and this user's secret cannot be kept in {text or '~/.fleet'}: {error}. Set "
            "FLEET_JOB_SECRET to the same value for every process, or FLEET_SECRET_FOLDER to a folder of yours."
        ) from None


def _read(folder_fd: int, folder: Path) -> bytes:
    """Returns the secret, or nothing where there is no file."""
    try:
        descriptor = os.open(NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder_fd)
    except FileNotFoundError:
        return b""
    # O_NONBLOCK above: a pipe at this place must not hold the process up before it is refused here.
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        _check_own(found, folder / NAME)
        secret = file.read(1024).strip() if stat.S_ISREG(found.st_mode) else b""
    if len(secret) < SECRET_BYTES:
        raise ConfigError(
            f"{folder / NAME} holds no secret ({len(secret)} characters). Remove it; the next process makes a new one."
        )
    return secret


def _make(folder_fd: int, folder: Path) -> bytes:
    """Makes the file, whole or not at all, unless another process is faster; returns its secret."""
    name = f".{NAME}-{secrets.token_hex(8)}"
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder_fd)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(f"{secrets.token_hex(SECRET_BYTES)}\n".encode())
            file.flush()
            os.fsync(descriptor)
        # link() fails where the name exists: of two processes one wins, and both read the winner's secret.
        with contextlib.suppress(FileExistsError):
            os.link(name, NAME, src_dir_fd=folder_fd, dst_dir_fd=folder_fd, follow_symlinks=False)
    finally:
        os.unlink(name, dir_fd=folder_fd)
    return _read(folder_fd, folder)


def _check_own(found: os.stat_result, path: Path) -> None:
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid != os.geteuid() or mode & 0o077:
        rule = "700" if stat.S_ISDIR(found.st_mode) else "600"
        raise ConfigError(
            f"{path} belongs to user {found.st_uid} and has mode {mode:o}; the secret of jobs started by hand must be "
            f"yours alone. Run chmod {rule} on it if it is yours, and set FLEET_SECRET_FOLDER to another folder if not."
        )
