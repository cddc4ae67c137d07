"""``python -m fleet launch-on ray``: runs a job on a Ray cluster, and ends when the job has ended."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from fleet.errors import ConfigError, LaunchError
from fleet.integrations.ray import launch
from fleet.launch.cli.command_options import CommandOptions, cut_options
from fleet.launch.cli.settings import parse_command_line

_PROGRAM = "python -m fleet launch-on ray"
_ABOUT = """Places one launcher on each of N nodes of a Ray cluster, prints what worker 0 prints, and ends when the job
has ended. Options of this command come first, then the launcher's flags, the script and its arguments:

  python -m fleet launch-on ray --nodes=2 --nproc_per_node=4 --resource=CPU=8 --resource=GPU=4 train.py --epochs=3
"""
_TAKES_VALUE = ("--nodes", "--nproc_per_node", "--resource", "--strategy", "--env", "--address", "--working_dir",
                "--timeout")  # fmt: skip
_INTERRUPTED = 130


def run(argv: Sequence[str]) -> int:
    """Runs the job; returns 0, the exit code of the launcher that failed first, or 130 after Ctrl-C.

    Raises:
        ConfigError: an option is wrong, or Ray decides it.
    """
    own, launcher = cut_options(argv, _TAKES_VALUE, ("--help", "-h"))
    parser = _parser()
    if {"--help", "-h"} & {*own}:
        print(parser.format_help())
        return 0
    given = parser.parse_args(own)
    line = parse_command_line(launcher, "python -m fleet.launch")
    flags = launcher[: len(launcher) - 1 - len(line.script_args)]
    try:
        launch(
            line.script,
            args=line.script_args,
            nodes=given.nodes,
            nproc_per_node=given.nproc_per_node,
            resources_per_node=_numbers(given.resource) if given.resource else None,
            placement_strategy=given.strategy,
            flags=[flag for flag in flags if flag != "--"],
            env=_pairs(given.env, "--env"),
            address=given.address,
            working_dir=given.working_dir,
            timeout_s=given.timeout,
        )
    except LaunchError as error:
        print(f"{_PROGRAM}: {error}", file=sys.stderr)
        return error.exit_code or 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandOptions(_PROGRAM, _ABOUT)
    add = parser.add_argument
    add("--nodes", type=int, default=1, help="number of nodes, one launcher on each (default 1)")
    add("--nproc_per_node", type=int, help="workers on each node; default: one for each GPU of its bundle, or one")
    add("--resource", action="append", default=[], metavar="NAME=N", help="what Ray sets aside for each launcher, once "
        "for each resource; default: one CPU for each worker")  # fmt: skip
    add("--strategy", default="SPREAD", help="PACK, SPREAD, STRICT_PACK or STRICT_SPREAD (default SPREAD)")
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="variable of the workers; may be repeated")
    add("--address", help="address of the cluster; default: what ray.init() finds")
    add("--working_dir", help="folder that Ray copies to every node, or its URI")
    add("--timeout", type=float, default=600.0, help="seconds to wait for the resources (default 600)")
    return parser


def _pairs(texts: Sequence[str], option: str) -> dict[str, str]:
    for text in texts:
        if "=" not in text:
            raise ConfigError(f"{option} is {text!r}; it takes NAME=VALUE.")
    return {text.partition("=")[0]: text.partition("=")[2] for text in texts}


def _numbers(texts: Sequence[str]) -> dict[str, float]:
    found = {}
    for name, value in _pairs(texts, "--resource").items():
        try:
            found[name] = float(value)
        except ValueError:
            raise ConfigError(f"--resource is {f'{name}={value}'!r}; it takes NAME=NUMBER, as in GPU=4.") from None
    return found
