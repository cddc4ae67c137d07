"""RunLog: the trackers of one job, for ``fleet.log`` and for the values that are logged automatically."""

from __future__ import annotations

import atexit
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from fleet.common.exit_status import EXIT
from fleet.common.log import LOGGER
from fleet.common.tracker_names import check_trackers, is_own
from fleet.env import Environment
from fleet.errors import ConfigError
from fleet.job.job import Job
from fleet.job.listener import Listener
from fleet.profile.step_watch import StepWatch
from fleet.role_maker.record import Role
from fleet.strategies._declare.fields import Values
from fleet.trackers.kubeflow_tracker import KubeflowTracker
from fleet.trackers.named_trackers import make_tracker
from fleet.trackers.page_trackers import CurvePage, RankPage
from fleet.trackers.progress import Progress
from fleet.trackers.run_record import RunRecord
from fleet.trackers.step_values import StepValues, peak_of
from fleet.trackers.tracker import RunInfo, Tracker
from fleet.trackers.value_means import ValueMeans, as_numbers
from fleet.training.batch_loops import BatchLoops

__all__ = ["RunLog"]

_VARIABLE = "FLEET_TRACKERS"
_ORIGIN = f"{_VARIABLE} (the launcher's --tracker)"
_NAME = re.compile(r"[\w.-]{1,128}")
_RANK_PAGE = "the job's page (ranks)"
_KUBEFLOW = "KUBEFLOW_TRAINER_SERVER_URL"


