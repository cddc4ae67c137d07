"""from_paddle_fleet: eager-mode scripts of ``paddle.distributed.fleet``; the static graph is named."""

from __future__ import annotations

import libcst as cst

from fleet.migrate.script_port import NUM, RANK, ScriptPort
from fleet.migrate.script_source import ScriptSource, argument
from fleet.migrate.training_parts import TrainingParts

# Qualified name, or a prefix that ends in a dot -> its replacement. The longest that fits counts.
NAMES = {
    "paddle.distributed.fleet.": "fleet.",
    "paddle.distributed.fleet": "fleet",
    "paddle.distributed.fleet.DistributedStrategy": "fleet.DistributedStrategy",
    "paddle.optimizer.": "fleet.optimizer.",
    "paddle.regularizer.": "fleet.regularizer.",
    "paddle.nn.ClipGradByGlobalNorm": "fleet.ClipGradByGlobalNorm",
    "paddle.nn.ClipGradByNorm": "fleet.ClipGradByNorm",
    "paddle.nn.ClipGradByValue": "fleet.ClipGradByValue",
    "paddle.DataParallel": "fleet.DataParallel",
    "paddle.save": "fleet.save",
    "paddle.load": "fleet.load",
    "paddle.incubate.distributed.models.moe": "fleet.moe",
    "paddle.nn.Layer": "torch.nn.Module",
    "paddle.nn.LayerList": "torch.nn.ModuleList",
    "paddle.nn.Conv2D": "torch.nn.Conv2d",
    "paddle.nn.MaxPool2D": "torch.nn.MaxPool2d",
    "paddle.nn.AvgPool2D": "torch.nn.AvgPool2d",
    "paddle.nn.AdaptiveAvgPool2D": "torch.nn.AdaptiveAvgPool2d",
    "paddle.nn.Conv1D": "torch.nn.Conv1d",
    "paddle.nn.Silu": "torch.nn.SiLU",
    "paddle.concat": "torch.cat",
    "paddle.distributed.fleet.utils.recompute": "fleet.utils.recompute",
    "paddle.equal": "torch.eq",
    "paddle.transpose": "torch.permute",
    "paddle.to_tensor": "torch.as_tensor",
    "paddle.seed": "torch.manual_seed",
    "paddle.io.Dataset": "torch.utils.data.Dataset",
    "paddle.io.TensorDataset": "torch.utils.data.TensorDataset",
    "paddle.io.DataLoader": "torch.utils.data.DataLoader",
}
_SAME_IN_FLEET = [
    "init_parallel_env", "get_rank", "get_world_size", "spawn", "ParallelEnv",
]  # fmt: skip
_SAME_IN_NN = [
    "Linear", "ReLU", "GELU", "Tanh", "Sigmoid", "Dropout", "Sequential", "Embedding", "CrossEntropyLoss", "MSELoss",
    "L1Loss", "Flatten", "Identity", "ParameterList", "LayerNorm", "Softplus", "Softmax", "LogSoftmax", "LeakyReLU",
    "BCELoss", "BCEWithLogitsLoss", "NLLLoss",
]  # fmt: skip
_SAME_FUNCTIONS = [
    "relu", "gelu", "tanh", "sigmoid", "cross_entropy", "mse_loss", "l1_loss", "dropout", "log_softmax", "softmax",
    "silu", "leaky_relu", "one_hot", "embedding", "binary_cross_entropy", "binary_cross_entropy_with_logits",
]  # fmt: skip
_SAME_IN_TORCH = [
    "no_grad", "matmul", "mean", "sum", "ones", "zeros", "randn", "rand", "arange", "exp", "log", "sqrt", "abs",
    "argmax", "stack", "squeeze", "unsqueeze", "flatten", "reshape", "float32", "float16", "bfloat16", "int64",
    "int32", "tanh", "sigmoid", "where", "clip", "bmm", "ones_like", "zeros_like", "topk", "is_tensor", "Tensor",
    "randint", "add", "subtract", "multiply", "divide", "pow", "maximum", "minimum", "square", "full", "eye", "tril",
    "triu", "linspace", "einsum", "isnan", "isinf", "float64", "bool",
]  # fmt: skip
NAMES |= {f"paddle.distributed.{name}": f"fleet.{name}" for name in _SAME_IN_FLEET}
NAMES |= {f"paddle.nn.{name}": f"torch.nn.{name}" for name in _SAME_IN_NN}
NAMES |= {f"paddle.nn.functional.{name}": f"torch.nn.functional.{name}" for name in _SAME_FUNCTIONS}
NAMES |= {f"paddle.{name}": f"torch.{name}" for name in _SAME_IN_TORCH}
# Calls that are moved whole, with their arguments.
_WHOLE = (
    "paddle.set_device", "paddle.device.set_device", "paddle.disable_static", "paddle.io.DistributedBatchSampler",
    "paddle.io.BatchSampler",
)  # fmt: skip
# Modules that keep the name under which the script imports them.
_MODULES = {"paddle.nn": "torch.nn", "paddle.nn.functional": "torch.nn.functional"}
# Names that start so are the static graph: the network is a module here, and the loop calls it.
STATIC = ("paddle.static.", "paddle.fluid.", "paddle.enable_static", "paddle.jit.")
BY_HAND = {
    "paddle.optimizer.lr.": "Write a schedule of torch.optim.lr_scheduler around the optimizer, and step it.",
    "paddle.vision.": "Use torchvision.",
    "paddle.metric.": "Count on each worker, and add up with fleet.metrics.",
    "paddle.amp.": "Set strategy.amp, or use torch.autocast and torch.amp.GradScaler.",
    "paddle.nn.BatchNorm": "torch.nn.BatchNorm2d; its momentum is 1 - Paddle's.",
    "paddle.distributed.": "Use torch.distributed; fleet.init starts its default group.",
    "paddle.nn.functional.linear": "torch's weight is [out, in]: torch.nn.functional.linear(x, weight.T, bias).",
    "paddle.cast": "Write x.to(torch.float32).",
    "paddle.Model": "Write the loop; docs/guides/recipes.md has its parts.",
    "paddle.distributed.fleet.utils.": "See docs/start/migration.md.",
}
_STATIC_WHY = "it belongs to the static graph, which does not exist here"
_STATIC_TODO = "Write the network as a torch.nn.Module and call it in the loop; docs/start/migration.md shows how."
# Names of arguments, where they are not torch's; of calls whose name starts so.
_ARGUMENTS = {
    "paddle.": {"axis": "dim", "start_axis": "start_dim", "stop_axis": "end_dim", "perm": "dims"},
    **{f"paddle.{made}": {"shape": "size"} for made in ("zeros", "ones", "full", "rand", "randn", "randint")},
    **{f"paddle.{made}": {"y": "other"} for made in ("add", "subtract", "multiply", "divide", "maximum", "minimum")},
    **{f"paddle.{made}": {"y": "other"} for made in ("equal", "matmul")},
    **{f"paddle.{made}": {"x": "tensors"} for made in ("concat", "stack")},
    "paddle.nn.LayerNorm": {"epsilon": "eps"},
    "paddle.nn.functional.": {"label": "target", "logit": "input", "x": "input"},
}
# Paddle takes the last axis where none is given; torch guesses one, by the number of axes.
_LAST_AXIS = {
    "paddle.nn.functional.softmax": 1,
    "paddle.nn.functional.log_softmax": 1,
    "paddle.nn.Softmax": 0,
    "paddle.nn.LogSoftmax": 0,
}
_LOADER_DROPPED = ("places", "return_list", "use_shared_memory")
# Methods of Fleet's wrappers -> their names in a plain optimizer or module of torch.
_PLAIN_METHODS = {"clear_grad": "zero_grad", "clear_gradients": "zero_grad"}
_DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool")
_CROSS_ENTROPY = ("paddle.nn.functional.cross_entropy", "paddle.nn.CrossEntropyLoss")
_ENTROPY_OF_PADDLE = ("soft_label", "axis", "use_softmax", "label_smoothing")


