"""from_accelerate: scripts around an ``Accelerator``.

[Note: What prepare did]
``accelerator.prepare`` divides loaders, moves batches, and steps a scheduler once for every process. Here loaders that
train get a DistributedSampler. Loaders that do not train stay whole: every worker evaluates all rows, so it has the
result that was gathered over the processes before. A scheduler steps once for each call.
"""

from __future__ import annotations

import libcst as cst

from fleet.migrate.divided_data import divide_data
from fleet.migrate.script_port import FIRST, NUM, RANK, ScriptPort
from fleet.migrate.script_source import argument
from fleet.migrate.worker_totals import divide_totals

_ACCELERATOR = ("accelerate.Accelerator", "accelerate.accelerator.Accelerator")
_KIND = '"cuda" if torch.cuda.is_available() else "cpu"'
_DEVICE = f"torch.device({_KIND})"
ATTRIBUTES = {
    "is_main_process": FIRST,
    "is_local_main_process": "(fleet.local_rank() == 0)",
    "is_last_process": f"({RANK} == {NUM} - 1)",
    "process_index": RANK,
    "local_process_index": "fleet.local_rank()",
    "num_processes": NUM,
    "device": _DEVICE,
    "use_distributed": f"({NUM} > 1)",
}
# Methods that become a function of the same arguments.
FUNCTIONS = {
    "print": "print",
    "wait_for_everyone": "fleet.barrier_worker",
    "clip_grad_norm_": "torch.nn.utils.clip_grad_norm_",
    "clip_grad_value_": "torch.nn.utils.clip_grad_value_",
}
REMOVED = ("end_training", "free_memory", "clear", "register_for_checkpointing")
# Methods that go, with the ending that their first argument gets instead.
FIRST_ARGUMENT = {"unwrap_model": ".module", "no_sync": ".no_sync()", "get_state_dict": ".full_state_dict()"}
GATHERS = ("gather", "gather_for_metrics", "reduce", "pad_across_processes")
BY_HAND = {
    "save_state": 'Use fleet.checkpoint.save(folder, {"model": model, "optimizer": optimizer}) on every worker.',
    "load_state": 'Use fleet.checkpoint.load(folder, {"model": model, "optimizer": optimizer}) on every worker.',
    "save_model": "On every worker: state = model.full_state_dict(); on worker 0: torch.save(state, path).",
    "init_trackers": "Open your tracker yourself, on worker 0.",
    "log": "Write the values to your tracker yourself, on worker 0.",
    "get_tracker": "Write the values to your tracker yourself, on worker 0.",
    "autocast": "Set strategy.amp, or use torch.autocast.",
    "split_between_processes": f"Take the rows {RANK} of {NUM}: items[{RANK}::{NUM}].",
    "join_uneven_inputs": "Use torch's Join([model]); docs/guides/recipes.md.",
    "skip_first_batches": "Use fleet.elastic.ElasticSampler; docs/guides/checkpoint.md.",
    "set_trigger": "Use fleet.all_reduce(flag, 'max').",
    "check_trigger": "Use fleet.all_reduce(flag, 'max').",
    "sync_gradients": "gradient_merge updates by itself; remove the condition.",
    "state": "Use fleet.worker_index() and the like.",
}
_DROPPED = ("cpu", "device_placement", "log_with", "project_dir", "project_config", "split_batches", "even_batches")


def port_accelerate(port: ScriptPort) -> None:
    """Turns a script of Accelerate into one for this package."""
    AcceleratePort(port).run()


