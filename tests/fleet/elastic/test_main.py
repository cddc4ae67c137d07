"""``python -m fleet.elastic``: the command itself is tested in tests/launch/cli/test_elastic_command.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import runpy, sys
sys.argv = ["fleet.elastic", "status"]
try:
    runpy.run_module("fleet.elastic", run_name="__main__")
except SystemExit as stop:
    print(stop.code, [name in sys.modules for name in ("torch", "etcd3gw", "requests")])
"""


def test_the_command_starts_without_torch_and_without_a_client(tmp_path: Path) -> None:
    """004-20: the client is imported only once a request is to be sent; a job that is not named is an error."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, cwd=tmp_path, timeout=30, check=True
    )
    assert done.stdout.strip() == "2 [False, False, False]"
    assert "The address of etcd is missing" in done.stderr
