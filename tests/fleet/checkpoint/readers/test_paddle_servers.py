"""Tables of Paddle's parameter server are recognised, and the way to load them is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleet.checkpoint.conversion.formats import open_state
from fleet.errors import CheckpointError


def test_tables_are_refused_with_the_way_to_load_them(tmp_path: Path) -> None:
    (tmp_path / "000").mkdir()
    (tmp_path / "000" / "part-000-00000").touch()
    with pytest.raises(CheckpointError, match=r"load_paddle_table\(\)"):
        open_state(str(tmp_path))
