"""No module of the library needs itself through its imports, those inside functions included."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from tests.helpers.sources import module_name, python_files, syntax_tree


def imports_of(tree: ast.Module, modules: set[str], types: bool) -> Iterator[str]:
    """Yields the modules that a file imports when it runs, and with ``types`` those under TYPE_CHECKING."""
    unseen: list[ast.AST] = [tree]
    while unseen:
        node = unseen.pop()
        if not types and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            unseen += node.orelse
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                target = f"{node.module}.{alias.name}"
                if target in modules or node.module in modules:
                    yield target if target in modules else str(node.module)
        unseen += ast.iter_child_nodes(node)


def circles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Returns the modules that are left when those that import nothing are taken away again and again."""
    left = {module: set(targets) - {module} for module, targets in imports.items()}
    for backwards in (False, True):
        while leaves := {module for module, targets in left.items() if not targets}:
            left = {module: targets - leaves for module, targets in left.items() if module not in leaves}
        if not backwards:
            left = {module: {other for other in left if module in left[other]} for module in left}
    return [sorted(left)] if left else []


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == [["b", "c"]]
    source = "if TYPE_CHECKING:\n    import a\ndef f():\n    from b import c\n    from a import x"
    assert sorted(imports_of(ast.parse(source), {"a", "b.c"}, types=False)) == ["a", "b.c"]
    assert sorted(imports_of(ast.parse(source), {"a", "b.c"}, types=True)) == ["a", "a", "b.c"]


def test_there_is_no_import_circle() -> None:
    paths = {module_name(path): path for path in python_files("fleet", "strategies", "launch")}
    imports = {name: set(imports_of(syntax_tree(path), set(paths), types=False)) for name, path in paths.items()}
    assert len(imports) > 200
    assert circles(imports) == []


def test_there_is_no_import_circle_with_types() -> None:
    """Imports for types count; a package's face, which names its own parts, does not."""
    paths = {module_name(path): path for path in python_files("fleet", "strategies", "launch")}
    paths = {name: path for name, path in paths.items() if path.name != "__init__.py"}
    imports = {name: set(imports_of(syntax_tree(path), set(paths), types=True)) for name, path in paths.items()}
    assert circles(imports) == []
