"""``python -m fleet.ps COMMAND``: what is done with the tables of a job beside training it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from fleet.errors import FleetError, did_you_mean

COMMANDS = {
    "export": ("fleet.ps.serving.export_command", "write a saved model as a program that takes its rows as inputs"),
    "rollback": ("fleet.ps.publishing.rollback_command", "take the readers of a folder back to a version, or release"),
    "scale": ("fleet.ps_job.scale_command", "divide the shards of a running job over more or fewer server processes"),
    "switch": ("fleet.ps_job.switch_command", "let the standby of a server serve, and the server be its standby"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that ``argv`` names and returns its exit status; 2 for an unknown command."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    name = arguments[0]
    if name not in COMMANDS:
        print(f"fleet.ps has no command {name!r}.{did_you_mean(name, COMMANDS)}\n\n{usage()}", file=sys.stderr)
        return 2
    try:
        status: int = import_module(COMMANDS[name][0]).run(arguments[1:])
    except FleetError as error:
        print(f"fleet.ps {name}: {error}", file=sys.stderr)
        return 2
    return status


def usage() -> str:
    """Returns the list of commands."""
    rows = "\n".join(f"  {name:10} {meaning}" for name, (_, meaning) in COMMANDS.items())
    return f"usage: python -m fleet.ps COMMAND [ARGUMENTS]\n\n{rows}\n\nA command prints its own help with --help."


if __name__ == "__main__":
    sys.exit(main())
