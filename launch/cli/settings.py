"""The command line and the environment -> one typed value per flag, with where it came from.

The command line is cut at the script before argparse sees it, so whatever stands behind the script passes through
untouched, even when it looks like a flag of the launcher. It wins over the environment (torchrun's rule; in Paddle the
environment won). Where both are given and differ, a warning names both values. Under a scheduler no flag is given, so
its environment decides.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from fleet.common.version import __version__
from fleet.env import VARIABLES, Environment
from fleet.errors import ConfigError, UnsupportedOptionError, did_you_mean
from fleet.launch.cli.flag import FLEETRUN, GROUPS, LAUNCH, REFUSED, WARNED, Flag
from fleet.launch.cli.flags import BY_SPELLING, FLAGS
from fleet.launch.cli.unused_flags import REMOVED
from fleet.launch.plan.records import Note
from fleet.launch.processes.redact import redact

Value = str | int | float | bool | None
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}
_LONG_NUMBER = re.compile(r"\d{640,}")
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
    """The command line, cut: the text of each flag that was given, the script, and its arguments."""

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
    # A switch that is off, and a value that is not given, need no words.
    shown = f" (default {flag.default})" if flag.default not in (None, "", False) and not flag.reason else ""
    return ("; ".join(parts) + shown).replace("%", "%%")


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


class Settings:
    """One value per flag; ``source`` names the flag or variable that set it, and is absent for a default."""

    def __init__(self, line: CommandLine, environment: Environment) -> None:
        self.line = line
        self.values: dict[str, Value] = {name: flag.default for name, flag in FLAGS.items()}
        self.source: dict[str, str] = {}
        self.on_command_line: set[str] = set()
        self.notes: list[Note] = []
        self.environment = environment

    def has(self, name: str) -> bool:
        """Returns whether flag ``name`` was set, on the command line or in the environment."""
        return name in self.source

    def text(self, name: str) -> str | None:
        """Returns the value of a text flag, or None."""
        value = self.values[name]
        return None if value is None else f"{value}"

    def number(self, name: str) -> int | None:
        """Returns the value of a whole-number flag, or None."""
        value = self.values[name]
        return None if value is None else int(value)

    def seconds(self, name: str) -> float:
        """Returns the value of a flag that takes seconds."""
        return float(self.values[name] or 0)

    def one_of(self, name: str, allowed: tuple[int, ...]) -> int:
        """Returns the value of a whole-number flag; raises ConfigError for any but the ``allowed`` ones."""
        value = self.number(name)
        if value is None or value not in allowed:
            rule = ", ".join(f"{item}" for item in allowed)
            raise ConfigError(f"{self.named(name)} is {value!r}; it takes one of {rule}.")
        return value

    def port(self, name: str) -> int | None:
        """Returns the value of a flag that takes a port; raises ConfigError for a number that is none."""
        value = self.number(name)
        if value is not None and not 0 < value < 65536:
            raise ConfigError(f"{self.named(name)} is {value}; it takes a port from 1 to 65535.")
        return value

    def node_range(self, name: str) -> tuple[int, int]:
        """Returns MIN and MAX of a flag that takes N or MIN:MAX."""
        text = self.text(name) or "1"
        parts = text.split(":")
        numbers = [int(part) for part in parts if part.strip().isdecimal()]
        if len(numbers) != len(parts) or len(parts) > 2 or numbers[0] < 1 or numbers[-1] < numbers[0]:
            raise ConfigError(
                f"{self.named(name)} is {text!r}; it takes N or MIN:MAX, integers from 1 with "
                "MIN <= MAX, as in 2 or 2:4."
            )
        return numbers[0], numbers[-1]

    @property
    def log_style(self) -> str:
        """ "launch" or "fleetrun": as ``--log_style`` says, else by the family of the flags that were written."""
        asked = self.text("log_style")
        if asked is not None:
            return asked
        styles = {FLAGS[name].style for name in self.on_command_line}
        return FLEETRUN if FLEETRUN in styles and LAUNCH not in styles else LAUNCH

    @property
    def visible_devices(self) -> str | None:
        """CUDA_VISIBLE_DEVICES as it was inherited; None: every card is visible."""
        return self.environment.inherited().get("CUDA_VISIBLE_DEVICES")

    def named(self, name: str) -> str:
        """Returns how the user set ``name``, for messages: ``--nnodes`` or ``PADDLE_NNODES``."""
        return self.source.get(name, f"--{name}")

    def drop(self, name: str, reason: str) -> None:
        """Sets ``name`` back to its default and notes the reason."""
        if self.has(name):
            self.note("WARNING", f"{self.named(name)}={self.values[name]} is ignored: {reason}")
            del self.source[name]
            self.on_command_line.discard(name)
        self.values[name] = FLAGS[name].default

    def note(self, level: str, text: str) -> None:
        """Keeps a line that the launcher logs once, before it starts."""
        self.notes.append(Note(level=level, text=redact(text)))

    def warn(self, text: str) -> None:
        """Keeps a warning."""
        self.note("WARNING", text)


def read_command(argv: Sequence[str], environment: Environment, program: str) -> Settings:
    """Returns the launcher's flags by its command line and the environment.

    Raises:
        UsageError: the command line cannot be read.
        ConfigError: a flag has a wrong value.
        UnsupportedOptionError: a flag is refused.
    """
    return read_settings(parse_command_line(argv, program), environment)


def launcher_environment(environment: Environment) -> Environment:
    """Returns the environment as a launcher reads it.

    Inside a worker (``FLEET_POD`` is set) the variables that the outer launcher set describe that worker and not
    the job to be started, so they are left out.
    """
    if not environment.has("FLEET_POD"):
        return environment
    inherited = environment.inherited()
    return Environment({k: v for k, v in inherited.items() if k not in VARIABLES or VARIABLES[k].owner != "launcher"})


def read_settings(command: CommandLine, environment: Environment) -> Settings:
    """Returns every flag's value; raises ConfigError for a wrong one and UnsupportedOptionError for a refused one."""
    environment = launcher_environment(environment)
    settings = Settings(command, environment)
    for flag in FLAGS.values():
        text = command.flags.get(flag.name)
        if text is not None and not text.strip() and flag.default == "":
            # Job templates write --servers="" for a list that is not set.
            text = None
        twin = next((name for name in flag.env if environment.has(name)), None)
        twin_text = environment.raw(twin) if twin else None
        if text is not None:
            value = convert(flag, text, f"--{flag.name}")
            _warn_of_twin(settings, flag, value, twin, twin_text)
            _set(settings, flag, value, f"--{flag.name}")
            settings.on_command_line.add(flag.name)
        elif twin is not None and twin_text is not None:
            _set(settings, flag, convert(flag, twin_text, twin), twin)
    return settings


