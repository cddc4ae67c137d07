"""divide_data: each worker trains on its own rows: DistributedSampler, set_epoch, and totals over all workers."""

from __future__ import annotations

import libcst as cst

from fleet.migrate.script_port import NUM, RANK, ScriptPort
from fleet.migrate.script_source import argument
from fleet.migrate.training_parts import Loop

_LINE = 116
_EXCLUSIVE = ("sampler", "batch_sampler")


def divide_data(port: ScriptPort, *, samplers: bool = True) -> None:
    """Divides the data of every loop that trains.

    Args:
        port: the script.
        samplers: gives loaders without a DistributedSampler one; otherwise such a loader is named.
    """
    done: set[cst.Call] = set()
    loops = port.parts.batch_loops()
    for loop in loops:
        if isinstance(loop, cst.While) or port.parts.counts(loop):
            _name_loop(port, loop)
            continue
        items = port.parts.items_of(loop)
        loaders, others = port.parts.loaders_of(items)
        if not loaders:
            _name_loop(port, loop, items)
        for other in others if loaders else []:
            port.edits.hand(other, f"{port.source.code(items)} may be this, too", "Give each worker its own rows.")
        # Several loops may use one loader, which gets one sampler.
        fresh = [call for call in loaders if call not in done]
        done |= set(loaders)
        shuffled = [_divide(port, call, samplers) for call in fresh]
        if loaders and (any(shuffled) or not fresh) and not _sets_epoch(port):
            _set_epoch(port, loop, items)


def _name_loop(port: ScriptPort, loop: Loop, items: cst.BaseExpression | None = None) -> None:
    text = port.source.code(items) if items is not None else "this loop"
    ranked = any(word in port.source.data.decode() for word in ("seed_offset", "ddp_rank", "process_index"))
    if items is None and ranked:
        port.edits.note(loop, "its batches come from no DataLoader; the script's own use of the rank divides them")
        return
    port.edits.hand(
        loop,
        f"{text} is no torch DataLoader that the script makes, so every worker may train on the same rows",
        f"Give each worker its rows: number {RANK} of {NUM}, or another seed for each.",
    )


def _divide(port: ScriptPort, call: cst.Call, samplers: bool) -> bool:
    """Gives the loader a sampler; returns whether its order changes with the epoch."""
    if any(argument(call, name) is not None for name in _EXCLUSIVE) or len(_plain(call)) > 3:
        return _has_sampler(port, call)
    dataset = argument(call, "dataset", 0)
    stars = [a for a in call.args if a.star]
    if not samplers or dataset is None or len(_plain(call)) > 2 or any(a.star == "*" for a in stars):
        port.edits.hand(call, "its rows are not divided over the workers", _advice(port, call))
        return False
    if _is_iterable(port, dataset.value):
        port.edits.hand(
            call, "an IterableDataset has no sampler", f"Skip rows in __iter__: row i if i % {NUM} == {RANK}."
        )
        return False
    shuffle = argument(call, "shuffle")
    order = port.source.code(shuffle.value) if shuffle is not None else _order_in(port, call, stars)
    if order is None:
        port.edits.hand(call, "whether it shuffles stands in a dict that others use, too", _advice(port, call))
        return False
    name = _named(port, dataset)
    tail = "" if order == "True" else f", shuffle={order}"
    text = f"sampler={_sampler(port, call, f'{_sampler_class(port)}({name}, {NUM}, {RANK}{tail})')}"
    # A loader refuses shuffle beside a sampler, so the sampler takes its place.
    if shuffle is not None:
        port.edits.replace(shuffle, text)
    else:
        port.edits.add_argument(call, text, before=stars[0] if stars else None)
    batch = argument(call, "batch_size", 1)
    size = f" ({port.source.code(batch.value)})" if batch is not None else ""
    port.edits.note(call, f"the batch size{size} is now that of each worker")
    return order != "False"


def _plain(call: cst.Call) -> list[cst.Arg]:
    return [a for a in call.args if a.keyword is None and not a.star]


def _advice(port: ScriptPort, call: cst.Call) -> str:
    return f"Pass sampler=DistributedSampler(dataset, {NUM}, {RANK}) and omit shuffle; call sampler.set_epoch(epoch)."


def _has_sampler(port: ScriptPort, call: cst.Call) -> bool:
    """Returns whether the loader's own sampler divides the rows and shuffles; names it where it does not divide."""
    given = argument(call, "sampler") or argument(call, "batch_sampler")
    found = port.source.origins(given.value) if given is not None else []
    calls = [n for n in found if isinstance(n, cst.Call)]
    around = [n for n in calls if port.source.called(n) == "torch.utils.data.BatchSampler" and n.args]
    calls += [m for n in around for m in port.source.origins(n.args[0].value) if isinstance(m, cst.Call)]
    good = [n for n in calls if port.source.called(n) == "torch.utils.data.DistributedSampler"]
    if not good:
        port.edits.hand(
            call, "its sampler was not recognised as one that divides the rows over the workers", _advice(port, call)
        )
        return False
    return not any((a := argument(n, "shuffle")) is not None and port.source.code(a.value) == "False" for n in good)


