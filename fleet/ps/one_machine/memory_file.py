"""Memory that processes of one user on one machine share: a file without a name (memfd), found through ``/proc``.

No folder holds it, no limit of ``/dev/shm`` applies to it, and it goes with the last process that has it mapped,
however that ends. Its maker tells the other process where it has it open, and a random word that is part of its name;
the other one opens it through ``/proc``, which the system allows the same user alone, and checks word, owner and size.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
from collections.abc import Mapping
from typing import Any

from fleet.errors import PSError

_NAME = "fleet-ps-{}"
_WORD_BYTES = 16


class NotShared(PSError):
    """Both ends cannot use the same memory."""


def make_memory(size: int) -> tuple[int, dict[str, Any]]:
    """Returns a descriptor of ``size`` new bytes, all zero, and what another process needs to open them.

    It can open them for as long as the descriptor is open.

    Raises:
        NotShared: this system has no such memory, or none is left.
    """
    word = secrets.token_hex(_WORD_BYTES)
    try:
        fd = os.memfd_create(_NAME.format(word), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError) as error:
        raise NotShared(f"no memory to share: {error}.") from None
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, size)
        # Nobody can shorten it, which would end a process that reads behind the end.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except (OSError, ValueError) as error:
        os.close(fd)
        raise NotShared(f"no memory to share: {error}.") from None
    return fd, {"pid": os.getpid(), "fd": fd, "word": word}


def open_memory(place: Mapping[str, Any], size: int) -> int:
    """Returns a descriptor of the memory that another process of this user and machine has made.

    Raises:
        NotShared: it is gone, or of another owner, kind or size.
    """
    pid, number, word = (place.get(name) for name in ("pid", "fd", "word"))
    if type(pid) is not int or type(number) is not int or not isinstance(word, str):
        raise NotShared("the place of the memory is malformed.")
    if len(word) != 2 * _WORD_BYTES or not word.isalnum() or pid < 1 or number < 0:
        raise NotShared("the place of the memory is malformed.")
    path = f"/proc/{pid}/fd/{number}"
    try:
        # The word shows that this is the maker's file: the number of a closed descriptor may belong to another one by
        # now.
        if os.readlink(path) != f"/memfd:{_NAME.format(word)} (deleted)":
            raise NotShared("this process sees other processes than the one that made it.")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise NotShared(f"the memory cannot be opened: {error.strerror}.") from None
    try:
        found = os.fstat(fd)
        is_own = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_size == size
        is_usable = is_own and bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        is_usable = False
    if not is_usable:
        os.close(fd)
        raise NotShared("it is not memory that this user made for it.")
    return fd