def paddle_parts(source: ScriptSource) -> TrainingParts:
    """Returns the parts of a script of Paddle."""
    return TrainingParts(source, ("paddle.io.DataLoader",), ("paddle.optimizer.",))


def port_paddle_fleet(port: ScriptPort) -> None:
    """Turns an eager-mode Fleet script into one for this package."""
    done: set[int] = set()
    for node in port.source.nodes:
        if isinstance(node, cst.Import | cst.ImportFrom):
            continue
        if isinstance(node, cst.Attribute | cst.Name) and not _is_inner(port, node):
            _name(port, node, done)
        elif isinstance(node, cst.Call):
            _call(port, node)
        elif isinstance(node, cst.Assign) and port.source.code(node.targets[0].target).endswith(".stop_gradient"):
            port.edits.remove(node)
    _imports(port)
    names = [port.source.called(call) for call in port.source.calls]
    if port.parts.batch_loops() and not any(name.startswith("paddle.distributed.") for name in names):
        todo = "Add fleet.init(is_collective=True), distributed_optimizer, distributed_model and a DistributedSampler."
        port.edits.hand(port.source.module, "nothing in it starts a job, so every worker would train for itself", todo)


def _is_inner(port: ScriptPort, node: cst.CSTNode) -> bool:
    """Returns whether ``node`` is the beginning of a longer dotted name, or a name that is declared."""
    parent = port.source.parent(node)
    if isinstance(parent, cst.Attribute):
        return parent.attr is node or bool(port.source.qualified(parent))
    in_import = any(isinstance(n, cst.Import | cst.ImportFrom) for n in port.source.above(node))
    return in_import or (isinstance(parent, cst.Arg) and parent.keyword is node)


