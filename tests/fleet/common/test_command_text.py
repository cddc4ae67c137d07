"""Commands show the name that was typed, and no markup."""

from __future__ import annotations

import os
import re
import sys

import pytest

from fleet.__main__ import COMMANDS
from fleet.common.command_text import plain_text, typed
from tests.helpers.ready_python import run_python


def test_the_typed_name(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {"/usr/bin/fleet": "fleet env", "fleet/__main__.py": "python -m fleet env", "": "python -m fleet env"}
    for path, shown in paths.items():
        monkeypatch.setattr(sys, "argv", [path])
        assert typed("env") == shown
    assert typed() == "python -m fleet"


def test_markup_goes() -> None:
    assert plain_text("``a b``: says ``c`` of\nthe d.\n\nMore.") == "Says c of the d. More."
    assert plain_text(None) == ""


@pytest.mark.parametrize(
    ("command", "program"),
    [*((command, "fleet") for command in sorted({*COMMANDS, ""} - {"launch-on"})), ("verify", "python -m fleet")],
)
def test_help_shows_the_typed_name_and_no_markup(command: str, program: str) -> None:
    code = f"import sys, fleet.__main__ as m; sys.argv[0] = {program.split()[0]!r}; sys.exit(m.main(sys.argv[1:]))"
    words = [*command.split(), "--help"]
    environment = {**os.environ, "COLUMNS": "200"}
    done = run_python(code, *words, env=environment)
    assert done.returncode == 0, done.stderr
    assert "``" not in done.stdout
    assert re.match(f"usage: {program} {command or 'COMMAND'}".rstrip(), done.stdout), done.stdout[:200]
    if program == "fleet":
        assert "python -m fleet " not in done.stdout.partition("\n\n")[0]
