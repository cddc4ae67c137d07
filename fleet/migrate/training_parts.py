"""TrainingParts: the parts of a training script, found in its text: loops, loaders, optimizers, models, epochs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst

from fleet.migrate.script_source import SAME_ITEMS, ScriptSource, argument

# Calls that make an optimizer, beside every class of torch.optim.
OPTIMIZERS = (
    "transformers.AdamW",
    "transformers.Adafactor",
    "timm.optim.create_optimizer",
    "timm.optim.create_optimizer_v2",
)
_NOT_OPTIMIZERS = ("torch.optim.lr_scheduler.", "torch.optim.swa_utils.")
LOADERS = ("torch.utils.data.DataLoader",)
Loop = cst.For | cst.While


@dataclass(frozen=True)
class MadeOptimizer:
    """An optimizer: the call that makes it, the name it gets ('' where it gets none), its models' names."""

    call: cst.Call
    name: str
    models: tuple[str, ...]


class TrainingParts:
    """Finds the parts of a training script.

    Args:
        source: the script.
        loaders: names of the classes whose objects are data loaders.
        optimizers: prefixes of the names of optimizer classes.
    """

    def __init__(
        self, source: ScriptSource, loaders: tuple[str, ...] = LOADERS, optimizers: tuple[str, ...] = ("torch.optim.",)
    ) -> None:
        self.source = source
        self._loaders = loaders
        self._prefixes = optimizers
        self._training: dict[str, bool] = {}
        self._optimizers: list[MadeOptimizer] | None = None

    # ---- loops ---------------------------------------------------------------------------------------------------

    def trains(self, node: cst.CSTNode) -> bool:
        """Returns whether ``node`` runs a backward pass, itself or in a function of the script that it calls."""
        for found in self.source.inside(node):
            if isinstance(found, cst.Call):
                last = found.func.attr if isinstance(found.func, cst.Attribute) else found.func
                name = last.value if isinstance(last, cst.Name) else ""
                if name in ("backward", "minimize") or self._function_trains(name):
                    return True
        return False

    def _function_trains(self, name: str) -> bool:
        function = self.source.functions.get(name)
        if function is None:
            return False
        if name not in self._training:
            self._training[name] = False  # ends the search in a function that calls itself
            self._training[name] = self.trains(function.body)
        return self._training[name]

    def batch_loops(self) -> list[Loop]:
        """Returns the innermost loops that train, also where a function around the pass is called in them."""
        loops = [n for n in self.source.nodes if isinstance(n, cst.For | cst.While) and self.trains(n.body)]
        # A loop over epochs trains as well, because the loop inside it does.
        inner = [
            loop
            for loop in loops
            if not any(other is not loop and other in self.source.inside(loop) for other in loops)
        ]
        return [loop for loop in inner if not self._calls_a_loop(loop)]

    def _calls_a_loop(self, loop: Loop) -> bool:
        """Returns whether a loop that trains lies in a function that ``loop`` calls, itself or through another one."""
        called = self._training_functions(loop)
        deeper = [other for function in called for other in self._training_functions(function) if other is not function]
        inside = (node for function in (*called, *deeper) for node in self.source.inside(function.body))
        return any(isinstance(node, cst.For | cst.While) and self.trains(node.body) for node in inside)

    def _training_functions(self, node: cst.CSTNode) -> list[cst.FunctionDef]:
        names = called_functions(self.source, node)
        return [self.source.functions[name] for name in names if self._function_trains(name)]

    def items_of(self, loop: cst.For) -> cst.BaseExpression:
        """Returns the iterable of ``loop``, without enumerate, tqdm and the like around it."""
        found: cst.BaseExpression = loop.iter
        for _ in range(6):
            if isinstance(found, cst.Name):
                known = [value.node for value in self.source.values.get(found.value, ()) if value.element is None]
                bar = known[0] if len(known) == 1 else None
                if not (isinstance(bar, cst.Call) and self._shows(bar) and bar.args):
                    return found
                found = bar
            if not (isinstance(found, cst.Call) and self._shows(found) and found.args):
                return found
            found = found.args[0].value
        return found

    def _shows(self, call: cst.Call) -> bool:
        name = self.source.called(call) or self.source.code(call.func)
        return name in SAME_ITEMS or name.rpartition(".")[2] in SAME_ITEMS

    def loaders_of(self, node: cst.CSTNode) -> tuple[list[cst.Call], list[cst.CSTNode]]:
        """Returns the loaders that ``node`` may stand for, and its other origins."""
        found = list(dict.fromkeys(self.source.origins(node)))
        made = [n for n in found if isinstance(n, cst.Call) and self.source.called(n) in self._loaders]
        return made, [n for n in found if n not in made]

    def epoch_of(self, loop: Loop) -> str:
        """Returns the number of the epoch where ``loop`` stands: the variable of a loop around it, or a parameter."""
        for found in self.source.above(loop):
            if isinstance(found, cst.For) and isinstance(found.target, cst.Name) and self.counts(found):
                return found.target.value
            if isinstance(found, cst.FunctionDef):
                names = [p.name.value for p in (*found.params.params, *found.params.kwonly_params)]
                return next((name for name in names if name in ("epoch", "epoch_i", "epoch_idx", "ep")), "")
        return ""

    def counts(self, loop: cst.For) -> bool:
        """Returns whether ``loop`` runs over numbers."""
        items = loop.iter
        while isinstance(items, cst.Call) and self._shows(items) and items.args:
            if self.source.code(items.func).rpartition(".")[2] == "trange":
                return True
            items = items.args[0].value
        name = self.source.code(items.func) if isinstance(items, cst.Call) else ""
        return name.rpartition(".")[2] in ("range", "trange", "count", "arange")

    # ---- optimizers and models -----------------------------------------------------------------------------------

    def optimizers(self) -> list[MadeOptimizer]:
        """Returns the optimizers of the script; where a function returns one, its calls count."""
        if self._optimizers is None:
            made = [self._made(call) for call in self.source.calls if self._makes_optimizer(call)]
            outside = [found for one in made for found in self._returned(one, one.call)]
            self._optimizers = list({found.call: found for found in outside}.values())
        return self._optimizers

    def _returned(self, made: MadeOptimizer, first: cst.Call, depth: int = 3) -> list[MadeOptimizer]:
        """Returns ``made``, or the calls of the script's own function that returns the result of ``first``."""
        function = self.source.function(made.call)
        if depth == 0 or not isinstance(function, cst.FunctionDef):
            return [made]
        returns = [n for n in self.source.inside(function.body) if isinstance(n, cst.Return) and n.value is not None]
        if not any(first in self.source.origins(n.value) for n in returns if n.value is not None):
            return [made]
        found = [
            MadeOptimizer(call, self._target(call), tuple(self._outside(name, function, call) for name in made.models))
            for call in self.source.calls_of_own(function)
        ]
        return [one for outer in found for one in self._returned(outer, first, depth - 1)] or [made]

    def _outside(self, name: str, function: cst.FunctionDef, call: cst.Call) -> str:
        """Returns the name, where ``call`` stands, of the model that is ``name`` in ``function``."""
        first, _, rest = name.partition(".")
        parameters = [p.name.value for p in function.params.params]
        if first == "self" and isinstance(call.func, cst.Attribute):
            given = self.source.code(call.func.value)
            return root(f"{given}.{rest}" if rest else given)
        if name in parameters:
            passed = argument(call, name, parameters.index(name) - (parameters[0] == "self"))
            return root(self.source.code(passed.value)) if passed is not None else name
        return name

    def _makes_optimizer(self, call: cst.Call) -> bool:
        name = self.source.called(call)
        if isinstance(call.func, cst.Attribute) and call.func.attr.value == "configure_optimizers":
            return True
        if name.startswith(_NOT_OPTIMIZERS) or name in ("torch.optim.Optimizer",):
            return False
        last = name.rpartition(".")[2]
        return name in OPTIMIZERS or (name.startswith(self._prefixes) and last[:1].isupper())

    def _target(self, call: cst.Call) -> str:
        """Returns the name to which the script assigns the result of ``call``, or ''."""
        parent = self.source.parent(call)
        target = parent.targets[0].target if isinstance(parent, cst.Assign) and len(parent.targets) == 1 else None
        return self.source.code(target) if isinstance(target, cst.Name | cst.Attribute) else ""

    def _made(self, call: cst.Call) -> MadeOptimizer:
        given = argument(call, "params") or argument(call, "parameters") or argument(call, "model", 0)
        if isinstance(call.func, cst.Attribute) and call.func.attr.value == "configure_optimizers":
            models: tuple[str, ...] = (self.source.code(call.func.value),)
        else:
            models = tuple(dict.fromkeys(self._models_in(given.value))) if given is not None else ()
        return MadeOptimizer(call, self._target(call), models)

    def _models_in(self, node: cst.CSTNode, depth: int = 3) -> Iterator[str]:
        """Yields the names of the models whose parameters are in ``node``."""
        for found in (node, *self.source.inside(node)):
            if isinstance(found, cst.Call) and isinstance(found.func, cst.Attribute):
                if found.func.attr.value in ("parameters", "named_parameters"):
                    yield root(self.source.code(found.func.value))
            elif isinstance(found, cst.Name) and depth and found.value in self.source.values:
                here = self.source.function(node)
                for value in self.source.values[found.value]:
                    if value.function is here:
                        yield from self._models_in(value.node, depth - 1)


def root(name: str) -> str:
    """Returns the name of the model in ``model.body.head``: ``model``; ``self.model`` stays."""
    parts = name.partition("[")[0].split(".")
    return ".".join(parts[:2]) if parts[0] == "self" else parts[0]


def called_functions(source: ScriptSource, node: cst.CSTNode) -> list[str]:
    """Returns the names of the script's own functions that ``node`` calls."""
    names = []
    for found in source.inside(node):
        if isinstance(found, cst.Call):
            last = found.func.attr if isinstance(found.func, cst.Attribute) else found.func
            if isinstance(last, cst.Name) and last.value in source.functions:
                names.append(last.value)
    return names
