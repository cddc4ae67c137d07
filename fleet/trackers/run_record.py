"""RunRecord: the name of a run in a folder, and whether an earlier process began it."""

from __future__ import annotations

import json
import os
from itertools import count
from pathlib import Path
from typing import Any


class RunRecord:
    """The file ``.<name>.run`` of a run: by which launch it was begun, and whether the script passes its own steps.

    A process that the same launcher started again goes on with the newest run of that name, and so does one that
    trains on from a checkpoint; any other begins a run, whose name no other has.

    Args:
        folder: of the runs; it exists.
        name: that was asked for.
        launch: mark of the launch; None without a launcher.
        goes_on: this process trains on where another one ended.
    """

    def __init__(self, folder: Path, name: str, launch: str | None, goes_on: bool) -> None:
        names = (name if number == 1 else f"{name}-{number}" for number in count(1))
        newest, self.name = "", name
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
        self._path, self._launch = self._path_of(folder, self.name), launch
        self._write()

    def note_own_steps(self) -> None:
        """Notes that the script passes steps of its own, which say nothing about what a restart trains again."""
        if not self.has_own_steps:
            self.has_own_steps = True
            self._write()

    @staticmethod
    def _path_of(folder: Path, name: str) -> Path:
        return folder / f".{name}.run"

    def _write(self) -> None:
        draft = self._path.with_name(f"{self._path.name}.tmp")
        draft.write_text(json.dumps({"launch": self._launch, "own_steps": self.has_own_steps}), encoding="utf-8")
        os.replace(draft, self._path)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
