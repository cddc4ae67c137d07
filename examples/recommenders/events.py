"""What the processes of the demonstration tell each other and its page: lines of JSON in one file."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class Events:
    """Adds events to a file that several processes write.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, kind: str, **facts: Any) -> None:
        """Writes an event with the present time, in one piece."""
        line = json.dumps({"at": time.time(), "kind": kind, **facts}) + "\n"
        place = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(place, line.encode())
        finally:
            os.close(place)

    def read(self, kind: str | None = None) -> list[Event]:
        """Returns the events so far, in time order; with ``kind`` those alone."""
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        found = [json.loads(line) for line in text.splitlines()]
        return sorted((one for one in found if kind in (None, one["kind"])), key=lambda one: one["at"])
