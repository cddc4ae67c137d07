"""split_pipeline: a pipe command as lists of words, one for each program, without a shell.

A ``|`` between programs works as in a shell. Everything else that a shell would interpret (``;``, ``>``, ``$NAME``,
``*``) is refused outside quotes, rather than passed to the program unchanged.
"""

from __future__ import annotations

import shlex

from fleet.errors import ConfigError, UnsupportedOptionError
from fleet.launch.processes.redact import redact

_ACTED_ON = frozenset(";&<>()$`\n*?[]{}~#!")
_IN_DOUBLE_QUOTES = frozenset("$`")


def split_pipeline(text: object, option: str) -> list[list[str]]:
    """Returns the words of each program of ``text``.

    Raises:
        ConfigError: not a string, an empty program, or unbalanced quotes.
        UnsupportedOptionError: something that only a shell could do.

    Example:
        >>> split_pipeline("python clean.py --days 3 | awk '{print $1}'", "pipe_command")
        [['python', 'clean.py', '--days', '3'], ['awk', '{print $1}']]
    """
    if not isinstance(text, str):
        raise ConfigError(f"{option}={text!r} takes a command line as a string.")
    try:
        programs = [shlex.split(part) for part in _parts(text, option)]
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{option}={redact(text)!r} is not a command line: {error}.") from error
    if not all(programs):
        raise ConfigError(f"{option}={redact(text)!r} names no program; the default is 'cat'.")
    return programs


def _parts(text: str, option: str) -> list[str]:
    """Returns the text between each ``|`` outside quotes."""
    parts, quote, at = [""], "", 0
    while at < len(text):
        char = text[at]
        if char == "\\" and quote != "'":
            parts[-1] += text[at : at + 2]
            at += 2
            continue
        if char in (_IN_DOUBLE_QUOTES if quote == '"' else frozenset() if quote else _ACTED_ON):
            raise UnsupportedOptionError(
                f"{option}={redact(text)!r} holds {char!r}, which only a shell interprets; none runs. Put it in "
                "single quotes if the program should see it, or move the work into a script."
            )
        if char == "|" and not quote:
            parts.append("")
        else:
            parts[-1] += char
            if char in "'\"" and quote in ("", char):
                quote = "" if quote else char
        at += 1
    return parts
