"""The file in which a process writes down what happened: one JSON document a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class RecordFile:
    """Appends documents to ``<folder>/events.jsonl``; each is on disk when :meth:`write` returns."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._file = (folder / "events.jsonl").open("a", encoding="utf-8")

    def write(self, kind: str, **values: Any) -> None:
        """Appends one document with its kind."""
        self._file.write(json.dumps({"kind": kind, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file; nothing is written after that."""
        self._file.close()


def read_record(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    """Returns the documents in ``folder``, or those of some kinds; a last line that was cut off is left out."""
    path = folder / "events.jsonl"
    return list(_documents(path, tuple(f'{{"kind": "{kind}"' for kind in kinds))) if path.exists() else []


def _documents(path: Path, starts: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        if starts and not line.startswith(starts):
            continue
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return