class RunLog(Listener):
    """Writes values to the trackers that the options and FLEET_TRACKERS name.

    Trackers are made, and so checked, when the session starts, and start with the first values.

    Raises:
        ConfigError: there is no such tracker, or its options are wrong.
        UnsupportedOptionError: the package of a tracker is not installed.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.sleeps = True
        self._means = ValueMeans(job)
        self._progress = Progress(lambda: self._step)
        self._trackers: dict[str, Tracker] = {}
        self._has_started = False
        self._unlogged_steps = 0
        self._values: StepValues | None = None
        self._record: RunRecord | None = None
        self._rank_page: RankPage | None = None
        self.is_recorded = False
        self.options_chosen(job.options)

    def options_chosen(self, options: Values) -> None:
        """Makes the trackers that ``options`` name; raises ConfigError where others have been given values."""
        job = self._job
        environment = Environment()
        if job.record.kind is not Role.WORKER:
            return
        if self._has_started:
            if any(options[name] != job.options[name] for name in ("trackers", "tracker_configs")):
                raise ConfigError(
                    "distributed_optimizer(strategy=...) changes strategy.trackers or tracker_configs, and values have "
                    "been logged already. Give the strategy to fleet.init()."
                )
            return
        asked = {name: "strategy.trackers" for name in options["trackers"]}
        asked.update({name: _ORIGIN for name in environment.list(_VARIABLE) if name not in asked})
        folder = environment.raw("FLEET_PAGE_FOLDER")
        if not (asked or folder or environment.has(_KUBEFLOW)) and options.is_set("tracker_configs"):
            LOGGER.warning("tracker_configs was set and changes nothing: strategy.trackers names none.")
        config = options["tracker_configs"]
        self._progress.total_steps = config.total_steps
        if config.run_name and _NAME.fullmatch(config.run_name) is None:
            raise ConfigError(
                f"tracker_configs['run_name'] is {config.run_name!r}; it takes letters, digits, '_', '.' and '-', at "
                "most 128, because it names files."
            )
        check_trackers(asked)
        made = {name: make_tracker(name, origin) for name, origin in asked.items() if self._may_be_here(name)}
        self.is_recorded = bool(asked)
        if folder:
            self._rank_page = RankPage(Path(folder), self._progress)
            self._job.listeners.wake(self)
            made.update({_RANK_PAGE: self._rank_page, "the job's page": CurvePage(Path(folder))})
        if environment.has(_KUBEFLOW) and job.global_rank == 0:
            made["Kubeflow Trainer's status"] = KubeflowTracker(self._progress, environment)
        self._trackers = {name: tracker for name, tracker in made.items() if self._is_here(tracker)}
        if asked and job.global_rank == 0:
            _make_folder(Path(config.folder).expanduser())
        self._measure(options)

    def log(self, values: Any, step: Any = None, total_steps: Any = 0) -> dict[str, float]:
        """Writes ``values``, see ``fleet.log``."""
        if total_steps:
            self._progress.total_steps = _checked_steps("total_steps", total_steps)
        times = self._job.listeners.get(StepWatch).times
        with nullcontext() if times is None else times.aside():
            return self._log(values, step)

    def means_of(self, call: str, values: dict[str, float]) -> dict[str, float] | None:
        """Returns the means of ``values``, see ``fleet.update_loss``; nothing is written."""
        return self._means.of(values, self._step, call)

    def _log(self, values: Any, step: Any) -> dict[str, float]:
        job = self._job
        if job.record.kind is not Role.WORKER:
            raise ConfigError("fleet.log() is for workers; this process is a parameter server.")
        number = self._step if step is None else _checked_steps("step", step)
        own = as_numbers(values)
        means = self._means.of(own, number)
        if means is None:
            return {}
        # The script counts its own steps; the trackers start without a first step, since nothing of an earlier run
        # can be superseded.
        if self._trackers and number != self._step:
            self._start(None)
            if self._record is not None:
                self._record.note_own_steps()
        self._write(own, means, number)
        return means

    def after_step(self, step: int) -> None:
        """Counts a step; every ``tracker_configs['every']`` steps it logs the automatic values."""
        if self._rank_page is not None and self._job.listeners.get(BatchLoops).checkpoints:
            self._rank_page.checkpoints = self._job.listeners.get(BatchLoops).checkpoints[-1].path
        if self._values is None:
            return
        self._unlogged_steps += 1
        if self._unlogged_steps == self._job.options["tracker_configs"].every:
            found = self._values.take(self._unlogged_steps)
            self._unlogged_steps = 0
            self._write(found, found, self._step)

    def close(self) -> None:
        """Closes the trackers."""
        if self._has_started:
            for name, tracker in list(self._trackers.items()):
                self._guarded(name, tracker.close)
            atexit.unregister(self.close)
            EXIT.unwatch()
        self._trackers = {}
        self._means.close()

    @property
    def _step(self) -> int:
        """Steps of the training run, with a checkpoint also the steps before a restart."""
        checkpoints = self._job.listeners.get(BatchLoops).checkpoints
        return checkpoints[-1].step if checkpoints else self._job.num_steps

    def _may_be_here(self, name: str) -> bool:
        """Returns whether this worker needs the tracker's class: trackers of this package run on worker 0 alone."""
        return self._job.global_rank == 0 or not is_own(name)

    def _is_here(self, tracker: Tracker) -> bool:
        return tracker.every_rank or self._job.global_rank == 0

    def _measure(self, options: Values) -> None:
        """Measures steps from now on, if this worker has a tracker and ``automatic`` is on."""
        config = options["tracker_configs"]
        job = self._job
        if not self._trackers or not config.automatic or self._values is not None:
            return
        times = self._job.listeners.get(StepWatch).measure()
        # Counting operations needs a forward that is not compiled.
        peak = 0.0 if options["to_static"] else config.peak_tflops or peak_of(job.device)
        self._values = StepValues(times, job.device, lambda: _batches_of_all(job), peak)
        self._job.listeners.get(StepWatch).values = self._values
        self._job.listeners.wake(self)

    def _write(self, own: dict[str, float], means: dict[str, float], step: int) -> None:
        if not self._trackers or not own:
            return
        self._start(step)
        EXIT.goes_on()
        for name, tracker in list(self._trackers.items()):
            self._guarded(name, tracker.log, own if tracker.every_rank else means, step)

    def _start(self, step: int | None) -> None:
        """Starts the trackers; ``step`` belongs to the first values, None where the script counts its own steps."""
        if self._has_started:
            return
        self._has_started = True
        job = self._job
        environment = Environment()
        config = job.options["tracker_configs"]
        began = self._step - self._job.num_steps
        run = RunInfo(
            name=config.run_name or environment.str("PADDLE_JOB_ID"),
            project=config.project,
            folder=Path(config.folder).expanduser().absolute(),
            rank=job.global_rank,
            world_size=job.world_size,
            options=job.options.to_dict(),
        )
        if job.global_rank == 0 and self.is_recorded:
            run = self._recorded(run, step, began, environment)
        EXIT.watch()
        for name, tracker in list(self._trackers.items()):
            self._guarded(name, tracker.start, run)
        # Exit functions run in reverse order, so this one runs before those that the packages have just registered.
        atexit.register(self.close)

    def _recorded(self, run: RunInfo, step: int | None, began: int, environment: Environment) -> RunInfo:
        goes_on = began > 0 or environment.int("FLEET_GENERATION") > 0
        try:
            self._record = record = RunRecord(run.folder, run.name, environment.raw("FLEET_POD"), goes_on)
        except OSError as error:
            LOGGER.warning(f"tracker_configs['folder']: {run.folder} cannot be written: {error.strerror}.")
            return run
        first = None
        if record.resumed and step is not None and not record.has_own_steps:
            # The steps after the checkpoint are trained again, so their old values are superseded.
            first = min(step, began + 1)
        return replace(run, name=record.name, resumed=record.resumed, first_step=first)

    def _guarded(self, name: str, call: Callable[..., None], *args: Any) -> None:
        """Makes ``call``; a tracker that raises is dropped, and training goes on."""
        try:
            call(*args)
        except Exception as error:  # whatever a tracker's package raises
            self._trackers.pop(name, None)
            LOGGER.warning(
                f"The tracker {name!r} failed in {call.__name__}() and gets no more values: {type(error).__name__}: "
                f"{error}. Training goes on."
            )


def _batches_of_all(job: Job) -> float:
    """Returns how many batches all workers train while this one trains one."""
    return job.data_replicas if job.logical is None else job.logical.num / len(job.logical.ranks)


def _checked_steps(name: str, steps: Any) -> int:
    if isinstance(steps, bool) or not hasattr(steps, "__index__") or int(steps) < 0:
        raise ConfigError(f"fleet.log({name}={steps!r:.80}) takes a number of steps, at least 0.")
    return int(steps)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"tracker_configs['folder'] is {str(folder)!r}, which cannot be made: {error.strerror}."
        ) from None
