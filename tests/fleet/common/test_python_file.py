from __future__ import annotations

from pathlib import Path

import pytest

from fleet.common.python_file import object_in
from fleet.errors import ConfigError


def test_finds_the_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", ["elsewhere"])
    (tmp_path / "a_model_file.py").write_text("def make():\n    return 7\n")
    assert object_in(f"{tmp_path / 'a_model_file.py'}:make")() == 7


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("model.py", "write the file and the name in it"),
        ("absent.py:make", "'absent.py' is not a file"),
        ("{}/a_broken_file.py:make", "could not be imported: ZeroDivisionError"),
        ("{}/letter.txt:make", "is no Python file"),
    ],
)
def test_says_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, text: str) -> None:
    monkeypatch.setattr("sys.path", ["elsewhere"])
    (tmp_path / "a_broken_file.py").write_text("1 / 0\n")
    (tmp_path / "letter.txt").touch()
    with pytest.raises(ConfigError, match=text):
        object_in(place.format(tmp_path))
