"""Finds the newest complete checkpoint, in agreement with the other workers, and loads it on every worker.

[Note: How a checkpoint is found]
Worker 0 names a checkpoint, newest first, and the sum of its index. Every worker reads that index, checks whether model
and optimizer fit, and verifies the bytes that it needs; damage on one worker makes all of them take the one before.
Where some worker does not see the folder, worker 0 sends the index, verifies for all, and sends the tensors. Nothing is
changed before all of this is agreed.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from fleet.checkpoint.index import INDEX, OBJECTS, Index
from fleet.checkpoint.items import SavedTensors, Wanted
from fleet.checkpoint.loading import misfits_of
from fleet.checkpoint.model_tensors import ModelTensors
from fleet.checkpoint.saved_objects import adapters_of
from fleet.checkpoint.saving import axes_of
from fleet.checkpoint.state_adapter import StateAdapter
from fleet.checkpoint.storage import LocalFolder
from fleet.checkpoint.to_group import ForeignError, GroupSource, StateGroup, StateMesh, as_damage
from fleet.checkpoint.values import decode
from fleet.common.log import LOGGER
from fleet.elastic.folder import candidates, check_no_link, check_whole, is_unfinished
from fleet.elastic.places import MeanOfWorkers, has_own_states, is_same_mesh, predecessor, reason_against_mean
from fleet.elastic.resize import declared_scales, rescale, warn_of_resize
from fleet.elastic.state import (
    check_form,
    kinds_of,
    names_elsewhere,
    optimizer_state,
    set_random_states,
    windows,
)
from fleet.errors import CheckpointError, ConfigError, OptionWarning
from fleet.strategies._shared.optimizer_wrapper import LR_SCALE
from fleet.training.fleet_optimizer import FleetOptimizer

if TYPE_CHECKING:
    from fleet.job.job import Job

_VISIBLE_S = 5.0
_POLL_S = 0.02


@dataclass
class Found:
    """The checkpoint that every worker loads.

    Attributes:
        name: the name of its folder.
        rest: its content beside model and optimizer; of the random generators, this worker's only.
        source: its tensors.
        plan: the adapters of model and optimizer, with the boxes that each wants.
        misfits: why it is not a checkpoint of this model and optimizer.
        is_mean: whether every worker saved its own state, and other workers continue from the mean.
    """

    name: str
    rest: dict[str, Any] = field(default_factory=dict)
    source: SavedTensors | GroupSource | None = None
    plan: dict[StateAdapter, Wanted] = field(default_factory=dict)
    misfits: list[str] = field(default_factory=list)
    is_mean: bool = False


class Restore:
    """Loads one checkpoint of ``folder`` into ``model`` and ``optimizer`` on all workers of ``job``."""

    def __init__(self, job: Job, folder: Path, model: nn.Module, optimizer: Optimizer | None) -> None:
        self._job = job
        self._folder = folder
        self._model = model
        self._optimizer = optimizer
        self._is_first = job.global_rank == 0
        self._elsewhere: set[str] = set()  # names of the state that only other stages of a pipeline hold

    def find(self) -> Found | None:
        """Returns the newest complete checkpoint, or None; a collective call."""
        self._elsewhere = names_elsewhere(self._model, self._job)
        complete = self._complete_checkpoints() if self._is_first else iter(())
        # Worker 0 names the checkpoint: on a network file system the workers may see different ones as the newest.
        while True:
            offered = self._gathered(lambda: next(complete, None))[0]
            if offered is None:
                return None
            name, index_sum = offered
            found = Found(name)
            problems = self._open(found, index_sum)
            if not problems:
                return found
            if self._is_first:
                _warn_of(self._folder, problems[0])

    def load(self, found: Found, scheduler: Any) -> dict[str, Any]:
        """Restores model, optimizer and scheduler; returns the rest. Raises CheckpointError when they do not match."""
        optimizer = self._optimizer
        declared = declared_scales(optimizer)  # loading replaces the groups, and with them the declared scales
        try:
            self._check_kinds(found, kinds_of(optimizer, scheduler))
            if found.misfits:
                raise CheckpointError(" ".join(f"{text}." for text in found.misfits))
            self._warn_of_mean(found)
            self._put(found)
            if scheduler is not None and found.rest["scheduler"] is not None:
                scheduler.load_state_dict(found.rest["scheduler"])
        except (CheckpointError, RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            # Errors of the checks above name the checkpoint and the remedy already.
            if f"{error}".startswith("Checkpoint.resume()"):
                raise
            raise CheckpointError(
                f"Checkpoint.resume(): {str(self._folder)}/{found.name} does not match: {f'{error}'.rstrip('.')}. "
                "Start training another model in a separate folder."
            ) from error
        if optimizer is not None:
            rescale(optimizer, scheduler, declared)
            now = max((w["k_steps"] for w in windows(optimizer_state(optimizer)).values()), default=1)
            warn_of_resize(found.rest, self._job, now, declared)
        return found.rest

    def data_of(self, rest: dict[str, Any], is_shared: bool, join: Callable[[list[Any]], Any] | None = None) -> Any:
        """Returns the position in the data for this worker; raises CheckpointError when it is unknown.

        ``join`` merges the positions of all workers, for data that can be divided anew.
        """
        positions = [worker["data"] for worker in rest["workers"]]
        mine = predecessor(rest, self._job)
        if mine is not None:
            return mine["data"]
        if is_shared or all(position == positions[0] for position in positions):
            return positions[0]
        if join is not None:
            return join(positions)
        raise CheckpointError(
            f"Checkpoint.resume(): {len(positions)} workers saved a position in the data each, and there "
            f"are {self._job.world_size} now. Use fleet.elastic.ElasticSampler, which any number can resume."
        )

    def set_random_states(self, rest: dict[str, Any]) -> None:
        """Restores the random generators of this worker, if as many workers train on different data as at the save.

        On another mesh the workers of one model copy get the same global generators, and streams by name begin anew.
        """
        mine = predecessor(rest, self._job)
        if mine is not None and self._job.logical is None:  # its numbers follow from the optimizer's state
            set_random_states(mine["random"], streams=is_same_mesh(rest, self._job))

    def _complete_checkpoints(self) -> Iterator[tuple[str, str]]:
        """Yields, on worker 0, names and sums of the checkpoints whose files have their lengths, newest first."""
        for path in candidates(self._folder):
            if is_unfinished(path):
                LOGGER.info("%s is a save that did not finish; it is passed over.", path)
                continue
            try:
                check_whole(path)
                yield path.name, _sum_of(LocalFolder(path).get(INDEX))
            except (CheckpointError, OSError) as error:
                _warn_of(self._folder, f"{error}")

    def _open(self, found: Found, index_sum: str) -> list[str]:
        """Verifies the bytes that this worker needs; returns the damage found by all workers."""
        path = self._folder / found.name
        text = _index_text(path, index_sum)

        def read() -> list[Any]:
            damage = ""
            try:
                if text:
                    self._open_source(found, lambda index: SavedTensors(LocalFolder(path), index), text)
            except CheckpointError as error:
                damage = f"{error}".rstrip(".") + f" (worker {self._job.global_rank})"
            return [damage, not text, found.misfits]

        reports = self._gathered(read)
        damaged = [damage for damage, _, _ in reports if damage]
        # A misfit is no damage: load() refuses it, where an older checkpoint would hide a wrong model.
        found.misfits = next((misfits for _, _, misfits in reports if misfits), [])
        if damaged or not any(is_blind for _, is_blind, _ in reports):
            return damaged
        return self._open_for_others(found, text)

    def _open_for_others(self, found: Found, text: bytes) -> list[str]:
        """Does the same where only worker 0 is sure to see the folder, and sends index and tensors to the others."""
        text = f"{self._gathered(lambda: text.decode() if self._is_first else '')[0]}".encode()
        path = self._folder / found.name
        index = Index.from_json(text, f"{found.name}/{INDEX}")
        if has_own_states(index):
            return [f"{found.name}: it holds a state for each worker, and not every worker sees it"]
        degrees = {**index.job["degrees"], **self._job.axes.degrees}
        if StateMesh(self._job.axes, self._job.device).has_stages or any(
            degrees.get(axis, 1) > 1 for axis in ("pp", "ep")
        ):
            raise ConfigError(
                f"Checkpoint.resume(): {path}: not every worker sees it, and with a pipeline or experts each reads its "
                "own part. Name a folder that all of them share."
            )
        saved = SavedTensors(LocalFolder(path), index) if self._is_first else None
        group = workers_of(self._job)
        try:
            with group.together():
                self._open_source(found, lambda index: GroupSource(index, f"{path}", group, saved=saved), text)
        # A worker has failed for another reason than this checkpoint, so the one before would not help.
        except ForeignError:
            raise
        except CheckpointError as error:
            return [f"{error}"]
        found.misfits = next((misfits for misfits in group.post(found.misfits) if misfits), [])
        return []

    def _open_source(
        self, found: Found, source_of: Callable[[Index], SavedTensors | GroupSource], text: bytes
    ) -> None:  # fmt: skip
        """Reads the rest and verifies this worker's bytes of model and optimizer. Raises CheckpointError."""
        path = self._folder / found.name
        with as_damage(found.name):
            check_no_link(path)
            source = source_of(Index.from_json(text, f"{found.name}/{INDEX}"))
            self._read_rest(found, source)
            own = has_own_states(source.index)
            found.is_mean = own and not is_same_mesh(found.rest, self._job)
            if found.is_mean:
                if reason := reason_against_mean(found.name, found.rest):
                    found.misfits = [reason]
                    return
                source = MeanOfWorkers(LocalFolder(path), source.index, found.rest["world_size"])
            found.source = source
            self._verify(found, source, own and not found.is_mean)

    def _read_rest(self, found: Found, source: SavedTensors | GroupSource) -> None:
        """Reads the content beside model and optimizer; of the random generators, this worker's only."""
        label = f"{found.name}: run"
        run = source.index.values["run"]
        check_form(run, "run", label)
        mine = predecessor(run, self._job)
        # Generators have some kilobytes for each worker: a job of thousands would read them all on each.
        workers = [
            worker if worker is mine else {key: value for key, value in worker.items() if key != "random"}
            for worker in run["workers"]
        ]
        encoded = {**run, "workers": workers, "scheduler": source.index.values.get("scheduler")}
        wanted = Wanted()
        wanted.add_inside(source, encoded)
        source.verify_all([wanted])
        source.fill_all([wanted])
        found.rest = decode(encoded, wanted.tensor)
        for worker in found.rest["workers"]:
            if "random" in worker:
                check_form(worker["random"], "random", label)

    def _verify(self, found: Found, source: SavedTensors | GroupSource, own: bool) -> None:
        """Checks whether model and optimizer fit, and verifies their bytes. Raises CheckpointError."""
        kinds = source.index.values.get(OBJECTS, {})
        objects = {"model": self._model, "optimizer": self._optimizer}
        given = {key: one for key, one in objects.items() if one is not None and key in kinds}
        adapters = adapters_of(given, self._job, axes_of(self._job), "Checkpoint.resume()", own)
        for adapter in adapters:
            if isinstance(adapter, ModelTensors):
                adapter.elsewhere = frozenset(self._elsewhere)
        found.misfits = misfits_of(adapters, source)
        found.plan = {} if found.misfits else {adapter: adapter.wanted(source) for adapter in adapters}
        source.verify_all(found.plan.values())

    def _put(self, found: Found) -> None:
        """Loads model and optimizer."""
        for group in () if self._optimizer is None else self._optimizer.param_groups:
            group.pop(LR_SCALE, None)  # the checkpoint's counts, and may be absent
        assert found.source is not None
        with self._without_warnings_of_other_workers():
            found.source.fill_all(found.plan.values())
            for adapter, wanted in found.plan.items():
                adapter.put(found.source, wanted)
        found.source.close()

    def _check_kinds(self, found: Found, now: dict[str, str]) -> None:
        """Raises CheckpointError where the state of one class would be loaded into another; nothing is loaded yet."""
        for role, saved in found.rest.get("kinds", {}).items():
            if now.get(role, saved) != saved:
                raise CheckpointError(
                    f"Checkpoint.resume(): {str(self._folder)}/{found.name} was saved with the {role} {saved}, and "
                    f"this job has {now[role]}. Continue with {saved}, or start in a separate folder."
                )

    def _warn_of_mean(self, found: Found) -> None:
        if found.is_mean and self._is_first:
            warnings.warn(
                f"Checkpoint.resume(): {found.name} holds a state for each of {found.rest['world_size']} workers, and "
                f"there are {self._job.world_size} now: they continue from the mean of the models and worker 0's "
                "optimizer; what the others had not yet sent is lost.",
                OptionWarning,
                stacklevel=5,
            )

    @contextmanager
    def _without_warnings_of_other_workers(self) -> Iterator[None]:
        with warnings.catch_warnings():
            if self._job.world_size > 1 and isinstance(self._optimizer, FleetOptimizer):
                # dgc would repeat for one worker's state the warning that _warn_of_mean gives about all.
                warnings.filterwarnings("ignore", message="dgc: this state was saved by worker", category=OptionWarning)
            yield

    def _gathered(self, call: Callable[[], Any]) -> list[Any]:
        """Returns the results of ``call`` on all workers; a collective call.

        Raises CheckpointError on every worker where it raises on one.
        """
        content = None
        problem = ""
        try:
            content = call()
        # The error travels in the report, for the others wait in all_gather().
        except Exception as error:
            if self._job.world_size == 1:
                raise
            problem = f"{error}" if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        reports = [json.loads(f"{text}") for text in self._job.util.all_gather(json.dumps([problem, content]))]
        for rank, (problem, _) in enumerate(reports):
            if problem:
                raise CheckpointError(f"Checkpoint.resume(): worker {rank}: {problem}")
        return [content for _, content in reports]


def workers_of(job: Job) -> StateGroup:
    """Returns all workers of a job, which send tensors to one another from host to host."""
    return StateGroup(range(job.world_size), job.host_group, torch.device("cpu"))


def _index_text(path: Path, wanted: str) -> bytes:
    """Returns the index of the checkpoint at ``path`` once its sum is ``wanted``; nothing after ``_VISIBLE_S``."""
    # A network file system may show this worker an older listing for some seconds.
    deadline = time.monotonic() + _VISIBLE_S
    while True:
        with suppress(OSError):
            text = LocalFolder(path).get(INDEX)
            if _sum_of(text) == wanted:
                return text
        if time.monotonic() > deadline:
            return b""
        time.sleep(_POLL_S)


def _sum_of(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def _warn_of(folder: Path, problem: str) -> None:
    where = "" if problem.startswith(f"{os.path.abspath(folder)}/") else f"{folder}/"  # an index names its whole path
    warnings.warn(
        f"Checkpoint.resume(): {where}{problem.rstrip('.')}. It is skipped, and the one before it is tried.",
        UserWarning,
        stacklevel=2,
    )
