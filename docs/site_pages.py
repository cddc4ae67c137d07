"""Gives the site its pages: the texts of the project under the paths they have in it, so that their links lead there.

A hook of MkDocs (mkdocs.yml). A file that a text links to and that is no text itself becomes part of the site as it is.
A page sees the navigation of its own language, and its twin in the other one.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation, Section
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "docs",
    "docs/*",
    "docs/reference/api/**",
    "strategies",
    "strategies/_gradients",
    "strategies/sharding",
    "deploy",
    "benchmarks",
    "benchmarks/notes",
    "benchmarks/silent_bugs",
    "examples/*",
    "fleet/checkpoint",
    "fleet/checks",
    "fleet/job",
    "fleet/ps",
    "fleet/training",
    "launch",
)
CHINESE = ".zh-CN."
# What a page weighs in the search: a reference or a record has every word, and would hide the page that explains it.
BOOSTS = {
    "CHANGELOG.md": 0.1,
    "benchmarks/": 0.2,
    "fleet/": 0.5,
    "launch/": 0.5,
    "strategies/": 0.5,
    "docs/reference/api/paddle/": 0.5,
    "docs/reference/environment": 0.5,
    "docs/reference/options": 0.5,
}
_LINK = re.compile(r"\]\(([^)\s#]+)[^)]*\)")
_ITEM = re.compile(r"- |\d+\. ")
_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
# A line end between two signs of Chinese text or punctuation.
_LINE_END = re.compile(
    r"(?<=[\u2014-\u201d\u3000-\u9fff\uff00-\uffef])\n *(?=[\u2014-\u201d\u3000-\u9fff\uff00-\uffef])"
)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds the pages of the API to the navigation, and the link to the repository that ``REPOSITORY`` names."""
    config.nav = _filled(config.nav)
    config.repo_url = config.repo_url or os.environ.get("REPOSITORY") or None
    config.repo_name = config.repo_name or "Repository"
    return config


def _filled(nav: Any) -> Any:
    """Returns ``nav`` with the texts of a folder, sorted, in place of its name, which ends with a slash."""
    if isinstance(nav, dict):
        return {title: _filled(part) for title, part in nav.items()}
    if isinstance(nav, list):
        return [_filled(part) for part in nav]
    if not nav.endswith("/"):
        return nav
    paths = sorted((ROOT / nav).glob("*.md"), key=lambda path: path.stem)
    return [{path.stem: path.relative_to(ROOT).as_posix()} for path in paths]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Returns the files of the site in place of those of docs/ alone."""
    found = [file for file in files if not file.src_uri.endswith((".md", ".png", ".py", ".yaml"))]
    texts = [path for folder in ("", *FOLDERS) for path in sorted(ROOT.glob(f"{folder}/*.md".lstrip("/")))]
    for path in sorted({*texts, *_linked(texts)}):
        found.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return Files(found)


def _linked(texts: list[Path]) -> Iterator[Path]:
    for text in texts:
        for target in _LINK.findall(text.read_text(encoding="utf-8")):
            path = (text.parent / target).resolve()
            if path.suffix != ".md" and path.is_file() and path.is_relative_to(ROOT):
                yield path


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Ends the way of next and previous pages where a language ends, and takes its name out of the path to a page."""
    for page in nav.pages:
        if page.next_page and _language(page) != _language(page.next_page):
            page.next_page.previous_page = None
            page.next_page = None
    for section in nav.items:
        for item in section.children or ():
            item.parent = None
    return nav


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Weighs the page in the search; returns its text as this Markdown wants it, where GitHub asks for less."""
    for start, boost in BOOSTS.items():
        if page.file.src_uri.startswith(start):
            page.meta.setdefault("search", {})["boost"] = boost
    markdown = _indented(markdown)
    if CHINESE not in page.file.src_uri:
        return markdown
    # A line end inside Chinese text would become a space.
    return "".join(part if part.startswith("```") else _LINE_END.sub("", part) for part in _FENCED.split(markdown))


def _indented(markdown: str) -> str:
    """Returns the text with four spaces before what belongs to an item of a list, and a line before the next item."""
    lines: list[str] = []
    width, start, fenced = 0, 0, False
    for line in markdown.split("\n"):
        fenced ^= line.startswith("```")
        marker = _ITEM.match(line)
        if marker and not fenced:
            lines += [""] if width and "" in lines[start:] and lines[-1] else []
            width, start = len(marker[0]), len(lines)
        elif line.strip() and not (width and line.startswith(" " * width)):
            width = 0
        elif line.strip():
            line = "    " + line[width:]
        lines.append(line)
    return "\n".join(lines)


def on_page_context(context: dict[str, Any], page: Page, config: MkDocsConfig, nav: Navigation) -> dict[str, Any]:
    """Gives the page the navigation and the words of its language, and a switch that leads to its twin."""
    language = _language(page)
    (section,) = (item for item in nav.items if isinstance(item, Section) and item.title == language)
    own = [found for found in nav.pages if _language(found) == language]
    context["nav"] = Navigation(section.children, own)
    context["nav"].homepage = own[0]
    config.theme["language"] = language
    written = {found.file.src_uri: found.url for found in nav.pages}
    suffixes = {"en": ".", "zh": CHINESE}
    config.extra["alternate"] = [
        {"name": name, "link": _twin(page.file.src_uri, suffixes[code], written), "lang": code}
        for code, name in config.extra["languages"].items()
    ]
    return context


def _language(page: Page) -> str:
    return "zh" if CHINESE in page.file.src_uri else "en"


def _twin(path: str, suffix: str, written: dict[str, str]) -> str:
    """Returns where a page is in the language of ``suffix``, or that language's list of pages where it is not."""
    twin = path.replace(CHINESE, ".").replace(".md", f"{suffix}md")
    return written.get(twin) or written[f"docs/README{suffix}md"]


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Returns the page with the full code of its language, and with the search index of that language."""
    if _language(page) == "en":
        return output
    output = output.replace('<html lang="zh"', '<html lang="zh-CN"')
    return re.sub(r'("base": ?"[^"]*)"', r'\1/zh/"', output, count=1)


def on_post_build(config: MkDocsConfig) -> None:
    """Divides the search index by language: a Chinese page also finds the English ones without a Chinese twin.

    The search takes index and pages from the base of its page, which for Chinese pages is the folder zh/.
    """
    site = Path(config.site_dir)
    index = json.loads((site / "search/search_index.json").read_text(encoding="utf-8"))
    sections = index["docs"]
    chinese = {_page_of(section) for section in sections if CHINESE in section["location"]}
    index["docs"] = [section for section in sections if _page_of(section) not in chinese]
    (site / "search/search_index.json").write_text(json.dumps(index, ensure_ascii=False), encoding="utf-8")
    twins = {page.replace(CHINESE, ".").replace("README.html", "index.html") for page in chinese}
    own = [section for section in sections if _page_of(section) not in twins]
    index["docs"] = [{**section, "location": f"../{section['location']}"} for section in own]
    (site / "zh/search").mkdir(parents=True)
    (site / "zh/search/search_index.json").write_text(json.dumps(index, ensure_ascii=False), encoding="utf-8")


def _page_of(section: dict[str, Any]) -> str:
    page: str = section["location"].partition("#")[0]
    return page
