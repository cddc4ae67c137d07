"""The part of docs/help/troubleshooting.md that comes from the code: every error class and the texts of its raises.

The classes, their docstrings and the texts are read from the source; docs/help/errors.yaml adds cause and mend in both
languages. A class without an entry, an entry without a class, and a text that the code no longer has end the run.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
PACKAGES = ("fleet", "strategies", "launch")
ENTRIES = ROOT / "docs" / "help" / "errors.yaml"
# A class that is raised with more texts than this shows those of docs/help/errors.yaml only.
MOST_TEXTS = 12
# Names of values that say little to a reader, and the words that stand in their place.
_PLACES = {"__name__": "type", "strerror": "reason"}
# Words of the sections; those of another language are in docs/help/words.LANGUAGE.yaml.
ENGLISH = {
    "cause": "Cause",
    "mend": "Fix",
    "other": "Other texts",
    "also": " Also caught as {bases}.",
    "and": ", ",
    "colon": ": ",
    "inside title": "Caught inside the library",
    "inside note": "These never reach a script unless something is wrong in the library; please report one that does.",
    "inside head": "| class | meaning |",
}
# Stands for what a text has no name for.
_DOTS = "\N{HORIZONTAL ELLIPSIS}"


def words_of_help(part: str, language: str, english: dict[str, str]) -> dict[str, str]:
    """Returns the words of a generated part in ``language``; ``english`` are those of the code."""
    return english if language == "en" else _help_words(language)[part]


@cache
def _help_words(language: str) -> dict[str, dict[str, str]]:
    text = (ROOT / "docs" / "help" / f"words.{language}.yaml").read_text(encoding="utf-8")
    words: dict[str, dict[str, str]] = yaml.safe_load(text)
    return words


@dataclass
class ErrorClass:
    """An error class as the source declares it: its docstring, its bases, the texts of its raise statements."""

    name: str
    path: Path
    meaning: str
    bases: tuple[str, ...]
    texts: list[str] = field(default_factory=list)

    @property
    def is_inside(self) -> bool:
        """Whether the name says that the class never leaves its module."""
        return self.name.startswith("_")


def template(node: ast.AST | None) -> str:
    """Returns the text that an expression makes, with ``<name>`` for each value; empty if it makes no text."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_place(part) if isinstance(part, ast.FormattedValue) else template(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        parts = template(node.left), template(node.right)
        return "".join(part or _DOTS for part in parts) if any(parts) else ""
    return ""


def _place(value: ast.FormattedValue) -> str:
    inner = value.value
    name = inner.id if isinstance(inner, ast.Name) else inner.attr if isinstance(inner, ast.Attribute) else ""
    shown = f"<{_PLACES.get(name, name.strip('_').lower())}>" if name else _DOTS
    return f"'{shown}'" if value.conversion == ord("r") else shown


@dataclass
class _Found:
    """What one walk over the library's modules gathers: classes, raise statements and every text."""

    classes: list[ErrorClass] = field(default_factory=list)
    raised: list[tuple[str, str]] = field(default_factory=list)
    texts: dict[str, None] = field(default_factory=dict)


@cache
def _library() -> _Found:
    found = _Found()
    for path in (path for top in PACKAGES for path in sorted((ROOT / top).rglob("*.py"))):
        if not any(part.is_symlink() for part in (path, *path.parents)):
            _gather(ast.parse(path.read_text(encoding="utf-8")), path.relative_to(ROOT), found)
    return found


def _gather(tree: ast.Module, path: Path, found: _Found) -> None:
    parts: set[int] = set()  # nodes inside a longer text, which is listed whole; walk() comes to the whole first
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            bases = tuple(ast.unparse(base).rpartition(".")[2] for base in node.bases)
            meaning = _one_line(ast.get_docstring(node) or "").replace("``", "`")
            found.classes.append(ErrorClass(node.name, path, meaning, bases))
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            text = _one_line(template(node.exc.args[0])) if node.exc.args else ""
            found.raised.append((ast.unparse(node.exc.func).rpartition(".")[2], text))
        elif isinstance(node, (ast.JoinedStr, ast.BinOp, ast.Constant)):
            if id(node) not in parts:
                found.texts[_one_line(template(node))] = None
            parts.update(id(part) for part in _parts_of(node))


