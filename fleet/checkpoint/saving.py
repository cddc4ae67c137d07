"""save: every worker writes its share of the state; one index makes them a checkpoint."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fleet.checkpoint.commit import Share, check_target, leave_error, raise_here, write_share
from fleet.checkpoint.data_files import FileBlock, add_block, block_of, file_order
from fleet.checkpoint.index import OBJECTS, Index
from fleet.checkpoint.items import Item, copy_into, raw_bytes, written_by
from fleet.checkpoint.optimizer_tensors import OptimizerTensors
from fleet.checkpoint.saved_objects import ObjectState, adapters_of, own_state_of, warn_of_waiting
from fleet.checkpoint.state_adapter import StateAdapter
from fleet.checkpoint.storage import Folder, LocalFolder, RemoteFolder, explained, open_folder
from fleet.checkpoint.to_group import StateGroup
from fleet.checkpoint.writer import own_writer
from fleet.common.log import LOGGER
from fleet.common.version import __version__
from fleet.errors import CheckpointError, ConfigError, FleetError
from fleet.job.axes import Axes
from fleet.job.job import Job
from fleet.job.listener import Listener
from fleet.job.running import running_job

_VISIBLE_S = 20.0
_POLL_S = 0.02


def save(path: str | os.PathLike[str], objects: Mapping[str, Any], *, asynchronous: bool = False) -> None:
    """Writes a checkpoint of ``objects`` to the folder ``path``; every worker calls it after the same step.

    Each worker writes what it holds, and what several hold they divide by bytes; nothing is gathered. The checkpoint
    appears at once when all of it is on disk; until then, and if the save is killed at any moment, the one that was
    there before stands. :func:`load` reads it on any mesh.

    Args:
        path: a new or empty folder that all workers share, or an address such as ``s3://bucket/run`` (extra
            ``remote``). A present checkpoint is replaced.
        objects: modules, optimizers, anything with ``state_dict`` and ``load_state_dict``, and plain values (numbers,
            texts, tensors, lists, dictionaries), by key. Where the last two kinds differ between workers, each worker's
            is saved, and only as many workers can load them. Of buffers, and of a module that the job did not wrap,
            worker 0's values are saved.
        asynchronous: return once the state was copied to host memory; a process beside this one writes it. The next
            save waits for it. An error is raised by the next step of a distributed optimizer, by the next call of this
            module, or at exit, with exit status 1.

    Raises:
        ConfigError: the arguments differ between workers, or hold something that a file without code cannot.
        CheckpointError: some worker could not write its share; raised on every worker. With ``asynchronous``, the save
            before it could not be written.

    Example:
        >>> fleet.checkpoint.save("checkpoint", {"model": model, "optimizer": optimizer, "epoch": 3})
    """
    call = "fleet.checkpoint.save()"
    job = running_job()
    if not isinstance(asynchronous, bool):
        raise ConfigError(f"{call}: asynchronous={asynchronous!r}; it is True or False.")
    folder = check_call(path, job, call)
    if job is not None:
        job.beat(pause=True)  # the launcher must not take a long write for a hang
    pending, token = _settled(folder, objects, job, call)
    try:
        # A store in the memory of this process is out of reach for the writer's process.
        if asynchronous and not getattr(folder, "is_of_this_process", False):
            pending.start(folder, token)
            if job is not None and job.listeners.find(_EarlierSave) is None:
                job.listeners.add(_EarlierSave())
            return
        pending.write(folder, token, agree=partial(_raise_on_all, job))
    finally:
        if job is not None:
            job.beat()


class _EarlierSave(Listener):
    """Reports the error of an asynchronous save after the next step."""

    def after_step(self, step: int) -> None:
        """Raises CheckpointError where the last save has failed; does not wait for one under way."""
        if error := own_writer().failed():
            raise CheckpointError(error)


def _settled(folder: Any, objects: Mapping[str, Any], job: Job | None, call: str) -> tuple[PendingShare, str]:
    """Returns this worker's share and the token of the save, once all workers agree; a collective call.

    Raises ConfigError, CheckpointError on every worker when one of them cannot save.
    """
    problem = ""
    adapters: list[StateAdapter] = []
    pending: PendingShare | None = None
    token = secrets.token_hex(6)
    try:
        if (error := own_writer().finish()) != "":
            raise CheckpointError(f"the save before this one failed: {error}")
        adapters = adapters_of(objects, job, axes_of(job), call)
        pending = pending_share(adapters, job)
        if _rank(job) == 0:
            check_target(folder)
            mark(folder, token)
    except FleetError as error:
        # It goes into the report first: a worker that raised here would leave the others waiting in the exchange.
        problem = f"{type(error).__name__}: {error}"
        if job is None or job.world_size == 1:
            raise
    # Digests tell whether workers differ without an exchange of the states.
    states = [adapter for adapter in adapters if isinstance(adapter, ObjectState)]
    digests = {adapter.key: adapter.digest() for adapter in states} if world_size_of(job) > 1 and not problem else {}
    report = {
        "path": folder.path, "token": token, "problem": problem, "step": steps_of(job), "digests": digests,
    }  # fmt: skip
    reports = agreed(job, report, call)
    token = reports[0]["token"]
    _check_shared(folder, token, job)
    for adapter in states:
        adapter.differs = len({other["digests"][adapter.key] for other in reports}) > 1 if digests else False
    # A state that differs gets @RANK/ before its name, so the share is described once more.
    if any(adapter.differs for adapter in states):
        pending = pending_share(adapters, job)
    assert pending is not None
    return pending, token


def wait() -> None:
    """Waits until this worker's asynchronous save is on disk.

    Raises CheckpointError if it could not be written.
    """
    if error := own_writer().finish():
        raise CheckpointError(error)


def axes_of(job: Job | None) -> Axes:
    """Returns the place of this worker; a single process before ``fleet.init``."""
    if job is None or not job.collective or not job.axes.degrees:
        return Axes({}, 0)
    found: Axes = job.axes
    return found


def check_call(path: Any, job: Job | None, call: str) -> LocalFolder | RemoteFolder:
    """Returns the folder that ``path`` names. Raises ConfigError where such a checkpoint cannot be in this job."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise ConfigError(f"{call}: path={path!r}; it takes the name of a folder.")
    if job is not None and job.has_tables:
        raise ConfigError(
            f"{call}: the tables of this job are on parameter servers, which save them: call "
            "fleet.save_persistables(). fleet.save() writes a dense state."
        )
    return open_folder(path)


