"""docs/guides/checkpoint.md: its program runs and resumes, both languages have one outline, the flags exist."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import fleet
from fleet.checkpoint.checkpoint_command import _parser
from fleet.elastic.faults import ACTIONS, POINTS
from fleet.launch.cli.flags import BY_SPELLING
from tests.helpers.ready_python import run_python
from tests.helpers.sources import ROOT

NAMES = ("docs/guides/checkpoint.md", "docs/guides/checkpoint.zh-CN.md")


def blocks(name: str) -> list[str]:
    """Returns the Python code of a text."""
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL)


def only_block(word: str) -> str:
    """Returns the one piece of Python code that holds the word."""
    (found,) = (block for block in blocks(NAMES[0]) if word in block)
    return found


@pytest.mark.slow
def test_the_program_runs_and_goes_on(tmp_path: Path) -> None:
    program, keep, scale = (only_block(word) for word in ("checkpoint.resume()", "keep_global_batch", "scale_lr"))
    (tmp_path / "train.py").write_text(program + "print('at', checkpoint.epoch, checkpoint.step)\n")
    (tmp_path / "declare.py").write_text(f"from fleet import fleet\n{keep}\nprint(strategy.gradient_merge_configs)\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    shown = []
    for name in ("train.py", "train.py", "declare.py"):
        done = run_python(tmp_path / name, cwd=tmp_path, env=environment, warnings=["error"])
        assert done.returncode == 0, done.stderr
        shown.append(done.stdout)
    assert shown[:2] == ["at 2 32\n", "at 2 32\n"]
    assert "8" in shown[2]
    assert "scale_lr(optimizer, workers=8" in scale


def test_both_languages_say_the_same() -> None:
    english, chinese = (
        [
            re.match(r"#+ |- |\| |```\w*|\d\. |", line)[0]  # type: ignore[index]
            for line in (ROOT / name).read_text(encoding="utf-8").splitlines()
            if re.match(r"#+ |- |\| |```\w*|\d\. ", line)
        ]
        for name in NAMES
    )
    assert english == chinese
    assert blocks(NAMES[0]) == blocks(NAMES[1])


def command_flags() -> set[str]:
    """Returns the flags of ``python -m fleet checkpoint``."""
    (commands,) = (action.choices for action in _parser()._actions if action.choices)
    return {flag for command in commands.values() for flag in command._option_string_actions}


@pytest.mark.parametrize("name", NAMES)
def test_flags_names_and_points_exist(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    flags = set(re.findall(r"--[a-z][a-z_-]+[a-z]", text))
    assert {"--heartbeat_timeout", "--preempt_grace", "--max_restart"} <= flags <= {*BY_SPELLING, *command_flags()}
    for found in set(re.findall(r"fleet\.elastic\.([A-Za-z_]+)", text)):
        assert hasattr(fleet.elastic, found)
    assert set(re.findall(r"`(save\.\w+|step)`", text)) >= {*POINTS, "step"}
    assert all(f"`{action}`" in text for action in ACTIONS)
