"""A script that logs to one tracker in a process of its own, and what the tracker's package then reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.helpers.ready_python import run_python

__all__ = ["read_back"]

_TRAIN = """
import sys
from fleet import fleet

strategy = fleet.DistributedStrategy()
strategy.trackers = [sys.argv[1]]
strategy.tracker_configs = {"folder": sys.argv[2] + "/runs"}
fleet.init(is_collective=True, strategy=strategy)
for step in range(1, 6):
    fleet.log({"loss": step / 2}, step=step)
if sys.argv[3] == "with an error":
    raise SystemError("the job fails")
if sys.argv[3].startswith("with status "):
    sys.exit(int(sys.argv[3].split()[-1]))
"""


def read_back(tracker: str, folder: Path, ends: str, environment: Mapping[str, str], read: str) -> Any:
    """Returns what the code ``read`` prints as JSON about a run that logged 5 losses to ``tracker``.

    Args:
        tracker: its name.
        folder: for everything that it writes.
        ends: how the job ends: "well", "with an error", or "with status 3".
        environment: variables of the job and of the reader.
        read: code that gets ``folder`` as its argument; its last line is the JSON.
    """
    variables = {**os.environ, **environment, "HOME": str(folder)}
    job = run_python(_TRAIN, tracker, str(folder), ends, cwd=folder, env=variables, timeout_s=120)
    expected = int(ends.removeprefix("with status ")) if "status" in ends else int(ends != "well")
    assert job.returncode == expected, job.stderr
    assert "Training goes on" not in job.stderr, job.stderr
    done = subprocess.run(
        [sys.executable, "-c", read, str(folder)],
        env=variables,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
