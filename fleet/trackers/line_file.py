"""LineFile: a text file that a run appends lines to, and takes up again after a restart."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from fleet.common.plain_files import open_own, open_to_read, replace_file


class LineFile:
    """Appends whole lines; each is on its way to the disk when :meth:`write` returns.

    Args:
        path: of the file.
        keep: says which of the lines that are there stay; a line without an end is dropped.
    """

    def __init__(self, path: Path, keep: Callable[[str], bool]) -> None:
        before = b""
        if path.exists():
            with open_to_read(path) as file:
                before = file.read()
        # A damaged byte costs its line at most; other marks than \n, which str.splitlines() takes, may stand in a name.
        lines = before.split(b"\n")[:-1]
        kept = b"".join(b"%b\n" % line for line in lines if keep(line.decode("utf-8", "backslashreplace")))
        if kept != before:
            replace_file(path, kept, is_durable=False)
        self.path = path
        self.is_new = not kept
        descriptor = open_own(path, os.O_WRONLY | os.O_APPEND)
        self._file = open(descriptor, "a", encoding="utf-8")  # noqa: SIM115 (open while the run lasts)

    def write(self, line: str) -> None:
        """Appends ``line``."""
        self._file.write(f"{line}\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
