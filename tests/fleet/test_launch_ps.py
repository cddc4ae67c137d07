"""``python -m fleet.launch_ps`` is a command."""

from __future__ import annotations

import subprocess
import sys

from tests.helpers.sources import ROOT


def test_the_module_runs() -> None:
    """003-17, 003-25."""
    done = subprocess.run(
        [sys.executable, "-m", "fleet.launch_ps", "--node_ip=1", "t.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 2
    assert "use --host" in done.stderr
