"""The pages of docs/recommenders: their programs run, and what they say of the examples is so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.sources import ROOT
from tests.test_ps_pages import EXAMPLE, chinese
from tests.test_readme import read, run

EXAMPLES = ROOT / "examples/recommenders"
CONFIGS = [EXAMPLES / "configs" / path.with_suffix(".yaml").name for path in sorted((EXAMPLES / "models").glob("*.py"))]
CONFIGS = [path for path in CONFIGS if path.is_file()]  # parts.py is no model
OVERVIEW = "docs/recommenders/README.md"
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs/recommenders").glob("*.md"))
BLOCK = re.compile(r"^```\w*\n.*?^```", re.MULTILINE | re.DOTALL)


def test_a_model_of_your_own_is_trained_and_served(tmp_path: Path) -> None:
    files = dict(EXAMPLE.findall(read(OVERVIEW)))
    assert sorted(files) == ["predict.py", "train.py"]
    trained = run(files["train.py"], tmp_path)
    assert trained.returncode == 0, trained.stderr
    served = run(files["predict.py"], tmp_path)
    near_one, near_zero = (float(value) for value in re.findall(r"\d\.\d+(?:e-\d+)?", served.stdout)[-2:])
    assert near_one > 0.9 > 0.1 > near_zero, served.stdout + served.stderr


@pytest.mark.parametrize("page", [page for page in PAGES if ".zh-CN." not in page])
def test_the_code_is_the_same_in_both_languages(page: str) -> None:
    assert BLOCK.findall(read(page)) == BLOCK.findall(read(chinese(page)))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_page_has_the_settings_of_its_model(path: Path) -> None:
    """Each size that the file sets stands in the table, with its value."""
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    shown = {
        f"{section}.{key}: {_written(value)}"
        for section in ("model", "sampling")
        for key, value in settings.get(section, {}).items()
    }
    for page in (f"docs/recommenders/{path.stem}.md", f"docs/recommenders/{path.stem}.zh-CN.md"):
        named = set(re.findall(r"`((?:model|sampling)\.\w+: [^`]+)`", read(page)))
        assert named == shown
        for rule in re.findall(r"`optimizer: (\{[^`]+\})`", read(page)):
            assert yaml.safe_load(rule) == settings["optimizer"]


def test_the_overview_names_every_model() -> None:
    assert [path.stem for path in CONFIGS if f"({path.stem}.md)" not in read(OVERVIEW)] == []


@pytest.mark.parametrize("page", PAGES if CONFIGS else [])
def test_commands_have_options_that_the_script_has(page: str) -> None:
    """And scripts and models that are there."""
    commands = re.findall(r"(examples/recommenders/\S+\.py)([^`\n]*)", read(page))
    assert commands
    for script, options in commands:
        assert (ROOT / script).is_file()
        known = (EXAMPLES / "options.py").read_text(encoding="utf-8")
        assert [option for option in re.findall(r"--\w[\w-]*", options) if f'"{option}"' not in known] == []


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
