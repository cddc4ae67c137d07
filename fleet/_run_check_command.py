"""``python -m fleet run_check``: the same as ``fleet.utils.run_check()``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def run(argv: Sequence[str]) -> int:
    """Runs the check; returns 0 when one device works, and raises when none does."""
    argparse.ArgumentParser(prog="python -m fleet run_check", description=__doc__).parse_args(list(argv))
    from fleet.utils import run_check

    run_check()
    return 0
