"""Writes one checkpoint to disk: in the foreground, or by the process beside the trainer."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from fleet.checkpoint.commit import Share, leave_error
from fleet.checkpoint.saving import PendingShare
from fleet.checkpoint.storage import LocalFolder
from fleet.checkpoint.writer import own_writer
from fleet.elastic.faults import Faults
from fleet.elastic.folder import around
from fleet.errors import CheckpointError, FleetError


@dataclass(frozen=True, kw_only=True)
class ShareWrite:
    """This worker's write of a checkpoint.

    Attributes:
        path: the checkpoint.
        token: names this save, the same on all workers.
        pending: the share; ``None`` where worker 0 writes for all, or ``problem`` has the reason for its absence.
    """

    path: Path
    token: str
    step: int
    rank: int
    world_size: int
    keep: int
    pending: PendingShare | None
    problem: str
    faults: Faults

    def run(self) -> None:
        """Writes the share; on worker 0, commits the checkpoint as well. Raises OSError, FleetError."""
        pending = self._checked()
        if pending is not None:
            meet, after = around(self.faults, self.path, self.step, self.keep)
            pending.write(LocalFolder(self.path), self.token, meet)
            after()

    def start(self) -> None:
        """Copies the share and lets the process beside this one do the same. Raises FleetError."""
        pending = self._checked()
        faults = self.faults
        if pending is None:
            return
        arguments = {
            "faults": faults.text,
            "rank": faults.rank,
            "generation": faults.generation,
            "trainer": os.getpid(),
            "path": f"{self.path}",
            "step": self.step,
            "keep": self.keep,
        }
        pending.start(LocalFolder(self.path), self.token, "fleet.elastic.folder", arguments)

    def _checked(self) -> PendingShare | None:
        """Returns the share. Raises CheckpointError, after telling worker 0, where there should be one."""
        if self.problem:
            leave_error(LocalFolder(self.path), Share(self.token, self.rank, self.world_size, []), self.problem)
            raise CheckpointError(self.problem)
        return self.pending


class Background:
    """At most one write under way in the process beside the program, and the error it ended with.

    A program that exits waits for its last checkpoint.
    """

    def __init__(self) -> None:
        self._error = ""
        self._has_begun = False

    def start(self, write: ShareWrite) -> None:
        """Starts ``write``; the previous one must have finished."""
        self._has_begun = True
        try:
            write.start()
        except FleetError as error:
            # Raised here, it would stop this worker between two exchanges with the others; they hear of it at the next
            # save, or when this one steps.
            self._error = f"{error}"

    def finish(self) -> str:
        """Waits for the running write; returns its error, once, or an empty string."""
        return own_writer().finish() or self._take_error()

    def close(self) -> str:
        """Does the same, and ends the process that has written, with its copy of the state."""
        error = self.finish()
        own_writer().close()
        return error

    def failed(self) -> str:
        """Returns the error of a write that has ended, once, without waiting; an empty string otherwise."""
        return (own_writer().failed() or self._take_error()) if self._has_begun else ""

    def _take_error(self) -> str:
        error = self._error
        self._error = ""
        return error


def attempt(write: ShareWrite) -> str:
    """Runs ``write``; returns its error, or an empty string."""
    try:
        write.run()
    except FleetError as error:
        return f"{error}"
    except OSError as error:
        return f"{str(write.path.parent)!r}: {error.strerror or error}. The checkpoints before it are untouched."
    return ""
