"""Every requirement of the five source documents is cited by a test, by its id, and no test cites another one."""

from __future__ import annotations

import re

import pytest

from tests.helpers.sources import ROOT

# Document -> number of its last requirement: launching, servers by hand, quick start, questions, elastic jobs.
LAST = {"000": 30, "001": 12, "002": 27, "003": 38, "004": 20}
BETWEEN = {"000-03b", "000-03c"}
IDS = {f"{document}-{number:02d}" for document, last in LAST.items() for number in range(1, last + 1)} | BETWEEN


def cited_ids() -> dict[str, list[str]]:
    """Returns where the test files cite each id."""
    found: dict[str, list[str]] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        if str(path) != __file__:
            for match in re.findall(r"(?<![\w.-])00[0-4]-\d\d[a-z]?\b(?!-)", path.read_text(encoding="utf-8")):
                found.setdefault(match, []).append(path.name)
    return found


def test_there_are_129_requirements() -> None:
    assert len(IDS) == 129


@pytest.mark.parametrize("document", LAST)
def test_each_id_is_cited(document: str) -> None:
    assert {name for name in IDS if name.startswith(document)} - set(cited_ids()) == set()


def test_each_cited_id_exists() -> None:
    assert {name: files for name, files in cited_ids().items() if name not in IDS} == {}
