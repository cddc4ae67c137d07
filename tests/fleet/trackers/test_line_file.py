"""LineFile: whole lines only, and those that stay."""

from __future__ import annotations

from pathlib import Path

from fleet.trackers.line_file import LineFile


def test_lines_that_stay_and_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    file = LineFile(path, lambda line: True)
    assert file.is_new
    file.write("one")
    assert path.read_text() == "one\n"  # without close
    file.write("two")
    file.close()
    path.write_text(path.read_text() + "tor")
    again = LineFile(path, lambda line: line != "one")
    assert not again.is_new
    again.write("three")
    again.close()
    assert path.read_text() == "two\nthree\n"
    assert [each.name for each in tmp_path.iterdir()] == ["lines"]
