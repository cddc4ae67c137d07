"""from_ddp: torch.distributed, DistributedDataParallel, DistributedSampler, mp.spawn."""

from __future__ import annotations

import libcst as cst

from fleet.migrate.divided_data import divide_data
from fleet.migrate.from_single import share_scalers
from fleet.migrate.script_port import NUM, RANK, ScriptPort
from fleet.migrate.script_source import argument

DEVICE = '"cuda" if torch.cuda.is_available() else "cpu"'
# Calls without arguments of a group -> their replacement.
CALLS = {
    "torch.distributed.get_rank": RANK,
    "torch.distributed.get_world_size": NUM,
    "torch.distributed.barrier": "fleet.barrier_worker()",
}
# Statements that go: the launcher or fleet.init does this work.
REMOVED = ("torch.distributed.destroy_process_group", "torch.cuda.set_device", "torch.accelerator.set_device_index")
# Calls that stay, because they use the default group, which fleet.init starts.
KEPT = [
    "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "gather", "scatter", "reduce_scatter",
    "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "send", "recv", "isend", "irecv", "all_gather_object",
    "broadcast_object_list", "gather_object", "scatter_object_list", "monitored_barrier", "is_initialized",
    "is_available", "is_nccl_available", "is_gloo_available", "get_backend", "ReduceOp", "is_torchelastic_launched",
]  # fmt: skip
# Names that have no counterpart by rule -> what to do.
BY_HAND = {
    "torch.distributed.new_group": "A mesh comes from strategy.hybrid_configs; a plain group works beside it.",
    "torch.distributed.new_subgroups": "Groups of a mesh come from strategy.hybrid_configs.",
    "torch.distributed.init_device_mesh": "Set strategy.hybrid_configs; docs/guides/hybrid.md.",
    "torch.distributed.device_mesh.init_device_mesh": "Set strategy.hybrid_configs; docs/guides/hybrid.md.",
    "torch.distributed.optim.ZeroRedundancyOptimizer": "Use the plain optimizer and strategy.sharding = True.",
    "torch.distributed.fsdp.FullyShardedDataParallel": "Use fleet.distributed_model, and strategy.sharding, stage 3.",
    "torch.distributed.fsdp.fully_shard": "Use fleet.distributed_model, and strategy.sharding, stage 3.",
    "torch.distributed.rpc.init_rpc": "There is no RPC; parameter servers are in docs/ps/README.md.",
    "torch.nn.SyncBatchNorm.convert_sync_batchnorm": "Remove it and set strategy.sync_batch_norm = True.",
}
# Arguments of DistributedDataParallel that need nothing here.
_DDP_DROPPED = ("device_ids", "output_device", "dim", "gradient_as_bucket_view")
# Variables that the launcher sets.
_LAUNCHER_SETS = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK")
_INIT = "torch.distributed.init_process_group"
_DDP = "torch.nn.parallel.DistributedDataParallel"


def port_ddp(port: ScriptPort) -> None:
    """Turns a DistributedDataParallel script into one for this package."""
    for call in port.source.calls:
        _call(port, call)
    _environment(port)
    _devices(port)
    condition = _init(port)
    wrapped = port.source.calls_of(_DDP)
    for call in wrapped:
        _wrap(port, call)
    if port.parts.batch_loops():
        port.wrap_optimizers(with_models=not wrapped, condition=condition)
        divide_data(port, samplers=False)
    share_scalers(port, condition)
    port.guard_writes()
    port.name_own_ends()
    _named_attributes(port)
    _name_indices(port)


