"""TrackioTracker: rows of trackio's own database."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.tracked import read_back

_READ = """
import json
from trackio.sqlite_storage import SQLiteStorage
(run,) = SQLiteStorage.get_runs("fleet")
rows = SQLiteStorage.get_logs("fleet", run)
print(json.dumps([[row["step"], row["loss"]] for row in rows if "loss" in row]))
"""


@pytest.mark.slow
def test_a_run(tmp_path: Path) -> None:
    found = read_back("trackio", tmp_path, "well", {"TRACKIO_DIR": str(tmp_path / "trackio")}, _READ)
    assert found == [[step, step / 2] for step in range(1, 6)]
