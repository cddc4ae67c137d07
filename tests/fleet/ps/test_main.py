from __future__ import annotations

import subprocess
import sys

import pytest

from fleet.ps.__main__ import COMMANDS, main


def test_help_and_unknown_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in COMMANDS)
    assert main(["exprot"]) == 2
    assert "no command 'exprot'. Did you mean 'export'?" in capsys.readouterr().err
    assert main(["export", "/absent", "absent.py:make"]) == 2
    assert "fleet.ps export: /absent/model.pt: cannot be read" in capsys.readouterr().err


def test_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fleet.ps", "export", "--help"], capture_output=True, text=True, check=True, timeout=120
    )
    assert "usage: python -m fleet.ps export" in done.stdout