def _is_iterable(port: ScriptPort, dataset: cst.BaseExpression) -> bool:
    names = {port.source.code(n.func) for n in port.source.origins(dataset) if isinstance(n, cst.Call)}
    for node in port.source.nodes:
        bases = node.bases if isinstance(node, cst.ClassDef) and node.name.value in names else ()
        if any("IterableDataset" in port.source.code(base.value) for base in bases):
            return True
    return False


def _order_in(port: ScriptPort, call: cst.Call, stars: list[cst.Arg]) -> str | None:
    """Returns whether the loader shuffles, by its ``**`` arguments, as code; None where it is unknown."""
    if not stars or b'"shuffle"' not in port.source.data and b"'shuffle'" not in port.source.data:
        return "False"
    # pop() takes the entry out of the dict, which is right only where no other call uses it.
    name = port.source.code(stars[0].value)
    users = [c for c in port.source.calls for a in c.args if a.star == "**" and port.source.code(a.value) == name]
    alone = len(stars) == 1 and len(users) == 1 and isinstance(stars[0].value, cst.Name)
    return f'{name}.pop("shuffle", False)' if alone else None


def _named(port: ScriptPort, dataset: cst.Arg) -> str:
    """Returns a name of the dataset; a dataset made inside the call gets its name there."""
    text = port.source.code(dataset.value)
    if isinstance(dataset.value, cst.Name | cst.Attribute | cst.Subscript):
        return text
    name = _free_name(port, "train_data")
    start = port.source.span(dataset.value)[0]
    port.edits.replace_span(start, start, f"({name} := " if dataset.keyword else f"{name} := ")
    if dataset.keyword:
        end = port.source.span(dataset.value)[1]
        port.edits.replace_span(end, end, ")")
    return name


def _free_name(port: ScriptPort, name: str) -> str:
    while name in port.source.values:
        name = f"{name}_"
    return name


def _sampler(port: ScriptPort, call: cst.Call, made: str) -> str:
    """Returns the code ``made``, or a name that an inserted line gives it where the line would be too long."""
    line_start = port.edits.line_start(port.source.span(call.args[-1])[0])
    line = port.source.data[line_start:].split(b"\n", 1)[0].decode()
    # The dataset gets its name inside the call, after the inserted line.
    inside = ":=" in made or made.partition("(")[2].partition(",")[0] not in port.source.data.decode()
    name = _free_name(port, "train_sampler")
    if len(line) + len(made) < _LINE or inside or not port.edits.insert_before(call, f"{name} = {made}"):
        return made
    return name


def _sampler_class(port: ScriptPort) -> str:
    """Returns how the script writes DistributedSampler, with an import where needed."""
    imported = port.source.imported()
    if not imported & {f"torch.utils.data.{path}DistributedSampler" for path in ("", "distributed.")}:
        port.import_fleet("from torch.utils.data import DistributedSampler")
    return "DistributedSampler"


def _sets_epoch(port: ScriptPort) -> bool:
    return any(isinstance(c.func, cst.Attribute) and c.func.attr.value == "set_epoch" for c in port.source.calls)


def _set_epoch(port: ScriptPort, loop: cst.For, items: cst.BaseExpression) -> None:
    epoch = port.parts.epoch_of(loop)
    name = port.source.code(items)
    advice = f"Before the loop of each epoch: {name}.sampler.set_epoch(epoch)."
    if not isinstance(items, cst.Name | cst.Attribute):
        port.edits.hand(loop, "its order would be the same in every epoch", advice)
    elif any(argument(call, "batch_sampler") is not None for call in port.parts.loaders_of(items)[0]):
        port.edits.hand(loop, "its order would be the same in every epoch", "Call set_epoch of the sampler inside.")
    elif epoch:
        port.edits.insert_before(loop, f"{name}.sampler.set_epoch({epoch})")
    elif (place := _calling_loop(port, loop)) is not None:
        outer, text = place
        target = port.source.code(outer.target)
        if text:
            port.edits.insert_first(outer.body, f"{text}.sampler.set_epoch({target})")
        else:
            port.edits.hand(loop, "its order would be the same in every epoch", advice)
    elif any(isinstance(n, cst.For | cst.While) for n in port.source.above(loop)):
        port.edits.hand(loop, "its order would be the same in every epoch", advice)


def _calling_loop(port: ScriptPort, loop: cst.For) -> tuple[cst.For, str] | None:
    """Returns the loop over epochs in which the function of ``loop`` is called, and the loader's name there."""
    function = port.source.function(loop)
    if not isinstance(function, cst.FunctionDef):
        return None
    items = port.source.code(port.parts.items_of(loop))
    parameters = [p.name.value for p in function.params.params]
    for call in port.source.calls:
        if port.source.code(call.func).rpartition(".")[2] != function.name.value:
            continue
        outer = next((n for n in port.source.above(call) if isinstance(n, cst.For) and port.parts.counts(n)), None)
        if outer is None:
            continue
        if items not in parameters:
            return outer, items if isinstance(port.source.function(outer), cst.Module) else ""
        place = parameters.index(items) - (parameters[0] == "self")
        given = argument(call, items, place)
        return outer, port.source.code(given.value) if given is not None else ""
    return None