@dataclass(frozen=True)
class PendingShare:
    """This worker's share of a checkpoint, before it is written.

    Attributes:
        share: the description of the share, without a token.
        written: the blocks of its file, and views of their numbers in the memory of the objects.
    """

    share: Share
    written: Sequence[tuple[FileBlock, Tensor]]

    def write(
        self, folder: Folder, token: str, meet: Callable[[str], None] = lambda point: None,
        agree: Callable[[str], None] = raise_here,
    ) -> None:  # fmt: skip
        """Writes it from the memory of the objects; see :func:`write_share`."""
        data = raw_bytes(view for _, view in self.written)
        write_share(folder, replace(self.share, token=token), data, meet, LOGGER.warning, agree)

    def start(self, folder: Folder, token: str, hooks: str = "", arguments: dict[str, Any] | None = None) -> None:
        """Copies the share, and lets the writer of this process write the copy; see :meth:`Writer.start`.

        Raises CheckpointError where the machine has no memory for the copy.
        """
        share = replace(self.share, token=token)
        writer = own_writer()
        try:
            buffer = writer.buffer(sum(block.num_bytes for block, _ in self.written))
            copy_into(buffer, self.written)
            # Copies from a GPU may still be under way when the call returns, and the writer reads the buffer at once.
            if any(view.is_cuda for _, view in self.written):
                torch.cuda.synchronize()
        except Exception as error:
            leave_error(folder, share, f"{error}")
            raise
        writer.start(folder.path, share, hooks, arguments)


def pending_share(adapters: Sequence[StateAdapter], job: Job | None) -> PendingShare:
    """Returns this worker's share of the objects of ``adapters``. Raises ConfigError, CheckpointError."""
    axes = axes_of(job)
    items: list[Item] = []
    aliases: dict[str, str] = {}
    values: dict[str, Any] = {}
    for adapter in adapters:
        state = adapter.describe()
        items += state.items
        aliases |= state.aliases
        values |= state.values
    kinds = {adapter.key: [adapter.kind, adapter.class_name] for adapter in adapters}
    optimizers = [adapter.optimizer for adapter in adapters if isinstance(adapter, OptimizerTensors)]
    warn_of_waiting(optimizers)
    own = own_state_of(optimizers, job)
    saved_by = {
        "world_size": world_size_of(job),
        "degrees": {**axes.degrees, **axes.experts},
        "own": _own_options(values) if own else [],
        "torch": torch.__version__,
        "fleet": __version__,
    }
    written = written_by(items, _rank(job))
    values[OBJECTS] = kinds
    blocks = [block for block, _ in written]
    return PendingShare(Share("", _rank(job), world_size_of(job), blocks, values, aliases, saved_by), written)


def gathered(pending: PendingShare | None, problem: str, group: StateGroup, call: str) -> PendingShare | None:
    """Returns the shares of all workers as one, on the first worker of ``group``, for a folder that it alone sees.

    A collective call; the other workers get ``None``. Block after block travels, so the first worker needs room for the
    whole state on the host and for one block.

    Args:
        pending: this worker's share; ``None`` where it has a ``problem``.
        problem: why there is no share; empty elsewhere.
        group: all workers, and a device on which they send tensors to one another.
        call: the function that errors name.

    Raises:
        CheckpointError: a worker has a problem, or two mean different tensors by one name; raised on every worker.
    """
    blocks = [] if pending is None else [asdict(block) for block in pending.share.blocks]
    rest = {} if pending is None else {name: getattr(pending.share, name) for name in ("values", "aliases", "job")}
    posts = group.post({"blocks": blocks, **rest}, CheckpointError(f"{call}: {problem}") if problem else None)
    assert pending is not None
    index = Index.merged(_record_of(rank, post) for rank, post in zip(group.ranks, posts, strict=True))
    views = iter(view for _, view in pending.written)
    written: list[tuple[FileBlock, Tensor]] = []
    for rank, post in zip(group.ranks, posts, strict=True):
        for block in map(block_of, post["blocks"]):
            view = next(views) if rank == group.rank else None
            if (sent := group.to_first(view, rank, block.sizes, getattr(torch, block.dtype))) is not None:
                written.append((block, sent))
    if group.rank != group.ranks[0]:
        return None
    # The blocks of all workers need the order of one file, which write_share() asks for.
    written.sort(key=lambda pair: file_order(pair[0]))
    share = Share("", 0, 1, [block for block, _ in written], index.values, index.aliases, index.job)
    return PendingShare(share, written)