def _name(port: ScriptPort, node: cst.CSTNode, done: set[int]) -> None:
    name = port.source.qualified(node)
    if not name.startswith("paddle.") or id(node) in done or name in _WHOLE or _is_dropped(port, node):
        return
    fits = [
        known
        for known in (*NAMES, *BY_HAND, *STATIC)
        if name == known or (known[-1:] in "." and name.startswith(known))
    ]
    # Beginnings that end in no dot: BatchNorm1D to BatchNorm3D, the parts of paddle.static.
    fits += [known for known in (*STATIC, "paddle.nn.BatchNorm") if name.startswith(known)]
    best = max(fits, key=len, default="")
    if best in STATIC:
        port.edits.hand(node, _STATIC_WHY, _STATIC_TODO)
    elif best in NAMES and not (best.endswith(".") and not _exists(best, name)):
        new = NAMES[best] + (name.removeprefix(best) if best.endswith(".") else "")
        # The script's own alias of a module (F.relu) stays in use: its import is rewritten, not removed.
        for alias, module in _aliases(port).items():
            if new.startswith(f"{module}.") and "." not in new.removeprefix(f"{module}."):
                new = f"{alias}.{new.removeprefix(f'{module}.')}"
        if port.source.code(node) != new:
            port.edits.replace(node, new)
    else:
        port.edits.hand(node, f"{name} has no counterpart by rule", BY_HAND.get(best, "See docs/start/migration.md."))


def _is_dropped(port: ScriptPort, node: cst.CSTNode) -> bool:
    """Returns whether ``node`` stands in an argument of a loader that goes."""
    for found in port.source.above(node):
        if isinstance(found, cst.Arg) and found.keyword is not None and found.keyword.value in _LOADER_DROPPED:
            outer = port.source.parent(found)
            return isinstance(outer, cst.Call) and port.source.called(outer) == "paddle.io.DataLoader"
    return False


def _aliases(port: ScriptPort) -> dict[str, str]:
    """Returns the names under which the script imports modules that torch has, too."""
    found = {}
    for node in port.source.nodes:
        for alias in node.names if isinstance(node, cst.Import) else ():
            module = _MODULES.get(port.source.code(alias.name))
            if module is not None and alias.asname is not None:
                found[port.source.code(alias.asname.name)] = module
    return found


def _exists(best: str, name: str) -> bool:
    """Returns whether this package has the name that the rule ``best`` makes of ``name``."""
    rest = name.removeprefix(best)
    if best == "paddle.optimizer.":
        return rest.isidentifier()
    if best == "paddle.distributed.fleet.":
        return rest.split(".")[0] not in ("utils", "data_generator") and "auto" not in rest
    return True


