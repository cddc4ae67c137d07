"""``python -m fleet.launch`` is a command, and it starts without torch."""

from __future__ import annotations

import subprocess
import sys

from tests.helpers.sources import ROOT


def test_help() -> None:
    """000-09."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "fleet.launch", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0
    assert "--server_num" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "fleet.launch.cli.cli" in imported
    assert imported.isdisjoint({"torch", "numpy", "yaml"})
