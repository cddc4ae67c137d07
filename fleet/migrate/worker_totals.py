"""divide_totals: numbers that a loop adds up over its batches cover one worker's rows once the data is divided."""

from __future__ import annotations

import libcst as cst

from fleet.migrate.script_port import ScriptPort
from fleet.migrate.training_parts import Loop


def divide_totals(port: ScriptPort) -> None:
    """Adds up totals over the workers where they are divided by the size of the whole data, and names the others."""
    for loop in port.parts.batch_loops():
        sums = port.sums_in(loop)
        names = {name for name, _ in sums}
        for name, node in {name: node for name, node in sums}.items():
            _divide(port, loop, name, node, names)


def _divide(port: ScriptPort, loop: Loop, name: str, node: cst.AugAssign, names: set[str]) -> None:
    inside = set(map(id, port.source.inside(loop)))
    function = port.source.function(loop)
    uses = [
        n
        for n in port.source.nodes
        if isinstance(n, cst.Name)
        and n.value == name
        and id(n) not in inside
        and port.source.function(n) is function
        and port.source.span(n)[0] > port.source.span(loop)[0]
    ]
    kinds = {_kind(port, use, names) for use in uses}
    if kinds == {"of the data"} and ".item()" in port.source.code(node.value):
        port.edits.insert_after(loop, f"{name} = fleet.all_reduce({name})")
    elif "of the data" in kinds or "other" in kinds:
        port.edits.hand(
            node,
            f"{name} adds up this worker's batches alone",
            f"After the loop, on every worker: {name} = fleet.all_reduce({name}), and the same for what divides it.",
        )
    elif kinds:
        port.edits.note(node, f"{name} is a mean over this worker's batches", "")


def _kind(port: ScriptPort, use: cst.Name, names: set[str]) -> str:
    """Returns the use of a total: "of the data", "of the batches" by its divisor, or "other"."""
    parent = port.source.parent(use)
    if isinstance(parent, cst.BinaryOperation) and isinstance(parent.operator, cst.Divide) and parent.left is use:
        return _divisor(port.source.code(parent.right), names)
    if isinstance(parent, cst.AugAssign) and isinstance(parent.operator, cst.DivideAssign) and parent.target is use:
        return _divisor(port.source.code(parent.value), names)
    if isinstance(parent, cst.BinaryOperation) and parent.right is use:
        return "of the batches" if port.source.code(parent.left) in names else "other"
    return "other" if not _after_division(port, use, names) else "of the data"


def _after_division(port: ScriptPort, use: cst.Name, names: set[str]) -> bool:
    """Returns whether ``name /= len(...dataset)`` stands before ``use``, which then shows a finished mean."""
    for node in port.source.nodes:
        if isinstance(node, cst.AugAssign) and isinstance(node.operator, cst.DivideAssign):
            same = port.source.code(node.target) == use.value and port.source.function(node) is port.source.function(
                use
            )
            if same and port.source.span(node)[0] < port.source.span(use)[0]:
                return _divisor(port.source.code(node.value), names) == "of the data"
    return False


def _divisor(text: str, names: set[str]) -> str:
    if "dataset" in text or ("len(" in text and "data" in text and "loader" not in text):
        return "of the data"
    if text in names or "len(" in text or "batches" in text or text in ("i", "step", "steps", "(i + 1)", "n", "count"):
        return "of the batches"
    return "other"