def _call(port: ScriptPort, call: cst.Call) -> None:
    name = port.source.called(call)
    method = call.func.attr.value if isinstance(call.func, cst.Attribute) else ""
    if name == "paddle.io.DataLoader":
        _loader(port, call)
    elif name in ("paddle.io.DistributedBatchSampler", "paddle.io.BatchSampler"):
        pass  # moved with the loader
    elif name == "paddle.distributed.spawn":
        port.edits.note(call, "it starts the workers itself: python SCRIPT, without the launcher")
    elif name in _WHOLE:
        port.edits.remove(call)
    elif name in ("paddle.reshape", "paddle.to_tensor") and argument(call, "stop_gradient") is not None:
        port.edits.hand(call, "stop_gradient is requires_grad=False in torch", "Remove the argument.")
    if name.startswith("paddle.") and not name.startswith(("paddle.optimizer.", "paddle.distributed.", "paddle.io.")):
        _arguments(port, call, name)
    if not name and len(call.args) == 2 and _is_made_loss(port, call):
        _flatten(port, call.args[0], call.args[1])
    if not name and not call.args and method != "numpy" and _is_loader(port, call.func):
        port.edits.replace(call, port.source.code(call.func))
    if name.startswith("paddle.nn."):
        _parameter_attributes(port, call)
    if not name and method in _PLAIN_METHODS and isinstance(call.func, cst.Attribute) and not _wraps(port):
        port.edits.replace(call.func.attr, _PLAIN_METHODS[method])
    if name == "paddle.nn.Linear":
        port.edits.note(call, "torch's weights start from another distribution, and are stored as [out, in]")
    if not name and method == "numpy" and not call.args and isinstance(call.func, cst.Attribute):
        port.edits.replace(call.func.attr, "detach().cpu().numpy")
    if (
        not name
        and method == "clear_gradient"
        and not port.source.code(call.func).startswith(("optim", "self.optim", "opt"))
    ):
        port.edits.hand(call, "a parameter has no clear_gradient()", "Write parameter.grad = None.")


def _wraps(port: ScriptPort) -> bool:
    """Returns whether the script passes an optimizer through fleet; otherwise it is a plain one of torch."""
    return any(port.source.code(c.func).endswith(".distributed_optimizer") for c in port.source.calls)


def _parameter_attributes(port: ScriptPort, call: cst.Call) -> None:
    """``bias_attr=False`` is torch's ``bias=False``; other attributes are named."""
    for found in call.args:
        keyword = found.keyword.value if found.keyword is not None else ""
        if found.keyword is not None and keyword == "bias_attr" and port.source.code(found.value) == "False":
            port.edits.replace(found.keyword, "bias")
        elif keyword in ("weight_attr", "bias_attr"):
            todo = "Initialise the parameters with torch.nn.init."
            port.edits.hand(call, "attributes of parameters do not exist", todo)


def _is_loader(port: ScriptPort, node: cst.CSTNode) -> bool:
    """Returns whether ``node`` is a DataLoader, which Paddle allows to be called: ``for x, y in loader():``."""
    return isinstance(node, cst.Name | cst.Attribute) and bool(port.parts.loaders_of(node)[0])


def _arguments(port: ScriptPort, call: cst.Call, name: str) -> None:
    """Gives arguments torch's names and dtypes, and the losses and axes that Paddle means."""
    renamed = {old: new for start, names in _ARGUMENTS.items() if name.startswith(start) for old, new in names.items()}
    for found in call.args:
        keyword = found.keyword.value if found.keyword is not None else ""
        if found.keyword is not None and keyword in renamed:
            port.edits.replace(found.keyword, renamed[keyword])
        dtype = found.value.raw_value if isinstance(found.value, cst.SimpleString) else ""
        if dtype in _DTYPES and keyword in ("", "dtype"):
            port.edits.replace(found.value, f"torch.{dtype}" if keyword else f"dtype=torch.{dtype}")
    if (place := _LAST_AXIS.get(name)) is not None and argument(call, "axis", place) is None:
        port.edits.add_argument(call, "dim=-1")
    if name == "paddle.nn.AvgPool2D" and argument(call, "padding", 2) is not None:
        port.edits.hand(call, "Paddle leaves the padding out of the mean", "Pass count_include_pad=False.")
    if name in _CROSS_ENTROPY and _is_torchs_loss(port, call) and name == _CROSS_ENTROPY[0]:
        _flatten(port, argument(call, "input", 0), argument(call, "label", 1))


def _is_torchs_loss(port: ScriptPort, call: cst.Call) -> bool:
    """Returns whether a cross entropy needs flat arguments alone to be torch's; names what else it means."""
    others = [a.keyword.value for a in call.args if a.keyword is not None and a.keyword.value in _ENTROPY_OF_PADDLE]
    reduction = argument(call, "reduction")
    if reduction is not None and port.source.code(reduction.value).strip("\"'") not in ("mean", "sum"):
        others.append("reduction")
    if others:
        todo = "torch's classes are axis 1, its labels have no axis of 1, soft labels need no switch."
        port.edits.hand(call, f"torch's cross entropy has no {', '.join(others)} with this meaning", todo)
    return not others


