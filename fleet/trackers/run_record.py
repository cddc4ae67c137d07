"""RunRecord: the name of a run in a folder, and whether an earlier process began it."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

from fleet.common.plain_files import open_to_read, replace_file


class RunRecord:
    """The file ``.<name>.run`` of a run: the launch that began it, and whether the script passes its own steps.

    A process that the same launcher has restarted, or that resumes from a checkpoint, continues the newest run of that
    name. Any other process begins a run with a new name.

    Args:
        folder: the folder of the runs; it exists.
        name: the requested name.
        launch: the mark of the launch; None without a launcher.
        goes_on: this process resumes the training of another one.
    """

    def __init__(self, folder: Path, name: str, launch: str | None, goes_on: bool) -> None:
        names = (name if number == 1 else f"{name}-{number}" for number in count(1))
        newest = ""
        self.name = name
        for each in names:
            self.name = each
            if not self._path_of(folder, each).exists():
                break
            newest = each
        known: dict[str, Any] = {}
        if newest:
            known = _read(self._path_of(folder, newest))
        same_launch = launch is not None and known.get("launch") == launch
        self.resumed = bool(newest) and (same_launch or goes_on)
        if self.resumed:
            self.name = newest
        self.has_own_steps = self.resumed and known.get("own_steps") is True
        self._path = self._path_of(folder, self.name)
        self._launch = launch
        # Now, so that the next process with this name sees that it is in use.
        self._write()

    def note_own_steps(self) -> None:
        """Notes that the script passes its own steps, which do not show which steps a restart repeats."""
        if not self.has_own_steps:
            self.has_own_steps = True
            self._write()

    @staticmethod
    def _path_of(folder: Path, name: str) -> Path:
        return folder / f".{name}.run"

    def _write(self) -> None:
        content = json.dumps({"launch": self._launch, "own_steps": self.has_own_steps})
        replace_file(self._path, content, is_durable=False)


def _read(path: Path) -> dict[str, Any]:
    try:
        with open_to_read(path) as file:
            found = json.loads(file.read())
    except (OSError, ValueError, RecursionError):
        # Values can be logged without the record; a new run is begun beside the old one.
        return {}
    return found if isinstance(found, dict) else {}