def _init(port: ScriptPort) -> str:
    """Puts fleet.init in the place of init_process_group; returns the condition under which it runs, or ''."""
    inits = port.source.calls_of(_INIT)
    if not inits:
        port.init_first()
        return ""
    conditions = []
    for call in inits:
        if (found := argument(call, "timeout")) is not None:
            port.edits.note(found, "the time a collective may take", "Set PADDLE_PG_TIMEOUT, in milliseconds.")
        port.init_at(call)
        around = [n for n in port.source.above(call) if isinstance(n, cst.If)]
        conditions += [port.source.code(n.test) for n in around if "__name__" not in port.source.code(n.test)]
        is_plain = all(
            isinstance(n.test, cst.Name | cst.Attribute) for n in around if "__name__" not in port.source.code(n.test)
        )
        if len(around) > 1 or not is_plain:
            port.edits.hand(
                call,
                "it runs under a condition, and fleet.distributed_optimizer needs it before",
                "Call fleet.init in any case; it works in one process, too.",
            )
    return conditions[0] if len(set(conditions)) == 1 and conditions[0].replace(".", "").isidentifier() else ""


def _call(port: ScriptPort, call: cst.Call) -> None:
    name = port.source.called(call)
    if name in CALLS:
        if call.args:
            port.edits.hand(call, "it names a group or devices", f"For all workers: {CALLS[name]}.")
        else:
            port.edits.replace(call, CALLS[name])
            port.import_fleet()
    elif name in REMOVED:
        if not _is_chosen(port, call):
            port.edits.remove(call)
    elif name == "torch.utils.data.DistributedSampler":
        _sampler(port, call)
    elif name in ("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes"):
        _spawn(port, call)
    elif name in BY_HAND:
        port.edits.hand(call, "it has no counterpart by rule", BY_HAND[name])
    elif name.startswith("torch.distributed.") and name.count(".") == 2 and name != _INIT:
        last = name.rpartition(".")[2]
        if last not in KEPT:
            port.edits.hand(call, "it is not known here", "It works if it uses the default group of torch.")
        elif argument(call, "group") is not None:
            port.edits.hand(call, "it uses a group of its own", "See torch.distributed.new_group above.")
        elif last == "all_reduce" and any(".grad" in port.source.code(a.value) for a in call.args):
            port.edits.hand(call, "fleet.distributed_model averages gradients in backward()", "Remove this exchange.")
        elif not last.startswith(("is_", "get_", "Reduce")):
            port.edits.note(call, "stays: it uses the group that fleet.init starts for two or more workers")


def _is_chosen(port: ScriptPort, call: cst.Call) -> bool:
    """Returns whether the user of the script asked for this device: ``if args.gpu is not None:``."""
    tests = [n.test for n in port.source.above(call) if isinstance(n, cst.If)]
    return any("is not None" in port.source.code(test) for test in tests)


def _sampler(port: ScriptPort, call: cst.Call) -> None:
    plain = [a for a in call.args if a.keyword is None]
    given = {a.keyword.value for a in call.args if a.keyword is not None}
    if len(plain) > 1 or given & {"num_replicas", "rank"} or any(a.star for a in call.args):
        return
    first = call.args[0]
    end = port.source.span(first)[1]
    port.edits.replace_span(end, end, f", {NUM}, {RANK}")
    port.import_fleet()


def _wrap(port: ScriptPort, call: cst.Call) -> None:
    port.edits.replace(call.func, "fleet.distributed_model")
    port.import_fleet()
    dropped = [a for a in call.args[1:] if a.keyword is None or a.keyword.value in _DDP_DROPPED]
    for found in call.args[1:]:
        name = found.keyword.value if found.keyword is not None else ""
        text = port.source.code(found.value)
        if found in dropped:
            continue
        if name == "find_unused_parameters" and text in ("True", "False"):
            port.strategy += ["strategy.find_unused_parameters = True"] if text == "True" else []
        elif name == "bucket_cap_mb" and text.isdigit() and int(text):
            port.strategy.append(f"strategy.fuse_grad_size_in_MB = {text}")
        elif (name, text) in (("broadcast_buffers", "True"), ("static_graph", "False")):
            pass
        else:
            port.edits.hand(found, f"fleet.distributed_model takes no {name or text}", _ADVICE.get(name, "Remove it."))
        dropped.append(found)
    port.edits.drop_arguments(call, dropped)


