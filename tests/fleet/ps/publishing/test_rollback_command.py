from __future__ import annotations

from pathlib import Path

import pytest

from fleet import ps
from fleet.ps.__main__ import main
from fleet.ps.publishing.folder_sink import FolderSink
from fleet.ps.publishing.versions import Mark
from tests.fleet.ps.serving.deltas import Chain


@pytest.fixture
def rows(tmp_path: Path) -> str:
    sink = FolderSink(tmp_path, "shop", "float32")
    chain = Chain(sink)
    for name, save in (("monday", None), ("tuesday", "/saves/tuesday")):
        chain.write()
        sink.mark(0, Mark(name, name, 5, save))
    return str(tmp_path)


def test_it_lists_rolls_back_and_releases(rows: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollback", rows]) == 0
    said = capsys.readouterr().out
    assert "monday" in said
    assert "step 2  save /saves/tuesday" in said
    assert said.endswith("readers have the newest rows\n")
    assert main(["rollback", rows, "tuesday"]) == 0
    said = capsys.readouterr().out
    assert "go back to version 'tuesday', step 2" in said
    assert "fleet.load_model('/saves/tuesday')" in said
    assert ps.Reader(rows).version == ps.Reader(rows).versions[1]
    assert main(["rollback", rows]) == 0
    assert "<- readers are here" in capsys.readouterr().out.splitlines()[1]
    assert main(["rollback", rows, "--release"]) == 0
    assert "leave version 'tuesday' for the newest rows" in capsys.readouterr().out
    assert main(["rollback", rows, "--release"]) == 0
    assert "had the newest rows already" in capsys.readouterr().out
    assert ps.Reader(rows).version is None


def test_wrong_calls(rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollback"]) == 2
    assert main(["rollback", rows, "monday", "--release"]) == 2
    assert "--release takes no VERSION" in capsys.readouterr().err
    assert main(["rollback", rows, "sunday"]) == 2
    assert "has no version 'sunday'" in capsys.readouterr().err
    assert main(["rollback", "nowhere", "monday"]) == 2
    assert "no publisher has written there" in capsys.readouterr().err
    assert ps.Reader(rows).version is None
