"""EpochFile: the number that says which of two servers speaks for their rows, kept in a server's folder."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from fleet.errors import CheckpointError
from fleet.ps.files.own_folder import own_folder
from fleet.ps.files.row_file import open_plain

_NAME = "epoch.json"


@dataclass(slots=True)
class EpochFile:
    """The epoch of a server, and whether it has the rows of its number alone; see [Note: Which of two servers].

    Args:
        folder: the server's.
        epoch: 0 in a folder without one.
        leads: whether the server was the one that workers used.
    """

    folder: Path
    epoch: int = 0
    leads: bool = False

    @classmethod
    def read(cls, folder: Path) -> EpochFile:
        """Returns what ``folder`` holds; raises CheckpointError when it is damaged."""
        path = folder / _NAME
        if not path.exists():
            return cls(folder)
        try:
            with open_plain(path) as file:
                fields = json.loads(file.read())
            return cls(folder, int(fields["epoch"]), bool(fields["leads"]))
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path}: damaged ({error}). Restore the whole folder, or empty it.") from None

    def write(self, epoch: int, *, leads: bool) -> None:
        """Notes both; they survive the machine when this returns."""
        own_folder(self.folder)
        draft = self.folder / f".{_NAME}.tmp"
        draft.unlink(missing_ok=True)
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as file:
            json.dump({"epoch": epoch, "leads": leads}, file)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(self.folder / _NAME)
        self.epoch, self.leads = epoch, leads
