"""Makes the stubs from the code: what type checkers and editors know of names that are resolved at first use.

``fleet/__init__.pyi`` has the calls of the facade with their signatures, ``fleet/options/typed.pyi`` an attribute for
every option of the registry, and the other stubs name where the public classes of a folder live.
"""

from __future__ import annotations

import ast
import builtins
import subprocess
import sys
import textwrap
import typing
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from fleet.options import ALIASES, described, schema
from fleet.strategies._declare.fields import Config, FieldRule, plain, value_types

ROOT = Path(__file__).parents[1]
HEADER = "# Made by `make docs`; a change belongs into the code that it is made from.\n"
# Folders whose names are resolved at first use, beside the package itself.
LAZY = (
    "fleet.base",
    "fleet.dataset",
    "fleet.checkpoint",
    "fleet.elastic",
    "fleet.features",
    "fleet.layers.mpu",
    "fleet.meta_parallel",
    "fleet.moe",
    "fleet.ps",
    "fleet.utils",
)


def stubs() -> dict[str, str]:
    """Returns the text of every stub by its path, relative to the root."""
    made = {"fleet/__init__.pyi": package_stub(), "fleet/options/typed.pyi": options_stub()}
    made |= {f"{name.replace('.', '/')}/__init__.pyi": lazy_stub(name) for name in LAZY}
    return {path: _formatted(HEADER + text) for path, text in made.items()}


def _formatted(text: str) -> str:
    """Returns ``text`` as ruff writes it: imports in order, and lines of one form."""
    for words in (("check", "--fix-only", "--select=I"), ("format",)):
        command = (sys.executable, "-m", "ruff", *words, "--quiet", "--stdin-filename", "stub.pyi", "-")
        text = subprocess.run(command, input=text, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return text


def _docstring(text: str, indent: str = "    ") -> str:
    if "\n" not in text:
        text = textwrap.fill(text, 116 - len(indent) - 3, break_on_hyphens=False)
    return textwrap.indent(f'"""{text}"""' if "\n" not in text else f'"""{text}\n"""', indent)


# ---- fleet -----------------------------------------------------------------------------------------------------------


def lazy_stub(package: str) -> str:
    """Returns the stub of a folder whose public names are resolved at first use."""
    module = import_module(package)
    lines = [f'"""{module.__doc__}"""']
    for name, home in getattr(module, "_HOMES", {}).items():
        lines.append(f"from {home if home.startswith('fleet.') else f'{package}.{home}'} import {name} as {name}")
    modules = [name for name in module.__all__ if name not in getattr(module, "_HOMES", {})]
    lines += [f"from {package} import {name} as {name}" for name in modules]
    return "\n".join([*lines, f"__all__ = {module.__all__!r}"]) + "\n"


def package_stub() -> str:
    """Returns the stub of ``fleet``: its classes, its modules, and the calls of the facade as functions."""
    package: Any = import_module("fleet")
    source = ast.parse((ROOT / "fleet/facade.py").read_text(encoding="utf-8"))
    (facade,) = (node for node in source.body if isinstance(node, ast.ClassDef) and node.name == "Fleet")
    calls = {name: "\n".join(_call(name, nodes)) for name, nodes in _methods(facade).items() if name in package._CALLS}
    lines = [f'"""{package.__doc__}"""', "import fleet as fleet"]
    lines += [f"from {home} import {name} as {name}" for name, home in package._HOMES.items()]
    lines += [f"from fleet import {name} as {name}" for name in package._MODULES]
    used = {node.id for text in calls.values() for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    lines += sorted(_imports(source, used - set(package._HOMES) - set(vars(builtins))))
    lines += [f"__all__ = {package.__all__!r}", "__version__: str"]
    return "\n".join([*lines, *(calls[name] for name in package._CALLS)]) + "\n"


def _methods(facade: ast.ClassDef) -> dict[str, list[ast.FunctionDef]]:
    """Returns the definitions of public methods and properties by name; a second name has the same definitions."""
    found: dict[str, list[ast.FunctionDef]] = {}
    for node in facade.body:
        if isinstance(node, ast.FunctionDef):
            found.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
            found.update({target.id: found[node.value.id] for target in node.targets if isinstance(target, ast.Name)})
    return found


def _call(name: str, nodes: list[ast.FunctionDef]) -> Iterator[str]:
    overloads = [
        node for node in nodes if [ast.unparse(decorator) for decorator in node.decorator_list] == ["overload"]
    ]
    words = _docstring(next(filter(None, map(ast.get_docstring, nodes)), ""))
    for node in overloads or nodes[:1]:  # the setter of a property comes after its getter
        assert node.returns is not None
        returns = ast.unparse(node.returns)
        if node.decorator_list and not overloads:  # a property
            yield from (f"{name}: {returns}", textwrap.dedent(words))
            continue
        node.args.args = [argument for argument in node.args.args if argument.arg != "self"]
        yield from ["@overload"] if overloads else []
        yield from (f"def {name}({ast.unparse(node.args)}) -> {returns}:", words)


def _imports(source: ast.Module, names: set[str]) -> Iterator[str]:
    """Yields the imports that give ``names`` the meaning they have in ``source``."""
    for node in ast.walk(source):
        if isinstance(node, ast.ImportFrom | ast.Import):
            for alias in node.names:
                if (alias.asname or alias.name.partition(".")[0]) in names:
                    words = ast.unparse(ast.Import([alias]))
                    yield f"from {node.module} {words}" if isinstance(node, ast.ImportFrom) else words
    for node in source.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in names:
            yield f"from fleet.facade import {node.targets[0].id}"


# ---- options ---------------------------------------------------------------------------------------------------------

OPTIONS = '''# mypy: disable-error-code="override"
# The keys of a view are fixed; those of a dict are any text.
"""The options of DistributedStrategy as type checkers and editors see them."""

from typing import Any, Literal, TypeAlias, TypedDict, overload

from typing_extensions import Unpack

from fleet.options import BuildStrategy, ExecutionStrategy
from fleet.options.views import ConfigView
'''


def options_stub() -> str:
    """Returns the stub with one attribute for every option, and the keys of those that have some."""
    known = schema()
    kinds = {kind.__name__: kind for option in known.values() for kind in _config_kinds(option.kind)}
    lines = [OPTIONS]
    for name, kind in kinds.items():
        lines += [*_keys(name, kind), *_view(name, kind)]
    lines += ["class TypedOptions:", '    """Every option with its type, what it does, and its default."""']
    for name, option in {**known, **{alias: known[name] for alias, name in ALIASES.items()}}.items():
        lines += _attribute(name, option.kind, _words(option.name, option.rule, option.default))
    return "\n".join(lines) + "\n"


def _config_kinds(kind: Any) -> Iterator[type[Config]]:
    """Yields the groups of keys inside ``kind``, the inner ones first."""
    if isinstance(kind, type) and issubclass(kind, Config):
        for inner in value_types(kind).values():
            yield from _config_kinds(inner)
        yield kind


def _words(name: str, rule: FieldRule, default: Any) -> str:
    choices = f" One of {', '.join(map(repr, rule.choices))}." if rule.choices else ""
    shown = "" if isinstance(default, Config) else f" Default: {plain(default)!r}."
    text = described(name, rule)
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}{choices}{shown}"


def _read(kind: Any) -> str:
    """Returns the type of what reading gives."""
    if isinstance(kind, type) and issubclass(kind, Config):
        return {"BuildStrategyConfig": "BuildStrategy", "ExecutionStrategyConfig": "ExecutionStrategy"}.get(
            kind.__name__, f"{kind.__name__}View"
        )
    if typing.get_origin(kind) is tuple:
        return f"list[{_read(typing.get_args(kind)[0])}]"
    return kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind).replace("typing.", "")


