"""ScriptSource: a script as libcst sees it: the places of nodes, the meanings of names, and the origins of values.

[Note: Where a value comes from]
``origins`` follows a name to its assigned values: in its function, then through the arguments of the calls of that
function, then at module level; ``self.x`` anywhere in the script; a call of one of the script's own functions to its
returned values; ``x.to(...)`` to ``x``. It is a guess in one direction only: an empty or mixed answer is reported to
the user, never filled in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

import libcst as cst
from libcst.metadata import (
    ByteSpanPositionProvider,
    MetadataWrapper,
    ParentNodeProvider,
    PositionProvider,
    QualifiedNameProvider,
    QualifiedNameSource,
)

# Methods that return their object, and functions that return or iterate over their first argument.
SAME_OBJECT = ("to", "cuda", "cpu", "train", "eval", "float", "half", "requires_grad_")
SAME_ITEMS = ("enumerate", "iter", "tqdm", "trange", "track", "tqdm.tqdm", "tqdm.auto.tqdm", "rich.progress.track")
# Full names of torch's definitions, and older names -> the public names.
_HOMES = {
    "torch.utils.data.distributed.DistributedSampler": "torch.utils.data.DistributedSampler",
    "torch.utils.data.dataloader.DataLoader": "torch.utils.data.DataLoader",
    "torch.nn.parallel.distributed.DistributedDataParallel": "torch.nn.parallel.DistributedDataParallel",
    "torch.nn.parallel.data_parallel.DataParallel": "torch.nn.DataParallel",
    "torch.nn.parallel.DataParallel": "torch.nn.DataParallel",
    "torch.cuda.amp.GradScaler": "torch.amp.GradScaler",
    "torch.cuda.amp.grad_scaler.GradScaler": "torch.amp.GradScaler",
    "torch.amp.grad_scaler.GradScaler": "torch.amp.GradScaler",
    "torch.multiprocessing.spawn.spawn": "torch.multiprocessing.spawn",
}
Function = cst.FunctionDef | cst.Lambda | cst.Module


@dataclass(frozen=True)
class Value:
    """The value of an assignment to a name: the expression, and the index of the element if a tuple is unpacked."""

    node: cst.BaseExpression
    element: int | None
    statement: cst.CSTNode
    function: Function


class ScriptSource:
    """A parsed script.

    Args:
        text: the script; any line ends.

    Raises:
        libcst.ParserSyntaxError: the text is not Python.
    """

    def __init__(self, text: str) -> None:
        self.data = text.encode()
        # Without a copy of the tree: edits change the text alone, and nodes serve as keys.
        wrapper = MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
        self.module = wrapper.module
        found: Any = wrapper.resolve_many(
            (ByteSpanPositionProvider, PositionProvider, ParentNodeProvider, QualifiedNameProvider)
        )
        self._spans = found[ByteSpanPositionProvider]
        self._lines = found[PositionProvider]
        self._parents = found[ParentNodeProvider]
        self._names = found[QualifiedNameProvider]
        self.nodes: list[cst.CSTNode] = []
        self._places: dict[cst.CSTNode, tuple[int, int]] = {}
        self._list(self.module)
        self.calls = [node for node in self.nodes if isinstance(node, cst.Call)]
        self.functions = {node.name.value: node for node in self.nodes if isinstance(node, cst.FunctionDef)}
        self.values: dict[str, list[Value]] = {}
        for node in self.nodes:
            self._note_assignment(node)

    # ---- places --------------------------------------------------------------------------------------------------

    def span(self, node: cst.CSTNode) -> tuple[int, int]:
        """Returns where ``node`` starts and ends in ``data``, without the white space around it."""
        found = self._spans[node]
        return int(found.start), int(found.start + found.length)

    def code(self, node: cst.CSTNode) -> str:
        """Returns the text of ``node`` as it stands in the script."""
        start, end = self.span(node)
        return self.data[start:end].decode()

    def line(self, node: cst.CSTNode) -> int:
        """Returns the line on which ``node`` starts."""
        return int(self._lines[node].start.line)

    def parent(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """Returns the node around ``node``."""
        found: cst.CSTNode | None = self._parents.get(node)
        return found

    def above(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yields the nodes around ``node``, from the inside out."""
        found = self.parent(node)
        while found is not None:
            yield found
            found = self.parent(found)

    def statement(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """Returns the statement around ``node`` that begins a line; None behind ``if x:`` on one line."""
        for found in (node, *self.above(node)):
            if isinstance(found, cst.SimpleStatementLine | cst.BaseCompoundStatement):
                return found
            if isinstance(found, cst.SimpleStatementSuite):
                return None
        return None

    def function(self, node: cst.CSTNode) -> Function:
        """Returns the function around ``node``, or the module."""
        return next(f for f in self.above(node) if isinstance(f, cst.FunctionDef | cst.Lambda | cst.Module))

    # ---- names ---------------------------------------------------------------------------------------------------

    def qualified(self, node: cst.CSTNode) -> str:
        """Returns the imported name that ``node`` stands for, such as ``torch.distributed.get_rank``, or ''."""
        if not _is_dotted(node):
            return ""
        names: Any = self._names.get(node, set())
        names = names() if callable(names) else names  # libcst resolves them at first use
        found = {
            name.name for name in names if name.source in (QualifiedNameSource.IMPORT, QualifiedNameSource.BUILTIN)
        }
        name = found.pop().removeprefix("builtins.") if len(found) == 1 else ""
        name = name.replace("torch.distributed.distributed_c10d.", "torch.distributed.")
        return _HOMES.get(name, name)

    def called(self, call: cst.Call) -> str:
        """Returns the imported name of the function in ``call``, or ''."""
        return self.qualified(call.func)

    def calls_of(self, name: str) -> list[cst.Call]:
        """Returns the calls of the imported ``name``."""
        return [call for call in self.calls if self.called(call) == name]

    def calls_of_own(self, function: cst.FunctionDef) -> list[cst.Call]:
        """Returns the calls of one of the script's own functions or methods, from outside of it, by its name."""
        inside = self.inside(function)
        found = [c for c in self.calls if self.code(c.func).rpartition(".")[2] == function.name.value]
        return [call for call in found if call not in inside]

    def imported(self) -> set[str]:
        """Returns the modules and names that the script imports."""
        found: set[str] = set()
        for node in self.nodes:
            if isinstance(node, cst.Import):
                found |= {self.code(alias.name) for alias in node.names}
            elif isinstance(node, cst.ImportFrom) and node.module is not None:
                module = self.code(node.module)
                found.add(module)
                if not isinstance(node.names, cst.ImportStar):
                    found |= {f"{module}.{self.code(alias.name)}" for alias in node.names}
        return found

    def inside(self, node: cst.CSTNode) -> list[cst.CSTNode]:
        """Returns the nodes inside ``node``."""
        first, last = self._places[node]
        return self.nodes[first:last]

    # ---- values --------------------------------------------------------------------------------------------------

    def origins(self, node: cst.CSTNode, depth: int = 8) -> list[cst.CSTNode]:
        """Returns the expressions that ``node`` may stand for; see [Note: Where a value comes from]."""
        if depth == 0:
            return []
        if isinstance(node, cst.Call):
            return self._origins_of_call(node, depth)
        if isinstance(node, cst.IfExp):
            return [*self.origins(node.body, depth - 1), *self.origins(node.orelse, depth - 1)]
        if not isinstance(node, cst.Name | cst.Attribute):
            return [node]
        name = self.code(node)
        function = self.function(node)
        known = self.values.get(name, [])
        if isinstance(node, cst.Name):
            near = [value for value in known if value.function is function]
            passed = self._passed(node.value, function)
            if not near and not passed:
                near = [value for value in known if isinstance(value.function, cst.Module)] or known
            found = [origin for argument in passed for origin in self.origins(argument, depth - 1)]
            known = near
        else:
            found = []
        for value in known:
            found += self._origins_of_value(value, name, depth - 1)
        return found

    def _origins_of_value(self, value: Value, name: str, depth: int) -> list[cst.CSTNode]:
        if value.element is None:
            again = [node for node in self.inside(value.node) if isinstance(node, cst.Name) and self._reads(node, name)]
            same = isinstance(value.node, cst.Call) and isinstance(value.node.func, cst.Attribute) and again
            return [] if same or self.code(value.node) == name else self.origins(value.node, depth)
        if _is_prepare(value.node) and value.element < len(value.node.args):
            given = value.node.args[value.element].value  # Accelerate returns its arguments in their order
            return [] if self.code(given) == name else self.origins(given, depth)
        found = []
        for node in self.origins(value.node, depth):
            if isinstance(node, cst.Tuple | cst.List) and value.element < len(node.elements):
                found += self.origins(node.elements[value.element].value, depth)
            elif isinstance(node, cst.Call):
                found.append(node)
        return found

    def _reads(self, node: cst.Name, name: str) -> bool:
        """Returns whether ``node`` is the variable ``name``, not an attribute or a keyword that is called the same."""
        parent = self.parent(node)
        label = isinstance(parent, cst.Attribute) and parent.attr is node
        label = label or (isinstance(parent, cst.Arg) and parent.keyword is node)
        return node.value == name and not label

    def _origins_of_call(self, call: cst.Call, depth: int) -> list[cst.CSTNode]:
        function = call.func
        if isinstance(function, cst.Attribute) and function.attr.value in SAME_OBJECT and not self.called(call):
            return self.origins(function.value, depth - 1)
        own = self.functions.get(function.value) if isinstance(function, cst.Name) else None
        if own is None or self.called(call):
            return [call]
        returned = [
            node for node in self.inside(own.body) if isinstance(node, cst.Return) and self.function(node) is own
        ]
        return [found for node in returned if node.value for found in self.origins(node.value, depth - 1)]

    def _passed(self, name: str, function: Function) -> list[cst.CSTNode]:
        """Returns the arguments that the calls of ``function`` pass as its parameter ``name``."""
        if not isinstance(function, cst.FunctionDef):
            return []
        parameters = [p.name.value for p in (*function.params.params, *function.params.kwonly_params)]
        if name not in parameters:
            return []
        place = parameters.index(name)
        callee = function.name.value
        own_class = self.class_of(function)
        if own_class is not None and parameters[0] in ("self", "cls"):
            place -= 1  # calls do not pass self
            callee = own_class if callee == "__init__" else callee
        found: list[cst.CSTNode] = []
        for call in self.calls:
            last = call.func.attr if isinstance(call.func, cst.Attribute) else call.func
            if isinstance(last, cst.Name) and last.value == callee:
                found += [a.value for a in call.args if a.keyword is not None and a.keyword.value == name]
                plain = [a.value for a in call.args if a.keyword is None and not a.star]
                found += plain[place : place + 1]
        return found

    def class_of(self, function: cst.CSTNode) -> str | None:
        """Returns the name of the class whose body holds ``function``."""
        around = [node for node in self.above(function) if isinstance(node, cst.FunctionDef | cst.ClassDef)]
        return around[0].name.value if around and isinstance(around[0], cst.ClassDef) else None

    def _list(self, node: cst.CSTNode) -> None:
        first = len(self.nodes)
        for child in node.children:
            self.nodes.append(child)
            self._list(child)
        self._places[node] = first, len(self.nodes)

    def _note_assignment(self, node: cst.CSTNode) -> None:
        if isinstance(node, cst.Assign):
            pairs = [(target.target, node.value) for target in node.targets]
        elif isinstance(node, cst.AnnAssign) and node.value is not None:
            pairs = [(node.target, node.value)]
        else:
            return
        for target, value in pairs:
            several = isinstance(target, cst.Tuple | cst.List)
            parts = [e.value for e in target.elements] if isinstance(target, cst.Tuple | cst.List) else [target]
            for place, part in enumerate(parts):
                element = place if several else None
                given = Value(value, element, node, self.function(node))
                if isinstance(value, cst.Tuple) and element is not None and element < len(value.elements):
                    given = Value(value.elements[element].value, None, node, self.function(node))
                self.values.setdefault(self.code(part), []).append(given)


def argument(call: cst.Call, name: str, place: int | None = None) -> cst.Arg | None:
    """Returns the argument of ``call`` that is passed by ``name`` or at ``place``."""
    for found in call.args:
        if found.keyword is not None and found.keyword.value == name:
            return found
    plain = [found for found in call.args if found.keyword is None and not found.star]
    return plain[place] if place is not None and place < len(plain) else None


def _is_dotted(node: cst.CSTNode) -> bool:
    while isinstance(node, cst.Attribute):
        node = node.value
    return isinstance(node, cst.Name)


def _is_prepare(node: cst.CSTNode) -> TypeGuard[cst.Call]:
    return isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and node.func.attr.value == "prepare"
