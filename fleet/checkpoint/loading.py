"""load: each worker reads what its parts need, whatever mesh wrote the checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from fleet.checkpoint.commit import read_index
from fleet.checkpoint.index import OBJECTS, Index, tensor_names
from fleet.checkpoint.items import SavedTensors, StateSource, Wanted
from fleet.checkpoint.model_tensors import refuse
from fleet.checkpoint.saved_objects import adapters_of
from fleet.checkpoint.saving import agreed, axes_of, check_call, steps_of, wait, world_size_of
from fleet.checkpoint.state_adapter import StateAdapter
from fleet.checkpoint.storage import Folder
from fleet.checkpoint.values import decode
from fleet.errors import CheckpointError, FleetError, did_you_mean
from fleet.job.job import Job
from fleet.job.running import running_job


def load(
    path: str | os.PathLike[str], objects: Mapping[str, Any] | None = None, *, check_sums: bool = True
) -> dict[str, Any]:
    """Loads the checkpoint in the folder ``path`` into ``objects``; every worker calls it, on any mesh.

    Each worker reads the bytes of the parts that it holds, straight into the memory of its parameters. All of it is
    checked first, with its sums: where something does not fit on one worker, nothing is changed on any.

    Args:
        path: the folder that :func:`save` wrote.
        objects: by the keys of the save; some may be left out. Modules, optimizers and other objects with
            ``load_state_dict`` are loaded in place; a present value is ignored. ``None`` returns everything, tensors
            whole and on the host; a single worker may do that.
        check_sums: verify the sum of each block of 1 MiB that is touched. ``False`` reads exactly the needed bytes.

    Returns:
        By key, the objects, and the saved values.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged or incomplete, or does not fit: names, shapes, the class
            of the optimizer, or a state that each worker of another mesh had for itself. Raised on every worker.
        ConfigError: the workers give other paths or other keys, or call it after different steps.
        RendezvousError: not every worker calls it.

    Example:
        >>> fleet.checkpoint.save("checkpoint", {"model": model, "optimizer": optimizer, "epoch": 3})
        >>> epoch = fleet.checkpoint.load("checkpoint", {"model": model, "optimizer": optimizer, "epoch": 0})["epoch"]
    """
    call = "fleet.checkpoint.load()"
    job = running_job()
    folder = check_call(path, job, call)
    # An asynchronous save of this process may still be writing to the folder.
    if objects is None:
        wait()
        with closing(_source(folder, check_sums)) as source:
            return everything(source)
    _meet(objects, folder.path, job, call)
    source, plan = _fitting(objects, folder, job, call, check_sums)
    with closing(source):
        return _load_into(objects, plan, source, folder.path, call)


def _meet(objects: Any, path: str, job: Job | None, call: str) -> None:
    """Waits until every worker is here, and the earlier saves of all of them are on disk.

    Raises ConfigError, CheckpointError, RendezvousError.
    """
    problem = ""
    try:
        wait()
    except CheckpointError as error:
        if world_size_of(job) == 1:
            raise
        problem = f"CheckpointError: {error}"
    keys = [f"{key}" for key in objects] if isinstance(objects, Mapping) else []
    report = {"path": path, "problem": problem, "step": steps_of(job), "digests": dict.fromkeys(keys, 0)}
    agreed(job, report, call)


def _source(folder: Folder, check_sums: bool) -> SavedTensors:
    index = read_index(folder)
    if holes := index.holes():
        raise CheckpointError(f"{folder.path!r}: parts of {holes[:4]!r} are missing ({len(holes)} tensors in all).")
    return SavedTensors(folder, index, check_sums)


def _fitting(
    objects: Mapping[str, Any], folder: Folder, job: Job | None, call: str, check_sums: bool
) -> tuple[SavedTensors, dict[StateAdapter, Wanted]]:
    """Returns the checkpoint and the boxes that each state wants, once it fits on every worker; a collective call.

    Raises ConfigError, CheckpointError on every worker where one of them cannot load. Nothing is changed then.
    """
    source = None
    plan = {}
    problem = ""
    try:
        source = _source(folder, check_sums)
        adapters = adapters_of(objects, job, axes_of(job), call, own=bool(source.index.job.get("own")))
        _check_adapters(adapters, source, folder.path, job)
        plan = {adapter: adapter.wanted(source) for adapter in adapters}
        if check_sums:
            source.verify_all(plan.values())
    except FleetError as error:
        if world_size_of(job) == 1:
            if source is not None:
                source.close()
            raise
        problem = f"{type(error).__name__}: {error}"
    # Names of data files hold the token of their save: other names on a worker mean that it read another checkpoint.
    files = sorted(source.index.files) if source is not None else []
    report = {"path": folder.path, "problem": problem, "step": steps_of(job), "digests": {}, "files": files}
    try:
        if any(other["files"] != files for other in agreed(job, report, call)):
            raise CheckpointError(
                f"{call}: a save to {folder.path!r} has replaced the checkpoint meanwhile. Load again."
            )
    except FleetError:
        if source is not None:
            source.close()
        raise
    assert source is not None
    return source, plan


def _check_adapters(adapters: Sequence[StateAdapter], source: StateSource, path: str, job: Job | None) -> None:
    """Raises CheckpointError where the checkpoint does not fit."""
    kinds = source.index.values.get(OBJECTS, {})
    problems = []
    for adapter in adapters:
        if adapter.key not in kinds:
            problems.append(f"it has no {adapter.key!r}, but {sorted(kinds)!r}{did_you_mean(adapter.key, kinds)}")
            continue
        kind, class_name = kinds[adapter.key]
        mine = adapter.class_name
        is_converted = class_name == ""  # from a file that names no classes, and no state apart from a value
        is_of_kind = kind == adapter.kind or (is_converted and (kind, adapter.kind) == ("value", "state"))
        if not is_of_kind or (class_name != mine and not is_converted and kind in ("optimizer", "state")):
            problems.append(
                f"{adapter.key!r} was saved from {_called(kind, class_name)} and is {_called(adapter.kind, mine)} here"
            )
    refuse(problems, path)
    _check_own(source.index, job, axes_of(job), path)
    refuse(misfits_of(adapters, source), path)


def misfits_of(adapters: Sequence[StateAdapter], source: StateSource) -> list[str]:
    """Returns why the states of ``adapters`` are not those of ``source``. Nothing is changed."""
    found = [text for adapter in adapters for text in adapter.check(source)]
    twins = [(adapter.key, pair) for adapter in adapters for pair in adapter.twins(source)]
    for (key, (alias, name)), is_equal in zip(twins, source.are_equal([pair for _, pair in twins]), strict=True):
        if not is_equal:
            found.append(f"{key!r}: {name!r} and {alias!r} are one parameter here and differ in the checkpoint")
    return found


def _load_into(
    objects: Mapping[str, Any], plan: Mapping[StateAdapter, Wanted], source: StateSource, path: str, call: str
) -> dict[str, Any]:
    found = dict(objects)
    source.fill_all(plan.values())
    for adapter, wanted in plan.items():
        try:
            loaded = adapter.put(source, wanted)
        except FleetError:
            raise
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{call}: {adapter.key!r} does not take its state from {path!r}: {type(error).__name__}: {error}. It "
                "was saved from an object of another form."
            ) from error
        if adapter.kind == "value":
            found[adapter.key] = loaded
    return found


def _called(kind: str, class_name: str) -> str:
    return {"module": "a module", "value": "a value"}.get(kind, f"a {class_name}")


def _check_own(index: Index, job: Job | None, axes: Any, path: str) -> None:
    """Raises CheckpointError where the workers of another mesh have saved a state each."""
    if not index.job.get("own"):
        return
    saved = (index.job["world_size"], index.job["degrees"])
    now = (1 if job is None else job.world_size, {**axes.degrees, **axes.experts})
    if saved != now:
        raise CheckpointError(
            f"load(path={path!r}): {', '.join(index.job['own'])} had a state on each of {saved[0]} workers "
            f"({_mesh(saved[1])}), which no other mesh can take over; this job has {now[0]} ({_mesh(now[1])}). Load it "
            "on the same mesh, or save where the workers agree: after an update (gradient_merge), with the option off."
        )


def _mesh(degrees: Mapping[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in degrees.items() if size > 1) or "one process"


def everything(source: SavedTensors) -> dict[str, Any]:
    """Returns the whole content of a checkpoint by key, with states of modules and optimizers as dictionaries."""
    found: dict[str, Any] = {}
    inside = {inner for value in source.index.values.values() for inner in tensor_names(value)}
    for key, (kind, _) in source.index.values.get(OBJECTS, {}).items():
        if kind in ("state", "value"):
            found[key] = decode(source.index.values[key], source.whole)
            continue
        begin = f"{key}/"
        names = [n for n in (*source.index.tensors, *source.index.aliases) if n.startswith(begin) and n not in inside]
        state: dict[str, Any] = {name.removeprefix(begin): source.whole(name) for name in names}
        for name, value in source.index.values.items():
            if name.startswith(begin):
                state[name.removeprefix(begin)] = decode(value, source.whole)
        found[key] = state
    return found
