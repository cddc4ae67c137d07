"""The documentation builds as a site: every page in both languages, links checked, search, nothing from outside."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.sources import ROOT
from tests.test_readme import TEXTS

pytest.importorskip("mkdocs", reason="`make site` installs what builds the site")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of the site; a warning ends the build."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


def test_every_text_is_a_page(site: Path) -> None:
    pages = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    wanted = {re.sub(r"README\.md$", "index.md", path.as_posix()) for path in TEXTS if path.parts[0] != "tests"}
    assert {name.removesuffix(".md") + ".html" for name in wanted} == pages - {"404.html"}


def test_a_page_has_the_language_of_its_text(site: Path) -> None:
    for name, language in (
        ("index", "en"),
        ("README.zh-CN", "zh-CN"),
        ("docs/ps/index", "en"),
        ("docs/ps/README.zh-CN", "zh-CN"),
    ):
        assert f'<html lang="{language}"' in (site / f"{name}.html").read_text(encoding="utf-8")


def test_search_knows_both_languages(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    assert index["config"]["lang"] == ["en", "zh"]
    places = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert {"docs/reference/api.html", "docs/reference/options.zh-CN.html"} <= places


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    loaded = re.compile(r'<(?:script|link|img)[^>]+(?:src|href)="?(?:https?:)?//')
    assert [path for path in site.rglob("*.html") if loaded.search(path.read_text(encoding="utf-8"))] == []
