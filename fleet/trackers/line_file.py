"""LineFile: a text file that a run appends lines to, and takes up again after a restart."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


class LineFile:
    """Appends whole lines; each is on its way to the disk when :meth:`write` returns.

    Args:
        path: of the file.
        keep: says which of the lines that are there stay; a line without an end is dropped.
    """

    def __init__(self, path: Path, keep: Callable[[str], bool]) -> None:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        kept = [line for line in lines if line.endswith("\n") and keep(line.rstrip("\n"))]
        if kept != lines:
            draft = path.with_name(f".{path.name}.tmp")
            draft.write_text("".join(kept), encoding="utf-8")
            os.replace(draft, path)
        self.path = path
        self.is_new = not kept
        self._file = path.open("a", encoding="utf-8")

    def write(self, line: str) -> None:
        """Appends ``line``."""
        self._file.write(f"{line}\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
