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


def found_by_search(site: Path, folder: str) -> set[str]:
    """Returns the pages in a search index, relative to the site."""
    index = json.loads((site / folder / "search_index.json").read_text(encoding="utf-8"))
    assert index["config"]["lang"] == ["en", "zh"]
    return {entry["location"].partition("#")[0] for entry in index["docs"]}


def test_search_stays_in_the_language_of_the_page(site: Path) -> None:
    english, chinese = found_by_search(site, "search"), found_by_search(site, "zh/search")
    assert {"docs/reference/api.html", "docs/ps/modes.html"} <= english
    assert not [page for page in english if ".zh-CN." in page]
    # A page that is not translated is better than none.
    assert {"../docs/ps/modes.zh-CN.html", "../docs/reference/api.html", "../docs/ps/README.zh-CN.html"} <= chinese
    assert not {"../docs/ps/modes.html", "../docs/ps/index.html"} & chinese


def test_the_search_index_is_where_a_page_looks_for_it(site: Path) -> None:
    for page in ("README.zh-CN.html", "docs/ps/modes.zh-CN.html"):
        (base,) = re.findall(r'"base": ?"([^"]*)"', (site / page).read_text(encoding="utf-8"))
        assert ((site / page).parent / base / "search" / "search_index.json").resolve().is_file()
        assert base.endswith("/zh/")


def test_the_switch_of_the_language_stays_on_the_page(site: Path) -> None:
    for page in ("docs/ps/modes.html", "docs/ps/modes.zh-CN.html"):
        links = dict(re.findall(r'<a href="([^"]*)" hreflang="(\w+)"', (site / page).read_text(encoding="utf-8")))
        assert links == {"modes.html": "en", "modes.zh-CN.html": "zh"}
    text = (site / "docs" / "reference" / "api.html").read_text(encoding="utf-8")
    assert '<a href="../README.zh-CN.html" hreflang="zh"' in text


def test_a_page_has_the_tabs_of_its_language_and_the_pages_beside_it(site: Path) -> None:
    for page, tab, beside in (
        ("modes", "Run on", "embeddings.html"),
        ("modes.zh-CN", "\u8fd0\u884c\u73af\u5883", "embeddings.zh-CN.html"),
    ):
        text = (site / "docs" / "ps" / f"{page}.html").read_text(encoding="utf-8")
        tabs = re.findall(r'class="md-tabs__link">\s*([^<]+?)\s*<', text)
        assert tab in tabs
        assert len(tabs) == 8 if page == "modes" else len(tabs) >= 7
        assert f'<link rel="prev" href="{beside}">' in text
    last = (site / "fleet" / "ps" / "index.html").read_text(encoding="utf-8")
    assert 'rel="next"' not in last or ".zh-CN" not in last.split('rel="next"')[1].split(">")[0]


def test_code_is_folded_and_not_cut_off(site: Path) -> None:
    assert "white-space: pre-wrap" in (site / "site.css").read_text(encoding="utf-8")
    assert "site.css" in (site / "docs" / "ps" / "modes.html").read_text(encoding="utf-8")


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    loaded = re.compile(r'<(?:script|link|img)[^>]+(?:src|href)="?(?:https?:)?//')
    assert [path for path in site.rglob("*.html") if loaded.search(path.read_text(encoding="utf-8"))] == []