_ADVICE = {
    "find_unused_parameters": "Set strategy.find_unused_parameters before fleet.init.",
    "bucket_cap_mb": "Set strategy.fuse_grad_size_in_MB before fleet.init.",
    "broadcast_buffers": "Buffers come from worker 0 before each forward; there is no switch.",
    "static_graph": "Set strategy.find_unused_parameters if parameters are left out of the loss.",
    "process_group": "Set strategy.hybrid_configs for a mesh of workers.",
    "mixed_precision": "Set strategy.amp and amp_configs.",
}


def _spawn(port: ScriptPort, call: cst.Call) -> None:
    """Turns mp.spawn(f, args, nprocs) into f(rank, *args): the launcher starts the processes."""
    given = argument(call, "args", 1)
    function = argument(call, "fn", 0)
    count = argument(call, "nprocs", 2)
    nested = [
        n for n in port.source.above(call) if isinstance(n, cst.If) and "__name__" not in port.source.code(n.test)
    ]
    values = given.value if given is not None else None
    simple = isinstance(values, cst.Tuple) and isinstance(port.source.parent(call), cst.Expr) and not nested
    if not simple or function is None or not isinstance(function.value, cst.Name) or not isinstance(values, cst.Tuple):
        port.edits.hand(
            call,
            "the launcher starts the processes",
            "Call the function once, with fleet.get_rank() and fleet.get_world_size(), which work before fleet.init.",
        )
        return
    number = port.source.code(count.value) if count is not None else ""
    texts = [port.source.code(element.value) for element in values.elements]
    passed = ["fleet.get_world_size()" if text == number else text for text in texts]
    port.edits.replace(call, f"{function.value.value}({', '.join(['fleet.get_rank()', *passed])})")
    port.import_fleet()
    port.edits.note(call, "the launcher starts the processes: python -m fleet.launch --nproc_per_node=N SCRIPT")
    # mp.spawn counts processes of one node; rank arithmetic for several nodes would count them twice now.
    body = port.source.functions.get(function.value.value)
    uses = [n for n in port.source.inside(body.body) if isinstance(n, cst.BinaryOperation)] if body else []
    rank = body.params.params[0].name.value if body and body.params.params else ""
    for node in uses:
        if "*" in port.source.code(node) and rank in port.source.code(node).replace("*", " ").split():
            port.edits.hand(node, f"{rank} is the rank in the whole job now, not that on the node", f"Write {rank}.")


def _environment(port: ScriptPort) -> None:
    """Removes assignments of the launcher's variables, and gives --local_rank its value from the launcher."""
    for node in port.source.nodes:
        if isinstance(node, cst.Assign) and isinstance(node.targets[0].target, cst.Subscript):
            text = port.source.code(node.targets[0].target)
            if any(text in (f'os.environ["{n}"]', f"os.environ['{n}']") for n in _LAUNCHER_SETS):
                port.edits.remove(node)
        elif isinstance(node, cst.Call) and port.source.code(node.func).endswith(".add_argument"):
            names = {a.value.raw_value for a in node.args if isinstance(a.value, cst.SimpleString)}
            if names & {"--local_rank", "--local-rank"}:
                _local_rank(port, node)
        elif isinstance(node, cst.Call) and _sets_default(port, node):
            port.edits.remove(node)


def _sets_default(port: ScriptPort, call: cst.Call) -> bool:
    name = port.source.code(call.args[0].value).strip("\"'") if call.args else ""
    return port.source.called(call) == "os.environ.setdefault" and name in _LAUNCHER_SETS


def _local_rank(port: ScriptPort, call: cst.Call) -> None:
    """The launcher passes no --local_rank: its default becomes the variable LOCAL_RANK."""
    default = argument(call, "default")
    old = port.source.code(default.value) if default is not None else "0"
    made = f'int(os.environ.get("LOCAL_RANK", {old}))'
    if "LOCAL_RANK" in old:
        return
    if default is not None:
        port.edits.replace(default.value, made)
    else:
        port.edits.add_argument(call, f"default={made}")
    if (required := argument(call, "required")) is not None:
        port.edits.replace(required.value, "False")
    if "os" not in port.source.imported():
        port.import_fleet("import os")


