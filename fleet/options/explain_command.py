"""``python -m fleet explain FILE``: effects of a strategy file, options without effect, and refusals."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fleet.common.command_text import plain_text, typed
from fleet.errors import ConfigError, OptionWarning

if TYPE_CHECKING:
    from fleet.options import DistributedStrategy


def run(argv: Sequence[str]) -> int:
    """Prints the explanation of a file; returns 0, 1 when the strategy is refused, 2 when the file is wrong."""
    parser = argparse.ArgumentParser(prog=typed("explain"), description=plain_text(__doc__))
    parser.add_argument("file", help="strategy as YAML, or as protobuf text when the name ends in .prototxt")
    parser.add_argument("--world-size", type=_positive, default=2, metavar="N", help="number of workers (default: 2)")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--ps",
        action="store_true",
        help="explain it for a parameter-server job (default: where the file sets a_sync or an option of servers)",
    )
    kind.add_argument("--collective", action="store_true", help="explain it for a collective job, whatever it sets")
    try:
        arguments = parser.parse_args(list(argv))
    except SystemExit as stop:
        return int(stop.code or 0)
    from fleet.options.explain import explain
    from fleet.strategies._declare.strategy_plan import problems

    try:
        strategy = _read(arguments.file)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    collective = not arguments.ps
    served = [] if arguments.ps or arguments.collective else _server_options(strategy)
    if served:
        collective = False
        print(
            f"Explained for a parameter-server job, since the file sets {', '.join(served)}; "
            "--collective explains it for a collective job."
        )
    explain(strategy, arguments.world_size, collective=collective)
    return 1 if problems(strategy, arguments.world_size, collective=collective) else 0


def _read(file: str) -> DistributedStrategy:
    from fleet.options import DistributedStrategy

    with warnings.catch_warnings():
        # The explanation lists them.
        warnings.simplefilter("ignore", OptionWarning)
        if not file.endswith((".prototxt", ".pbtxt", ".textproto")):
            return DistributedStrategy.load(file)
        strategy = DistributedStrategy()
        strategy.load_from_prototxt(file)
        return strategy


def _server_options(strategy: DistributedStrategy) -> list[str]:
    """Returns the options that the file sets and that only jobs with parameter servers read."""
    from fleet.strategies._declare.strategy import REGISTRY, JobKind
    from fleet.strategies._declare.strategy_plan import settings_of

    kinds = [one for one in REGISTRY.values() if issubclass(one, JobKind) and one.in_ps_job]
    return [key for kind in kinds for key in (kind.name, *settings_of(kind)) if strategy.is_set(key)]


def _positive(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of workers, such as 2")
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} workers; a job has at least 1")
    return int(text)