class AcceleratePort:
    """The edits of one script of Accelerate."""

    def __init__(self, port: ScriptPort) -> None:
        self._port = port
        self._source = port.source
        self._edits = port.edits
        self._accelerators = [call for call in self._source.calls if self._source.called(call) in _ACCELERATOR]
        self._holders = self._find_holders()
        self._merges = self._accumulates()
        self._used: set[int] = set()

    def run(self) -> None:
        """Makes the edits."""
        port = self._port
        for node in self._source.nodes:
            if isinstance(node, cst.Attribute) and self._source.code(node.value) in self._holders:
                self._attribute(node)
        for call in self._accelerators:
            self._init(call)
        if not self._accelerators:
            self._edits.note(self._source.module, "it makes no Accelerator, so fleet.init() is called in another file")
            port.import_fleet()
        loops = port.parts.batch_loops()
        if loops:
            divide_data(port)
            divide_totals(port)
            self._name_unmoved_batches()
        port.guard_writes()
        self._imports()

    # ---- names of the accelerator --------------------------------------------------------------------------------

    def _find_holders(self) -> set[str]:
        source = self._source
        found = {"accelerator", "self.accelerator"}
        for node in source.nodes:
            if isinstance(node, cst.Param) and self._is_annotated(node):
                found.add(node.name.value)
        # Each round follows one more assignment or call; scripts hand it on two or three times.
        for _ in range(4):
            for name, values in source.values.items():
                for value in values:
                    is_new = isinstance(value.node, cst.Call) and value.node in self._accelerators
                    if is_new or (value.element is None and source.code(value.node) in found):
                        found.add(name)
            for function in source.functions.values():
                for parameter in function.params.params:
                    passed = source._passed(parameter.name.value, function)
                    if passed and all(source.code(given) in found for given in passed):
                        found.add(parameter.name.value)
        return found

    def _is_annotated(self, node: cst.Param) -> bool:
        return node.annotation is not None and self._source.qualified(node.annotation.annotation) in _ACCELERATOR

    def _accumulates(self) -> bool:
        given = [a for call in self._accelerators if (a := argument(call, "gradient_accumulation_steps")) is not None]
        return any(self._source.code(a.value) != "1" for a in given)

    # ---- Accelerator(...) ----------------------------------------------------------------------------------------

    def _init(self, call: cst.Call) -> None:
        for found in call.args:
            self._argument(found)
        self._port.init_at(call)
        parent = self._source.parent(call)
        target = parent.targets[0].target if isinstance(parent, cst.Assign) else None
        if isinstance(target, cst.Name) and not self._passed_on(target.value):
            start = self._source.span(target)[0]
            self._edits.replace_span(start, self._source.span(call)[0], "")

    def _passed_on(self, name: str) -> bool:
        """Returns whether the object itself is used, and not only its attributes."""
        for node in self._source.nodes:
            if isinstance(node, cst.Name) and node.value == name:
                parent = self._source.parent(node)
                if isinstance(parent, cst.Arg) and parent.value is node or isinstance(parent, cst.Assign):
                    return True
                if isinstance(parent, cst.Return | cst.Element):
                    return True
        return False

    def _argument(self, found: cst.Arg) -> None:
        name = found.keyword.value if found.keyword is not None else ""
        text = self._source.code(found.value)
        strategy = self._port.strategy
        if name == "mixed_precision":
            self._precision(found, text)
        elif name == "gradient_accumulation_steps":
            if text != "1":
                strategy.append("strategy.gradient_merge = True")
                strategy.append(f'strategy.gradient_merge_configs = {{"k_steps": {text}}}')
        elif name in _DROPPED:
            if (name, text) == ("split_batches", "True"):
                self._edits.hand(found, "batch_size was that of all processes", f"Divide it by {NUM}.")
            elif name not in ("cpu", "device_placement", "split_batches"):
                self._edits.note(found, "it is dropped")
        elif name == "step_scheduler_with_optimizer":
            pass
        else:
            todo = (
                "DistributedDataParallelKwargs(find_unused_parameters=True) is strategy.find_unused_parameters = True; "
            )
            self._edits.hand(
                found, "there is no rule for this argument", todo + "docs/reference/options.md lists the others."
            )

    def _precision(self, found: cst.Arg, text: str) -> None:
        kind = text.strip("\"'")
        strategy = self._port.strategy
        types = {"bf16": "bfloat16", "fp16": "float16"}
        if kind in types:
            strategy += ["strategy.amp = True", f'strategy.amp_configs = {{"dtype": "{types[kind]}"}}']
        elif kind == "fp8":
            self._edits.hand(found, "there is no fp8", 'Use amp_configs = {"dtype": "bfloat16"}.')
        elif kind not in ("no", "None"):
            strategy.append(f'strategy.amp = {text} in ("fp16", "bf16")')
            strategy.append(f'strategy.amp_configs = {{"dtype": "bfloat16" if {text} == "bf16" else "float16"}}')
            if "fp8" in self._source.data.decode():
                self._edits.hand(found, "there is no fp8; it would train in float32", "Take it out of the choices.")

    # ---- accelerator.NAME ----------------------------------------------------------------------------------------

    def _attribute(self, node: cst.Attribute) -> None:
        name = node.attr.value
        parent = self._source.parent(node)
        call = parent if isinstance(parent, cst.Call) and parent.func is node else None
        if call is not None:
            self._method(name, call, node)
        elif name in ATTRIBUTES:
            self._edits.replace(node, ATTRIBUTES[name])
            self._port.import_fleet()
            if name == "device" and "torch" not in self._source.imported():
                self._port.import_fleet("import torch")
        elif name == "distributed_type":
            self._kind(node)
        elif name == "mixed_precision":
            self._kept_precision(node)
        elif name == "save":
            self._edits.replace(node, "torch.save")
        elif name == "sync_gradients" and not self._merges:
            self._edits.replace(node, "True")
        else:
            self._edits.hand(node, "there is no rule for it", BY_HAND.get(name, "See docs/guides/recipes.md."))

    def _kind(self, node: cst.Attribute) -> None:
        """Compares with backends that do not exist here: the answer is known."""
        outer = self._source.parent(node)
        if isinstance(outer, cst.Comparison) and len(outer.comparisons) == 1:
            text = self._source.code(outer.comparisons[0].comparator)
            operator = outer.comparisons[0].operator
            absent = text.rpartition(".")[2] in ("XLA", "TPU", "DEEPSPEED", "FSDP", "MEGATRON_LM")
            if absent and isinstance(operator, cst.Equal | cst.NotEqual):
                self._edits.replace(outer, "False" if isinstance(operator, cst.Equal) else "True")
                return
        self._edits.hand(node, "there are no kinds of backend", "Decide by torch.cuda.is_available().")

    def _kept_precision(self, node: cst.Attribute) -> None:
        """``accelerator.mixed_precision == "no"`` becomes a question to the options."""
        outer = self._source.parent(node)
        compared = outer.comparisons[0] if isinstance(outer, cst.Comparison) and len(outer.comparisons) == 1 else None
        text = self._source.code(compared.comparator).strip("\"'") if compared is not None else ""
        same = compared is not None and isinstance(compared.operator, cst.Equal)
        if compared is not None and outer is not None and isinstance(compared.operator, cst.Equal | cst.NotEqual):
            if text == "no":
                self._edits.replace(outer, f"{'not ' if same else ''}fleet.session.options.amp")
                return
            if text == "fp8":
                self._edits.replace(outer, "False" if same else "True")
                return
        self._edits.hand(node, "the kind of precision is an option here", 'Read amp_configs["dtype"] of the strategy.')

    def _method(self, name: str, call: cst.Call, node: cst.Attribute) -> None:
        if name == "backward":
            self._edits.unwrap(call, after=".backward()")
        elif name == "prepare":
            self._prepare(call)
        elif name in FUNCTIONS:
            self._edits.replace(node, FUNCTIONS[name])
            if name.startswith("clip_grad") and self._merges:
                todo = "Pass grad_clip=fleet.ClipGradByGlobalNorm(...) to an optimizer of fleet.optimizer."
                self._edits.hand(call, "with gradient_merge it would clip each batch", todo)
        elif name in FIRST_ARGUMENT and call.args:
            self._edits.unwrap(call, after=FIRST_ARGUMENT[name])
            if len(call.args) > 1:
                self._edits.note(call, "its further arguments are dropped")
        elif name in GATHERS:
            self._gather(name, call)
        elif name == "accumulate":
            self._accumulate(call)
        elif name in ("main_process_first", "local_main_process_first"):
            self._first(call)
        elif name in REMOVED and isinstance(self._source.parent(call), cst.Expr):
            self._edits.remove(call)
        elif name == "save":
            self._edits.replace(node, "torch.save")
            if not self._port.guarded(call) and not self._edits.guard(call, FIRST):
                self._edits.hand(call, "every worker would write it", f"Put it under `if {FIRST}:`.")
        else:
            self._edits.hand(call, "there is no rule for it", BY_HAND.get(name, "See docs/guides/recipes.md."))

    def _accumulate(self, call: cst.Call) -> None:
        """``with accelerator.accumulate(model):`` goes; strategy.gradient_merge counts the batches."""
        self._empty_context(call)
        self._edits.note(call, "strategy.gradient_merge counts the batches; the with statement does nothing now")
        self._edits.hand(
            call,
            "Accelerate also updates after the last batch of a loader; gradient_merge goes on in the next epoch",
            "Let k_steps divide the number of batches, or pass drop_last=True to the loader. With gradient_merge a "
            "scheduler in the loop advances once for each batch, not for each update.",
        )

    def _empty_context(self, call: cst.Call) -> None:
        """Replaces the context of a with statement, whose block keeps its indentation."""
        self._edits.replace(call, "contextlib.nullcontext()")
        if "contextlib" not in self._source.imported():
            self._port.import_fleet("import contextlib")

    def _first(self, call: cst.Call) -> None:
        self._empty_context(call)
        self._edits.hand(
            call,
            "every worker runs this block at the same time now",
            f"If it writes files: before it `if not {FIRST}: fleet.barrier_worker()`, after it the same with {FIRST}.",
        )

    def _gather(self, name: str, call: cst.Call) -> None:
        loop = next((n for n in self._source.above(call) if isinstance(n, cst.For)), None)
        outer = self._source.parent(self._source.parent(call) or call)
        if loop is not None and not self._port.parts.trains(loop.body):
            self._edits.unwrap(call)
            self._edits.note(call, "every worker evaluates all rows, so there is nothing to gather")
        elif name == "gather" and _is_mean(self._source.parent(call)) and isinstance(outer, cst.Call):
            inner = call.args[0].value
            start, end = self._source.span(outer)
            first, last = self._source.span(inner)
            self._edits.replace_span(start, first, "torch.tensor(fleet.all_reduce(")
            self._edits.replace_span(last, end, f".mean().item()) / {NUM})")
        else:
            todo = "For a number: fleet.all_reduce(x.item()). For rows: torch.distributed.all_gather_object."
            self._edits.hand(call, "whether each worker holds a part of it cannot be read from the script", todo)

    # ---- prepare -------------------------------------------------------------------------------------------------

    def _prepare(self, call: cst.Call) -> None:
        statement = self._source.parent(call)
        target = statement.targets[0].target if isinstance(statement, cst.Assign) else None
        elements = target.elements if isinstance(target, cst.Tuple | cst.List) else ()
        names = [self._source.code(e.value) for e in elements] or ([self._source.code(target)] if target else [])
        plain = len(names) == len(call.args) and all(a.keyword is None and not a.star for a in call.args)
        kinds = [self._part(given.value) for given in call.args]
        if not plain or not isinstance(statement, cst.Assign):
            self._edits.hand(call, "what it returns is not unpacked into as many names", _PREPARE)
            return
        lines = []
        for name, kind, given in zip(names, kinds, call.args, strict=True):
            text = self._source.code(given.value)
            wrapped = {"model": "distributed_model", "optimizer": "distributed_optimizer"}.get(kind, "")
            if wrapped:
                lines.append(f"{name} = fleet.{wrapped}({text})")
            elif name != text:
                lines.append(f"{name} = {text}")
            if kind == "scheduler":
                self._scheduler(call, given)
            elif not kind:
                self._edits.hand(given, "what it is was not found", _PREPARE)
        # distributed_model() needs the optimizer: it may divide parameters that the optimizer holds.
        lines.sort(key=lambda line: "distributed_optimizer" not in line)
        indent = self._edits.indent(self._source.statement(call) or call)
        if lines:
            self._edits.replace(statement, f"{self._edits.newline}{indent}".join(lines))
        else:
            self._edits.remove(statement)

    def _scheduler(self, call: cst.Call, given: cst.Arg) -> None:
        made = [self._source.code(call).replace(" ", "") for call in self._accelerators]
        if any("step_scheduler_with_optimizer=False" in code for code in made):
            return
        self._edits.hand(
            given,
            "Accelerate stepped this scheduler once for each process at every step(); here it steps once",
            "Totals that are computed from len(loader) fit as they are, because the loader is divided. Divide fixed "
            f"numbers (warm-up steps, step_size) by {NUM} to keep the old schedule, or keep them to count updates.",
        )

    def _part(self, node: cst.BaseExpression) -> str:
        """Returns the kind of ``node``: "model", "optimizer", "loader" or "scheduler", or '' where it is unknown."""
        source = self._source
        text = source.code(node)
        calls = [n for n in source.origins(node) if isinstance(n, cst.Call)]
        names = [source.called(call) or source.code(call.func) for call in calls]
        if any(source.called(call) == "torch.utils.data.DataLoader" for call in calls):
            return "loader"
        if any("lr_scheduler" in name or "schedule" in name.lower() for name in names):
            return "scheduler"
        if any(made.name == text or made.call in calls for made in self._port.parts.optimizers()):
            return "optimizer"
        # Objects of other files are told by the methods that the script calls on them.
        used = {
            c.func.attr.value
            for c in source.calls
            if isinstance(c.func, cst.Attribute) and source.code(c.func.value) == text
        }
        if used & {"parameters", "named_parameters", "state_dict", "eval"} and "zero_grad" not in used - {"parameters"}:
            return "model"
        if {"zero_grad", "step"} <= used:
            return "optimizer"
        loops = [n for n in source.nodes if isinstance(n, cst.For)]
        if any(source.code(self._port.parts.items_of(loop)) == text for loop in loops):
            return "loader"
        return "model" if used & {"parameters", "train"} else ""

    # ---- the rest ------------------------------------------------------------------------------------------------

    def _name_unmoved_batches(self) -> None:
        """Moves or names the batches that prepare() moved to the device."""
        for loop in (n for n in self._source.nodes if isinstance(n, cst.For)):
            loaders, _ = self._port.parts.loaders_of(self._port.parts.items_of(loop))
            code = self._source.code(loop.body)
            if not loaders or ".to(" in code or ".cuda(" in code:
                continue
            target: cst.BaseExpression = loop.target
            if self._source.code(loop.iter).startswith("enumerate(") and isinstance(target, cst.Tuple):
                target = target.elements[-1].value
            parts = [e.value for e in target.elements] if isinstance(target, cst.Tuple | cst.List) else []
            if parts and all(isinstance(part, cst.Name) for part in parts):
                names = [self._source.code(part) for part in parts if self._source.code(part) != "_"]
                several = f"({', '.join(names)}{',' if len(names) == 1 else ''})"
                moved = f"(t.to({_KIND}) for t in {several})"
                self._edits.insert_first(loop.body, f"{several[1:-1]} = {moved}")
            else:
                todo = "On a GPU, move what the model gets: batch = {k: v.to(device) for k, v in batch.items()}."
                self._edits.hand(loop, "prepare() moved its batches to the device", todo)

    def _name_import(self, alias: cst.ImportAlias) -> None:
        name = self._source.code(alias.name)
        if name == "set_seed":
            self._edits.note(alias, "it still comes from accelerate, and works without an Accelerator")
        elif name not in ("Accelerator", "DistributedType"):
            todo = "Use logging.getLogger." if name == "get_logger" else "Remove it with what uses it."
            self._edits.hand(alias, "it may need an Accelerator, and there is none any more", todo)

    def _imports(self) -> None:
        """Removes the imports that nothing needs any more."""
        for node in self._source.nodes:
            if isinstance(node, cst.ImportFrom) and not isinstance(node.names, cst.ImportStar) and node.module:
                if self._source.code(node.module).split(".")[0] != "accelerate":
                    continue
                gone = ("Accelerator", "DistributedType")
                left = [a for a in node.names if self._source.code(a.name) not in gone]
                for alias in left:
                    self._name_import(alias)
                if not left:
                    self._edits.remove(node)
                else:
                    kept = ", ".join(self._source.code(alias).rstrip(", ") for alias in left)
                    self._edits.replace(node, f"from {self._source.code(node.module)} import {kept}")
            elif isinstance(node, cst.Param) and node.annotation is not None and self._is_annotated(node):
                self._edits.replace(node.annotation.annotation, "fleet.Fleet")


_PREPARE = "Pass models through fleet.distributed_model and optimizers through fleet.distributed_optimizer."


def _is_mean(node: cst.CSTNode | None) -> bool:
    return isinstance(node, cst.Attribute) and node.attr.value == "mean"
