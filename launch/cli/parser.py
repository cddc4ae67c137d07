"""Command line -> text of each flag, script and script arguments; nothing is interpreted yet.

The command line is cut at the script before argparse sees it, so whatever stands behind the script passes through
untouched, even when it looks like a flag of the launcher.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from fleet._version import __version__
from fleet.errors import ConfigError, did_you_mean
from fleet.launch.cli.flag import GROUPS, REFUSED, Flag
from fleet.launch.cli.flags import BY_SPELLING, FLAGS
from fleet.launch.cli.unused_flags import REMOVED

SWITCH_WORDS = frozenset({"1", "0", "true", "false", "yes", "no", "on", "off"})

_EPILOG = """\
Every flag takes _ and - in its name. A flag on the command line wins over its variable in the environment.
The script is a .py file, another executable, a module with -m, or the word run_check; everything behind it is
handed to it as it stands.

examples:
  python -m fleet.launch --gpus=0,1 train.py
  python -m fleet.launch --nnodes=2 --devices=0,1 train.py
  python -m fleet.launch --server_num=1 --worker_num=2 train.py
"""


@dataclass(frozen=True)
class CommandLine:
    """The command line, cut: the text of each flag that was given, the script, and what follows it."""

    flags: dict[str, str]
    script: str
    script_args: tuple[str, ...]
    argv: tuple[str, ...] = field(default=())


class UsageError(ConfigError):
    """The command line cannot be read; the launcher prints its usage and exits with 2."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


class _Formatter(argparse.HelpFormatter):
    """One line per flag: its spellings with ``_`` only, then meaning and default."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=110)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        flag = BY_SPELLING.get(action.option_strings[-1]) if action.option_strings else None
        if flag is None:
            return super()._format_action_invocation(action)
        names = [s for s in flag.spellings if "-" not in s[2:]]
        return ", ".join(names) + ("" if flag.kind == "switch" else f" {_metavar(flag)}")

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "".join(indent + line for line in text.splitlines(keepends=True))


def build_parser(program: str) -> argparse.ArgumentParser:
    """Returns the parser that knows every flag of every family."""
    parser = _Parser(
        prog=program,
        usage=f"{program} [flags] script [flags of the script]",
        description="Starts the processes of a Fleet job on this node and watches them.",
        epilog=_EPILOG,
        allow_abbrev=False,
        formatter_class=_Formatter,
    )
    parser.add_argument(
        "--version", action="version", version=f"torch-fleet {__version__}", help="print the version and exit"
    )
    for title in GROUPS:
        group = parser.add_argument_group(title)
        for flag in FLAGS.values():
            if flag.group == title:
                group.add_argument(*flag.spellings, dest=flag.name, default=None, help=_help(flag))
    return parser


def _metavar(flag: Flag) -> str:
    return "{" + ",".join(flag.choices) + "}" if flag.choices else flag.name.upper()


def _help(flag: Flag) -> str:
    parts = [flag.meaning]
    if flag.reason:
        parts.append(f"{'refused' if flag.fate == REFUSED else 'no effect'}: {flag.reason}")
    if flag.env:
        parts.append("environment: " + ", ".join(flag.env))
    shown = "empty" if flag.default == "" else flag.default
    return ("; ".join(parts) + f" (default {shown})").replace("%", "%%")


def parse_command_line(argv: Sequence[str], program: str) -> CommandLine:
    """Returns the command line, cut into flags, script and script arguments; raises UsageError."""
    tokens, rest = _cut(list(argv))
    parser = build_parser(program)
    given = {name: text for name, text in vars(parser.parse_args(tokens)).items() if text is not None}
    if not rest:
        raise UsageError(
            "the script is missing: name a .py file, an executable or, with -m, a module "
            "behind the flags, as in: --gpus=0,1 train.py"
        )
    return CommandLine(given, rest[0], tuple(rest[1:]), tuple(argv))


def _cut(argv: list[str]) -> tuple[list[str], list[str]]:
    """Returns the launcher's own tokens as ``--flag=value``, and the rest from the script on."""
    tokens: list[str] = []
    at = 0
    while at < len(argv):
        word = argv[at]
        if word == "--":
            return tokens, argv[at + 1 :]
        if not word.startswith("-") or word == "-":
            return tokens, argv[at:]
        at += 1
        if word in ("-h", "--help", "--version"):
            return ["--version" if word == "--version" else "--help"], []
        name, equals, value = word.partition("=")
        flag = BY_SPELLING.get(name)
        if flag is None:
            raise UsageError(_unrecognized(word, name))
        if not equals:
            value, at = value_of(flag, name, argv, at)
        tokens.append(f"--{flag.name}={value}")
    return tokens, []


def value_of(flag: Flag, name: str, argv: list[str], at: int) -> tuple[str, int]:
    """Returns the value that follows flag ``name`` and the position behind it."""
    following = argv[at] if at < len(argv) else None
    if flag.kind == "switch":
        takes = name != "-m" and following is not None and following.lower() in SWITCH_WORDS
        return (following, at + 1) if takes and following is not None else ("true", at)
    if following is None or following.split("=")[0] in BY_SPELLING:
        raise UsageError(f"argument {name}: a value is missing; write {name}=VALUE.")
    return following, at + 1


def _unrecognized(word: str, name: str) -> str:
    bare = name.lstrip("-").replace("-", "_")
    if bare in REMOVED:
        return f"unrecognized arguments: {word} ({name} was removed: {REMOVED[bare]})"
    hint = did_you_mean("--" + bare, [s for s in BY_SPELLING if "-" not in s[2:]])
    return f"unrecognized arguments: {word}.{hint} --help lists every flag; flags of the script go behind the script."
