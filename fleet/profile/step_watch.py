"""StepWatch: measures the steps of a job, once a profile or a tracker asks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from fleet.job.job import Job
from fleet.job.listener import Listener
from fleet.job.wrapped_model import WrappedModel
from fleet.profile.step_profiler import start_profiler
from fleet.profile.step_times import StepTimes
from fleet.strategies._gradients.gradient_exchange import data_parallel_in, exchange_of

if TYPE_CHECKING:
    from fleet.trackers.step_values import StepValues


class StepWatch(Listener):
    """Passes the events of the job to the profiler, the times and the values.

    Attributes:
        times: measures the parts of steps; None while nobody asks.
        values: adds up the values that trackers log by themselves; None without trackers.

    Raises:
        ConfigError: FLEET_PROFILE is no range of steps.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._profiler = start_profiler(job.global_rank, job.device)
        self.times: StepTimes | None = None if self._profiler is None else self._profiler.times
        self.values: StepValues | None = None
        self.sleeps = self.times is None

    def measure(self, times: StepTimes | None = None) -> StepTimes:
        """Measures the parts of steps from now on; returns the running measurement, or else ``times`` or a new one."""
        if self.times is None:
            self.times = times or StepTimes()
            self._job.listeners.wake(self)
        return self.times

    def forward_begins(self, model: WrappedModel, inputs: Any) -> None:
        """Called before a forward of a wrapped model."""
        if self.times is not None:
            self.times.forward_begins()
        if self.values is not None:
            self.values.forward_begins(model, inputs)

    def forward_ends(self) -> None:
        """Called after it, also when it failed."""
        if self.values is not None:
            self.values.forward_ends()
        if self.times is not None:
            self.times.forward_ends()

    def model_wrapped(self, model: WrappedModel) -> None:
        """Measures ``model`` from now on."""
        if self.times is not None:
            self.times.watch_model(model)
        logical = self._job.logical
        if logical is not None and self._turn_ends not in logical.ends:
            logical.ends.append(self._turn_ends)
        module = data_parallel_in(model._chain)
        if self._profiler is not None and module is not None:
            # The trace then names each bucket by its number and its strategy.
            exchange_of(module).use()

    def before_forward(self, model: WrappedModel) -> None:
        """Called before each forward."""
        if self._profiler is not None:
            self._profiler.before_forward(self._job.num_steps)

    def before_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Called before each step of an optimizer."""
        if self.times is not None:
            self.times.update_begins()

    def _turn_ends(self) -> None:
        logical = self._job.logical
        if self.times is not None and logical is not None and logical.is_amid_update:
            self.times.turn_ends()

    def after_step(self, step: int) -> None:
        """Called when ``step`` steps are finished."""
        if self.times is not None:
            self.times.update_ends()
        if self._profiler is not None:
            self._profiler.after_step(step)

    def close(self) -> None:
        """Writes the profile."""
        if self._profiler is not None:
            self._profiler.close()
