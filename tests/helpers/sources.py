"""The project's own files as data: which there are, their syntax trees, what they import."""

from __future__ import annotations

import ast
import gc
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Top folder -> the package its modules belong to.
PACKAGES = {"fleet": "fleet", "strategies": "fleet.strategies", "launch": "fleet.launch"}


@cache
def project_files() -> tuple[Path, ...]:
    """Returns every file that git tracks or would add, links included, relative to the root, sorted."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=30).stdout
    found = {Path(name) for name in listed.split("\0") if name}
    # A file that was deleted and not committed yet is still listed.
    return tuple(sorted(path for path in found if (ROOT / path).is_symlink() or (ROOT / path).is_file()))


def python_files(*folders: str) -> list[Path]:
    """Returns the ``.py`` files of the given top folders, or all of the project's, relative to the root."""
    files = [path for path in project_files() if path.suffix == ".py" and not (ROOT / path).is_symlink()]
    return [path for path in files if not folders or path.parts[0] in folders]


@cache
def syntax_tree(path: Path) -> ast.Module:
    """Returns the syntax tree of a file; ``path`` is relative to the root."""
    gc.disable()  # and freeze(): the garbage collector would take longer over the trees than the parser
    try:
        return ast.parse((ROOT / path).read_text(encoding="utf-8"), str(path))
    finally:
        gc.freeze()
        gc.enable()


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Returns every node of a file's syntax tree, in the order of ``ast.walk``."""
    return tuple(ast.walk(syntax_tree(path)))


def module_name(path: Path) -> str:
    """Returns the name a package file is imported by; ``strategies/amp/amp.py`` gives ``fleet.strategies.amp``."""
    parts = [PACKAGES[path.parts[0]], *path.with_suffix("").parts[1:]]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@dataclass(frozen=True)
class Import:
    """One imported module or name: ``from fleet.errors import ConfigError`` is ``fleet.errors.ConfigError``."""

    target: str
    path: Path
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line} imports {self.target}"

    def within(self, *modules: str) -> bool:
        """Returns whether the target is one of ``modules`` or something inside one of them."""
        return any(self.target == module or self.target.startswith(f"{module}.") for module in modules)


@cache
def imports_of(path: Path) -> tuple[Import, ...]:
    """Returns every import of a file, those inside functions and under TYPE_CHECKING too."""
    return tuple(_imports(path))


@cache
def imported_by(path: Path) -> frozenset[str]:
    """Returns what a file imports, and everything that this lies in: ``a.b.c`` counts as ``a.b`` and as ``a`` too."""
    targets = [found.target.split(".") for found in imports_of(path)]
    return frozenset(".".join(parts[:size]) for parts in targets for size in range(1, len(parts) + 1))


def _imports(path: Path) -> Iterator[Import]:
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, path, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = f"{'.' * node.level}{node.module or ''}"
            for alias in node.names:
                yield Import(f"{base}.{alias.name}" if base.strip(".") else base, path, node.lineno)
        elif isinstance(node, ast.Call) and _called(node).rpartition(".")[2] == "import_module":
            name = node.args[0] if node.args else None
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield Import(name.value, path, node.lineno)


def calls_in(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """Yields every call of a file with its dotted name as written; ``""`` where the callee is no dotted name."""
    for node in nodes_of(path):
        if isinstance(node, ast.Call):
            yield _called(node), node


def dotted(node: ast.AST) -> str:
    """Returns ``a.b.c`` for such an expression; an inner part that is no name is left out: ``f().c`` gives ``.c``."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _called(node: ast.Call) -> str:
    return dotted(node.func)
