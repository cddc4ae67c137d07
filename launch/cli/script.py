"""What the workers run: a Python file, a module, another executable, or the word run_check."""

from __future__ import annotations

import os
import re
import shutil
import sys
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from fleet.errors import ConfigError
from fleet.launch.cli.flags import BY_SPELLING
from fleet.launch.cli.parser import CommandLine

_IMPORTS_FLEET = re.compile(r"^\s*(from|import) fleet\b", re.MULTILINE)


@dataclass(frozen=True)
class Script:
    """The program of the workers, under the names of :class:`LaunchConfig`'s fields."""

    script: str
    script_args: tuple[str, ...]
    is_module: bool = False
    run_direct: bool = False


def read_script(command: CommandLine, *, is_module: bool, no_python: bool, path: str | None) -> Script:
    """Returns what to run; raises ConfigError when it does not exist or cannot be run."""
    try:
        return _find(command, is_module=is_module, no_python=no_python, path=path)
    except OSError as error:
        raise ConfigError(f"The script {command.script!r} cannot be looked for: {error.strerror}.") from None


def _find(command: CommandLine, *, is_module: bool, no_python: bool, path: str | None) -> Script:
    name, args = command.script, command.script_args
    if is_module and no_python:
        raise ConfigError("--module runs through Python and --no_python does not. Omit one of them.")
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


def misplaced_flags(script: Script) -> list[str]:
    """Returns a sentence for each flag of the launcher that stands behind the script and is not the script's own.

    A flag whose name stands in the script's text is taken to be its own.
    """
    text = _text_of(script)
    flags = [(word, BY_SPELLING.get(word.partition("=")[0])) for word in script.script_args if word.startswith("--")]
    return [
        f"{word} stands behind the script, so {script.script} gets it and the launcher does not. If it is meant for "
        f"the launcher, write it before {script.script}."
        for word, flag in flags
        if flag is not None and not any(name in text for name in (flag.name, *flag.aliases))
    ]


def check_shadow(script: Script) -> None:
    """Raises ConfigError when ``import fleet`` in the script finds a file of the user instead of this package."""
    folder = Path() if script.is_module else Path(script.script).parent
    own_package = folder / "fleet" / "__init__.py"
    shadow = folder / "fleet.py" if not own_package.exists() else own_package
    if script.run_direct or not shadow.exists() or (folder / "fleet" / "facade.py").exists():
        return
    if script.is_module or _IMPORTS_FLEET.search(_text_of(script)):
        raise ConfigError(
            f"{shadow} stands beside {script.script}, so `import fleet` there finds it instead of this package. "
            "Rename it."
        )


def _text_of(script: Script) -> str:
    try:
        return Path(script.script).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


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
