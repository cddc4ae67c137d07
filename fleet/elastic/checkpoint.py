"""Checkpoint: saves a training run atomically, and resumes from the newest complete checkpoint."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from fleet.checkpoint.saved_objects import adapters_of
from fleet.checkpoint.saving import axes_of, blind_workers, gathered, mark, pending_share
from fleet.checkpoint.storage import LocalFolder
from fleet.common.log import LOGGER
from fleet.elastic.faults import injected_faults
from fleet.elastic.folder import candidates, check_whole, new_name, remove_leftovers, remove_unfinished
from fleet.elastic.health import Health
from fleet.elastic.restore import Found, Restore, workers_of
from fleet.elastic.sampler import ElasticSampler
from fleet.elastic.state import from_bytes, kinds_of, optimizer_state, random_states, to_bytes, windows
from fleet.elastic.write import Background, ShareWrite, attempt
from fleet.errors import CheckpointError, ConfigError, FleetError, NotInitializedError
from fleet.job.listener import Listener
from fleet.job.running import running_session
from fleet.job.session import Session
from fleet.training.batch_loops import BatchLoops, PeriodicSave

_VISIBLE_S = 2.0  # a worker that sees the folder later than this writes no share of its own in this run
_OWN_VISIBLE_S = 20.0  # where no other worker can write its state


class _Steps(Listener):
    """Reports the end of a step; a Checkpoint is no listener, because its ``close`` is a call of the script."""

    def __init__(self, call: Callable[[int], None]) -> None:
        self._call = call

    def after_step(self, step: int) -> None:
        """Reports the step."""
        self._call(step)


class Checkpoint(PeriodicSave):
    """The checkpoints of one training run in one folder.

    Every worker calls :meth:`save` and :meth:`resume` at the same step. A save that is interrupted at any moment, by
    kill -9 or a power cut, leaves the earlier checkpoints intact. A damaged checkpoint is detected by its sums, and the
    one before it is used. Nothing in a checkpoint can run code.

    Where all workers see the folder, each writes its share of the state and reads its parts, on any mesh;
    :func:`fleet.checkpoint.load` reads such a checkpoint as well. Where only worker 0 sees it, worker 0 gathers and
    writes the whole state, and on resume sends it to the others. A strategy with a state on each worker (localsgd, dgc,
    an open window of gradient_merge) needs a folder that all workers share.

    Args:
        path: the folder; one training run in each.
        model: the user's module, or the result of ``distributed_model``.
        optimizer: the user's optimizer, which stands for the distributed one, or the distributed one.
        scheduler: anything with ``state_dict`` and ``load_state_dict``.
        epoch: where training begins without a checkpoint; the attribute ``epoch`` is saved.
        data: an :class:`ElasticSampler`, or anything with ``state_dict`` and ``load_state_dict``. Another number of
            workers can resume data that also has ``joined_states``, which merges the states of all workers into one.
        keep: how many checkpoints are kept.
        asynchronous: return once the state was copied; a process beside this one writes it. The next step, ``save`` or
            ``close`` raises an error.
        every: steps between two checkpoints that are written automatically, where the loop asks for its next batch;
            0 turns this off.

    Raises:
        NotInitializedError: before ``fleet.init``.
        ConfigError: an argument is wrong.

    Example:
        >>> checkpoint = fleet.elastic.Checkpoint("checkpoints", model, optimizer, keep=2)
        >>> checkpoint.resume()
        False
        >>> for epoch in range(checkpoint.epoch, 3):
        ...     model(torch.ones(3, 4)).sum().backward()
        ...     optimizer.step()
        ...     checkpoint.save(epoch=epoch + 1)
        >>> checkpoint.close()
        >>> checkpoint.resume(), checkpoint.epoch
        (True, 3)
    """

    def __init__(
        self, path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None = None,
        scheduler: Any = None, *, epoch: int = 0, data: Any = None, keep: int = 3, asynchronous: bool = False,
        every: int = 0,
    ) -> None:  # fmt: skip
        session = _started_session()
        _check_arguments(path, model, optimizer, scheduler, data, keep, every, epoch)
        _check_switch("Checkpoint", "asynchronous", asynchronous)
        self.path = Path(os.path.abspath(os.path.expanduser(path)))
        self.epoch = epoch
        self.keep = keep
        self.every = every
        self.extra: dict[str, Any] = {}
        self._session = session
        self._model = model
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._data = data
        self._asynchronous = asynchronous
        self._background = Background()
        self._counted_from = session.job.num_steps
        self._saved_at = 0
        self._has_written = False
        self._has_resumed = False
        self._is_superseded = False
        self._is_shared: bool | None = True if session.job.world_size == 1 else None
        self._begun: Path | None = None
        self._faults = injected_faults(session.job.global_rank)
        self._noted: tuple[int, Any] | None = None  # the position in the data after a step, and which
        session.job.listeners.get(BatchLoops).add(self)
        self._steps = _Steps(self.after_step)
        session.job.listeners.add(self._steps)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            # Not close(), which is collective: the other workers may never reach it. The error is in the log.
            self._background.finish()

    @property
    def step(self) -> int:
        """How many times the distributed optimizers have stepped in this training run, including before a restart."""
        return self._session.job.num_steps - self._counted_from

    def save(self, epoch: int | None = None, *, wait: bool = False) -> None:
        """Writes a checkpoint of the current state; every worker calls it after the same step.

        Args:
            epoch: the epoch to begin with after a restart; at the end of an epoch, the next one. The default is
                the attribute ``epoch``, or ``data.epoch`` where that is later.
            wait: return once it is on disk, even with ``asynchronous``.

        Raises:
            CheckpointError: this checkpoint, or with ``asynchronous`` the previous one, could not be written; raised on
                every worker.
            ConfigError: the workers are at different steps or positions, or the folder holds checkpoints that this
                run does not continue: ``resume`` was not called, or another ``Checkpoint`` has saved since.
        """
        if epoch is not None:
            _check_number("Checkpoint.save", "epoch", epoch, 0)
        _check_switch("Checkpoint.save", "wait", wait)
        self._claim_folder()
        # Data whose set_epoch() the loop does not call stays in epoch 0, whatever the script has counted.
        self.epoch = epoch if epoch is not None else max(self.epoch, int(getattr(self._data, "epoch", 0)))
        self._session.job.beat(pause=True)  # writing may take longer than a step
        self._session.job.meet("Checkpoint.save()")
        reports = self._agree(self._background.finish())
        write = self._plan(reports)
        self._saved_at = self.step
        if self._asynchronous and not wait:
            self._background.start(write)
        else:
            self._raise_on_all(attempt(write))
        self._session.job.beat()

    def resume(self) -> bool:
        """Loads the newest complete checkpoint on every worker; returns whether there was one.

        Damaged checkpoints are skipped with a warning that names them. ``epoch``, ``step`` and ``extra`` are then the
        checkpoint's, and so are the random generators when as many workers train on different data (the streams of
        divided layers: on the same mesh). Call it before or after ``distributed_model``, at the same point on every
        worker.

        With parameter servers call it before ``fleet.init_worker()``, after which they hold what is trained.

        Raises:
            CheckpointError: the checkpoint does not match the model, the optimizer or the data.
            ConfigError: this worker trains with parameter servers already.
        """
        job = self._session.server_job
        if job is not None and job.connected is not None:
            raise ConfigError(
                "Checkpoint.resume() was called after fleet.init_worker(): the parameter servers hold what is trained, "
                "and the worker goes on where they are. Call resume() before fleet.init_worker()."
            )
        self._session.job.beat(pause=True)
        self._session.job.meet("Checkpoint.resume()")
        # A save under way ends first, or this would load the checkpoint before it.
        self._raise_on_all(self._background.finish())
        restore = Restore(self._session.job, self.path, self._model, self._chain)
        found = restore.find()
        self._has_resumed = True
        self._is_superseded = False
        if found is not None:
            self._load(restore, found)
        self._session.job.beat()
        return found is not None

    def close(self) -> None:
        """Waits for the checkpoint that is being written; raises CheckpointError on every worker if that failed."""
        if self in self._loops.checkpoints:
            self._loops.checkpoints.remove(self)
        self._session.job.listeners.remove(self._steps)
        self._session.job.meet("Checkpoint.close()")
        self._raise_on_all(self._background.close())

    def after_step(self, step: int) -> None:
        """Keeps the position in the data; raises CheckpointError if the write beside training has failed."""
        if self._data is not None and not _says_next_batch(self._data):
            self._note_position()
        if error := self._background.failed():
            rank = self._session.job.global_rank
            raise CheckpointError(f"Checkpoint: the previous checkpoint was not written; worker {rank}: {error}")

    def save_when_due(self, sampler: object = None) -> None:
        """Saves when ``every`` steps have passed since the last one; called between two batches.

        It does not save in the loop over something other than ``data``: a resumed run would repeat that evaluation,
        with random numbers that it has already drawn.
        """
        is_other = _says_next_batch(self._data) and sampler is not None and sampler is not self._data
        if self._is_due and not is_other:
            self.save()

    def saves_by_itself(self, data: object) -> bool:
        """Returns whether it saves the position in ``data`` every so many steps."""
        return bool(self.every) and self._data is data

    @property
    def _is_due(self) -> bool:
        return bool(self.every) and self.step - self._saved_at >= self.every

    @property
    def _loops(self) -> BatchLoops:
        return self._session.job.listeners.get(BatchLoops)

    def _note_position(self) -> None:
        """Keeps the position in the data after a step, for a save that comes once the loop has the next batch."""
        health = self._session.job.listeners.find(Health)
        if self._is_due or (health is not None and health.is_preempted):
            self._noted = self.step, self._data.state_dict()

    def _position(self) -> Any:
        if self._data is None:
            return None
        # The loop may hold a batch that it has not trained on, and the data has moved past it.
        if self._loops.holds_untrained and self._noted is not None and self._noted[0] == self.step:
            return self._noted[1]
        return self._data.state_dict()

    @property
    def _chain(self) -> Optimizer | None:
        """The distributed optimizer around the user's optimizer."""
        wrapped = (one for one in self._session.optimizers if one.user_optimizer is self._optimizer)
        return next(wrapped, self._optimizer)

    def _agree(self, error: str) -> list[dict[str, Any]]:
        """Exchanges the reports of the workers, which must agree; raises on every worker when they do not."""
        chain = self._chain
        stranger = self._stranger()
        report = {
            "error": error,
            "stranger": stranger,
            "name": "" if stranger else self._next_name(),
            "step": self.step,
            "own": self._session.job.world_size > 1 and bool(getattr(chain, "has_own_state", False)),
            # The token of worker 0 counts on all workers: it names the files of this save.
            "token": secrets.token_hex(6),
            "data": self._position(),
            "random": random_states(),
            "place": {**self._session.job.axes.coordinate(), "data": self._session.job.data_rank},
        }
        reports = [from_bytes(data) for data in self._session.job.util.all_gather(to_bytes(report))]
        # After the exchange: every worker has ended its part of the save before, and writes there no more.
        self._remove_unfinished()
        _raise_first([found["error"] for found in reports], "the previous checkpoint was not written")
        _check_stranger(self.path, reports[0]["stranger"])
        _check_same("step", [found["step"] for found in reports])
        if isinstance(self._data, ElasticSampler):
            for name in ("epoch", "done"):
                _check_same(f"data position ({name})", [found["data"][name] for found in reports])
        return reports

    def _claim_folder(self) -> None:
        """Makes this the program's only Checkpoint that saves in its folder, until another one resumes there."""
        if self._is_superseded:
            raise ConfigError(
                f"Checkpoint.save(): another Checkpoint in this program has saved to {str(self.path)!r} since, and "
                "each would remove the other's checkpoints. Give each a folder, or call resume() to continue from what "
                "is there."
            )
        for other in self._loops.checkpoints:
            if isinstance(other, Checkpoint) and other is not self and other.path == self.path:
                other._is_superseded = True

    def _stranger(self) -> str:
        """Returns, on worker 0, the name of a checkpoint in the folder that this run does not continue."""
        if self._session.job.global_rank or self._has_written or self._has_resumed:
            return ""
        with contextlib.suppress(CheckpointError):  # an unreadable folder is reported by the write
            for path in candidates(self.path):
                with contextlib.suppress(CheckpointError):
                    check_whole(path)
                    return path.name
        return ""

    def _next_name(self) -> str:
        """Returns, on worker 0, the name of the next checkpoint; before the first, removes leftovers of dead saves."""
        if self._session.job.global_rank:
            return ""
        if not self._has_written:
            with contextlib.suppress(CheckpointError, OSError):  # an unreadable folder is reported by the write
                remove_leftovers(self.path)
        return new_name(self.path, self.step).name

    def _all_see(self, first: dict[str, Any], own: bool) -> bool:
        """Returns whether every worker sees the folder. The first time, a collective call that makes the next
        checkpoint's folder.

        Args:
            first: worker 0's report.
            own: whether every worker saves its own state.

        Raises:
            CheckpointError: ``own``, and some worker does not see the folder.
        """
        if self._is_shared or (self._is_shared is False and not own):
            return self._is_shared
        folder = LocalFolder(self.path / first["name"])
        if self._session.job.global_rank == 0:
            with contextlib.suppress(CheckpointError):  # the write says so
                mark(folder, first["token"])
        blind = blind_workers(folder, first["token"], self._session.job, _OWN_VISIBLE_S if own else _VISIBLE_S)
        if blind and self._session.job.global_rank == 0:
            remove_unfinished(Path(folder.path))
        if not blind:
            self._is_shared = True
        elif 0 not in blind:
            self._is_shared = False
            if own:
                raise CheckpointError(
                    f"Checkpoint: it was not written; worker {blind[0]} does not see {first['name']}, which worker 0 "
                    f"created in {str(self.path)!r}. This strategy keeps a state on each worker, so all of them must "
                    "share the folder."
                )
            LOGGER.info("Workers %s do not see %s: worker 0 gathers and writes the state.", blind, self.path)
        return self._is_shared is True or own

    def _plan(self, reports: Sequence[dict[str, Any]]) -> ShareWrite:
        """Plans this worker's write; where not every worker sees the folder, worker 0 gathers all shares.

        Raises CheckpointError on every worker where a state cannot be gathered.
        """
        session = self._session
        call = "Checkpoint.save()"
        problem = ""
        pending = None
        own = any(found["own"] for found in reports)
        self._has_written = True
        is_shared = self._all_see(reports[0], own)
        self._begun = self.path / reports[0]["name"]
        objects = {"model": self._model, "optimizer": self._chain, "scheduler": self._scheduler}
        if session.job.global_rank == 0:
            objects["run"] = self._rest(reports)
        try:
            given = {key: found for key, found in objects.items() if found is not None}
            pending = pending_share(adapters_of(given, session.job, axes_of(session.job), call, own), session.job)
        except FleetError as error:
            # Raised by the write: a worker that stopped here would leave the others waiting in the gather.
            problem = f"{error}"
        if not is_shared:
            pending = gathered(pending, problem, workers_of(session.job), call)
        return ShareWrite(
            path=self.path / reports[0]["name"],
            token=reports[0]["token"],
            step=self.step,
            rank=session.job.global_rank,
            world_size=session.job.world_size,
            keep=self.keep,
            pending=pending,
            problem=problem,
            faults=self._faults,
        )

    def _rest(self, reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Returns everything but model and optimizer, as worker 0 writes it."""
        state = {} if self._chain is None else optimizer_state(self._chain)
        return {
            "epoch": self.epoch,
            "step": self.step,
            "world_size": self._session.job.world_size,
            "k_steps": max((window["k_steps"] for window in windows(state).values()), default=1),
            "kinds": kinds_of(self._chain, self._scheduler),
            "extra": dict(self.extra),
            "degrees": {**self._session.job.axes.degrees, **self._session.job.axes.experts},
            "replicas": self._session.job.data_replicas,
            "workers": [{name: found[name] for name in ("data", "random", "place")} for found in reports],
        }

    def _load(self, restore: Restore, found: Found) -> None:
        """Loads everything; the random generators last, because loading may draw numbers."""
        rest = restore.load(found, self._scheduler)
        if self._data is not None:
            join = getattr(self._data, "joined_states", None)
            self._data.load_state_dict(restore.data_of(rest, isinstance(self._data, ElasticSampler), join))
        self.epoch = int(rest["epoch"])
        self.extra = dict(rest["extra"])
        self._counted_from = self._session.job.num_steps - int(rest["step"])
        self._saved_at = self.step
        restore.set_random_states(rest)

    def _raise_on_all(self, error: str) -> None:
        errors = [error]
        if self._session.job.world_size > 1:
            errors = [f"{found}" for found in self._session.job.util.all_gather(error or " ")]
        self._remove_unfinished()
        _raise_first(errors, "it was not written")

    def _remove_unfinished(self) -> None:
        """Removes, on worker 0, the files of a failed save; no worker may be writing any more."""
        begun = self._begun
        self._begun = None
        if begun is not None and self._session.job.global_rank == 0:
            remove_unfinished(begun)


def _raise_first(errors: Sequence[str], what: str) -> None:
    for rank, error in enumerate(errors):
        if error.strip():
            raise CheckpointError(f"Checkpoint: {what}; worker {rank}: {error}")


def _check_stranger(folder: Path, name: str) -> None:
    if name:
        raise ConfigError(
            f"Checkpoint.save(): {str(folder)!r} holds {name} of an earlier run, and resume() was not called; a "
            "restart would load that one. Call resume() before the first step, or name another folder."
        )


def _check_same(name: str, values: Sequence[Any]) -> None:
    if any(value != values[0] for value in values):
        raise ConfigError(
            f"Checkpoint.save(): the workers are at different places: {name} by rank is {list(values)!r}. Every worker "
            "must call save() after the same step. Give all the same number of batches: "
            'rest="drop" or "repeat" of fleet.ParquetDataset, drop_last of a sampler.'
        )


def _started_session() -> Session:
    if (session := running_session()) is None:
        raise NotInitializedError("fleet.elastic.Checkpoint() needs fleet.init() first.")
    return session


def _check_arguments(
    path: object, model: object, optimizer: object, scheduler: object, data: object, keep: int, every: int, epoch: int
) -> None:
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise ConfigError(f"Checkpoint(path={path!r}) takes the name of a folder.")
    if os.path.exists(path) and not os.path.isdir(path):
        raise ConfigError(f"Checkpoint(path={str(path)!r}): this is a file. Name a folder.")
    if not isinstance(model, nn.Module):
        raise ConfigError(f"Checkpoint(model={model!r}) takes a torch.nn.Module.")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise ConfigError(f"Checkpoint(optimizer={optimizer!r}) takes a torch.optim.Optimizer.")
    for name, value in (("scheduler", scheduler), ("data", data)):
        if value is not None and not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
            raise ConfigError(f"Checkpoint({name}={value!r}) takes an object with state_dict() and load_state_dict().")
    for name, number, least in (("keep", keep, 1), ("every", every, 0), ("epoch", epoch, 0)):
        _check_number("Checkpoint", name, number, least)


def _check_number(call: str, name: str, number: object, least: int) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise ConfigError(f"{call}({name}={number!r}) takes an integer of at least {least}.")


def _check_switch(call: str, name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{call}({name}={value!r}) takes True or False.")


def _says_next_batch(data: object) -> bool:
    """Returns whether loops over ``data`` report each request for a batch, see ``BatchLoops``."""
    return bool(getattr(type(data), "says_next_batch", False))
