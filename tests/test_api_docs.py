"""What is public: the names that docs/reference/api describes, and nothing else in documentation and examples."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

import fleet
from tests.helpers.sources import imports_of, nodes_of, python_files
from tests.test_readme import FENCED, TEXTS, api, read

GUIDES = [path for path in TEXTS if path.parts[0] in ("README.md", "README.zh-CN.md", "docs", "examples")]


def public() -> set[str]:
    """Returns what may be imported: the documented modules and their names."""
    return {*api().modules(), *api().public_names(), "fleet.fleet", "fleet.__version__"}


def test_public_is_what_the_package_and_the_documented_modules_name() -> None:
    modules = [importlib.import_module(name) for name in api().modules()]
    assert [module.__name__ for module in modules if not isinstance(module.__all__, list)] == []
    assert {f"fleet.{name}" for name in fleet.__all__} <= public()
    assert {name for name in public() if name.rpartition(".")[2].startswith("_")} == {"fleet.__version__"}
    assert "Public is what `fleet.__all__` and the documented submodules name" in read("CONTRIBUTING.md")


def api_pages() -> list[str]:
    """Returns the paths of the pages of modules."""
    return [path.as_posix() for path in TEXTS if path.as_posix().startswith("docs/reference/api/")]


def test_every_module_has_a_page_and_no_page_is_left_over() -> None:
    assert sorted(api_pages()) == sorted(api().path(module) for module in api().modules())


def test_every_public_name_has_an_entry() -> None:
    titles = [title for page in api_pages() for title in re.findall(r"^#{1,2} (\S+)$", read(page), re.MULTILINE)]
    assert sorted(titles) == sorted([*api().modules(), *api().public_names()])
    assert len(titles) > 200


def test_every_entry_says_something() -> None:
    entries = [part for page in api_pages() for part in re.split(r"^#{1,2} ", read(page), flags=re.MULTILINE)[1:]]
    words = {entry.partition("\n")[0]: re.sub(r"```.*?```", "", entry, flags=re.DOTALL) for entry in entries}
    assert {name for name, text in words.items() if len(text.split()) < 2} == set()


@pytest.mark.parametrize("path", GUIDES, ids=str)
def test_guides_import_public_names_only(path: Path) -> None:
    code = "\n".join(body for _, kind, body in FENCED.findall(read(path)) if kind == "python")
    found = set(re.findall(r"^ *from (fleet[\w.]*) import ([\w, ]+)", code, re.MULTILINE))
    names = {f"{module}.{name.split()[0]}" for module, listed in found for name in listed.split(",")}
    assert {*names, *re.findall(r"^ *import (fleet[\w.]*)", code, re.MULTILINE)} - public() == set()


def test_examples_use_public_names_only() -> None:
    paths = python_files("examples")
    imported = {str(found) for path in paths for found in imports_of(path) if found.within("fleet")}
    targets = {found.target for path in paths for found in imports_of(path) if found.within("fleet")}
    assert targets - public() == set(), imported
    used = {
        f"fleet.{node.attr}"
        for path in paths
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "fleet"
    }
    assert used - public() == {"fleet.util"}
    assert len(used) > 10
