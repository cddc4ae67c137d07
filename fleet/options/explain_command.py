"""``python -m fleet explain FILE``: effects of a strategy file, options without effect, and refusals."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence

from fleet.common.command_text import plain_text, typed
from fleet.errors import ConfigError, OptionWarning


def run(argv: Sequence[str]) -> int:
    """Prints the explanation of a file; returns 0, 1 when the strategy is refused, 2 when the file is wrong."""
    parser = argparse.ArgumentParser(prog=typed("explain"), description=plain_text(__doc__))
    parser.add_argument("file", help="strategy as YAML, or as protobuf text when the name ends in .prototxt")
    parser.add_argument("--world-size", type=_positive, default=2, metavar="N", help="number of workers (default: 2)")
    parser.add_argument("--ps", action="store_true", help="explain it for a parameter-server job")
    try:
        arguments = parser.parse_args(list(argv))
    except SystemExit as stop:
        return int(stop.code or 0)
    from fleet.options import DistributedStrategy
    from fleet.options.explain import explain
    from fleet.strategies._declare.strategy_plan import problems

    strategy = DistributedStrategy()
    try:
        with warnings.catch_warnings():
            # The explanation lists them.
            warnings.simplefilter("ignore", OptionWarning)
            if arguments.file.endswith((".prototxt", ".pbtxt", ".textproto")):
                strategy.load_from_prototxt(arguments.file)
            else:
                strategy = DistributedStrategy.load(arguments.file)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    explain(strategy, arguments.world_size, collective=not arguments.ps)
    return 1 if problems(strategy, arguments.world_size, collective=not arguments.ps) else 0


def _positive(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of workers, such as 2")
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} workers; a job has at least 1")
    return int(text)
