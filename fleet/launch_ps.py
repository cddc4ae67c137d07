"""``python -m fleet.launch_ps``: the command of the oldest launcher, kept for scripts that use it."""

from __future__ import annotations

import sys

from fleet.launch.cli.launch_ps import main

if __name__ == "__main__":
    sys.exit(main())