def _record_of(rank: int, post: dict[str, Any]) -> Index:
    """Returns the record of a worker from the ``post`` of its share; its rank stands for its file."""
    record = Index(values=post["values"], aliases=post["aliases"], job=post["job"])
    for block in map(block_of, post["blocks"]):
        add_block(record, block, f"{rank}", 0)
    return record


def _own_options(values: Mapping[str, Any]) -> list[str]:
    """Returns the options with an addition to an optimizer's state, except amp, whose scale is the same everywhere."""
    return sorted({name.rpartition("/+")[2] for name in values if "/+" in name} - {"amp"})


def mark(folder: Folder, token: str) -> None:
    """Makes the folder, with a file in it by which other workers recognise it."""
    try:
        folder.prepare()
        if isinstance(folder, LocalFolder):
            folder.touch(_marker(token))
    except OSError as error:
        raise CheckpointError(f"save(path={folder.path!r}): {explained(error)}.") from error


def agreed(job: Job | None, report: dict[str, Any], call: str) -> list[dict[str, Any]]:
    """Returns the reports of all workers; a collective call.

    Raises ConfigError, CheckpointError on all of them where one has a problem, or path, step or keys differ.
    """
    if job is None or job.world_size == 1:
        return [report]
    job.meet(call)
    reports = [json.loads(str(text)) for text in job.util.all_gather(json.dumps(report))]
    for rank, other in enumerate(reports):
        if other["problem"]:
            kind, _, text = other["problem"].partition(": ")
            raise (ConfigError if kind == "ConfigError" else CheckpointError)(f"{call}: worker {rank}: {text}")
    for name in ("path", "step"):
        reported = [other[name] for other in reports]
        if any(one != reported[0] for one in reported):
            raise ConfigError(
                f"{call}: the workers are at different places: {name} by rank is {reported!r}. Every worker calls it "
                "with the same path, after the same step."
            )
    keys = [sorted(other["digests"]) for other in reports]
    if any(one != keys[0] for one in keys):
        raise ConfigError(f"{call}: the workers name different objects: {keys!r} by rank. Give the same keys to all.")
    return reports


def blind_workers(folder: Folder, token: str, job: Job, limit_s: float) -> list[int]:
    """Returns, on every worker, the ranks that do not see the file of :func:`mark` within ``limit_s`` seconds."""
    deadline = time.monotonic() + limit_s
    while not (seen := _sees(folder, _marker(token))) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return [rank for rank, found in enumerate(job.util.all_gather(int(seen))) if not int(found)]


def _marker(token: str) -> str:
    # Named like a record: the next save removes it where this one dies.
    return f"record-{token}-00000.json"


def _check_shared(folder: Any, token: str, job: Job | None) -> None:
    """Raises CheckpointError on every worker unless all of them see the folder that worker 0 has made."""
    if job is None or job.world_size == 1 or not isinstance(folder, LocalFolder):
        return
    if blind := blind_workers(folder, token, job, _VISIBLE_S):
        folder.remove(_marker(token))
        raise CheckpointError(
            f"fleet.checkpoint.save(path={folder.path!r}): workers {blind} do not see the folder that worker 0 made. "
            "Every worker writes its share, so name a folder that all of them share."
        )


def _sees(folder: Folder, marker: str) -> bool:
    try:
        return marker in folder.names()
    except OSError:  # a file, or a folder of another user: the worker counts as blind, in step with the others
        return False


def _raise_on_all(job: Job | None, failed: str) -> None:
    if job is None or job.world_size == 1:
        if failed:
            raise CheckpointError(failed)
        return
    for rank, text in enumerate(job.util.all_gather(failed or " ")):
        if f"{text}".strip():
            raise CheckpointError(f"fleet.checkpoint.save(): worker {rank}: {text}")


def _rank(job: Job | None) -> int:
    return 0 if job is None else int(job.global_rank)


def world_size_of(job: Job | None) -> int:
    """Returns the number of workers of the job; 1 before ``fleet.init``."""
    return 1 if job is None else int(job.world_size)


def steps_of(job: Job | None) -> int:
    """Returns the number of steps that this worker has made."""
    return 0 if job is None else int(job.num_steps)
