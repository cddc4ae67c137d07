"""The pages of servers, serving and recommenders: the tutorial runs, both languages have the same code and shape."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.sources import ROOT
from tests.test_readme import read, run

EXAMPLE = re.compile(r"<!-- example: ([\w.]+) -->\n```python\n(.*?)```", re.DOTALL)
FENCED = re.compile(r"```\w*\n.*?```", re.DOTALL)
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("ps", "recommenders", "serving")
    for path in (ROOT / "docs" / folder).glob("*.md")
    if ".zh-CN." not in path.name
)


def chinese(page: str) -> str:
    """Returns the path of the Chinese twin of a page."""
    return page.replace(".md", ".zh-CN.md")


def test_the_tutorial_trains_and_predicts(tmp_path: Path) -> None:
    files = dict(EXAMPLE.findall(read("docs/ps/tutorial.md")))
    for name, body in files.items():
        (tmp_path / name).write_text(body, encoding="utf-8")
    trained = run(files["train.py"], tmp_path)
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", trained.stdout, re.MULTILINE)]
    assert len(losses) == 3, trained.stderr
    assert losses[-1] < 0.2 < losses[0]
    predicted = run(files["predict.py"], tmp_path)
    (right,) = re.findall(r"^right: (\d+)%$", predicted.stdout, re.MULTILINE)
    assert int(right) > 90, predicted.stderr


def test_the_tutorial_is_one_program_in_both_languages() -> None:
    english, translated = (EXAMPLE.findall(read(f"docs/ps/tutorial{language}.md")) for language in ("", ".zh-CN"))
    assert english == translated
    assert [name for name, _ in english] == ["model.py", "train.py", "predict.py"]


@pytest.mark.parametrize("page", PAGES)
def test_both_languages_have_the_same_shape(page: str) -> None:
    """Headings, rows, items and blocks of code, in order; comments of code may be translated."""
    assert shape(read(page)) == shape(read(chinese(page)))


def shape(text: str) -> list[str]:
    """Returns the kinds of the parts of a page in order."""
    blocks = len(FENCED.findall(text))
    prose = FENCED.sub("", text)
    return [*re.findall(r"^(#+ |- |\| )", prose, re.MULTILINE), f"{blocks} blocks"]


def test_no_page_is_long() -> None:
    """A page is read in ten minutes: the servers have pages, not one guide."""
    assert {page for page in PAGES if len(read(page).split()) > 2200} == set()
