"""Files that a run changes outside its own folder: each is kept as it was, and put back before the next run.

[Note: Changed files]
A script that saves a checkpoint under an absolute path, or in a folder that was there before, resumes from it when it
runs again: one process would then begin where the workers ended. What is written before the first update (a data set
that is downloaded, a cache) is the same for every run, and stays; so does what other programs write.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_SYSTEM = ("/dev/", "/proc/", "/sys/")
_FACTS, _CONTENT = "facts.json", "content"


class ChangedFiles:
    """Keeps what a path was before this process changes it, in ``<run>/before``, which all workers of a run share.

    Args:
        run: the folder of the run; what is in it is not kept.
        has_begun: whether training has begun; folders that are made are noted before that as well.
        failed: told of a path that could not be kept.
    """

    def __init__(self, run: Path, has_begun: Callable[[], bool], failed: Callable[[str], None]) -> None:
        self._run = os.path.realpath(run)
        self._has_begun = has_begun
        self._failed = failed
        self._kept = Path(self._run, "before")
        self._known: set[str] = set()
        self._thread = threading.local()

    def watch(self) -> None:
        """Begins: Python's own functions, ``torch.save`` and safetensors tell of what they are about to write."""
        import torch

        self._kept.mkdir(exist_ok=True)
        # tempfile looks for its folder by writing a file, under a lock that its first name in a process needs, too.
        os.rmdir(tempfile.mkdtemp(dir=self._kept))
        sys.addaudithook(self._heard)
        torch.save = self._saving(torch.save, 1)
        try:
            import safetensors
        except ImportError:
            return
        save = self._saving(safetensors.serialize_file, 1)
        for name in ("safetensors", "safetensors.torch", "safetensors.numpy"):
            if name in sys.modules:
                sys.modules[name].serialize_file = save  # type: ignore[attr-defined]

    def _saving(self, original: Callable[..., Any], position: int) -> Callable[..., Any]:
        """Returns a function that opens its file in compiled code, which then tells of it."""

        @wraps(original)
        def save(*args: Any, **kwargs: Any) -> Any:
            named = [kwargs[name] for name in ("f", "filename") if name in kwargs]
            self._heard("open", (named[0] if named else args[position] if len(args) > position else None, "w", _WRITES))
            return original(*args, **kwargs)  # hands on

        return save

    def _heard(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            if isinstance(args[2], int) and args[2] & _WRITES:
                self._keep(args[0], follow=True)
        elif event in ("os.remove", "os.rmdir") and args[1] == -1:  # -1: relative to no open folder
            self._keep(args[0])
        elif event == "os.mkdir" and args[2] == -1:
            self._keep(args[0], always=True)
        elif event == "os.truncate":
            self._keep(args[0], follow=True)
        elif event in ("os.symlink", "os.link") and args[2] == -1:
            self._keep(args[1])
        elif event == "os.rename" and args[2] == args[3] == -1:
            self._keep_all(args[0], args[1])
        elif event == "shutil.rmtree":  # which removes relative to open folders
            self._keep_all(args[0])

    def _keep_all(self, old: Any, new: Any = None) -> None:
        """Keeps a path with all that is in it, and the places where that is about to go."""
        if not isinstance(old, str | bytes | os.PathLike) or not self._has_begun():
            return
        source = os.fsdecode(old)
        target = os.fsdecode(new) if isinstance(new, str | bytes | os.PathLike) else None
        inside = [""]
        for folder, folders, files in os.walk(source) if not os.path.islink(source) else ():
            inside += [os.path.relpath(os.path.join(folder, name), source) for name in (*folders, *files)]
        for name in inside:
            for place in (source, target):
                if place is not None:
                    self._keep(os.path.join(place, name) if name else place)

    def _keep(self, given: Any, *, follow: bool = False, always: bool = False) -> None:
        """Keeps the state of a path; ``follow`` goes to what a link names."""
        if not isinstance(given, str | bytes | os.PathLike) or getattr(self._thread, "busy", False):
            return
        if not always and not self._has_begun():
            return
        self._thread.busy = True
        try:
            path = os.fsdecode(given)
            parent, name = os.path.split(os.path.abspath(path))
            path = os.path.realpath(path) if follow else os.path.join(os.path.realpath(parent), name)
            if path not in self._known and not path.startswith((self._run + os.sep, *_SYSTEM)):
                self._known.add(path)
                self._write(path)
        except (OSError, ValueError) as error:
            self._failed(f"{given!s:.200} was changed and could not be kept as it was: {error}.")
        finally:
            self._thread.busy = False

    def _write(self, path: str) -> None:
        """Writes the state of ``path``, unless another worker has: then this one may have changed it already."""
        final = self._kept / hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()[:32]
        if final.exists():
            return
        kind = _kind_of(path)
        if kind == "other":
            return
        made = Path(tempfile.mkdtemp(dir=self._kept, prefix="new-"))
        facts = {"path": path, "kind": kind, "link": os.readlink(path) if kind == "link" else ""}
        (made / _FACTS).write_text(json.dumps(facts), encoding="utf-8")
        if kind == "file":
            shutil.copy2(path, made / _CONTENT)
        try:
            made.rename(final)
        except OSError:  # another worker was first
            shutil.rmtree(made, ignore_errors=True)


def _kind_of(path: str) -> str:
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "absent"
    for kind, asked in (("link", stat.S_ISLNK), ("file", stat.S_ISREG), ("folder", stat.S_ISDIR)):
        if asked(mode):
            return kind
    return "other"


def put_back(run: Path) -> list[str]:
    """Makes each path that a run changed what it was, removes ``<run>/before``; returns what could not be done."""
    kept = run / "before"
    entries = [entry for entry in kept.iterdir() if not entry.name.startswith("new-")] if kept.is_dir() else []
    known = [(json.loads((entry / _FACTS).read_text(encoding="utf-8")), entry) for entry in entries]
    failed = []
    for facts, entry in sorted(known, key=lambda one: len(one[0]["path"]), reverse=True):  # what is inside goes first
        try:
            _put_back_one(facts, entry / _CONTENT)
        except OSError as error:
            failed.append(f"{facts['path']} was changed and could not be put back: {error}.")
            continue
        shutil.rmtree(entry, ignore_errors=True)
    if not failed:
        shutil.rmtree(kept, ignore_errors=True)
    return failed


def _put_back_one(facts: dict[str, str], content: Path) -> None:
    path, kind, now = facts["path"], facts["kind"], _kind_of(facts["path"])
    if kind == "absent":
        if now == "folder":
            if not os.listdir(path):
                os.rmdir(path)
        elif now != "absent":
            os.remove(path)
        return
    if now == kind == "folder":
        return
    if now == "folder":
        os.rmdir(path)
    elif now != "absent" and not now == kind == "file":  # a file is written anew in its place
        os.remove(path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if kind == "folder":
        os.makedirs(path, exist_ok=True)
    elif kind == "link":
        os.symlink(facts["link"], path)
    else:
        shutil.copy2(content, path)
