"""Lists the public names of a release with their signatures, and says what a later state of the code breaks.

``python docs/generate_names.py`` writes docs/releases/VERSION.txt, once for each release. tests/test_release_names.py
compares later states with the newest of these files.
"""

from __future__ import annotations

import ast
import enum
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from generate_api import documented, modules, public_names, value_of

from fleet.__main__ import COMMANDS
from fleet.common.version import __version__
from fleet.env import VARIABLES
from fleet.launch.cli.flags import BY_SPELLING
from fleet.options import option_listing_markdown

FOLDER = Path(__file__).parent / "releases"
_ROW = re.compile(r"^(?:## (\w+)|\| `([\w.]+)` \| (.*?) \| (`.*?`)? \|)", re.MULTILINE)


def names() -> list[str]:
    """Returns a line for each public name: modules, calls with their arguments, members, options, flags, variables."""
    found = [f"module {name}" for name in modules()]
    for name in public_names():
        found += _lines(name, value_of(name))
    found += [f"option {line}" for line in _options()]
    found += [f"command {name}" for name in COMMANDS]
    found += [f"flag {spelling}" for spelling in BY_SPELLING]
    found += [f"variable {name}" for name in VARIABLES]
    return sorted(set(found))


def broken(before: list[str], now: list[str]) -> dict[str, str]:
    """Returns every name of ``before`` that a script could use and can no longer use in the same way, and why.

    Example:
        >>> broken(["call f(a, b=1)"], ["call f(a, b=1, c=2)"])
        {}
        >>> broken(["call f(a, b=1)", "flag --x"], ["call f(a, c, b=1)"])
        {'call f': 'c has no default; b is argument 3 and was 2', 'flag --x': 'is gone'}
    """
    present = dict(map(_divided, now))
    found = {}
    for name, signature in map(_divided, before):
        if name not in present:
            found[name] = "is gone"
        elif reasons := [*_reasons(signature, present[name])]:
            found[name] = "; ".join(reasons)
    return found


def _divided(line: str) -> tuple[str, str]:
    """Returns the kind and name of a line, and what follows them: arguments, or the type and default of an option."""
    place = re.search(r"[(:]", line)
    return (line[: place.start()], line[place.start() :]) if place else (line, "")


def _reasons(before: str, now: str) -> Iterator[str]:
    if not before.startswith("(") or not now.startswith("("):
        yield from [f"{before!r} became {now!r}"] if before != now else []
        return
    old, new = _arguments(before), _arguments(now)
    for name, (_, default) in new.items():
        if name not in old and default is None and not name.startswith("*"):
            yield f"{name} has no default"
    for name, (place, default) in old.items():
        if name not in new:
            yield f"{name} is gone"
            continue
        new_place, new_default = new[name]
        if place is not None and place != new_place:
            yield f"{name} is argument {new_place or 'by name'} and was {place}"
        if default is not None and default != new_default:
            yield f"{name} is {new_default or 'required'} where it is left out, and was {default}"


def _arguments(signature: str) -> dict[str, tuple[int | None, str | None]]:
    """Returns each argument with its place, None where it is given by name alone, and its default."""
    call = ast.parse(f"def f{signature}: ...").body[0]
    assert isinstance(call, ast.FunctionDef)
    listed = call.args
    placed = [*listed.posonlyargs, *listed.args]
    defaults = [None] * (len(placed) - len(listed.defaults)) + [*listed.defaults]
    found = {
        argument.arg: (place, ast.unparse(default) if default else None)
        for place, (argument, default) in enumerate(zip(placed, defaults, strict=True), start=1)
    }
    by_name = {
        argument.arg: (None, ast.unparse(default) if default else None)
        for argument, default in zip(listed.kwonlyargs, listed.kw_defaults, strict=True)
    }
    rest = {f"{'*' * stars}{one.arg}": (None, None) for stars, one in ((1, listed.vararg), (2, listed.kwarg)) if one}
    return {**found, **by_name, **rest}


def _lines(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, type):
        bare = issubclass(value, enum.Enum | BaseException)
        yield f"class {name}{'' if bare else _signature(value)}"
        if issubclass(value, enum.Enum):
            yield from (f"value {name}.{member}" for member in value.__members__)
        for last, member in documented(value):
            yield from _member(f"{name}.{last}", member)
    else:
        yield f"call {name}{_signature(value)}" if callable(value) else f"constant {name}"


def _member(name: str, member: Any) -> Iterator[str]:
    if isinstance(member, property):
        yield f"property {name}"
    elif isinstance(member, classmethod | staticmethod):
        yield f"call {name}{_signature(member.__func__, first=isinstance(member, staticmethod))}"
    elif inspect.isfunction(member):
        yield f"call {name}{_signature(member)}"


def _signature(call: Any, first: bool = False) -> str:
    """Returns names and defaults of the arguments; types may become wider and are left to the type checkers."""
    try:
        parameters = list(inspect.signature(call).parameters.values())
    except ValueError:
        return "(*args, **kwargs)"
    if not first and parameters and parameters[0].name in ("self", "cls"):
        parameters = parameters[1:]
    bare = [
        parameter.replace(annotation=parameter.empty, default=_Default.of(parameter.default, parameter.empty))
        for parameter in parameters
    ]
    return str(inspect.Signature(bare))


class _Default:
    """A default as a literal, or ``...`` for an object."""

    def __init__(self, value: Any) -> None:
        simple = value is None or isinstance(value, bool | int | float | str | tuple)
        self.text = repr(value) if simple and not isinstance(value, enum.Enum) and "<" not in repr(value) else "..."

    def __repr__(self) -> str:
        return self.text

    @classmethod
    def of(cls, value: Any, empty: Any) -> Any:
        """Returns ``value`` as a default, or ``empty`` where there is none."""
        return empty if value is empty else cls(value)


def _options() -> Iterator[str]:
    """Yields every option of ``DistributedStrategy`` and every key of its settings, with type and default."""
    option = ""
    for title, name, kind, default in _ROW.findall(option_listing_markdown(folded=False)):
        option = title or option
        if name:
            yield f"{option + '.' if option else ''}{name}: {kind} = {default.strip('`') or 'its keys'}"


def main() -> None:
    """Writes the file of this version; one that exists belongs to a release and stays."""
    path = FOLDER / f"{__version__}.txt"
    if path.exists():
        raise SystemExit(f"{path}: exists. The file of a release stays as it is; delete it where nothing was released.")
    FOLDER.mkdir(exist_ok=True)
    path.write_text("\n".join(names()) + "\n", encoding="utf-8")
    print(f"{path}: written")


if __name__ == "__main__":
    main()
