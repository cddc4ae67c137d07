"""``python -m fleet verify SCRIPT``: proof that a strategy, or having N workers, did not change the training.

Runs a few updates of a script on one process and on N, on the CPU, with the same seeds and samples, and compares them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shlex
import sys
import time
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from fleet.common.command_text import plain_text, typed
from fleet.common.plain_files import replace_file
from fleet.common.version import __version__
from fleet.errors import ConfigError, FleetError
from fleet.verify.incomparable_runs import own_failure, with_advice
from fleet.verify.paired_runs import VerifyRequest
from fleet.verify.report import Finding, Report
from fleet.verify.run_comparison import compare_runs
from fleet.verify.user_lines import place_of

_HEADS = {"equal": "EQUAL", "differs": "DIFFERS", "not_comparable": "COULD NOT BE COMPARED"}


def run(argv: Sequence[str]) -> int:
    """Compares the two runs and prints the report; returns 0 equal, 1 differs, 2 could not be compared.

    An error of the command itself is no difference: its traceback and what to do are printed, and 2 is returned.
    """
    try:
        return _run(argv)
    except FleetError:
        raise
    except Exception as error:
        traceback.print_exc()
        print(with_advice(own_failure(error)), file=sys.stderr)
        return 2


def _run(argv: Sequence[str]) -> int:
    try:
        arguments = _parser().parse_args(list(argv))
    except SystemExit as stop:
        return int(stop.code or 0)
    script = Path(arguments.script)
    if not script.is_file():
        raise ConfigError(f"{arguments.script!r} is not a file. Give the path of the training script.")
    if arguments.strategy and not Path(arguments.strategy).is_file():
        raise ConfigError(f"--strategy {arguments.strategy!r} is not a file. Give the path of a strategy as YAML.")
    given = arguments.arguments[1:] if arguments.arguments[:1] == ["--"] else arguments.arguments
    _check_places(arguments)
    request = VerifyRequest(
        script=script.resolve(),
        arguments=tuple(given),
        workers=arguments.nproc_per_node,
        steps=arguments.steps,
        strategy=str(Path(arguments.strategy).resolve()) if arguments.strategy else "",
        timeout_s=arguments.timeout,
    )
    began = time.perf_counter()

    def say(text: str) -> None:
        print(f"fleet verify: {time.perf_counter() - began:5.1f} s  {text}", file=sys.stderr, flush=True)

    say(f"{arguments.script}, {arguments.steps} updates on {arguments.nproc_per_node} workers and on one process")
    report = compare_runs(request, Path(arguments.keep) if arguments.keep else None, say)
    report.about = _about(arguments.script, argv)
    print(text_of(report))
    if arguments.json:
        replace_file(arguments.json, json.dumps(report.to_json(), indent=1, default=str) + "\n")
    if arguments.html:
        from fleet.verify.page.report_page import write_page

        write_page(report, Path(arguments.html))
    return report.exit_code


def _check_places(arguments: argparse.Namespace) -> None:
    """Makes the folder of --keep; raises ConfigError where a report could not be written after the runs."""
    try:
        Path(arguments.keep or ".").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--keep {arguments.keep!r}: the folder cannot be made: {error.strerror}.") from error
    if arguments.keep and (Path(arguments.keep) / "many").exists():
        raise ConfigError(f"--keep {arguments.keep!r} holds the runs of an earlier call. Give another folder.")
    for option, name in (("--json", arguments.json), ("--html", arguments.html)):
        if name is None:
            continue
        path = Path(name)
        if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
            rule = "is a folder" if path.is_dir() else "lies in no folder that this user may write to"
            raise ConfigError(f"{option} {name!r} {rule}. Give the path of a file in a folder that exists.")


def _about(script: str, argv: Sequence[str]) -> dict[str, str]:
    """Returns what was run, when, and with which versions."""
    return {
        "script": script,
        "command": shlex.join(["python", "-m", "fleet", "verify", *argv]),
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "torch": version("torch"),
        "fleet": __version__,
        "python": platform.python_version(),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=typed("verify"), description=plain_text(__doc__))
    parser.add_argument("script", help="the training script, run unchanged")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments, after --")
    parser.add_argument("--nproc_per_node", type=_at_least(2), default=2, metavar="N", help="workers (default: 2)")
    parser.add_argument("--steps", type=_at_least(1), default=6, metavar="K", help="updates to compare (default: 6)")
    parser.add_argument("--strategy", metavar="FILE", help="strategy as YAML, in place of the script's own")
    parser.add_argument("--timeout", type=_seconds, default=300.0, metavar="S", help="seconds for a run (default: 300)")
    parser.add_argument("--json", metavar="FILE", help="writes the report as JSON")
    parser.add_argument("--html", metavar="FILE", help="writes the report as one HTML page")
    parser.add_argument("--keep", metavar="FOLDER", help="keeps what the processes wrote down and printed")
    return parser


def _at_least(least: int):  # type: ignore[no-untyped-def]
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}; it takes a number of at least {least}")
        return int(text)

    return number


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}; it takes a number of seconds above 0")
    return seconds


def text_of(report: Report) -> str:
    """Returns the report as lines for a terminal."""
    lines = [f"{_HEADS[report.outcome]}: {report.steps} updates on {report.workers} workers and on one process"]
    lines += [f"  within {report.tolerance['text']}"] if report.outcome == "equal" else []
    for i, finding in enumerate(report.findings):
        lines += [f"{'First difference' if i == 0 else 'Also'}: {finding.sentence}", *_facts(finding)]
    for warning in report.warnings:
        lines += [f"Warning: {warning.sentence}", *_facts(warning)]
    lines += [f"note: {note}" for note in report.notes]
    seconds = ", ".join(f"{name.removesuffix('_s').replace('_', ' ')} {s:.1f} s" for name, s in report.timings.items())
    return "\n".join([*lines, f"time: {seconds}"])


def _facts(finding: Finding) -> list[str]:
    names = ("cause", "step", "rank", "module", "tensor", "expected", "received", "difference")
    given = [("line", place_of(finding.where)), *((name, getattr(finding, name)) for name in names)]
    shown = [(name, f"{value:.6g}" if isinstance(value, float) else value) for name, value in given]
    lines = [f"  {name:10} {value}" for name, value in shown if value is not None and value != ""]
    # Two norms may be close while the tensors point elsewhere.
    if finding.is_of_norms:
        lines[-1] += ", of the tensors, relative; expected and received are their norms"
    return lines
