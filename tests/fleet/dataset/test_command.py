"""Pipe commands: words and pipes as in a shell, and nothing else of a shell."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.dataset._command import split_pipeline
from fleet.errors import ConfigError, UnsupportedOptionError


def test_words_and_pipes() -> None:
    """B.7: pipe_command is a pipeline of programs."""
    assert split_pipeline("cat", "pipe_command") == [["cat"]]
    text = """python 'my script.py' --sep "|" a\\|b | awk '{print $1 > "x"}' | tr -d '*'"""
    assert split_pipeline(text, "pipe_command") == [
        ["python", "my script.py", "--sep", "|", "a|b"],
        ["awk", '{print $1 > "x"}'],
        ["tr", "-d", "*"],
    ]


@given(st.lists(st.text(min_size=1), min_size=1, max_size=4))
def test_quoted_words_reach_the_program_as_they_are(words: list[str]) -> None:
    text = " ".join("'" + word.replace("'", "'\\''") + "'" for word in words)
    assert shlex.split(text) == words
    assert split_pipeline(text, "pipe_command") == [words]


@pytest.mark.parametrize(
    "text",
    [
        "cat; rm x",
        "cat && ls",
        "cat > out",
        "cat < in",
        "cat $HOME",
        'cat "$HOME"',
        "cat `id`",
        'cat "`id`"',
        "cat *.txt",
    ]
    + ["cat &", "(cat)", "cat\nls", "cat ~", "cat {a,b}", "cat [ab]", "cat ?", "cat #x", "cat $(id)"],
)
def test_what_only_a_shell_does_is_refused(text: str) -> None:
    """No shell runs: what it would act on is refused, not passed on and not run."""
    with pytest.raises(UnsupportedOptionError, match="only a shell interprets"):
        split_pipeline(text, "pipe_command")


@pytest.mark.parametrize(
    ("text", "rule"),
    [("", "names no program"), ("cat |", "names no program"), ("a || b", "names no program"), ("cat 'x", "quotation")]
    + [(None, "as a string"), (["cat"], "as a string")],
)
def test_no_command(text: Any, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        split_pipeline(text, "pipe_command")
