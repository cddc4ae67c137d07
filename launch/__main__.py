"""``python -m fleet.launch``."""

from __future__ import annotations

import sys

from fleet.launch.cli.cli import main

if __name__ == "__main__":
    sys.exit(main())
