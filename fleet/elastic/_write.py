"""Writes one checkpoint to disk: in the foreground, or by the process beside the trainer."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from fleet.checkpoint.commit import Share, leave_error
from fleet.checkpoint.saving import Taken
from fleet.checkpoint.storage import LocalFolder
from fleet.checkpoint.writer import own_writer
from fleet.elastic._around import around
from fleet.elastic._faults import Faults
from fleet.errors import CheckpointError, FleetError


@dataclass(frozen=True, kw_only=True)
class ShareWrite:
    """What this worker writes of a checkpoint.

    Attributes:
        path: the checkpoint.
        token: of this save, the same on all workers.
        taken: the share; ``None`` where worker 0 writes for all, or ``problem`` says why there is none.
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

    def run(self) -> None:
        """Writes the share; on worker 0, commits the checkpoint as well. Raises OSError, FleetError."""
        taken = self._checked()
        if taken is not None:
            meet, after = around(self.faults, self.path, self.step, self.keep)
            taken.write(LocalFolder(self.path), self.token, meet)
            after()

    def start(self) -> None:
        """Copies the share and lets the process beside this one do the same. Raises FleetError."""
        taken, faults = self._checked(), self.faults
        if taken is None:
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
        taken.start(LocalFolder(self.path), self.token, "fleet.elastic._around", arguments)

    def _checked(self) -> Taken | None:
        """Returns the share. Raises CheckpointError, after telling worker 0, where there should be one."""
        if self.problem:
            leave_error(LocalFolder(self.path), Share(self.token, self.rank, self.world_size, []), self.problem)
            raise CheckpointError(self.problem)
        return self.taken


class Background:
    """At most one write under way in the process beside the program, and the error it ended with.

    A program that exits waits for its last checkpoint.
    """

    def __init__(self) -> None:
        self._error = ""

    def start(self, write: ShareWrite) -> None:
        """Starts ``write``; the previous one must have finished."""
        try:
            write.start()
        except FleetError as error:  # the other workers are told at the next save, or when this one steps
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
        return own_writer().failed() or self._take_error()

    def _take_error(self) -> str:
        error, self._error = self._error, ""
        return error


def attempt(write: ShareWrite) -> str:
    """Runs ``write``; returns what went wrong, or an empty string."""
    try:
        write.run()
    except FleetError as error:
        return f"{error}"
    except OSError as error:
        return f"{str(write.path.parent)!r}: {error.strerror or error}. The checkpoints before it are untouched."
    return ""