def _set(settings: Settings, flag: Flag, value: Value, source: str) -> None:
    if flag.fate == REFUSED:
        # The default asks for nothing, so job templates may write it out.
        if value == flag.default:
            return
        raise UnsupportedOptionError(f"{source}={value} cannot be honoured: {flag.reason}. Omit it.")
    if flag.fate == WARNED and value != flag.default:
        settings.warn(f"{source}={value} has no effect: {flag.reason}.")
    settings.values[flag.name] = value
    settings.source[flag.name] = source


def _warn_of_twin(settings: Settings, flag: Flag, value: Value, twin: str | None, twin_text: str | None) -> None:
    if twin is None or twin_text is None:
        return
    try:
        differs = convert(flag, twin_text, twin) != value
    # The flag wins, so a variable that cannot be read is no error.
    except ConfigError:
        differs = True
    if differs:
        settings.warn(f"--{flag.name}={value} on the command line wins over {twin}={twin_text} in the environment.")


def convert(flag: Flag, text: str, source: str) -> Value:
    """Returns ``text`` as the kind of value that ``flag`` takes; ``source`` names it in the error."""
    text = text.strip()
    if flag.kind == "int":
        try:
            return int(text)
        except ValueError:
            raise ConfigError(f"{source} is {text!r}; it takes an integer.") from None
    # Python refuses to convert a number of so many digits, with an error of its own.
    if found := _LONG_NUMBER.search(text):
        raise ConfigError(f"{source} is {text!r}; no number in it may have {len(found[0])} digits.")
    if flag.kind == "seconds":
        return _seconds(text, source)
    if flag.kind == "switch":
        word = text.lower()
        if word in _TRUE or word in _FALSE:
            return word in _TRUE
        raise ConfigError(f"{source} is {text!r}; it takes true or false.")
    if flag.choices and text not in flag.choices:
        rule = " or ".join(flag.choices)
        raise ConfigError(f"{source} is {text!r}; it takes {rule}.{did_you_mean(text, flag.choices)}")
    return text


def _seconds(text: str, source: str) -> int | float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{source} is {text!r}; it takes a number of seconds, 0 or more.")
    return int(value) if value == int(value) else value
