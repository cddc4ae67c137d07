"""EpochFile: the number that says which of two servers speaks for their rows, kept in a server's folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from fleet.common.plain_files import replace_file
from fleet.errors import CheckpointError
from fleet.ps.files.own_folder import own_folder
from fleet.ps.files.row_file import open_plain

_NAME = "epoch.json"


@dataclass(slots=True)
class EpochFile:
    """The epoch of a server, and whether it has the rows of its number alone; see [Note: Which of two servers].

    Args:
        folder: the server's.
        epoch: 0 in a folder without an epoch.
        leads: whether workers used this server.
    """

    folder: Path
    epoch: int = 0
    leads: bool = False

    @classmethod
    def read(cls, folder: Path) -> EpochFile:
        """Returns the epoch in ``folder``; raises CheckpointError when its file is damaged."""
        path = folder / _NAME
        if not path.exists():
            return cls(folder)
        try:
            with open_plain(path) as file:
                fields = json.loads(file.read())
            return cls(folder, int(fields["epoch"]), bool(fields["leads"]))
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
            raise CheckpointError(f"{path}: damaged ({error}). Restore the whole folder, or empty it.") from None

    def write(self, epoch: int, *, leads: bool) -> None:
        """Notes both; they survive the machine when this returns."""
        own_folder(self.folder)
        # On the disk before memory: a server that dies between the two must not have acted on the new epoch.
        replace_file(self.folder / _NAME, json.dumps({"epoch": epoch, "leads": leads}), 0o600)
        self.epoch = epoch
        self.leads = leads
