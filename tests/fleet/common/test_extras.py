"""Each extra that an error names is one of pyproject.toml, and the command is the one that works from a clone."""

from __future__ import annotations

import re

from fleet.common.extras import install_line
from tests.helpers.sources import ROOT, python_files


def test_the_command_installs_from_the_clone() -> None:
    assert install_line("redis") == "run `pip install '.[redis]'` in the clone of torch-fleet"


def test_every_extra_that_an_error_names_exists() -> None:
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    paths = python_files("fleet", "strategies", "launch")
    texts = [(ROOT / path).read_text(encoding="utf-8") for path in paths]
    named = {name for text in texts for name in re.findall(r"install_line\(['\"](\w+)['\"]\)", text)}
    assert len(named) >= 10
    assert {name for name in named if not re.search(rf"^{name} = \[", declared, re.MULTILINE)} == set()
    assert not any("pip install 'torch-fleet" in text for text in texts)
