"""``python -m fleet.ps switch SERVER``: a server hands over to its standby while training goes on."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from fleet.env import Environment
from fleet.ps_job.server_line import tell_server

_ABOUT = """Lets the standby of SERVER serve the workers from now on, and makes SERVER its standby: to empty a machine
or go back after a failure. Nothing is lost, and workers wait for less than a second. The servers must have been started
with standbys (launcher: --server_standby), and this command with the FLEET_JOB_SECRET and FLEET_PS_CA of the job."""


def run(argv: Sequence[str]) -> int:
    """Switches; returns 0, or 2 for a wrong call.

    Raises:
        PSError: the server is away, has no standby that could take over, or does not serve.
    """
    parser = argparse.ArgumentParser(prog="python -m fleet.ps switch", description=_ABOUT)
    parser.add_argument("server", metavar="SERVER", help="host:port of the server, as the job's lists write it")
    try:
        server: str = parser.parse_args(list(argv)).server
    except SystemExit as stop:
        return int(stop.code or 0)
    began = time.monotonic()
    leads = tell_server(server, {"switch": True}, Environment())["leads"]
    print(f"{leads} serves now, and {server} is its standby ({time.monotonic() - began:.2f} s)")
    return 0
