"""``python -m fleet COMMAND`` dispatches, and names what it does not know."""

from __future__ import annotations

from pathlib import Path

import pytest

import fleet
from fleet.__main__ import COMMANDS, main


def test_usage_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Without arguments and with --help the commands are listed, exit status 0."""
    for argv in ([], ["--help"]):
        assert main(argv) == 0
    main([])
    shown = capsys.readouterr().out
    assert all(f"  {name}" in shown for name in COMMANDS)


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"torch-fleet {fleet.__version__}\n"


def test_unknown_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown command: exit status 2 and the nearest name."""
    assert main(["explan"]) == 2
    assert "Did you mean 'explain'?" in capsys.readouterr().err


def test_commands_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """explain reads a file, env describes the machine; a wrong file gives exit status 2 and no traceback."""
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("fuse_grad_size_in_MB: 8\n")
    bad.write_text("fuse_grad_size: 8\n")
    assert main(["explain", str(good)]) == 0
    assert "data_parallel" in capsys.readouterr().out
    assert main(["explain", str(bad)]) == 2
    assert "fuse_grad_size_in_MB" in capsys.readouterr().err
    assert main(["env"]) == 0
    assert "torch" in capsys.readouterr().out
