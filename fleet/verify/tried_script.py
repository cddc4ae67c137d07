"""A script that is only tried: a few updates without network and other programs; files it changes are put back."""

from __future__ import annotations

import importlib.util
import linecache
import os
import sys
from collections import Counter
from importlib.machinery import SourceFileLoader
from multiprocessing import util
from types import CodeType, FrameType
from typing import Any

from torch.optim import Optimizer

from fleet import parallel
from fleet.strategies._shared.optimizer_wrapper import OptimizerWrapper
from fleet.strategies._shared.update_rule import RuleWrapper
from fleet.verify.changed_files import ChangedFiles
from fleet.verify.record_files import RecordFile
from fleet.verify.run_recording import StopTraining

_NETWORK = ("socket.connect", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname", "urllib.Request")
_PROGRAMS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn")
_ASKING = ("stty size", "tput ", "git rev-parse", "git describe", "git log", "git status", "git diff", "nvidia-smi")
_BUILDERS = ("/torch/_inductor/", "/torch/utils/cpp", "/triton/", "/platform.py", "/ctypes/util.py")


class UpdateCounter:
    """Counts updates and writes each down; raises StopTraining after ``steps`` of one optimizer."""

    def __init__(self, record: RecordFile, steps: int) -> None:
        self._record = record
        self._steps = steps
        self._updates: Counter[int] = Counter()

    def before_update(self, optimizer: Optimizer, *_: Any) -> None:
        """Nothing is noted before an update."""

    def after_update(self, optimizer: Optimizer, *_: Any) -> None:
        """Counts an update of the optimizer inside all wrappers."""
        if isinstance(optimizer, OptimizerWrapper) and not isinstance(optimizer, RuleWrapper):
            return
        self._updates[id(optimizer)] += 1
        self._record.write("update", number=self._updates[id(optimizer)])
        if self._updates[id(optimizer)] >= self._steps:
            raise StopTraining


def confine(record: RecordFile) -> None:
    """Refuses network and other programs from now on, and keeps every file as it was before it is changed.

    ``fleet.spawn`` calls its function in this process.
    """
    run = record.folder.parent
    ChangedFiles(run, lambda: True, lambda text: record.write("note", text=text)).watch()
    parallel.spawn = lambda func, args=(), *_, **__: func(*args)
    util.spawnv_passfds = _no_process  # type: ignore[assignment]
    sys.addaudithook(_refuse)


def _no_process(*args: Any) -> int:
    raise PermissionError("the trial run starts no other program: a process of multiprocessing")


def _refuse(event: str, args: tuple[Any, ...]) -> None:
    if event in _NETWORK and not _is_local(event, args):
        raise PermissionError("the trial run has no network")
    if event in _PROGRAMS and not _is_building() and not _is_asking(args):
        raise PermissionError(f"the trial run starts no other program: {args[0]!s:.200}")


def _is_local(event: str, args: tuple[Any, ...]) -> bool:
    """Returns whether the address is a path on this machine, as the workers of a DataLoader use."""
    return event in ("socket.connect", "socket.sendto") and isinstance(args[1], str | bytes)


def _is_asking(args: tuple[Any, ...]) -> bool:
    """Returns whether the program only tells something, such as the width of a terminal or the commit."""
    given = args[1] if len(args) > 1 else args[0]
    words = [given] if isinstance(given, str | bytes) else list(given or ())
    line = " ".join(map(os.fsdecode, words)).removeprefix("/bin/sh -c ")
    return line.startswith(_ASKING) and not set(line) & set(";|&<>`$")


def _is_building() -> bool:
    """Returns whether a compiler of torch, or a look at the machine, asks for the program."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if any(part in frame.f_code.co_filename for part in _BUILDERS):
            return True
        frame = frame.f_back
    return False


def run_text(path: str, text: str) -> None:
    """Runs ``text`` as ``python path`` would run it; the file at ``path`` may hold another one, and stays as it is."""
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    loader = _TextLoader("__main__", path, text)
    spec = importlib.util.spec_from_file_location("__main__", path, loader=loader)
    if spec is None:
        raise AssertionError(f"no module can be made of {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules["__main__"] = module
    loader.exec_module(module)


class _TextLoader(SourceFileLoader):
    def __init__(self, name: str, path: str, text: str) -> None:
        super().__init__(name, path)
        self._text = text

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self._text.encode(), self.path)
