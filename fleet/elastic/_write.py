"""Writes one checkpoint to disk: in the foreground, by the process beside the trainer, or in a thread."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet._log import LOGGER
from fleet.checkpoint.commit import Share, leave_error
from fleet.checkpoint.saving import Taken
from fleet.checkpoint.storage import LocalFolder
from fleet.checkpoint.writer import own_writer
from fleet.elastic._around import around
from fleet.elastic._faults import Faults
from fleet.elastic._folder import prune
from fleet.elastic._torch_files import publish, write_manifest, write_part
from fleet.errors import CheckpointError, FleetError


@dataclass(frozen=True, kw_only=True)
class ShareWrite:
    """What this worker contributes to a checkpoint of which every worker writes its share.

    Attributes:
        path: the checkpoint.
        token: of this save, the same on all workers.
        taken: the share; ``None`` where ``problem`` says why there is none.
    """

    path: Path
    token: str
    step: int
    rank: int
    world_size: int
    keep: int
    taken: Taken | None
    problem: str
    faults: Faults

    @property
    def folder(self) -> Path:
        """The folder of checkpoints."""
        return self.path.parent

    def run(self) -> None:
        """Writes the share; on worker 0, commits the checkpoint as well. Raises OSError, FleetError."""
        meet, after = around(self.faults, self.path, self.step, self.keep)
        self._checked().write(LocalFolder(self.path), self.token, meet)
        after()

    def start(self) -> None:
        """Copies the share and lets the process beside this one do the same. Raises FleetError."""
        faults = self.faults
        arguments = {
            "faults": faults.text,
            "rank": faults.rank,
            "generation": faults.generation,
            "trainer": os.getpid(),
            "path": f"{self.path}",
            "step": self.step,
            "keep": self.keep,
        }
        self._checked().start(LocalFolder(self.path), self.token, "fleet.elastic._around", arguments)

    def _checked(self) -> Taken:
        if self.taken is None:
            leave_error(LocalFolder(self.path), Share(self.token, self.rank, self.world_size, []), self.problem)
            raise CheckpointError(self.problem)
        return self.taken


@dataclass(frozen=True, kw_only=True)
class Write:
    """A checkpoint that worker 0 alone writes; ``files`` holds the contents by name."""

    folder: Path
    staging: Path
    step: int
    rank: int
    keep: int
    files: Mapping[str, Any]
    values: Mapping[str, Any]
    faults: Faults

    def run(self) -> None:
        """Writes this worker's files; on worker 0 it also publishes the checkpoint. Raises OSError, FleetError."""
        self._meet("save.begin")
        if self.rank == 0:
            try:
                self._write_all()
            except BaseException:
                shutil.rmtree(self.staging, ignore_errors=True)
                raise

    def _write_all(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.staging.mkdir()
        parts = {name: write_part(self.staging / name, obj, self._meet) for name, obj in self.files.items()}
        write_manifest(self.staging, self.values, parts)
        self._meet("save.manifest")
        self._meet("save.rename")
        written = publish(self.staging, self.folder, self.step)
        self._meet("save.renamed")
        prune(self.folder, self.keep, written, self._meet)

    def _meet(self, point: str) -> None:
        self.faults.meet(point, self.step)


class Background:
    """At most one write under way beside the program, and the error it ended with.

    A program that exits waits for its last checkpoint.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error = ""

    def start(self, write: Write | ShareWrite) -> None:
        """Starts ``write``; the previous one must have finished."""
        if isinstance(write, ShareWrite):
            try:
                write.start()
            except FleetError as error:  # the other workers are told at the next save, or when this one steps
                self._error = f"{error}"
            return
        self._thread = threading.Thread(target=self._run, args=(write,), name="fleet-checkpoint")
        self._thread.start()

    def finish(self) -> str:
        """Waits for the running write; returns its error, once, or an empty string."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return own_writer().finish() or self._take_error()

    def close(self) -> str:
        """Does the same, and ends the process that has written, with its copy of the state."""
        error = self.finish()
        own_writer().close()
        return error

    def failed(self) -> str:
        """Returns the error of a write that has ended, once, without waiting; an empty string otherwise."""
        return own_writer().failed() or ("" if self._thread is not None else self._take_error())

    def _take_error(self) -> str:
        error, self._error = self._error, ""
        return error

    def _run(self, write: Write) -> None:
        self._error = attempt(write)
        if self._error:
            LOGGER.error("The checkpoint of step %d was not written: %s", write.step, self._error)


def attempt(write: Write | ShareWrite) -> str:
    """Runs ``write``; returns what went wrong, or an empty string."""
    try:
        write.run()
    except FleetError as error:
        return f"{error}"
    except OSError as error:
        return f"{str(write.folder)!r}: {error.strerror or error}. The checkpoints before it are untouched."
    return ""