def _written(kind: Any) -> str:
    """Returns the type of what may be assigned."""
    if isinstance(kind, type) and issubclass(kind, Config):
        return f"{kind.__name__}Dict | {_read(kind)}"
    if typing.get_origin(kind) is tuple:
        item = _read(typing.get_args(kind)[0])
        return f"list[{item}] | tuple[{item}, ...]"
    return _read(kind)


def _attribute(name: str, kind: Any, words: str = "") -> Iterator[str]:
    if _read(kind) == _written(kind):
        yield f"    {name}: {_read(kind)}"
        if words:
            yield _docstring(words)
        return
    yield from ("    @property", f"    def {name}(self) -> {_read(kind)}:")
    yield _docstring(words, " " * 8) if words else "        ..."
    yield from (f"    @{name}.setter", f"    def {name}(self, value: {_written(kind)}) -> None: ...")


def _keys(name: str, kind: type[Config]) -> Iterator[str]:
    """Yields the dictionary that may be assigned: any of the keys."""
    yield from (f"class {name}Dict(TypedDict, total=False):", _docstring(f"The keys of {kind.option}."))
    default = kind()
    for key, inner in value_types(kind).items():
        yield f"    {key}: {_written(inner)}"
        yield _docstring(_words("", kind.rule(key), getattr(default, key)))


def _view(name: str, kind: type[Config]) -> Iterator[str]:
    """Yields what reading the option gives: every key has a value, as an item and as an attribute."""
    types = value_types(kind)
    yield f"{name}Key: TypeAlias = Literal[{', '.join(map(repr, types))}]"
    yield from (f"class {name}View(ConfigView):", _docstring(f"The settings of {kind.option}; see {name}Dict."))
    for key, inner in types.items():
        yield from _attribute(key, inner)
    groups: dict[tuple[str, str], list[str]] = {}
    for key, inner in types.items():
        groups.setdefault((_read(inner), _written(inner)), []).append(repr(key))
    for method, value in (("__getitem__", ""), ("__setitem__", ", value: {1}")):
        for kinds, keys in groups.items():
            returns = kinds[0] if not value else "None"
            yield from ["    @overload"] if len(groups) > 1 else []
            words = f"key: Literal[{', '.join(keys)}]{value.format(*kinds)}, /"
            yield f"    def {method}(self, {words}) -> {returns}: ..."
    yield f"    def __delitem__(self, key: {name}Key, /) -> None: ..."
    yield f"    def pop(self, key: {name}Key, /, *default: Any) -> Any: ..."
    yield f"    def setdefault(self, key: {name}Key, default: Any = None, /) -> Any: ..."
    yield f"    def update(self, changes: {name}Dict | {name}View = ..., /, **keys: Unpack[{name}Dict]) -> None: ..."