def _devices(port: ScriptPort) -> None:
    """Makes devices that are computed from a rank the worker's own."""
    for node in port.source.nodes:
        is_text = isinstance(node, cst.FormattedString) and port.source.code(node)[2:].startswith("cuda:")
        if is_text:
            inside = port.source.parent(node)
            alone = isinstance(inside, cst.Assign | cst.Arg | cst.AnnAssign)
            port.edits.replace(node, DEVICE if alone else f"({DEVICE})")
        elif isinstance(node, cst.BinaryOperation | cst.Call) and _is_formatted(port, node):
            around = port.source.parent(node)
            decided = isinstance(around, cst.IfExp) and "is_available" in port.source.code(around.test)
            port.edits.replace(node, '"cuda"' if decided else f"({DEVICE})")
        elif isinstance(node, cst.Call) and _is_numbered(port, node):
            port.edits.drop_arguments(node, [node.args[1]])
            port.edits.replace(node.args[0].value, DEVICE)
    port.name_devices()


def _is_formatted(port: ScriptPort, node: cst.BinaryOperation | cst.Call) -> bool:
    """Returns whether ``node`` is ``"cuda:%d" % rank``, ``"cuda:" + str(rank)`` or ``"cuda:{}".format(rank)``."""
    left = node.left if isinstance(node, cst.BinaryOperation) else getattr(node.func, "value", None)
    return isinstance(left, cst.SimpleString) and left.raw_value in ("cuda:%d", "cuda:%s", "cuda:", "cuda:{}")


def _is_numbered(port: ScriptPort, call: cst.Call) -> bool:
    two = port.source.called(call) == "torch.device" and len(call.args) == 2
    return two and port.source.code(call.args[0].value).strip("\"'") == "cuda"


def _named_attributes(port: ScriptPort) -> None:
    for node in port.source.nodes:
        if isinstance(node, cst.Name | cst.Attribute) and port.source.qualified(node) == _DDP:
            _name_class(port, node)
        if not isinstance(node, cst.Attribute):
            continue
        if node.attr.value == "require_backward_grad_sync" and isinstance(port.source.parent(node), cst.AssignTarget):
            port.edits.hand(
                node,
                "it changes nothing here: each backward exchanges, with the same gradients in the end",
                "To save the exchanges, run all but the last backward under `with model.no_sync():`.",
            )
        elif node.attr.value == "register_comm_hook":
            port.edits.hand(node, "hooks are options here", "For fp16_compress_hook: strategy.fp16_allreduce = True.")


def _name_class(port: ScriptPort, node: cst.Name | cst.Attribute) -> None:
    """Makes ``isinstance(model, DistributedDataParallel)`` ask for the class that fleet returns."""
    parent = port.source.parent(node)
    inside = [n for n in port.source.above(node) if isinstance(n, cst.Import | cst.ImportFrom | cst.ClassDef)]
    is_base = isinstance(parent, cst.Arg) and isinstance(port.source.parent(parent), cst.ClassDef)
    if is_base:
        port.edits.hand(node, "a class of its own around the exchange", "Pass the module to fleet.distributed_model.")
    elif not (isinstance(parent, cst.Call) and parent.func is node) and not isinstance(
        inside[0] if inside else None, cst.Import | cst.ImportFrom
    ):
        port.edits.replace(node, "fleet.FleetModel")


def _name_indices(port: ScriptPort) -> None:
    """Notes where the number of a GPU moves something: it fits where workers use the GPUs 0 to n-1 of a node."""
    for call in port.source.calls:
        method = call.func.attr.value if isinstance(call.func, cst.Attribute) else ""
        if method in ("to", "cuda") and call.args and not port.source.called(call):
            text = port.source.code(call.args[0].value)
            if text.rpartition(".")[2] in ("rank", "gpu", "gpu_id", "local_rank", "device_id", "ddp_local_rank"):
                port.edits.note(
                    call, f"{text} is the index of a GPU: right where workers use the GPUs 0 to n-1 of a node"
                )
                return
