"""The command ``python -m fleet.launch``: reads the configuration and hands it to the running half."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fleet.env import Environment
from fleet.errors import ConfigError, LaunchError
from fleet.launch.cli.config import PROGRAM, read_config
from fleet.launch.cli.elastic import check_elastic
from fleet.launch.cli.settings import UsageError
from fleet.launch.plan.local_machine import Machine, read_machine
from fleet.launch.processes.redact import one_sentence

USAGE_ERROR = 2


def main(
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
    machine: Machine | None = None,
    program: str = "",
) -> int:
    """Runs the job that the command line describes and returns the exit code of the launcher.

    Args:
        argv: the arguments without the program's name; ``None`` takes those of this process.
        environ: the environment; ``None`` takes that of this process.
        machine: the facts about this machine; ``None`` reads them.
        program: how the user called the launcher; empty takes it from this process.

    Returns:
        0 when all workers ended with 0, else the code of the worker that failed first; 2 for a command line or an
        environment that cannot be used.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    program = program or program_name(sys.argv[0] if argv is None else "")
    environment = Environment(environ)
    try:
        config = read_config(arguments, environment, machine or read_machine(), program)
        check_elastic(config, environment)
        from fleet.launch.job import run

        return run(config, environment)
    except SystemExit as stop:
        # argparse has printed the help and ends the process by this exception.
        return stop.code if isinstance(stop.code, int) else 0
    except UsageError as error:
        print(f"usage: {program} [flags] script [flags of the script]", file=sys.stderr)
        return _report(program, error, USAGE_ERROR)
    except ConfigError as error:
        return _report(program, error, USAGE_ERROR)
    except LaunchError as error:
        return _report(program, error, error.exit_code)


def _report(program: str, error: Exception, exit_code: int) -> int:
    print(f"{program}: error: {one_sentence(error)}", file=sys.stderr)
    return exit_code


def program_name(path: str) -> str:
    """Returns how the user called the launcher: ``python -m fleet.launch``, or the name of an installed command."""
    name = Path(path).name
    if name in ("", "__main__.py", "-c", "-m", "launch_ps.py"):
        python = Path(sys.executable).name if sys.executable else "python"
        return PROGRAM.replace("python", python, 1)
    return name
