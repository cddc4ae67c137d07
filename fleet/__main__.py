"""``python -m fleet COMMAND``: explain a strategy, estimate memory, convert checkpoints, check a machine, launch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module

from fleet.common.command_text import typed
from fleet.common.version import __version__
from fleet.errors import FleetError, did_you_mean

COMMANDS = {
    "checkpoint": (
        "fleet.checkpoint.checkpoint_command",
        "show, verify or convert a checkpoint, also one of another program",
    ),
    "env": ("fleet.utils._env_report", "print what to paste into a bug report"),
    "estimate": (
        "fleet.estimate.estimate_command",
        "print the memory that training a module, or tables of servers, will take",
    ),
    "explain": ("fleet.options.explain_command", "print what a strategy file does, warns about and refuses"),
    "launch": ("fleet.launch.cli.cli", "start a job: the same as python -m fleet.launch"),
    "launch-on": (
        "fleet.utils._launch_on",
        "start a launcher on every node of a job of Slurm, or on nodes of a Ray cluster",
    ),
    "migrate": ("fleet.migrate.migrate_command", "print the diff that moves a script of another kind here"),
    "run_check": ("fleet.utils._run_check", "train two small layers on every device of this machine"),
    "verify": ("fleet.verify.verify_command", "train a script on one process and on several, and compare them"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that ``argv`` names and returns its exit status; 2 for an unknown command."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if arguments[0] == "--version":
        print(f"torch-fleet {__version__}")
        return 0
    name = arguments[0]
    if name not in COMMANDS:
        print(f"fleet has no command {name!r}.{did_you_mean(name, COMMANDS)}\n\n{usage()}", file=sys.stderr)
        return 2
    module = import_module(COMMANDS[name][0])
    run: Callable[[Sequence[str]], int] = partial(module.main, program=typed(name)) if name == "launch" else module.run
    try:
        return run(arguments[1:])
    except FleetError as error:
        print(f"fleet {name}: {error}", file=sys.stderr)
        return 2


def usage() -> str:
    """Returns the list of commands."""
    rows = "\n".join(f"  {name:10} {meaning}" for name, (_, meaning) in COMMANDS.items())
    lines = f"usage: {typed()} COMMAND [ARGUMENTS]\n       {typed()} --version"
    return f"{lines}\n\n{rows}\n\nA command prints its own help with --help."


if __name__ == "__main__":
    sys.exit(main())
