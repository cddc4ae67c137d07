"""What the workers run: a Python file, a module, another executable, or the word run_check."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from fleet.errors import ConfigError
from fleet.launch._parser import CommandLine


@dataclass(frozen=True)
class Script:
    """The program of the workers, under the names of :class:`LaunchConfig`'s fields."""

    script: str
    script_args: tuple[str, ...]
    is_module: bool = False
    run_direct: bool = False


def read_script(command: CommandLine, *, is_module: bool, no_python: bool, path: str | None) -> Script:
    """Returns what to run; raises ConfigError when it does not exist or cannot be run."""
    name, args = command.script, command.script_args
    if is_module and no_python:
        raise ConfigError("--module runs through Python and --no_python does not. Leave one of them out.")
    if is_module:
        return Script(name, args, is_module=True)
    if name == "run_check" and not Path(name).exists():
        return Script("fleet", ("run_check", *args), is_module=True)
    if name.endswith(".py") and not no_python:
        if not Path(name).is_file():
            raise ConfigError(f"The script {name!r} does not exist (looked in {Path.cwd()}).{_near(name)}")
        return Script(name, args)
    if shutil.which(name, path=path) is not None:
        return Script(name, args, run_direct=True)
    if not Path(name).exists():
        raise ConfigError(
            f"The script {name!r} is neither a file here ({Path.cwd()}) nor a program on PATH."
            f"{_near(name)} For a module put -m before its name."
        )
    if Path(name).is_file() and os.sep not in name and os.access(name, os.X_OK):
        return Script(f".{os.sep}{name}", args, run_direct=True)
    raise ConfigError(
        f"The script {name!r} is neither a .py file nor an executable. Make it executable (chmod +x), or "
        "give it the ending .py."
    )


def _near(name: str) -> str:
    folder = Path(name).parent
    if not folder.is_dir():
        return ""
    near = get_close_matches(Path(name).name, [p.name for p in folder.iterdir() if p.is_file()], n=1, cutoff=0.6)
    return f" Did you mean {f'{folder / near[0]}'!r}?" if near else ""


def python_command(script: str, args: tuple[str, ...], *, is_module: bool, run_direct: bool) -> tuple[str, ...]:
    """Returns the command of one process: this interpreter, unbuffered, unless the script is its own program."""
    if run_direct:
        return (script, *args)
    return (sys.executable, "-u", *(("-m",) if is_module else ()), script, *args)
