"""Options of ``python -m fleet launch-on``, in front of the launcher's flags, and the flags that it sets itself."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import NoReturn

from fleet.errors import ConfigError
from fleet.launch.cli.settings import CommandLine, UsageError

# Flags of the launcher that follow from the nodes which a scheduler gives.
_MEETING_FLAGS = ("nnodes", "master", "rank", "ips", "host", "job_id", "standalone", "master_addr", "master_port",
                  "rdzv_backend")  # fmt: skip
_SERVER_FLAGS = ("server_num", "worker_num", "servers", "workers", "server_standby", "server_shards", "server_spare")


class CommandOptions(argparse.ArgumentParser):
    """A parser whose errors are UsageErrors that name the command.

    Args:
        program: the command as it is typed.
        about: the text of its help.
    """

    def __init__(self, program: str, about: str) -> None:
        super().__init__(
            prog=program,
            description=about,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            usage=f"{program} [options] [launcher's flags] script [arguments]",
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Raises UsageError."""
        raise UsageError(f"{message}. {self.prog} --help lists the options.")


def cut_options(
    arguments: Sequence[str], takes_value: Sequence[str], switches: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Returns the options of a command, and everything from the first other word on."""
    at = 0
    own: list[str] = []
    while at < len(arguments):
        name, equals, value = arguments[at].partition("=")
        spelled = name.replace("-", "_").replace("__", "--", 1) if name.startswith("--") else name
        if spelled in switches and not equals:
            own.append(spelled)
        elif spelled in takes_value:
            if not equals:
                if at + 1 == len(arguments):
                    raise UsageError(f"{name} has no value; write {name}=VALUE.")
                at += 1
                value = arguments[at]
            own.append(f"{spelled}={value}")
        else:
            break
        at += 1
    return own, list(arguments[at:])


def check_set_flags(
    line: CommandLine, nodes: int, *, sets: str, chooses: str, number: str, more: Mapping[str, str] | None = None
) -> None:
    """Raises ConfigError for flags that follow from the nodes, and for servers on several nodes.

    Args:
        line: the launcher's command line.
        nodes: how many.
        sets: the subject that sets the flags, and its source.
        chooses: the scheduler that chooses the nodes.
        number: how one node is written.
        more: further flags that are refused, with their replacement.
    """
    hints = {**dict.fromkeys(_MEETING_FLAGS, "Omit it."), **(more or {})}
    for name, hint in hints.items():
        if name in line.flags:
            raise ConfigError(f"--{name} is a flag that {sets}. {hint}")
    servers = [name for name in _SERVER_FLAGS if name in line.flags]
    if servers and nodes > 1:
        raise ConfigError(
            f"--{servers[0]} with {number}={nodes}: the endpoints of servers on several nodes must be known "
            f"before the job starts, and {chooses} chooses the nodes. Use {number}=1, whose launcher starts all of "
            "them."
        )
