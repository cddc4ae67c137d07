"""A parameter-server job of a script of this folder, for ``ps.py``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def job(script: str, settings: dict[str, Any], num_servers: int = 1) -> list[dict[str, Any]]:
    """Runs servers and two workers of a script of this folder; returns what the workers wrote."""
    with tempfile.TemporaryDirectory() as folder:
        roles = [f"--server_num={num_servers}", "--worker_num=2", f"--log_dir={folder}/log"]
        command = [sys.executable, "-m", "fleet.launch", *roles, str(HERE / script)]
        done = subprocess.run(
            [*command, json.dumps({**settings, "folder": folder})],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        if done.returncode:
            raise SystemExit(f"{settings['mode']}: the job ended with {done.returncode}\n{done.stdout[-4000:]}")
        return written(folder)


def written(folder: str) -> list[dict[str, Any]]:
    """Returns what both workers wrote into ``folder``."""
    return [json.loads(Path(folder, f"samples.{rank}.json").read_text()) for rank in (0, 1)]
