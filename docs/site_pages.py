"""Gives the site its pages: the texts of the project under the paths they have in it, so that their links lead there.

A hook of MkDocs (mkdocs.yml). A file that a text links to and that is no text itself becomes part of the site as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "docs",
    "docs/*",
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
_LINK = re.compile(r"\]\(([^)\s#]+)[^)]*\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Returns the files of the site in place of those of docs/ alone."""
    found = [file for file in files if not file.src_uri.endswith((".md", ".png", ".py", ".yaml"))]
    texts = [path for folder in ("", *FOLDERS) for path in sorted(ROOT.glob(f"{folder}/*.md".lstrip("/")))]
    for path in sorted({*texts, *_linked(texts)}):
        found.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return Files(found)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Returns the page with the language that its name says."""
    return output.replace('<html lang="en"', '<html lang="zh-CN"') if ".zh-CN." in page.file.src_uri else output


def _linked(texts: list[Path]) -> Iterator[Path]:
    for text in texts:
        for target in _LINK.findall(text.read_text(encoding="utf-8")):
            path = (text.parent / target).resolve()
            if path.suffix != ".md" and path.is_file() and path.is_relative_to(ROOT):
                yield path
