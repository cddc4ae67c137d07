"""Makes docs/reference/api.md and a page for each module from the code: public names, signatures, docstrings."""

from __future__ import annotations

import enum
import inspect
import os
import re
import textwrap
from collections.abc import Iterator
from importlib import import_module
from typing import Any

HEAD = """\
# API reference

Every public name, made from signatures and docstrings by `make docs`. Public is what `fleet.__all__` and the `__all__`
of the modules below name; everything else may change without notice. The options of `DistributedStrategy` are in
[options.md](options.md), the launcher's flags in `python -m fleet.launch --help`.

## Modules
"""
# Modules that exist so that imports of Paddle scripts work; a new script needs none of them.
PADDLE_PATHS = (
    "fleet.base",
    "fleet.base.role_maker",
    "fleet.clip",
    "fleet.incubate",
    "fleet.layers",
    "fleet.layers.mpu",
    "fleet.optimizer",
    "fleet.parallel",
    "fleet.regularizer",
    "fleet.utils",
    "fleet.utils.fs",
    "fleet.utils.hybrid_parallel_util",
    "fleet.utils.sequence_parallel_utils",
)
PADDLE_HEAD = """\
## Paddle's paths

For scripts that were written for Paddle: their imports work as they stand.
"""
# Documented modules that are not attributes of the package.
MORE_MODULES = (
    "fleet.base.role_maker",
    "fleet.integrations.fabric",
    "fleet.integrations.hf",
    "fleet.integrations.lightning",
    "fleet.integrations.ray",
    "fleet.layers.mpu",
    "fleet.utils.fs",
    "fleet.utils.hybrid_parallel_util",
    "fleet.utils.sequence_parallel_utils",
)
# A page with more names than these begins with a list of them.
MANY_NAMES = 3
_SECTION = re.compile(r"^(Args|Returns|Raises|Example|Examples|Yields):\n((?:    .*\n|\n)+)", re.MULTILINE)
_ENTRY = re.compile(r"^(\*{0,2}\w[\w, .*]*): (.*(?:\n    .*)*)", re.MULTILINE)


def modules() -> list[str]:
    """Returns the names of the documented modules, Paddle's paths last."""
    package: Any = import_module("fleet")
    found = sorted([*(f"fleet.{name}" for name in package._MODULES), *MORE_MODULES])
    return ["fleet", *sorted(found, key=lambda name: name in PADDLE_PATHS)]


def public_names() -> dict[str, str]:
    """Returns every public name with its module: ``fleet.init`` is in ``fleet``; modules have a chapter instead."""
    chapters = {*modules(), "fleet.fleet"}
    found = ((f"{module}.{name}", module) for module in modules() for name in import_module(module).__all__)
    return {name: module for name, module in found if name not in chapters}


def api_pages() -> dict[str, str]:
    """Returns the texts of docs/reference/api.md and of the page of each module, by path."""
    homes: dict[int, str] = {}
    entries: dict[str, list[tuple[str, list[str]]]] = {module: [] for module in modules()}
    again: dict[str, list[tuple[str, list[str]]]] = {module: [] for module in modules()}
    for name, module in public_names().items():
        value = value_of(name)
        key = id(value) if isinstance(value, type) or callable(value) else id(name)
        first = homes.setdefault(key, name)
        if first == name:
            entries[module].append((name, [*_entry(name, value)]))
        else:
            target = _link(module, public_names()[first])
            again[module].append((name, [f"The same as [`{first}`]({target}#{_anchor(first)}).", ""]))
    pages = {path(module): _page(module, entries[module] + again[module]) for module in modules()}
    return {"docs/reference/api.md": _index(), **pages}


def path(module: str) -> str:
    """Returns the path of the page of ``module``, relative to the root."""
    return f"docs/reference/api/{'paddle/' if module in PADDLE_PATHS else ''}{module}.md"


def _link(module: str, target: str) -> str:
    """Returns the link from the page of ``module`` to that of ``target``; nothing within one page."""
    return "" if module == target else os.path.relpath(path(target), os.path.dirname(path(module)))


def _index() -> str:
    lines = [HEAD]
    for module in modules():
        if module == PADDLE_PATHS[0]:
            lines += ["", PADDLE_HEAD]
        target = path(module).removeprefix("docs/reference/")
        lines.append(f"- [{module}]({target}): {_summary(import_module(module))}")
    return "\n".join(lines) + "\n"


