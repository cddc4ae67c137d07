"""ScriptPort: the edits of every kind of script: the import, fleet.init, wrapped optimizers, one writer, devices."""

from __future__ import annotations

import re

import libcst as cst

from fleet.migrate.script_edits import ScriptEdits
from fleet.migrate.script_source import ScriptSource, argument
from fleet.migrate.training_parts import Loop, MadeOptimizer, TrainingParts, called_functions

NUM = "fleet.worker_num()"
RANK = "fleet.worker_index()"
FIRST = "fleet.is_first_worker()"
# Calls that write a file, as statements: worker 0 makes them.
WRITERS = (
    "torch.save", "torchvision.utils.save_image", "numpy.save", "numpy.savez", "json.dump", "shutil.copyfile",
    "shutil.copy", "matplotlib.pyplot.savefig", "safetensors.torch.save_file",
)  # fmt: skip
WRITING_METHODS = ("save_pretrained", "savefig", "to_csv", "push_to_hub")
# Calls that every worker would make, and that return something: named.
SHARED_OUTPUTS = (
    "torch.utils.tensorboard.SummaryWriter", "tensorboardX.SummaryWriter", "wandb.init", "mlflow.start_run",
)  # fmt: skip
# Imports that may be without a use afterwards.
_DROPPED_IMPORTS = ("torch.distributed", "torch.nn.parallel.", "torch.multiprocessing", "accelerate.")
_KNOWN_METHODS = frozenset({
    "train", "eval", "to", "cuda", "cpu", "zero_grad", "parameters", "named_parameters", "state_dict",
    "load_state_dict", "requires_grad_", "module", "modules", "named_modules", "children", "named_children", "buffers",
    "no_sync", "half", "float", "double", "apply", "bfloat16", "compile", "full_state_dict", "load_full_state_dict",
    "register_forward_hook", "join",
})  # fmt: skip


