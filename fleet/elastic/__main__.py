"""``python -m fleet.elastic``."""

from __future__ import annotations

import sys

from fleet.launch.cli.elastic_command import main

if __name__ == "__main__":
    sys.exit(main())