def _parts_of(text: ast.expr) -> Iterator[ast.expr]:
    if isinstance(text, ast.JoinedStr):
        yield from text.values
    elif isinstance(text, ast.BinOp):
        for part in (text.left, text.right):
            yield part
            yield from _parts_of(part)


@cache
def error_classes() -> dict[str, ErrorClass]:
    """Returns every class of the library that derives from an exception, by name."""
    declared = _library().classes
    found: dict[str, ErrorClass] = {}
    while new := [c for c in declared if c.name not in found and any(_is_error(base, found) for base in c.bases)]:
        found |= {c.name: c for c in new}
    for error, text in _library().raised:
        if error in found and text and text not in found[error].texts:
            found[error].texts.append(text)
    return found


def _is_error(name: str, found: dict[str, ErrorClass]) -> bool:
    builtin = getattr(builtins, name, None)
    return name in found or (isinstance(builtin, type) and issubclass(builtin, BaseException))


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def full_text(phrase: str) -> str:
    """Returns the shortest text of the code that holds ``phrase``; raises LookupError if none does."""
    holding = [text for text in _library().texts if phrase in text]
    if not holding:
        raise LookupError(f"docs/help/errors.yaml has {phrase!r}, which no module has any more; correct the entry")
    return min(holding, key=len)


def entries() -> dict[str, Any]:
    """Returns docs/help/errors.yaml; raises LookupError if a class has no entry or an entry no class."""
    given: dict[str, Any] = yaml.safe_load(ENTRIES.read_text(encoding="utf-8"))
    wanted = {name for name, error in error_classes().items() if not error.is_inside}
    if lacking := wanted - given.keys():
        raise LookupError(f"docs/help/errors.yaml has no entry for {', '.join(sorted(lacking))}; add cause and mend")
    if strange := given.keys() - wanted:
        raise LookupError(f"docs/help/errors.yaml has entries for {', '.join(sorted(strange))}, which the code has not")
    return given


def errors_markdown(language: str = "en") -> str:
    """Returns a section for each error class, in the order of the entries, and a table of those kept inside."""
    shown = [(error_classes()[name], entry) for name, entry in entries().items()]
    sections = [_section(error, entry, language) for error, entry in shown if "inside" not in entry]
    return "\n".join(sections) + "\n" + _inside(shown, language)


def _section(error: ErrorClass, entry: dict[str, Any], language: str) -> str:
    words, said = words_of_help("errors", language, ENGLISH), _in(entry, language)
    also = words["also"].format(bases=words["and"].join(f"`{base}`" for base in error.bases))
    lines = [f"### {error.name}", "", f"{said.get('meaning', error.meaning)}{also}", ""]
    lines += [f"- **{words[name]}**{words['colon']}{said[name]}" for name in ("cause", "mend")] + [""]
    listed = []
    for message in entry.get("messages", ()):
        text = full_text(message["find"])
        listed.append(text)
        lines += [f"{_code(text)}", "", f"- {_in(message, language)['mend']}", ""]
    others = [text for text in error.texts if text not in listed]
    if others and len(error.texts) <= MOST_TEXTS:
        lines += [f"{words['other']}{words['colon']}".rstrip(), "", *[f"- {_code(text)}" for text in others], ""]
    return "\n".join(lines)


def _in(entry: dict[str, Any], language: str) -> dict[str, Any]:
    said: dict[str, Any] = entry if language == "en" else entry["zh"]
    return said


def _code(text: str) -> str:
    fence = "``" if "`" in text else "`"
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def _inside(shown: list[tuple[ErrorClass, dict[str, Any]]], language: str) -> str:
    words = words_of_help("errors", language, ENGLISH)
    kept = [(error, entry) for error, entry in shown if "inside" in entry]
    rows = [f"| `{error.name}` | {_in(entry, language).get('inside', error.meaning)} |" for error, entry in kept]
    return (
        "\n".join(
            [f"### {words['inside title']}", "", words["inside note"], "", words["inside head"], "| --- | --- |", *rows]
        )
        + "\n"
    )
