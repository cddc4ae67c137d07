"""StepProfiler: torch's profiler for some steps of this worker, and the files that the launcher joins."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import torch

from fleet._log import LOGGER
from fleet.env import Environment
from fleet.launch.processes.profile_range import FOLDER, PROFILE, read_range
from fleet.profile.step_times import StepTimes


class StepProfiler:
    """Profiles the steps from ``first`` up to ``last``, which is not among them; steps are counted from 0.

    Args:
        times: measures the parts of the steps.
        first: the first step.
        last: the step before which it ends.
        folder: where its files go.
        rank: of this worker.
        device: what it trains on.
    """

    def __init__(self, times: StepTimes, first: int, last: int, folder: Path, rank: int, device: torch.device) -> None:
        self.times, self._first, self._last = times, first, last
        self._folder, self._rank, self._device = folder, rank, device
        self._profile: Any = None
        self._is_done = False
        self._steps: list[dict[str, Any]] = []
        self._begun = 0

    def before_forward(self, step: int) -> None:
        """Called before each forward, after ``step`` steps; starts where the job begins or resumes inside the range."""
        if self._profile is None and not self._is_done and self._first <= step < self._last:
            self._start(step)

    def after_step(self, step: int) -> None:
        """Called when ``step`` steps are finished."""
        if self._profile is not None:
            spans = self.times.spans or []
            self._steps.append({"step": step - 1, "begin_ns": self._begun, "end_ns": spans[-1][2]})
            self._steps[-1]["parts_ns"] = self.times.take()
            self._begun = spans[-1][2]
            if step >= self._last:
                self.close()
        else:
            self.before_forward(step)

    def close(self) -> None:
        """Writes what was profiled; called again, does nothing."""
        if self._profile is None:
            return
        profile, self._profile, self._is_done = self._profile, None, True
        profile.stop()
        spans, self.times.spans, self.times.waits = self.times.spans, None, None
        try:
            self._write(profile, spans or [])
        except OSError as error:
            LOGGER.warning(f"--profile: {self._folder} cannot be written: {error.strerror}. Training goes on.")
        self.times.restart()

    def _start(self, step: int) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            # Otherwise kernels of one part would run, and be counted, in another.
            self.times.waits = lambda: torch.cuda.current_stream(self._device).synchronize()
        self._profile = torch.profiler.profile(activities=activities)
        self._profile.start()
        self.times.spans = []
        self.times.restart()
        self._begun = self.times.since
        LOGGER.info("Profiling steps %d to %d", step, self._last - 1)

    def _write(self, profile: Any, spans: list[tuple[str, int, int]]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        trace = self._folder / f"rank{self._rank}.trace.json"
        profile.export_chrome_trace(str(trace))
        described = {"rank": self._rank, "host": socket.gethostname(), "pid": os.getpid(), "steps": self._steps}
        whole = self._folder / f"rank{self._rank}.steps.json"
        part = whole.with_suffix(".part")
        part.write_text(json.dumps({**described, "spans": spans}), encoding="utf-8")
        part.replace(whole)


def start_profiler(rank: int, device: torch.device) -> StepProfiler | None:
    """Returns what profiles the steps that FLEET_PROFILE names; None when it names none.

    Raises ConfigError when FLEET_PROFILE is no range.
    """
    environment = Environment()
    text = environment.raw(PROFILE)
    if text is None:
        return None
    first, last = read_range(text, PROFILE)
    folder = Path(environment.str("PADDLE_LOG_DIR")) / FOLDER
    return StepProfiler(StepTimes(), first, last, folder, rank, device)
