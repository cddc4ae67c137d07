"""The folder of checkpoints: names in order, and what counts as unfinished."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleet.elastic.folder import candidates, check_no_link, is_unfinished, new_name, remove_leftovers
from fleet.errors import CheckpointError


def test_names_are_free_and_newest_first(tmp_path: Path) -> None:
    assert candidates(tmp_path / "absent") == []
    for step in (3, 12, 3):
        new_name(tmp_path, step).mkdir()
    names = [path.name for path in candidates(tmp_path)]
    assert names == ["step-0000000012", "step-0000000003.1", "step-0000000003"]


def test_what_a_save_has_begun_goes_and_notes_of_others_stay(tmp_path: Path) -> None:
    begun, noted = new_name(tmp_path, 1), new_name(tmp_path, 2)
    for path in (begun, noted):
        path.mkdir()
        (path / "data-0a1b-00000.safetensors").touch()
    (noted / "notes.txt").touch()
    (tmp_path / ".step-0000000009.trash").mkdir()
    assert (is_unfinished(begun), is_unfinished(noted)) == (True, False)
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [noted.name]


def test_a_link_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "step-0000000001").symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match="it is a symbolic link"):
        check_no_link(tmp_path / "step-0000000001")
