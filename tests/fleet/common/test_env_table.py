"""The table of environment variables: complete, used, and the same as the launcher's flags say."""

from __future__ import annotations

import re

import pytest

from fleet.common.env_table import VARIABLES
from fleet.launch.cli.flag import Flag
from fleet.launch.cli.flags import FLAGS
from tests.helpers.sources import ROOT, python_files

# Rows of parts that are not there yet.
CODE = {
    path.as_posix(): (ROOT / path).read_text(encoding="utf-8")
    for path in python_files("fleet", "strategies", "launch")
    if path.name != "env_table.py"
}


def test_each_row_is_described() -> None:
    for name, variable in VARIABLES.items():
        assert variable.name == name
        assert re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)
        assert variable.owner in {"user", "launcher", "torch", "scheduler"}
        assert variable.meaning
        assert not variable.meaning.endswith(".")


def test_each_variable_is_used_somewhere() -> None:
    """The promise: what is documented has an effect, or a reason in its row."""
    used = {word for text in CODE.values() for word in re.findall(r"\w+", text)}
    assert set(VARIABLES) - used == set()


@pytest.mark.parametrize("flag", FLAGS.values(), ids=lambda flag: flag.name)
def test_the_twins_of_a_flag_are_rows(flag: Flag) -> None:
    assert set(flag.env) <= set(VARIABLES)


def test_a_row_that_names_a_twin_names_a_flag() -> None:
    named = {flag for row in VARIABLES.values() for flag in re.findall(r"twin of --(\w+)", row.meaning)}
    spelled = {name for flag in FLAGS.values() for name in (flag.name, *flag.aliases)}
    assert len(named) > 20
    assert named - spelled == set()
