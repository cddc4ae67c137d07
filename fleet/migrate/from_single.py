"""from_single: a plain torch script in one process."""

from __future__ import annotations

import libcst as cst

from fleet.migrate.divided_data import divide_data
from fleet.migrate.script_port import ScriptPort
from fleet.migrate.script_source import argument
from fleet.migrate.worker_totals import divide_totals

# Imports of programs that run the loop themselves: there is no loop to move. Module -> what to do.
OTHER_PROGRAMS = {
    "deepspeed": "Use fleet's sharding and amp options in place of the engine: strategy.sharding = True.",
    "lightning": "Keep the Trainer; it runs the loop itself.",
    "pytorch_lightning": "Keep the Trainer; it runs the loop itself.",
    "horovod.torch": "Replace hvd.init, hvd.DistributedOptimizer and hvd.broadcast_parameters by fleet.init, "
    "fleet.distributed_optimizer and fleet.distributed_model.",
    "transformers.Trainer": "Keep the Trainer; it runs the loop itself.",
}


_SEEDS = ("torch.manual_seed", "torch.random.manual_seed", "accelerate.utils.set_seed", "transformers.set_seed")
_DRAWS = [f"torch.{name}" for name in ("rand", "randn", "randint", "normal", "bernoulli", "randperm")]
_DRAWS += ["torch.rand_like", "torch.randn_like", "torch.randint_like"]


def port_single(port: ScriptPort) -> None:
    """Turns a script of one process into one of many."""
    if not port.parts.batch_loops():
        port.edits.hand(
            port.source.module, "no loop was found that calls backward()", "Move the training loop by hand."
        )
        return
    _unwrap_data_parallel(port)
    port.init_first()
    port.wrap_optimizers(with_models=True)
    port.name_hidden_models({name for made in port.parts.optimizers() for name in made.models})
    share_scalers(port)
    same_splits(port)
    divide_data(port)
    divide_totals(port)
    port.name_summed_losses()
    port.name_own_ends()
    port.guard_writes()
    port.name_devices()


def share_scalers(port: ScriptPort, condition: str = "") -> None:
    """Passes every GradScaler through ``fleet.distributed_scaler``."""
    for call in port.source.calls_of("torch.amp.GradScaler"):
        start, end = port.source.span(call)
        parent = port.source.parent(call)
        target = parent.targets[0].target if isinstance(parent, cst.Assign) else None
        name = port.source.code(target) if isinstance(target, cst.Name | cst.Attribute) else ""
        lines = [f"{name} = fleet.distributed_scaler({name})"]
        if condition:
            lines = [f"if {condition}:", f"{port.edits.indent_step}{lines[0]}"]
        if not (name and port.edits.insert_after(call, *lines)):
            port.edits.replace_span(start, start, "fleet.distributed_scaler(")
            port.edits.replace_span(end, end, ")")
    for call in port.source.calls:
        if port.source.called(call) in ("timm.utils.NativeScaler", "timm.utils.cuda.NativeScaler"):
            port.edits.hand(call, "it holds a GradScaler", "Pass its _scaler through fleet.distributed_scaler once.")


def same_splits(port: ScriptPort) -> None:
    """Makes random splits of the data the same on every worker, where the script sets no seed."""
    seeds = ("manual_seed", "set_seed", "seed_everything", "seed")
    names = [port.source.code(call.func).rpartition(".")[2] for call in port.source.calls]
    if any(name in seeds for name in names):
        return
    around = {port.source.module, *(port.source.function(made.call) for made in port.parts.optimizers())}
    loops = port.parts.batch_loops()
    for call in port.source.calls:
        name = port.source.called(call)
        if (
            name in _DRAWS
            and port.source.function(call) in around
            and not any(n in loops for n in port.source.above(call))
        ):
            port.edits.note(
                call, "without a seed, every worker draws other numbers", "Seed alike before it, if they are data."
            )
        if name == "torch.utils.data.random_split" and argument(call, "generator", 2) is None:
            port.edits.add_argument(call, "generator=torch.Generator().manual_seed(0)")
            port.edits.note(call, "without a seed, every worker would draw another split")
            if "torch" not in port.source.imported():
                port.import_fleet("import torch")
        elif name == "sklearn.model_selection.train_test_split" and argument(call, "random_state") is None:
            port.edits.add_argument(call, "random_state=0")
            port.edits.note(call, "without a seed, every worker would draw another split")
        elif name in ("torch.randperm", "random.shuffle", "numpy.random.shuffle", "numpy.random.permutation"):
            port.edits.hand(call, "without a seed, every worker draws another order", "Seed it alike on every worker.")


def note_equal_draws(port: ScriptPort) -> None:
    """Notes where dropout, or the loop itself, draws the same numbers on every worker, because all are seeded alike."""
    seeds = [call for call in port.source.calls if port.source.called(call) in _SEEDS and call.args]
    ranked = any(word in port.source.code(call) for call in seeds for word in ("rank", "process_index", "seed_offset"))
    loops = port.parts.batch_loops()
    drawn = [call for call in port.source.calls if port.source.called(call) in _DRAWS]
    drawn = [c for c in drawn if argument(c, "generator") is None and any(n in loops for n in port.source.above(c))]
    drops = any(isinstance(n, cst.Name) and "dropout" in n.value.lower() for n in port.source.nodes)
    if ranked or not (drawn or (drops and seeds)):
        return
    seed = port.source.code(seeds[-1].args[0].value) if seeds else "seed"
    port.edits.note(
        drawn[0] if drawn else seeds[-1],
        "every worker draws the same numbers here, because all are seeded alike"
        if drawn
        else "dropout drops the same units on every worker, because all are seeded alike",
        f"For draws of their own add torch.manual_seed({seed} + fleet.worker_index()) after the model is made.",
    )


def _unwrap_data_parallel(port: ScriptPort) -> None:
    for call in port.source.calls_of("torch.nn.DataParallel"):
        parent = port.source.parent(call)
        target = port.source.code(parent.targets[0].target) if isinstance(parent, cst.Assign) else ""
        if target and call.args and port.source.code(call.args[0].value) == target:
            port.edits.remove(call)
        else:
            port.edits.unwrap(call)
        port.edits.note(call, "a worker has one device, so DataParallel goes")