def _flatten(port: ScriptPort, logits: cst.Arg | None, label: cst.Arg | None) -> None:
    """Paddle's classes are the last axis, and its labels may have an axis of 1 more; torch's are axis 1, and [N]."""
    if logits is not None and label is not None:
        port.edits.call_method(logits.value, ".flatten(0, -2)")
        port.edits.call_method(label.value, ".flatten()")


def _is_made_loss(port: ScriptPort, call: cst.Call) -> bool:
    """Returns whether ``call`` calls a ``CrossEntropyLoss`` of the script that is torch's on flat arguments."""
    made = port.source.origins(call.func) if isinstance(call.func, cst.Name | cst.Attribute | cst.Call) else []
    calls = [n for n in made if isinstance(n, cst.Call) and port.source.called(n) == _CROSS_ENTROPY[1]]
    return bool(made) and len(calls) == len(made) and all(_is_torchs_loss(port, n) for n in calls)


def _loader(port: ScriptPort, call: cst.Call) -> None:
    """Rewrites the sampler of a loader: Paddle's makes batches, torch's takes rows."""
    if (fed := argument(call, "feed_list")) is not None:
        port.edits.hand(fed, _STATIC_WHY, _STATIC_TODO)
    dropped = [a for a in call.args if a.keyword is not None and a.keyword.value in _LOADER_DROPPED]
    port.edits.drop_arguments(call, dropped)
    given = argument(call, "batch_sampler")
    if given is None:
        port.edits.note(call, "every worker reads all rows, as before")
        return
    made = [n for n in port.source.origins(given.value) if isinstance(n, cst.Call)]
    for sampler in made:
        if port.source.called(sampler) != "paddle.io.DistributedBatchSampler":
            port.edits.hand(sampler, "it does not divide the rows over the workers", "Use DistributedSampler.")
            continue
        dataset = argument(sampler, "dataset", 0)
        size = argument(sampler, "batch_size", 1)
        if dataset is None or size is None:
            port.edits.hand(sampler, "its dataset and batch size were not found", "Use DistributedSampler.")
            continue
        parts = {name: argument(sampler, name, place) for name, place in _SAMPLER.items()}
        code = {name: port.source.code(a.value) if a is not None else _DEFAULTS[name] for name, a in parts.items()}
        rows = f"{port.source.code(dataset.value)}, {code['num_replicas']}, {code['rank']}, shuffle={code['shuffle']}"
        port.edits.replace(
            sampler,
            f"torch.utils.data.BatchSampler(torch.utils.data.DistributedSampler({rows}), "
            f"{port.source.code(size.value)}, {code['drop_last']})",
        )
    _epochs(port, port.source.code(given.value))


_SAMPLER = {"num_replicas": 2, "rank": 3, "shuffle": 4, "drop_last": 5}
_DEFAULTS = {"num_replicas": NUM, "rank": RANK, "shuffle": "False", "drop_last": "False"}


def _epochs(port: ScriptPort, name: str) -> None:
    """``sampler.set_epoch``: torch's is one layer deeper."""
    for call in port.source.calls:
        if isinstance(call.func, cst.Attribute) and call.func.attr.value == "set_epoch":
            start = port.source.span(call.func.attr)[0]
            port.edits.replace_span(start, start, "sampler.")


def _imports(port: ScriptPort) -> None:
    """Replaces Paddle's imports."""
    nodes = [n for n in port.source.nodes if isinstance(n, cst.Import | cst.ImportFrom)]
    ours = [n for n in nodes if "paddle" in port.source.code(n)]
    _named_imports(port, ours)
    # The new imports take the lines of the first old ones, so that the head of the script keeps its form.
    wanted = ["import torch", "from fleet import fleet"]
    last = None
    for node in ours:
        modules = [port.source.code(alias.name) for alias in node.names] if isinstance(node, cst.Import) else []
        kept = modules and all(module in _MODULES for module in modules)
        if kept and isinstance(node, cst.Import):
            for alias in node.names:
                port.edits.replace(alias.name, _MODULES[port.source.code(alias.name)])
            continue
        if isinstance(port.source.function(node), cst.Module):
            last = node
            if wanted:
                port.edits.replace(node, wanted.pop(0))
                continue
        port.edits.remove(node)
    if wanted and last is not None:
        port.edits.insert_after(last, *wanted)


def _named_imports(port: ScriptPort, nodes: list[cst.Import | cst.ImportFrom]) -> None:
    for node in nodes:
        if isinstance(node, cst.ImportFrom) and isinstance(node.names, cst.ImportStar):
            port.edits.hand(node, "what it brings cannot be read from the script", "Import the names one by one.")
