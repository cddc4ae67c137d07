"""The epoch in a server's folder survives the process and is refused when it is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleet.errors import CheckpointError
from fleet.ps.standby.epoch_file import EpochFile


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    """An empty folder has epoch 0; a later write replaces the first."""
    folder = tmp_path / "server-0"
    first = EpochFile.read(folder)
    assert (first.epoch, first.leads) == (0, False)
    first.write(3, leads=True)
    first.write(4, leads=False)
    again = EpochFile.read(folder)
    assert (again.epoch, again.leads) == (4, False)
    assert (folder / "epoch.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"epoch": 1}', '{"epoch": null, "leads": true}', '{"epoch": Infinity}', "[" * 200_000]
)
def test_damage_is_refused(tmp_path: Path, text: str) -> None:
    """A guess could make two servers lead."""
    (tmp_path / "epoch.json").write_text(text)
    with pytest.raises(CheckpointError, match="epoch.json: damaged"):
        EpochFile.read(tmp_path)
