"""Rewrites what is made from the code: ``make docs``.

In a text, such a part stands between ``<!-- generated: NAME -->`` and ``<!-- end -->``; docs/reference/api.md, the
pages of its modules and the stubs of the package are whole files. tests/test_readme.py fails when one is out of date.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from generate_api import api_pages
from generate_errors import errors_markdown
from generate_limits import (
    flags_markdown,
    idle_options_markdown,
    pairs_markdown,
    refused_options_markdown,
    statements_markdown,
)
from generate_stubs import stubs

from fleet.env import VARIABLES, Variable
from fleet.options import option_listing_markdown, words_of
from fleet.options.guide_text import strategies_markdown

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"
TEXTS = (
    "README.md",
    "CONTRIBUTING.md",
    "README.zh-CN.md",
    "docs/reference/options.md",
    "docs/reference/options.zh-CN.md",
    "docs/reference/environment.md",
    "docs/reference/environment.zh-CN.md",
    "docs/reference/strategies.md",
    "docs/reference/strategies.zh-CN.md",
    "docs/help/limits.md",
    "docs/help/limits.zh-CN.md",
    "docs/help/troubleshooting.md",
    "docs/help/troubleshooting.zh-CN.md",
)
_PART = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def training_diff() -> str:
    """Returns the lines in which the two scripts of the quick start differ, their titles left out."""
    scripts = [ROOT / "examples/quickstart" / name for name in ("train_torch.py", "train_fleet.py")]
    before, after = (script.read_text(encoding="utf-8").splitlines()[1:] for script in scripts)
    return "```diff\n" + "\n".join(_hunks(before, after)) + "\n```\n"


def _hunks(before: list[str], after: list[str]) -> Iterator[str]:
    changes = list(difflib.unified_diff(before, after, lineterm="", n=0))[2:]
    for position, line in enumerate(changes):
        if not line.startswith("@@"):
            yield line
        elif position:
            yield ""


def environment_table(language: str = "en") -> str:
    """Returns the table of every environment variable the project knows."""
    words = _words("environment", language)
    head = [words.get(name, name.capitalize()) for name in ("variable", "set by", "default", "meaning")]
    rows = [
        f"| `{variable.name}` | {words.get('owners', {}).get(variable.owner, variable.owner)} "
        f"| {'' if variable.default is None else f'`{variable.default}`'} | {_variable_meaning(variable, words)} |"
        for variable in VARIABLES.values()
    ]
    return "\n".join([f"| {' | '.join(head)} |", "| --- | --- | --- | --- |", *rows]) + "\n"


def _variable_meaning(variable: Variable, words: dict[str, Any]) -> str:
    """Returns the meaning in the language of ``words``; twins of flags share one sentence there."""
    twin = re.fullmatch(r"twin of (--\w+)(, which has no effect)?", variable.meaning)
    if twin and "twin" in words:
        return str(words["twin without effect" if twin[2] else "twin"]).format(flag=twin[1])
    return str(words.get("meanings", {}).get(variable.name, variable.meaning))


def _words(page: str, language: str) -> dict[str, Any]:
    """Returns the words of a page of docs/reference/; English ones are in the code."""
    if language == "en":
        return {}
    words: dict[str, Any] = yaml.safe_load((REFERENCE / f"{page}.{language}.yaml").read_text(encoding="utf-8"))
    return words


def strategies_page(language: str) -> str:
    """Returns the sections of the strategies in a language."""
    words = _words("strategies", language)
    options = words_of(language)
    meanings = {**options["meanings"], **words["meanings"]}
    return strategies_markdown({**words, "meanings": meanings, "reasons": options["reasons"]})


def tree() -> str:
    """Returns the folders of the library with the first line of each package's docstring."""
    lines = []
    for top in ("fleet", "strategies", "launch"):
        for package in sorted((ROOT / top).rglob("__init__.py")):
            folder = package.parent.relative_to(ROOT)
            text = ast.get_docstring(ast.parse(package.read_text(encoding="utf-8"))) or ""
            lines.append(f"{'  ' * (len(folder.parts) - 1)}{folder.name}/".ljust(17) + text.splitlines()[0])
    return "```\n" + "\n".join(lines) + "\n```\n"


PARTS: dict[str, Callable[[], str]] = {
    "diff": training_diff,
    "strategies": strategies_markdown,
    "strategies-zh": partial(strategies_page, "zh"),
    "tree": tree,
}
# Parts that are made in both languages; the Chinese one has the name with "-zh".
BOTH: dict[str, Callable[[str], str]] = {
    "environment": environment_table,
    "option-listing": option_listing_markdown,
    "errors": errors_markdown,
    "limits": statements_markdown,
    "refused-options": refused_options_markdown,
    "idle-options": idle_options_markdown,
    "pairs": pairs_markdown,
    "flags": flags_markdown,
}
for _name, _made in BOTH.items():
    PARTS |= {_name: partial(_made, "en"), f"{_name}-zh": partial(_made, "zh")}


def current(text: str) -> str:
    """Returns ``text`` with every generated part made again; raises KeyError for a part of an unknown name."""
    return _PART.sub(lambda part: f"{part[1]}{PARTS[part[2]]()}{part[3]}", text)


def files() -> dict[str, str]:
    """Returns every file that is made from the code, whole or in part, by its path: what it should say."""
    return {name: current((ROOT / name).read_text(encoding="utf-8")) for name in TEXTS} | {
        **api_pages(),
        **stubs(),
    }


def main() -> None:
    """Rewrites the files that are out of date and prints their names."""
    for name, text in files().items():
        path = ROOT / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"{name}: rewritten")


if __name__ == "__main__":
    main()
