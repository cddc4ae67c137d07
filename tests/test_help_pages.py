"""The help pages say what the code does: every error class has an entry, every limit a test or a reason."""

from __future__ import annotations

import ast
import re
import sys
from types import ModuleType

import pytest

from fleet.env import VARIABLES
from fleet.strategies import REGISTRY
from tests.helpers.sources import ROOT, nodes_of, python_files
from tests.test_readme import generator, read

LANGUAGES = ("", ".zh-CN")


def part(name: str) -> ModuleType:
    """Returns a module of docs/ that makes parts of the pages."""
    generator()
    return sys.modules[name]


def declared_errors() -> set[str]:
    """Returns the names of the classes whose bases look like exceptions, private ones left out."""
    looks = re.compile(r"(Error|Exception|Warning|Lost|Refused|Aborted)$")
    return {
        node.name
        for path in python_files("fleet", "strategies", "launch")
        for node in nodes_of(path)
        if isinstance(node, ast.ClassDef) and any(looks.search(ast.unparse(base)) for base in node.bases)
        if not node.name.startswith("_")
    }


# ---- troubleshooting -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_error_class_has_an_entry(language: str) -> None:
    page = read(f"docs/help/troubleshooting{language}.md")
    named = set(re.findall(r"^### (\w+)$", page, re.MULTILINE)) | set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    assert len(declared_errors()) > 30
    assert declared_errors() - named == set()


def test_a_class_without_an_entry_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = part("generate_errors")
    more = {**errors.error_classes(), "NewError": errors.ErrorClass("NewError", ROOT, "New.", ("FleetError",))}
    monkeypatch.setattr(errors, "error_classes", lambda: more)
    with pytest.raises(LookupError, match="no entry for NewError"):
        errors.entries()


def test_an_entry_without_a_class_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = part("generate_errors")
    fewer = {name: error for name, error in errors.error_classes().items() if name != "PSError"}
    monkeypatch.setattr(errors, "error_classes", lambda: fewer)
    with pytest.raises(LookupError, match="PSError, which the code has not"):
        errors.entries()


def test_a_text_that_is_gone_ends_the_run() -> None:
    with pytest.raises(LookupError, match="which no module has any more"):
        part("generate_errors").full_text("no such " + "words in any module")


def test_a_text_is_the_whole_one_with_its_values_named() -> None:
    text = part("generate_errors").full_text("needs fleet.init() first.")
    assert text.startswith("fleet.<call>") or "needs fleet.init() first." in text
    assert part("generate_errors").template(ast.parse("f'a {b} is {c.d!r}, not {e()}'", mode="eval").body) == (
        "a <b> is '<d>', not \N{HORIZONTAL ELLIPSIS}"
    )


# ---- limits ----------------------------------------------------------------------------------------------------------


def test_every_limit_names_a_test_or_a_reason() -> None:
    rows = [row for topic in part("generate_limits").statements() for row in topic["rows"]]
    assert len(rows) > 40
    for row in rows:
        assert ("test" in row) != ("untested" in row), row
        assert row["says"], row
        assert row["zh"], row
        assert "untested" not in row or row["untested_zh"], row


def test_the_tests_of_limits_exist() -> None:
    named = [row["test"] for topic in part("generate_limits").statements() for row in topic["rows"] if "test" in row]
    for test in named:
        path, _, name = test.partition("::")
        assert (ROOT / path).is_file(), test
        assert not name or f"def {name}(" in read(path), test


# ---- Chinese pages ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["troubleshooting", "limits", "faq", "comparison", "glossary"])
def test_both_languages_have_the_same_headings(name: str) -> None:
    english, chinese = (re.findall(r"^#+ ", read(f"docs/help/{name}{z}.md"), re.MULTILINE) for z in LANGUAGES)
    assert english == chinese
    assert len(english) >= 3


def test_every_strategy_has_chinese_sentences() -> None:
    guides = part("generate")._words("strategies", "zh")["guides"]
    for name, strategy in REGISTRY.items():
        if strategy.refused is None:
            effects = {"model": strategy.model_effect, "optimizer": strategy.optimizer_effect}
            wanted = {kind for kind, effect in effects.items() if effect} | (
                {"when", "cost"} if strategy.guide else set()
            )
            assert wanted <= set(guides.get(name, {})), name
    assert set(guides) <= set(REGISTRY)


def test_every_variable_has_a_chinese_meaning() -> None:
    """A twin of a flag needs none of its own."""
    meanings = part("generate")._words("environment", "zh")["meanings"]
    own = {name for name, variable in VARIABLES.items() if not variable.meaning.startswith("twin of ")}
    assert own - set(meanings) == set()
    assert set(meanings) <= set(VARIABLES)


@pytest.mark.parametrize("name", ["environment", "options", "strategies", "limits", "troubleshooting"])
def test_nothing_generated_is_left_in_english(name: str) -> None:
    """Names, formulas, sources and the texts of errors are no sentences."""
    folder = "help" if name in ("limits", "troubleshooting") else "reference"
    prose = re.sub(r"`+[^`]+`+|\u6765\u6e90[^\n]*|\([^)\n]*\)", "", read(f"docs/{folder}/{name}.zh-CN.md"))
    assert re.findall(r"[a-z]{3,} [a-z]{2,} [a-z]{2,} [a-z]{2,} [a-z]{2,}", prose) == []