def _page(module: str, entries: list[tuple[str, list[str]]]) -> str:
    """Returns the page of a module: its docstring, the list of its names, and a section for each of them."""
    lines = [f"# {module}", "", *_words(import_module(module).__doc__ or "")]
    lines += [f"- [`{name}`](#{_anchor(name)})" for name, _ in entries] if len(entries) > MANY_NAMES else []
    lines += [line for name, words in entries for line in ("", f"## {name}", "", *words)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def _anchor(title: str) -> str:
    return re.sub(r"[^\w-]", "", title.lower())


def _summary(value: Any) -> str:
    return _inline((inspect.getdoc(value) or "").partition("\n\n")[0].replace("\n", " "))


def value_of(name: str) -> Any:
    """Returns what a public name stands for; a call of the package is the method of ``Fleet``."""
    module, _, last = name.rpartition(".")
    if module == "fleet":
        package: Any = import_module("fleet")
        if last in package._CALLS:
            return getattr(package.Fleet, last)
    return getattr(import_module(module), last)


def _entry(name: str, value: Any) -> Iterator[str]:
    last = name.rpartition(".")[2]
    if isinstance(value, type):
        yield from _class(last, value)
    elif callable(value):
        yield from _code(f"def {last}{_signature(value)}")
        yield from _words(inspect.getdoc(value) or "")
    else:
        shown = f", `{value!r}`" if isinstance(value, int | str) else ""
        yield from (f"A constant of type `{type(value).__name__}`{shown}.", "")


def _class(name: str, kind: type[Any]) -> Iterator[str]:
    bare = issubclass(kind, enum.Enum | BaseException)
    yield from _code(f"class {name}{'' if bare else _signature(kind)}")
    yield from _words(inspect.getdoc(kind) or "")
    if issubclass(kind, enum.Enum):
        yield from (f"Values: {', '.join(f'`{value}`' for value in kind.__members__)}.", "")
    members = [f"- `{shown}`: {_summary(member)}" for shown, member in _members(kind)]
    yield from ["Members:", "", *members] if members else []
    yield ""


def _members(kind: type[Any]) -> Iterator[tuple[str, Any]]:
    """Yields the documented public members as they are shown: methods with their signatures."""
    for name, member in documented(kind):
        if isinstance(member, property):
            yield name, member
        elif isinstance(member, classmethod | staticmethod):
            yield f"{name}{_signature(member.__func__, first=isinstance(member, staticmethod))}", member
        elif inspect.isfunction(member):
            yield f"{name}{_signature(member)}", member


def documented(kind: type[Any]) -> Iterator[tuple[str, Any]]:
    """Yields the documented public members that come from this project, as their classes hold them."""
    seen: set[str] = set()
    for base in kind.__mro__:
        for name, member in vars(base).items() if base.__module__.startswith("fleet.") else ():
            if not name.startswith("_") and name not in seen and isinstance(inspect.getdoc(member), str):
                seen.add(name)
                yield name, member


class _Text:
    """A part of a signature that is shown as it stands in the source."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _shown(annotation: Any) -> Any:
    return _Text(annotation) if isinstance(annotation, str) else annotation


def _signature(call: Any, first: bool = False) -> str:
    """Returns arguments and result of a call; ``first`` keeps its first argument whatever its name."""
    try:
        found = inspect.signature(call)
    except ValueError:
        return "(...)"
    parameters = [p.replace(annotation=_shown(p.annotation)) for p in found.parameters.values()]
    if not first and parameters and parameters[0].name in ("self", "cls"):
        parameters = parameters[1:]
    for place, parameter in enumerate(parameters):
        if " at 0x" in repr(parameter.default):
            parameters[place] = parameter.replace(default=_Text("..."))
    returns = inspect.Signature.empty if isinstance(call, type) else _shown(found.return_annotation)
    return str(found.replace(parameters=parameters, return_annotation=returns))


def _code(text: str) -> Iterator[str]:
    if len(text) > 100 and "(" in text:
        head, _, rest = text.partition("(")
        inside, _, tail = rest.rpartition(")")
        text = "\n".join([f"{head}(", *(f"    {argument}," for argument in _arguments(inside)), f"){tail}"])
    yield from ("```python", *text.split("\n"), "```", "")


def _arguments(text: str) -> Iterator[str]:
    """Yields the parts of ``text`` between the commas that stand in no brackets."""
    depth, start = 0, 0
    for place, sign in enumerate(text):
        depth += (sign in "([{") - (sign in ")]}")
        if sign == "," and not depth:
            yield text[start:place].strip()
            start = place + 1
    yield text[start:].strip()


# ---- docstrings ------------------------------------------------------------------------------------------------------


def _inline(text: str) -> str:
    """Returns ``text`` in Markdown: names in single backticks, without their roles."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
    return re.sub(r"``([^`]+)``", r"`\1`", text)


def _words(docstring: str) -> Iterator[str]:
    """Yields a docstring as Markdown: paragraphs, arguments and errors as lists, examples as code."""
    text, place = inspect.cleandoc(docstring) + "\n", 0
    for section in _SECTION.finditer(text):
        yield from _paragraphs(text[place : section.start()])
        title, body = section[1], textwrap.dedent(section[2]).strip("\n")
        if title.startswith("Example"):
            yield from ("```python", *body.split("\n"), "```", "")
        else:
            entries = [(name, " ".join(words.split())) for name, words in _ENTRY.findall(body)]
            listed = [f"- `{name}`: {_inline(words)}" for name, words in entries]
            yield from (f"{title}:", "", *(listed or [_inline(" ".join(body.split()))]), "")
        place = section.end()
    yield from _paragraphs(text[place:])


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in text.strip("\n").split("\n\n"):
        if paragraph.startswith("    "):
            yield from ("```", *textwrap.dedent(paragraph).split("\n"), "```", "")
        elif re.match(r"\[Note: .*\]", paragraph):
            return  # for who changes the code
        elif paragraph.strip("\n:"):
            yield from (_inline(re.sub(r"::$", ":", paragraph)), "")