class ScriptPort:
    """The edits that turn one script into one for this package.

    Args:
        source: the script.
        parts: where its loops, loaders and optimizers are.
    """

    def __init__(self, source: ScriptSource, parts: TrainingParts | None = None) -> None:
        self.source = source
        self.edits = ScriptEdits(source)
        self.parts = parts or TrainingParts(source)
        self.strategy: list[str] = []
        self._inits: list[cst.CSTNode] = []
        self._imports: list[str] = []

    # ---- import and init -----------------------------------------------------------------------------------------

    def import_fleet(self, line: str = "from fleet import fleet") -> None:
        """Adds the import after the last one of torch at the top, or after the last one."""
        if line not in self._imports:
            self._imports.append(line)

    def init_at(self, node: cst.CSTNode) -> None:
        """Puts ``fleet.init`` in the place of ``node``."""
        self._inits.append(node)
        self.import_fleet()

    def init_first(self) -> None:
        """Puts ``fleet.init`` where the script begins to work, with no call to replace."""
        self.import_fleet()
        block, after = self._entry()
        line = "fleet.init(is_collective=True)"
        done = self.edits.insert_after(after, line) if after is not None else self._insert_at_top(block, line)
        if not done:
            self.edits.hand(block, "there is no line to put fleet.init(is_collective=True) on", f"Add {line}.")

    def _insert_at_top(self, block: cst.CSTNode, line: str) -> bool:
        if isinstance(block, cst.Module):
            words = (cst.FunctionDef, cst.ClassDef)
            for statement in block.body:
                if isinstance(statement, words) or _is_import(statement) or _is_text(statement):
                    continue
                if any(isinstance(found, cst.Call) for found in self.source.inside(statement)):
                    return self.edits.insert_before(statement, line)
            return False
        return isinstance(block, cst.BaseSuite) and self.edits.insert_first(block, line)

    def _entry(self) -> tuple[cst.CSTNode, cst.CSTNode | None]:
        """Returns the block in which the work starts, and the statement after which it does, if there is one."""
        made = [made.call for made in self.parts.optimizers()]
        at_top = any(isinstance(self.source.function(call), cst.Module) for call in made)
        block: cst.CSTNode = self.source.module
        if not at_top:
            block = self._main() or block
        for call in self.source.calls:
            name = call.func.attr.value if isinstance(call.func, cst.Attribute) else ""
            statement = self.source.statement(call)
            reads = name in ("parse_args", "parse_known_args") and statement is not None
            if reads and statement is not None and self.source.parent(statement) is block:
                return block, statement
        return block, None

    def _main(self) -> cst.CSTNode | None:
        """Returns the block behind ``if __name__ == "__main__"``, or the body of the one function it calls."""
        for node in self.source.module.body:
            if isinstance(node, cst.If) and "__name__" in self.source.code(node.test):
                statements = node.body.body
                only = statements[0] if len(statements) == 1 else None
                small = only.body[0] if isinstance(only, cst.SimpleStatementLine) else None
                call = small.value if isinstance(small, cst.Expr) else None
                name = call.func.value if isinstance(call, cst.Call) and isinstance(call.func, cst.Name) else ""
                function = self.source.functions.get(name)
                return function.body if function is not None else node.body
        return None

    def finish(self) -> None:
        """Adds the import, and the strategy before ``fleet.init``."""
        wanted = (
            "fleet.init(is_collective=True, strategy=strategy)" if self.strategy else "fleet.init(is_collective=True)"
        )
        # The strategy is made once, before the first fleet.init; further ones use the same name.
        for place, node in enumerate(self._inits):
            lines = ["strategy = fleet.DistributedStrategy()", *self.strategy] if self.strategy else []
            if place == 0 and lines and not self.edits.insert_before(node, *lines):
                self.edits.hand(node, "the strategy needs lines before fleet.init", " ".join(lines))
            self.edits.replace(node, wanted)
        if self._imports:
            self._add_imports()
        self._drop_imports()

    def _add_imports(self) -> None:
        top = [node for node in self.source.module.body if _is_import(node)]
        ours = [n for n in top if re.match(r"(from|import) (torch|accelerate)\b", self.source.code(n))]
        future = [n for n in top if "__future__" in self.source.code(n)]
        place = (ours or top)[-1] if (ours or top) else None
        if place is None or (place in future and not ours):
            place = top[-1] if top else None
        if place is not None:
            self.edits.insert_after(place, *sorted(self._imports, key=_import_order), first=True)
        else:
            self.edits.replace_span(0, 0, "\n".join(self._imports) + "\n")

    def _drop_imports(self) -> None:
        """Removes imports whose every use the edits have removed."""
        for node in self.source.nodes:
            if not isinstance(node, cst.Import | cst.ImportFrom) or isinstance(node.names, cst.ImportStar):
                continue
            module = self.source.code(node.module) if isinstance(node, cst.ImportFrom) and node.module else ""
            names = [f"{module}.{self.source.code(alias.name)}".strip(".") for alias in node.names]
            if self.edits.covers(node) or not all(name.startswith(_DROPPED_IMPORTS) for name in names):
                continue
            local = [_local_name(self.source, alias) for alias in node.names]
            if all(name.isidentifier() and self._is_unused(name) for name in local):
                self.edits.remove(node)

    def _is_unused(self, name: str) -> bool:
        """Returns whether the script used ``name`` and every use is gone."""
        uses = [
            n
            for n in self.source.nodes
            if isinstance(n, cst.Name)
            and n.value == name
            and not any(isinstance(above, cst.Import | cst.ImportFrom) for above in self.source.above(n))
        ]
        return bool(uses) and all(self.edits.covers(use) for use in uses)

    # ---- optimizers and models -----------------------------------------------------------------------------------

    def wrap_optimizers(self, *, with_models: bool, condition: str = "") -> None:
        """Passes every optimizer, and with ``with_models`` its models, through fleet, where the optimizer is made."""
        made = self.parts.optimizers()
        wrapped: set[tuple[int, str]] = set()
        for one in made:
            self._wrap(one, with_models, condition, wrapped)
        if not made:
            loops = self.parts.batch_loops()
            where = loops[0] if loops else self.source.module
            self.edits.hand(
                where,
                "no line was found that makes an optimizer",
                "Make one of torch.optim if there is none, and pass it through fleet.distributed_optimizer(optimizer)"
                + (", and the model through fleet.distributed_model(model)." if with_models else "."),
            )

    def _wrap(self, one: MadeOptimizer, with_models: bool, condition: str, wrapped: set[tuple[int, str]]) -> None:
        lines = []
        if one.name:
            lines.append(f"{one.name} = fleet.distributed_optimizer({one.name})")
        else:
            start, end = self.source.span(one.call)
            self.edits.replace_span(start, start, "fleet.distributed_optimizer(")
            self.edits.replace_span(end, end, ")")
        if with_models:
            statement = self.source.statement(one.call) or one.call
            # Optimizers of one block may share a model, which is wrapped once there.
            blocks = {id(node) for node in self.source.above(statement)}
            fresh = [name for name in one.models if not any((block, name) in wrapped for block in blocks)]
            wrapped |= {(id(self.source.parent(statement)), name) for name in one.models}
            if one.models and one.name:
                late = [name for name in fresh if self._wrap_compiled(one, name)]
                lines += [_wrapping(name) for name in fresh if name not in late]
                if fresh and self._may_be_left_out(statement):
                    todo = "Behind the if, in any case: " + "; ".join(_wrapping(name) for name in fresh) + "."
                    self.edits.hand(one.call, "under this condition alone the model is wrapped", todo)
            else:
                todo = ", ".join(_wrapping(name) for name in one.models or ("model",))
                self.edits.hand(one.call, "there is no line for its model", f"Add {todo}.")
        if condition and lines:
            lines = [f"if {condition}:", *(f"{self.edits.indent_step}{line}" for line in lines)]
        if lines and not self.edits.insert_after(one.call, *lines):
            self.edits.hand(one.call, "it shares its line with an if or a loop", "After it: " + "; ".join(lines))

    def _may_be_left_out(self, statement: cst.CSTNode) -> bool:
        """Returns whether ``statement`` stands in an if that has no else."""
        around: cst.CSTNode | None = self.source.parent(self.source.parent(statement) or statement)
        while isinstance(around, cst.If):
            if around.orelse is None and "__name__" not in self.source.code(around.test):
                return True
            around = self.source.parent(around)
        return False

    def _wrap_compiled(self, one: MadeOptimizer, name: str) -> bool:
        """Wraps a model that is compiled after its optimizer was made, behind that: torch compiles plain modules."""
        for value in self.source.values.get(name, ()):
            compiled = isinstance(value.node, cst.Call) and self.source.called(value.node) == "torch.compile"
            later = self.source.span(value.statement)[0] > self.source.span(one.call)[0]
            if compiled and later and value.function is self.source.function(one.call):
                block = self.source.parent(self.source.statement(one.call) or one.call)
                around = (value.statement, *self.source.above(value.statement))
                beside = next((node for node in around if self.source.parent(node) is block), None)
                return beside is not None and self.edits.insert_after(beside, _wrapping(name))
        return False

    def name_hidden_models(self, models: set[str]) -> None:
        """Names calls that run a model past its wrapper: compiled copies under another name, methods that compute."""
        for call in self.source.calls:
            name = self.source.called(call)
            parent = self.source.parent(call)
            if name in ("torch.compile", "torch.jit.script", "torch.jit.trace") and call.args:
                given = self.source.code(call.args[0].value)
                target = self.source.code(parent.targets[0].target) if isinstance(parent, cst.Assign) else ""
                if given in models and target != given:
                    self.edits.hand(
                        call,
                        f"{target or 'the result'} would run {given} without the exchange of gradients",
                        f"Compile what fleet.distributed_model({given}) returns, or set strategy.to_static = True.",
                    )
        for loop in self.parts.batch_loops():
            for found in self.source.inside(loop.body):
                if isinstance(found, cst.Call) and isinstance(found.func, cst.Attribute):
                    owner = self.source.code(found.func.value)
                    method = found.func.attr.value
                    own = method in self.source.functions and self.source.class_of(self.source.functions[method])
                    if owner in models and own and method not in _KNOWN_METHODS:
                        self.edits.hand(
                            found,
                            f"{method}() is not the forward of the wrapped model",
                            f"Call {owner}.mark_forward_method({method!r}) once after fleet.distributed_model.",
                        )

    def name_summed_losses(self) -> None:
        """Names losses that are sums over rows: workers average their gradients."""
        for loop in self.parts.batch_loops():
            bodies = [loop.body, *(self.source.functions[n].body for n in called_functions(self.source, loop.body))]
            for call in (n for body in bodies for n in self.source.inside(body) if isinstance(n, cst.Call)):
                found = argument(call, "reduction")
                if found is not None and self.source.code(found.value).strip("\"'") == "sum":
                    self.edits.hand(
                        call,
                        "the loss is a sum over this worker's rows, and gradients are averaged over the workers",
                        'strategy.gradient_scale_configs = {"scale_strategy": "sum"} adds them up, as in one process.',
                    )

    # ---- who writes ----------------------------------------------------------------------------------------------

    def guard_writes(self) -> None:
        """Lets worker 0 alone write files, and names outputs that every worker would open."""
        done: set[int] = set()
        for call in self.source.calls:
            name = self.source.called(call)
            method = call.func.attr.value if isinstance(call.func, cst.Attribute) else ""
            if name in SHARED_OUTPUTS:
                self._name_output(call)
            elif name == "open" and self._writes(call) and not self.guarded(call):
                self.edits.hand(call, "every worker would write this file", f"Open it under `if {FIRST}:`.")
            elif name in WRITERS or (method in WRITING_METHODS and not name and not argument(call, "is_main_process")):
                self._guard(call, done)
                self._name_read_back(call)

    def _name_read_back(self, save: cst.Call) -> None:
        """Names the places where every worker loads a file that worker 0 has just saved."""
        for call in self.source.calls_of("torch.load") if self.source.called(save) == "torch.save" else ():
            behind = self.source.span(call)[0] > self.source.span(save)[1]
            if behind and self.source.function(call) is self.source.function(save) and not self.guarded(call):
                todo = "Before it, on every worker: fleet.barrier_worker()."
                self.edits.hand(call, "worker 0 may still be saving what the others load here", todo)

    def name_own_ends(self) -> None:
        """Names the places where a worker would leave the loop by its own loss, and the others would wait for it."""
        for loop in self.parts.batch_loops():
            read = {
                name
                for name, values in self.source.values.items()
                for value in values
                if value.statement in self.source.inside(loop) and ".item()" in self.source.code(value.node)
            }
            for node in (n for n in self.source.inside(loop.body) if isinstance(n, cst.Break)):
                tests = [
                    n.test for n in self.source.above(node) if isinstance(n, cst.If) and n in self.source.inside(loop)
                ]
                used = {n.value for test in tests for n in (test, *self.source.inside(test)) if isinstance(n, cst.Name)}
                if used & read and tests:
                    todo = "Decide by what is the same on all: fleet.all_reduce(loss) / fleet.worker_num()."
                    self.edits.hand(tests[0], "each worker would end by a number of its own, and the others wait", todo)

    def _writes(self, call: cst.Call) -> bool:
        mode = argument(call, "mode", 1)
        return mode is not None and bool(set(self.source.code(mode.value)) & set("wax"))

    def _name_output(self, call: cst.Call) -> None:
        if not self.guarded(call):
            self.edits.hand(
                call,
                "every worker would open it",
                f"Open it and write to it under `if {FIRST}:`, so that one worker alone writes.",
            )

    def _guard(self, call: cst.Call, done: set[int]) -> None:
        models = {name for made in self.parts.optimizers() for name in made.models}
        if self.source.called(call) == "torch.save" and call.args and self.source.code(call.args[0].value) in models:
            end = self.source.span(call.args[0].value)[1]
            self.edits.replace_span(end, end, ".module")
            todo = f"Save {self.source.code(call.args[0].value)}.module.state_dict(), and load that into a new module."
            self.edits.hand(
                call, "a whole module is saved, and in a job it carries hooks that torch.load refuses", todo
            )
        if self.guarded(call):
            return
        around = self.source.statement(call)
        block = self.source.parent(around) if around is not None else None
        test = self.source.parent(block) if block is not None else None
        # Where an if holds nothing but the call, its condition is extended, once for all calls under it.
        alone = isinstance(block, cst.IndentedBlock) and len(block.body) == 1
        if alone and isinstance(test, cst.If) and test.orelse is None and test.body is block:
            if id(test) not in done:
                done.add(id(test))
                end = self.source.span(test.test)[1]
                simple = not isinstance(test.test, cst.BooleanOperation) or isinstance(test.test.operator, cst.And)
                if simple and not isinstance(test.test, cst.NamedExpr | cst.IfExp | cst.Lambda):
                    self.edits.replace_span(end, end, f" and {FIRST}")
                    return
            else:
                return
        expression = isinstance(self.source.parent(call), cst.Expr)
        if not (expression and self.edits.guard(call, FIRST)):
            self.edits.hand(call, "every worker would write it", f"Put it under `if {FIRST}:`.")

    def guarded(self, node: cst.CSTNode) -> bool:
        """Returns whether ``node``, or every call of the function it is in, runs on one worker."""
        words = ("rank", "master", "main_process", "is_first", "gpu_id == 0", "is_main", "primary")
        for found in self.source.above(node):
            if isinstance(found, cst.If) and any(word in self.source.code(found.test) for word in words):
                return True
            if isinstance(found, cst.FunctionDef):
                calls = self.source.calls_of_own(found)
                return bool(calls) and all(self.guarded(call) for call in calls)
        return False

    # ---- devices -------------------------------------------------------------------------------------------------

    def name_devices(self) -> None:
        """Makes "cuda:0" the worker's own device, and names other fixed indices."""
        for node in self.source.nodes:
            fixed = isinstance(node, cst.SimpleString) and re.fullmatch(r"cuda:\d+", node.raw_value)
            if fixed and isinstance(node, cst.SimpleString):
                if node.raw_value == "cuda:0":
                    self.edits.replace(node, f"{node.quote}cuda{node.quote}")
                else:
                    self.edits.hand(node, "a fixed GPU for every worker", 'Write "cuda": each worker has its own GPU.')

    def sums_in(self, loop: Loop) -> list[tuple[str, cst.AugAssign]]:
        """Returns the numbers that ``loop`` adds up over its batches."""
        found = []
        for node in self.source.inside(loop.body):
            if isinstance(node, cst.AugAssign) and isinstance(node.operator, cst.AddAssign):
                name = self.source.code(node.target)
                plain = isinstance(node.target, cst.Name) and any(
                    isinstance(inner, cst.Call) for inner in (node.value, *self.source.inside(node.value))
                )
                if plain and argument_free(self.source, node.value):
                    found.append((name, node))
        return found


def argument_free(source: ScriptSource, node: cst.BaseExpression) -> bool:
    """Returns whether ``node`` reads a tensor: it calls item(), sum(), mean(), detach() or float()."""
    calls = [found for found in (node, *source.inside(node)) if isinstance(found, cst.Call)]
    names = [source.code(call.func).rpartition(".")[2] for call in calls]
    return any(name in ("item", "sum", "mean", "detach", "float", "tolist") for name in names)


def _wrapping(name: str) -> str:
    return f"{name} = fleet.distributed_model({name})"


def _import_order(line: str) -> tuple[bool, str]:
    return "fleet" in line, line


def _local_name(source: ScriptSource, alias: cst.ImportAlias) -> str:
    return source.code(alias.asname.name) if alias.asname is not None else source.code(alias.name)


def _is_import(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.SimpleStatementLine) and any(
        isinstance(small, cst.Import | cst.ImportFrom) for small in node.body
    )


def _is_text(node: cst.CSTNode) -> bool:
    small = node.body[0] if isinstance(node, cst.SimpleStatementLine) else None
    return isinstance(small, cst.Expr) and isinstance(small.value, cst.SimpleString | cst.ConcatenatedString)
