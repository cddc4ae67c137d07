"""Flags and their twins in the environment -> one typed value per flag, with where it came from.

The command line wins over the environment (torchrun's rule; in Paddle the environment won). Where both are given
and differ, a warning names both values. Under a scheduler no flag is given, so its environment decides.
"""

from __future__ import annotations

import math
import re

from fleet.env import VARIABLES, Environment
from fleet.errors import ConfigError, UnsupportedOptionError, did_you_mean
from fleet.launch.cli.flag import REFUSED, WARNED, Flag
from fleet.launch.cli.flags import FLAGS
from fleet.launch.cli.parser import CommandLine
from fleet.launch.plan.records import Note
from fleet.launch.processes.redact import redact

Value = str | int | float | bool | None
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}
_LONG_NUMBER = re.compile(r"\d{640,}")


class Settings:
    """One value per flag; ``source`` says what the user wrote to set it, or is absent for a default."""

    def __init__(self, environment: Environment) -> None:
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
    settings = Settings(environment)
    for flag in FLAGS.values():
        text = command.flags.get(flag.name)
        if text is not None and not text.strip() and flag.default == "":
            text = None  # --servers="" is how job templates write "not set"
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
    if found := _LONG_NUMBER.search(text):  # Python refuses to read one
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
