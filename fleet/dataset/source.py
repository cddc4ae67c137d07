"""read_blocks: the lines of one file of a dataset, after download and pipe command, in blocks of whole lines.

Reads local files, and through the ``hadoop`` program those whose names begin with ``hdfs:`` or ``afs:``. Files ending
in ``.gz`` are unpacked. Programs are started without a shell; each has ended when the last block has been read.

split_pipeline reads a pipe command: a ``|`` between programs works as in a shell. Everything else that a shell would
interpret (``;``, ``>``, ``$NAME``, ``*``) is refused outside quotes, rather than passed to the program unchanged.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO

from fleet.errors import ConfigError, UnsupportedOptionError
from fleet.launch.processes.redact import redact, redact_arguments

_BLOCK_BYTES = 1 << 20
_REMOTE = ("hdfs:", "afs:")
_ACTED_ON = frozenset(";&<>()$`\n*?[]{}~#!")
_IN_DOUBLE_QUOTES = frozenset("$`")


@dataclass(frozen=True)
class Source:
    """How a file is read: commands as lists of words, ``None`` where there is nothing to start.

    ``download`` is started with the file name as its last argument, instead of opening the file; ``pipeline`` reads the
    file's bytes and writes the lines. ``fs_name`` and ``fs_ugi`` are address and user of the Hadoop file system.
    """

    pipeline: tuple[tuple[str, ...], ...] = ()
    download: tuple[str, ...] | None = None
    fs_name: str = ""
    fs_ugi: str = ""

    def check_files(self, files: list[str]) -> None:
        """Raises ConfigError when a local file does not exist."""
        if self.download is None:
            absent = [file for file in files if not file.startswith(_REMOTE) and not os.path.isfile(file)]
            if absent:
                raise ConfigError(f"set_filelist(...) names {absent[0]!r}, which is not a file here.{_others(absent)}")

    def commands(self, file: str) -> tuple[list[list[str]], bool]:
        """Returns the programs to start for a file, in order, and whether the first reads the file itself."""
        first: list[list[str]] = []
        if self.download is not None:
            first = [[*self.download, file]]
        elif file.startswith(_REMOTE):
            options = [f"-Dfs.default.name={self.fs_name}"] if self.fs_name else []
            options += [f"-Dhadoop.job.ugi={self.fs_ugi}"] if self.fs_ugi else []
            return [["hadoop", "fs", *options, "-text" if file.endswith(".gz") else "-cat", file], *self._piped()], True
        unpack = [["gzip", "-dc"]] if file.endswith(".gz") and self.download is None else []
        return [*first, *unpack, *self._piped()], bool(first)

    def _piped(self) -> list[list[str]]:
        return [list(words) for words in self.pipeline]


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
    parts = [""]
    quote = ""  # the quotation mark that is open
    at = 0
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


def read_blocks(file: str, source: Source) -> Iterator[bytes]:
    """Yields the lines of ``file`` in blocks of whole lines, about 1 MiB each; the last line may lack its newline.

    Raises:
        ConfigError: the file cannot be read, a program cannot be started, or its exit status is not 0.
    """
    commands, reads_itself = source.commands(file)
    with ExitStack() as stack:
        stream: IO[bytes] | None = None
        if not reads_itself:
            try:
                stream = stack.enter_context(open(file, "rb"))
            except OSError as error:
                raise ConfigError(f"{file!r} of set_filelist cannot be read: {error.strerror}.") from error
        # Registered before the first start: a program that cannot be started must not leave the earlier ones running.
        started: list[subprocess.Popen[bytes]] = []
        stack.callback(_end_all, started)
        for words in commands:
            process = _start(words, stream, file)
            started.append(process)
            # The program holds this end now: with a second holder, the one before it would never get SIGPIPE.
            if stream is not None:
                stream.close()
            stream = process.stdout
        if stream is None:
            raise AssertionError("nothing to read from")
        yield from _whole_lines(stream)
        stream.close()
        _check_ends(started, commands, file)


def _start(words: list[str], stdin: IO[bytes] | None, file: str) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(words, stdin=stdin or subprocess.DEVNULL, stdout=subprocess.PIPE)
    except OSError as error:
        raise ConfigError(f"{_shown(words)} cannot be started for {file!r}: {error.strerror}.") from error


def _whole_lines(stream: IO[bytes]) -> Iterator[bytes]:
    rest = b""
    while block := stream.read(_BLOCK_BYTES):
        head, newline, tail = block.rpartition(b"\n")
        if newline:
            yield rest + head + newline
            rest = tail
        else:
            rest += block
    if rest:
        yield rest


def _check_ends(started: list[subprocess.Popen[bytes]], commands: list[list[str]], file: str) -> None:
    codes = [process.wait() for process in started]
    for index, (code, words) in enumerate(zip(codes, commands, strict=True)):
        # A program that stops reading early ends the one before it with SIGPIPE, as in a shell.
        if code and not (code == -signal.SIGPIPE and index < len(codes) - 1):
            ended = f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"
            raise ConfigError(f"{_shown(words)} {ended} while it read {file!r}. See its messages above.")


def _shown(words: list[str]) -> str:
    return repr(" ".join(redact_arguments(words)))


def _end_all(started: list[subprocess.Popen[bytes]]) -> None:
    for process in started:
        if process.stdout is not None:
            process.stdout.close()
        if process.poll() is None:
            process.kill()
        process.wait()


def _others(absent: list[str]) -> str:
    return f" {len(absent) - 1} more are absent." if len(absent) > 1 else ""
