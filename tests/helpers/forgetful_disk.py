"""A disk that forgets what was not synced: what a machine leaves that lost its power (as etcd and bbolt test it).

It watches ``fsync`` and ``fdatasync`` of one folder. Synced is the content of a file at its last sync, and the names in
a folder at that folder's. :meth:`ForgetfulDisk.cut` is the end of the power: no later sync succeeds, and
:meth:`ForgetfulDisk.rebuild` writes what the disk has then: what was synced, and of the rest nothing, everything, or a
random part. Names of one folder change all together or not at all, pages of a file one by one.
"""

from __future__ import annotations

import errno
import os
import random
import stat
import threading
from pathlib import Path
from typing import Literal

import pytest

Unsynced = Literal["lost", "kept", "random"]
_PAGE = 512


class ForgetfulDisk:
    """The disk of ``root``, a folder that exists and is empty.

    Args:
        root: everything in it is watched.
        patch: takes the calls over.
        cut_at: the power ends in the sync of this number, before it has done anything; 0 leaves it on.
    """

    def __init__(self, root: Path, patch: pytest.MonkeyPatch, cut_at: int = 0) -> None:
        self.root, self.cut_at, self.syncs, self.is_off = root, cut_at, 0, False
        self._files: dict[int, bytes] = {}
        self._folders: dict[int, dict[str, int]] = {}
        self._open: dict[int, int] = {}  # inodes stay theirs while somebody has them open
        self._lock = threading.RLock()
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, self._sync)

    def _sync(self, fd: int) -> None:
        with self._lock:
            self.syncs += 1
            if self.syncs == self.cut_at:
                self.cut()
            if self.is_off:
                raise OSError(errno.EIO, "the power is off")
            if not Path(os.readlink(f"/proc/self/fd/{fd}")).is_relative_to(self.root):
                return  # the folders above it, which others use too
            number = self._hold(f"/proc/self/fd/{fd}")
            if stat.S_ISDIR(os.fstat(fd).st_mode):
                self._folders[number] = self._names(number)
            else:
                self._files[number] = self._content(number)

    def _hold(self, path: str) -> int:
        fd = os.open(path, os.O_RDONLY)
        number = os.fstat(fd).st_ino
        if number in self._open:
            os.close(fd)
        else:
            self._open[number] = fd
        return number

    def _names(self, number: int) -> dict[str, int]:
        at = f"/proc/self/fd/{self._open[number]}"
        return {name: self._hold(f"{at}/{name}") for name in os.listdir(at)}

    def _content(self, number: int) -> bytes:
        return Path(f"/proc/self/fd/{self._open[number]}").read_bytes()

    def cut(self) -> None:
        """Ends the power; what was not synced is as it is at this moment."""
        with self._lock:
            if self.is_off:
                return
            self.is_off = True
            self._now: dict[int, bytes | dict[str, int]] = {}
            waiting = [self._hold(str(self.root))]
            for names in self._folders.values():
                waiting += names.values()
            while waiting:
                number = waiting.pop()
                if number in self._now:
                    continue
                if stat.S_ISDIR(os.fstat(self._open[number]).st_mode):
                    names = self._names(number)
                    self._now[number] = names
                    waiting += names.values()
                else:
                    self._now[number] = self._content(number)

    def rebuild(self, target: Path, unsynced: Unsynced = "lost", seed: int = 0) -> Path:
        """Writes the folder as the disk has it to ``target`` and returns it."""
        self.cut()
        self._write(os.stat(self.root).st_ino, target, unsynced, random.Random(seed))
        return target

    def _write(self, number: int, target: Path, unsynced: Unsynced, rng: random.Random) -> None:
        now = self._now[number]
        if isinstance(now, bytes):
            target.write_bytes(_mixed(self._files.get(number, b""), now, unsynced, rng))
            return
        target.mkdir()
        is_new = unsynced == "kept" or (unsynced == "random" and rng.random() < 0.5)
        names = now if is_new else self._folders.get(number, {})
        for name, child in sorted(names.items()):
            self._write(child, target / name, unsynced, rng)

    def close(self) -> None:
        """Lets the inodes go."""
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()


def _mixed(old: bytes, new: bytes, unsynced: Unsynced, rng: random.Random) -> bytes:
    if unsynced != "random":
        return new if unsynced == "kept" else old
    size = rng.choice((len(old), len(new)))
    old, new = old.ljust(size, b"\0"), new.ljust(size, b"\0")
    pages = ((old if rng.random() < 0.5 else new)[at : at + _PAGE] for at in range(0, size, _PAGE))
    return b"".join(pages)[:size]
